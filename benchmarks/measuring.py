"""What the benchmarks share: times taken in turns, and results written whole.

Every speed is a ratio within one run. The things compared take turns, so that what else the
machine does disturbs all of them alike, and the median over turns is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
# Figures and files are written as the experiments write them.
sys.path.insert(0, str(HERE.parent / "experiments"))
import threads  # noqa: E402, F401

# isort: split
import jax  # noqa: E402

from files import write_whole  # noqa: E402
from lavajax.steps import MOST_DRAWN  # noqa: E402

Name = TypeVar("Name")
RESULTS = HERE / "results"
PART = Path("runs/benchmarks_part")
"""Where what was measured in part goes, if nothing else is said."""
# Training draws tasks for so many steps at a time: a turn of fewer would pay for unused ones.
STEPS = MOST_DRAWN


def interleaved(
    runs: Mapping[Name, Callable[[], Any]], *, repeats: int, calls: int = 1, pause: float = 0.0
) -> dict[Name, float]:
    """Median seconds of one call of each, all warmed up, taking turns in a new order each time.

    What runs before leaves a cache to what runs after: not always to the same one.

    Args:
        runs: what to time, by name; a JAX result is waited for.
        repeats: turns.
        calls: calls in a turn; as many as make a turn much longer than the clock's resolution.
        pause: seconds before each turn, for the threads of the one before to come to rest.
    """
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[Name, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    for _ in range(repeats):
        shuffle(order)
        for name in order:
            time.sleep(pause)
            begun = time.perf_counter()
            for _ in range(calls):  # each is waited for: calls in a queue would overlap
                jax.block_until_ready(runs[name]())
            times[name].append((time.perf_counter() - begun) / calls)
    return {name: statistics.median(values) for name, values in times.items()}


def temporaries(compiled: Any) -> int:
    """Bytes that a compiled function needs beside its arguments and results, as XLA plans them."""
    return compiled.memory_analysis().temp_size_in_bytes


class _Quick(argparse.Action):
    """Sets the flag, and keeps tiny numbers away from the measured ones."""

    def __call__(self, parser: Any, namespace: Any, *_: Any) -> None:
        namespace.quick = True
        if namespace.out == RESULTS:
            namespace.out = Path("runs/benchmarks_quick")


class Part(argparse.Action):
    """Stores an option that measures a part, and keeps it away from the whole that is published."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, *_: Any) -> None:
        """As the parser calls it."""
        setattr(namespace, self.dest, values)
        if namespace.out == RESULTS:
            namespace.out = PART


def options(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--quick", action=_Quick, nargs=0, default=False, help="everything tiny: is it sound?"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results")
    return parser


def machine() -> dict[str, Any]:
    """What the figures were measured on, for a reader to judge them by."""
    return {
        "cores": os.cpu_count(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        # Processes that wanted a core; the benchmark is one or two. Windows does not say.
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "processor": platform.machine(),
        "python": platform.python_version(),
    }


def peak_bytes() -> int:
    """The most memory that this process has held."""
    import resource  # which Windows has not

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 2**10 * peak


def write_results(name: str, data: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes ``NAME.json`` with the data and the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = json.dumps({"machine": machine(), **data}, indent=1, allow_nan=False)
    write_whole(path, text + "\n")
    return path
