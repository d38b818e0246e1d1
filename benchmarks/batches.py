"""Time of a training step as the meta-batch grows, and of several seeds together.

    python benchmarks/batches.py [--quick] [--out FOLDER]

The default LAVA on sine waves, N = 10. Per task, a step should not become dearer with more tasks;
five seeds in one call of ``train`` should cost less than five runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

import measuring

# isort: split
import jax

import lavajax
from lavajax.methods.base import Method
from lavajax.start import init_state
from lavajax.steps import run_steps
from ratios import Ratio, publish

BATCHES = (16, 64, 256, 1024)
SEEDS = 5
MOST_SEEDS = 4.0


def main() -> int:
    """Measures, prints the table and writes the results."""
    args = measuring.options(__doc__).parse_args()
    batches, steps, repeats = ((2, 4), 2, 2) if args.quick else (BATCHES, measuring.STEPS, 7)
    per_task = measure_batches(lavajax.Lava(), batches, steps=steps, repeats=repeats)
    first = per_task[batches[0]]
    rows = [
        Ratio("step, per task", f"that of B={batches[0]}", f"B={b}", s / first, 1.0)
        for b, s in per_task.items()
        if b != batches[0]
    ]
    steps = 2 if args.quick else 500
    one, several = measure_seeds(lavajax.Lava(), SEEDS, steps=steps, repeats=repeats)
    rows.append(
        Ratio(f"train, {SEEDS} seeds", "train, one seed", "B=10", several / one, MOST_SEEDS)
    )
    data = {
        "microseconds_per_task": {str(b): 1e6 * s for b, s in per_task.items()},
        "seconds_of_steps": {"steps": steps, "1": one, str(SEEDS): several},
    }
    publish("batches", rows, data, args.out)
    return 0


def measure_batches(
    method: Method, batches: Sequence[int], *, steps: int, repeats: int
) -> dict[int, float]:
    """Median seconds of a step per task of its meta-batch."""
    source, tx = lavajax.Sine(), lavajax.outer_optimizer(10_000)
    state = init_state(method, source, tx, jax.random.key(0))

    def run(size: int) -> partial:
        return partial(
            jax.jit(lambda s: run_steps(s, source, tx, 0, steps, meta_batch=size)), state
        )

    seconds = measuring.interleaved({str(b): run(b) for b in batches}, repeats=repeats)
    return {b: seconds[str(b)] / (steps * b) for b in batches}


def measure_seeds(method: Method, seeds: int, *, steps: int, repeats: int) -> tuple[float, float]:
    """Median seconds of the steps of ``train``, without compilation: one seed, and several."""
    seconds: list[float] = []

    def run(number: int | None) -> None:
        lavajax.train(
            method,
            lavajax.Sine(),
            steps=steps,
            seeds=number,
            chunk=steps,
            callback=lambda progress: seconds.append(progress.seconds),
        )

    for number in (None, seeds):  # compiled, and not counted
        run(number)
    seconds.clear()
    for _ in range(repeats):
        run(None)
        run(seeds)
    one, several = sorted(seconds[::2]), sorted(seconds[1::2])
    return one[repeats // 2], several[repeats // 2]


if __name__ == "__main__":
    sys.exit(main())
