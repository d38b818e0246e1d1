"""Kill the preparation of every data set at random moments; the next start must succeed.

    python tests/slow/kill_preparation.py [--kills 20] [--seed 0] [--only omniglot]

The files are small ones in the published layouts. Every trial starts a process that prepares one of
the data sets in an empty folder, kills it with SIGKILL at a random moment between its first
instruction and a little after its end, and starts another, which must give the same arrays as one
that nobody killed, and leave nothing unfinished behind. One in four trials kills the second process
too, and starts a third.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# As pytest finds modules.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import test_air_quality
import test_datasets
import test_radio
from lavajax import datasets
from lavajax.datasets import builders  # noqa: F401  # imported once, in the parent of all

FORK = multiprocessing.get_context("fork")  # a start of Python is not what is tested


def air_quality(folder: Path) -> Path:
    """A zip of all stations."""
    content = test_air_quality.station_file("@@@@")
    return test_air_quality.write_zip(
        folder / "air.zip",
        {
            test_air_quality.name_of(s): content.replace(b"@@@@", s.encode())
            for s in test_air_quality.STATIONS
        },
    )


def omniglot(folder: Path) -> Path:
    """A zip of ten characters."""
    return test_datasets.write_zip(folder / "omniglot.zip", test_datasets.drawings("Greek", 10))


def mini_imagenet(folder: Path) -> Path:
    """Arrays of the three splits."""
    (folder / "mini").mkdir()
    return test_datasets.write_arrays(folder / "mini")


def radio(folder: Path) -> Path:
    """A file with few frames of each class."""
    return test_radio.write_radioml(folder / "radio.hdf5")


SETS: dict[str, tuple[Callable[[Path], Path], Callable[..., Any]]] = {
    "air quality": (air_quality, datasets.load_air_quality),
    "omniglot": (omniglot, datasets.load_omniglot),
    "mini-imagenet": (mini_imagenet, datasets.load_mini_imagenet),
    "radio": (radio, datasets.load_radio),
}


def digest(found: Any) -> str:
    """Of all arrays of a data set."""
    parts = found if isinstance(found, tuple) else (found,)
    return hashlib.sha256(b"".join(np.asarray(part).tobytes() for part in parts)).hexdigest()


def start(load: Callable[..., Any], source: Path, data: Path, told: Any = None) -> Any:
    """A process that prepares, and tells the digest of what it has."""

    def work() -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
        found = digest(load(source, data))
        if told is not None:
            told.put(found)

    process = FORK.Process(target=work)
    process.start()
    return process


def whole(load: Callable[..., Any], source: Path, data: Path) -> tuple[str, float]:
    """The digest that a process to its end gives, and the seconds that it takes."""
    begun, told = time.monotonic(), FORK.SimpleQueue()
    process = start(load, source, data, told)
    process.join()
    assert process.exitcode == 0, f"the preparation in {data} ended with {process.exitcode}"
    return told.get(), time.monotonic() - begun


def kill(load: Callable[..., Any], source: Path, data: Path, after: float) -> str:
    """Kills a process ``after`` seconds; says what it had done."""
    process = start(load, source, data)
    process.join(after)
    ended = process.exitcode is not None
    process.kill()
    process.join()
    if ended:
        return "after its end"
    if list(data.glob("*/*/[0-9]*.*")):
        return "while reading"
    return "half done" if list(data.glob("*/*/incomplete.*")) else "before the first file"


def main() -> int:
    """Runs the trials; 1 where any of them differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each data set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SETS, help="one data set")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    moments, good, all_ = random.Random(args.seed), 0, 0
    for name, (make, load) in SETS.items():
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as parent:
            source = make(Path(parent))
            expected, seconds = whole(load, source, Path(parent) / "unbroken")
            counts: dict[str, int] = {}
            for trial in range(args.kills):
                data = Path(parent) / str(trial)
                for _ in range(2 if trial % 4 == 3 else 1):
                    where = kill(load, source, data, moments.uniform(0, 1.1 * seconds))
                    counts[where] = counts.get(where, 0) + 1
                found, _ = whole(load, source, data)
                left = list(data.glob("*/*/incomplete.*"))
                same = found == expected and not left
                good, all_ = good + same, all_ + 1
                if not same:
                    print(f"{name}, trial {trial}, killed {where}: DIFFERENT {left}", flush=True)
            told = ", ".join(f"{count} {where}" for where, count in sorted(counts.items()))
            print(f"{name}: prepared in {seconds:.2f} s; killed {told}", flush=True)
    print(f"{good} of {all_} next starts gave the data of an unbroken one")
    return 0 if good == all_ else 1


if __name__ == "__main__":
    sys.exit(main())
