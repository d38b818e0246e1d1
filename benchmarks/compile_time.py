"""Seconds that the training step of each method takes to compile, at its default settings.

    python benchmarks/compile_time.py [--quick] [--out FOLDER] [--only lava maml]

Tracing and compiling, without JAX's cache of compiled programs. Where the machine has other work,
wall-clock time says little: compiling only computes, so that an idle machine takes no longer than
its CPU time, and the smaller of the two counts. Methods with inner steps are compiled with 2 and
with 50 of them.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time

if __name__ == "__main__":
    os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # before JAX starts, here and in what this starts

import measuring

# isort: split
import jax

import lavajax
from gpu_check import METHODS
from lavajax.methods.base import Method
from lavajax.start import init_state
from lavajax.steps import run_steps
from ratios import Ratio, publish

SECONDS, GROWTH = 6.0, 1.5
FEW, MANY = 2, 50


def main() -> int:
    """Compiles every method, prints the table and writes the results."""
    parser = measuring.options(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=METHODS, action=measuring.Part, help="some of the methods"
    )
    args = parser.parse_args()
    rows, seconds = [], {}
    for name in args.only or (["anil"] if args.quick else METHODS):
        tracing, compiling, busy = measure(METHODS[name])
        total = min(tracing + compiling, busy)
        seconds[name] = {"tracing": tracing, "compiling": compiling, "cpu": busy}
        rows.append(Ratio(name, "1 s", "defaults", total, SECONDS))
        print(f"{name:16s} {total:6.2f} s, {tracing:.2f} of them tracing", flush=True)
    for name in args.only or (["anil"] if args.quick else METHODS):
        method = METHODS[name]
        if isinstance(getattr(method, "inner_steps", None), int):
            few, many = (_total(dataclasses.replace(method, inner_steps=s)) for s in (FEW, MANY))  # type: ignore[type-var]
            at = f"S={MANY} / S={FEW}"
            rows.append(Ratio(name, name, at, many / few, GROWTH))
    publish("compile_time", rows, {"seconds": seconds}, args.out)
    return 0


def _total(method: Method) -> float:
    tracing, compiling, busy = measure(method)
    return min(tracing + compiling, busy)


def measure(method: Method, meta_batch: int = 10) -> tuple[float, float, float]:
    """Seconds of tracing, and of compiling, the steps that ``train`` takes; and of CPU time."""
    tasks, tx = lavajax.Sine(), lavajax.outer_optimizer(10_000)
    state = jax.eval_shape(lambda: init_state(method, tasks, tx, jax.random.key(0)))
    steps = jax.jit(
        lambda s, start, stop: run_steps(s, tasks, tx, start, stop, meta_batch=meta_batch)
    )
    busy, begun = time.process_time(), time.perf_counter()
    lowered = steps.lower(state, 0, 0)
    traced = time.perf_counter()
    lowered.compile()
    done = time.perf_counter()
    return traced - begun, done - traced, time.process_time() - busy


if __name__ == "__main__":
    sys.exit(main())
