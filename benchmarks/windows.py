"""Time and memory of preparing air-quality data, and the time of drawing a meta-batch of windows.

    python benchmarks/windows.py --data=FILE [--quick] [--out FOLDER]

FILE is the published zip. It is prepared in a process and a folder of their own, as in the first
run of a user; without FILE there is nothing to measure.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import measuring

# isort: split
import jax

import lavajax
from ratios import Ratio, publish

BATCH = 16
MOST = {"preparing, s": 60.0, "peak memory, MB": 1000.0, "drawing 16 windows, ms": 1.0}


def main() -> int:
    """Measures, prints and writes the results.

    Returns:
        0; 1 where preparing fails, or something is above its bound.
    """
    parser = measuring.options(__doc__)
    parser.add_argument("--data", type=Path, help="the published zip")
    parser.add_argument("--prepare", type=Path, help="prepare into this folder, and no more")
    args = parser.parse_args()
    if args.data is None:
        print("no --data: there is nothing to prepare")
        return 0
    if args.prepare is not None:
        return prepare(args.data, args.prepare)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, f"--data={args.data}", f"--prepare={folder}"]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return 1
        seconds, memory = map(float, done.stdout.splitlines()[-1].split())
        windows = lavajax.AirQuality(str(args.data)).load(folder)
    found = {
        "preparing, s": seconds,
        "peak memory, MB": memory,
        "drawing 16 windows, ms": 1e3 * drawing(windows, 5 if args.quick else 400),
    }
    for name, value in found.items():
        print(f"{name:24s}{value:8.3g}   at most {MOST[name]:g}")
    rows = [
        Ratio(name, f"{MOST[name]:g}", "air quality", value / MOST[name], 1.0)
        for name, value in found.items()
    ]
    publish("windows", rows, {"found": found}, args.out)
    return int(any(row.missed for row in rows))


def prepare(data: Path, folder: Path) -> int:
    """Prepares the data, and prints the seconds and the megabytes of this process at its most."""
    begun = time.perf_counter()
    lavajax.AirQuality(str(data)).load(folder)
    seconds = time.perf_counter() - begun
    print("\n", seconds, measuring.peak_bytes() / 1e6)
    return 0


def drawing(source: Any, calls: int) -> float:
    """Median seconds of drawing a meta-batch."""
    draw = jax.jit(lambda key: jax.vmap(source.sample)(jax.random.split(key, BATCH)))
    times = []
    for key in jax.random.split(jax.random.key(0), calls + 1):
        begun = time.perf_counter()
        jax.block_until_ready(draw(key))
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])  # the first compiles


if __name__ == "__main__":
    sys.exit(main())
