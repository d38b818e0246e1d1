"""The check of an accelerator from end to end, on a second CPU device that plays one.

    python tests/slow/gpu_check_on_cpu.py [--largest 256]

What it finds must be well: what differs from float64 is float32 alone, on both devices.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--largest", type=int, default=256, help="meta-batch that is timed")
args = parser.parse_args()

# All are read when the backend starts, and the check reads its own options.
flag = "--xla_force_host_platform_device_count=2"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.argv = sys.argv[:1]
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import jax  # noqa: E402

import gpu_check  # noqa: E402

if __name__ == "__main__":
    gpu_check.accelerators = lambda: jax.devices()[1:]
    gpu_check.SIZES = tuple(size for size in gpu_check.SIZES if size <= args.largest)
    sys.exit(gpu_check.main())
