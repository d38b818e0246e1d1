"""Train, save, load, resume, adapt and score again and again in one process: memory must stay flat.

    python tests/slow/soak.py [--minutes 60] [--no-files] [--most PERCENT]

Every cycle does for several methods what a long-lived service does: trains a small network, saves
it, loads it, goes on from a checkpoint, adapts to new tasks at once and point by point, and scores.
Methods, optimisers and sources are made anew each time, equal to those before, so that nothing is
compiled again; seeds and data differ. No cache is ever cleared.

The resident memory of the last two thirds of the time, when everything has been compiled and the
allocator has settled, is fitted by a line. The script fails where that line grows by more than
``--most`` percent in 100 cycles, which are 2,000 saves and 1,000 loads.

A process that trains ever new methods (other sizes, other hyperparameters) is another matter: JAX
keeps what it has compiled for each of them, some megabytes, until ``jax.clear_caches()``.
``--vary`` shows it, and that this call gives the memory back.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from lavajax import checkpoint
from lavajax.start import start_state

STEPS = 40


def methods(width: int) -> list[lavajax.Method]:
    """New objects, equal to those of the last cycle where the width is the same."""
    model = lavajax.MLP((width, width))
    return [
        lavajax.Lava(model),
        lavajax.lava_converged(model=model),
        lavajax.Maml(model),
        lavajax.Vfml(model),
        lavajax.Cnp(encoder=(width,), decoder=(width,)),
    ]


def work(method: lavajax.Method, cycle: int, folder: Path, *, files: bool) -> None:
    """What a user does with one method."""
    source = lavajax.Sine(shots=5, queries=10)
    states: list[lavajax.TrainState] = []

    def keep(progress: lavajax.Progress) -> None:
        if files:
            checkpoint.save_state(progress.state, folder)
        else:
            states.append(jax.tree.map(jnp.copy, progress.state))

    def trained(state: lavajax.TrainState | None = None) -> lavajax.Trained:
        optimizer = lavajax.outer_optimizer(STEPS)
        options = {"meta_batch": 4, "chunk": STEPS // 2, "optimizer": optimizer, "seed": cycle}
        return lavajax.train(method, source, steps=STEPS, state=state, callback=keep, **options)

    def half_way() -> lavajax.TrainState | None:
        if not files:
            return states[0]
        shutil.rmtree(folder / "checkpoints" / f"{STEPS:09d}")
        tx = lavajax.outer_optimizer(STEPS)
        like = jax.eval_shape(lambda: start_state(method, source, tx, seed=cycle))
        return checkpoint.restore_state(folder, like)

    whole = trained()
    resumed = trained(half_way())
    for a, b in zip(*(jax.tree.leaves(t.params.learned) for t in (whole, resumed)), strict=True):
        np.testing.assert_array_equal(a, b)

    params = resumed.params
    if files:
        shutil.rmtree(folder / "checkpoints")
        lavajax.save(params, folder / "model", overwrite=True)
        params = lavajax.load(folder / "model")
    task = source.sample(jax.random.key(cycle), "test")
    adapted = lavajax.adapt(params, task.support, key=jax.random.key(cycle))
    prediction = lavajax.predict(params, adapted, task.query.x)
    assert np.isfinite(prediction.mean).all()
    if hasattr(method, "absorb"):
        sums = lavajax.online(params)
        for x, y in zip(task.support.x, task.support.y, strict=True):
            sums = lavajax.update(params, sums, (x[None], y[None]), forget=0.99)
            lavajax.estimate(params, sums)
    assert np.isfinite(lavajax.evaluate(params, source, num_tasks=100, seed=cycle).mean)


def resident() -> float:
    """MiB of memory that the process holds, what its allocator has kept free left aside."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc
    if trim is not None:
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def maps() -> int:
    """Memory maps, of which Linux gives a process 65,530."""
    return len(Path("/proc/self/maps").read_text().splitlines())


def repeat(minutes: float, cycle: Callable[[int], None]) -> np.ndarray:
    """Runs cycles for so long, and prints a table; cycle, seconds, MiB and maps of each."""
    rows, begun, shown = [], time.monotonic(), 0.0
    print(" cycle   minutes      MiB    maps")
    while (now := time.monotonic() - begun) < 60 * minutes:
        cycle(len(rows))
        rows.append((len(rows), time.monotonic() - begun, resident(), maps()))
        if len(rows) == 1 or now >= shown:
            shown = now + 60 * minutes / 30
            number, seconds, size, count = rows[-1]
            print(f"{number:6d} {seconds / 60:9.1f} {size:8.1f} {count:7d}", flush=True)
    return np.array(rows)


def growth(rows: np.ndarray) -> tuple[float, float]:
    """MiB and percent in 100 cycles, of the last two thirds of the time."""
    late = rows[rows[:, 1] > rows[-1, 1] / 3]
    slope, start = np.polyfit(late[:, 0], late[:, 2], 1)
    first = start + slope * late[0, 0]
    return 100 * slope, 100 * 100 * slope / first


def main() -> int:
    """Runs the cycles; 1 where memory grows beyond the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--no-files", action="store_true", help="save and load nothing")
    parser.add_argument("--most", type=float, default=2.0, help="percent in 100 cycles")
    parser.add_argument("--vary", action="store_true", help="new sizes in each cycle")
    parser.add_argument("--clear", action="store_true", help="with --vary: clear JAX's caches")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:

        def cycle(number: int) -> None:
            for index, method in enumerate(methods(8 + number if args.vary else 8)):
                work(method, number, Path(parent) / str(index), files=not args.no_files)
            if args.clear:
                jax.clear_caches()

        rows = repeat(args.minutes, cycle)
    size, percent = growth(rows)
    print(f"{len(rows)} cycles; memory grows by {size:+.2f} MiB, {percent:+.2f}%, in 100 cycles")
    return 0 if percent <= args.most else 1


if __name__ == "__main__":
    sys.exit(main())
