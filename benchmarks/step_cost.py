"""Cost of one training step of each method, as ratios measured in one interleaved run.

    python benchmarks/step_cost.py [--shots 10] [--meta-batch 10] [--repeats 15]

Every entry is the median time of a compiled chunk of steps on sine waves, warmed up; the methods
take turns, so that a noisy machine disturbs all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

import jax

import lavajax
from lavajax.methods.base import Method
from lavajax.train import init_state, run_steps

METHODS: dict[str, Method] = {
    "anil": lavajax.Anil(),
    "lava head": lavajax.Lava(),
    "lava head, converged": lavajax.lava_converged(),
    "lava head, naive": lavajax.Lava(curvature="hessian", solver="naive"),
    "cavia": lavajax.Cavia(subspace=lavajax.Context(size=4)),
    "lava context, adapted": lavajax.Lava(subspace=lavajax.Context(size=4)),
    "lava context, prior": lavajax.Lava(subspace=lavajax.Context(size=4), curvature_at="prior"),
    "maml": lavajax.Maml(),
    "lava all weights, prior": lavajax.Lava(subspace=lavajax.Full()),
    "lava all weights, adapted": lavajax.Lava(subspace=lavajax.Full(), curvature_at="adapted"),
}
# What each is compared with: the one-step method of the same subspace.
REFERENCE = {"lava head": "anil", "lava context": "cavia", "lava all weights": "maml"}


def main() -> None:
    """Runs the benchmark and prints a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shots", type=int, default=10, help="support points")
    parser.add_argument("--meta-batch", type=int, default=10, help="tasks per step")
    parser.add_argument("--repeats", type=int, default=15, help="timed chunks of each method")
    parser.add_argument("--steps", type=int, default=100, help="steps in a chunk")
    args = parser.parse_args()
    seconds = measure(METHODS, args.shots, args.meta_batch, args.repeats, args.steps)
    for name, value in seconds.items():
        prefix = name.split(",")[0]
        ratio = f"{value / seconds[REFERENCE[prefix]]:.2f}" if prefix in REFERENCE else ""
        print(f"{name:28s} {1e3 * value:8.3f} ms {ratio:>6s}")
    print(json.dumps({"seconds_per_step": seconds, **vars(args)}))


def measure(
    methods: dict[str, Method], shots: int, meta_batch: int, repeats: int, steps: int
) -> dict[str, float]:
    """Median seconds of one training step of each method."""
    tasks = lavajax.Sine(shots=shots)
    tx = lavajax.outer_optimizer(10_000)
    chunk = jax.jit(lambda state: run_steps(state, tasks, tx, 0, steps, meta_batch=meta_batch))
    states = {
        name: init_state(method, tasks, tx, jax.random.key(0)) for name, method in methods.items()
    }
    runs = {name: partial(chunk, state) for name, state in states.items()}
    for run in runs.values():
        jax.block_until_ready(run())
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append((time.perf_counter() - start) / steps)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
