"""To be imported before JAX: one thread for the linear algebra of a small matrix.

XLA on CPU calls OpenBLAS for triangular solves. From about 60 x 20 on that splits a solve of 10
microseconds over threads, which on busy cores wait for each other for milliseconds.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
