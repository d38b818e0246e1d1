"""To be imported before JAX: what JAX, or what it calls, reads when it starts.

One thread for the linear algebra of a small matrix: XLA on CPU calls OpenBLAS for triangular
solves. From about 60 x 20 on that splits a solve of 10 microseconds over threads, which on busy
cores wait for each other for milliseconds.

What took a second or more to compile is kept in the user's cache folder, so that the same run need
not compile it the next time. ``JAX_COMPILATION_CACHE_DIR``, JAX's own variable, names another
folder, or none if it is empty. JAX before 0.10 says at length of whatever it loads from there that
it may be another machine's, since it takes preferences that it has set itself for features of the
processor: it is told to log fatal errors alone.
"""

import os
from importlib.metadata import version
from pathlib import Path


def cache_folder() -> Path | None:
    """The folder of lavajax in the user's cache, by the XDG rules; None for a user without one."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # by these rules a relative path is ignored
        return Path(base) / "lavajax"
    try:
        return Path.home() / ".cache" / "lavajax"
    except RuntimeError:
        return None


CACHE_NAMED = "JAX_COMPILATION_CACHE_DIR" in os.environ
"""Whether the user has said where compiled programs are kept."""

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if (_folder := cache_folder()) is not None:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_folder / "xla"))
    if version("jax").startswith("0.9."):
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
