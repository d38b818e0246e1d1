"""Seconds that the training step of each method takes to compile, at its default settings.

python benchmarks/compile_time.py [--only lava maml]
"""

from __future__ import annotations

import argparse
import time

import jax

import lavajax
from gpu_check import METHODS
from lavajax.methods.base import Method
from lavajax.train import init_state, run_steps


def main() -> None:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    for name in parser.parse_args().only:
        begun = time.process_time()
        tracing, compiling = measure(METHODS[name])
        busy = time.process_time() - begun  # what a machine with other work takes longer for
        total = tracing + compiling
        print(
            f"{name:16s} {total:6.2f} s, {tracing:.2f} of them tracing; {busy:.2f} s of CPU time",
            flush=True,
        )


def measure(method: Method, meta_batch: int = 10) -> tuple[float, float]:
    """Seconds of tracing, and of compiling, the steps that ``train`` takes."""
    tasks, tx = lavajax.Sine(), lavajax.outer_optimizer(10_000)
    state = jax.eval_shape(lambda: init_state(method, tasks, tx, jax.random.key(0)))
    steps = jax.jit(
        lambda s, start, stop: run_steps(s, tasks, tx, start, stop, meta_batch=meta_batch)
    )
    begun = time.perf_counter()
    lowered = steps.lower(state, 0, 0)
    traced = time.perf_counter()
    lowered.compile()
    return traced - begun, time.perf_counter() - traced


if __name__ == "__main__":
    main()
