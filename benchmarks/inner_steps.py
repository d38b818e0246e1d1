"""Time against the number of inner steps: of training, of adaptation, and of compiling.

    python benchmarks/inner_steps.py [--quick] [--shots 2 10] [--out FOLDER]

ANIL and CAVIA take 1 to 8 inner steps, MAML 1 to 3, LAVA 1 to 3 in its closed form and by the
paper's literal route, with N = 2, 5, 10, 20 support points of a sine wave. Measured, the methods of
one N taking turns:

- ``step_ms``: one outer step of 10 tasks;
- ``latency_us``: ``jax.jit(lavajax.adapt)`` of one task;
- ``thousand_ms``: adaptation to 1,000 tasks in one call;
- ``compile_s``: tracing and compiling the outer step.

The errors that such training reaches are those of ``experiments/paper.py time``.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["JAX_COMPILATION_CACHE_DIR"] = ""  # before JAX starts: compiling is measured

import measuring

# isort: split
import jax

import figures
import lavajax
from files import write_whole
from lavajax.methods.base import Method
from lavajax.start import start_state
from lavajax.steps import run_steps

SHOTS = (2, 5, 10, 20)
META_BATCH = 10
FAMILIES: dict[str, tuple[Callable[[int], Method], int]] = {
    "ANIL": (lambda s: lavajax.Anil(inner_steps=s), 8),
    "CAVIA": (lambda s: lavajax.Cavia(inner_steps=s), 8),
    "MAML": (lambda s: lavajax.Maml(inner_steps=s), 3),
    "LAVA": (lambda s: lavajax.Lava(inner_steps=s), 3),
    "LAVA, literal": (
        lambda s: lavajax.Lava(inner_steps=s, curvature="hessian", solver="naive"),
        3,
    ),
}
TIMES = {"step_ms": (11, 3), "latency_us": (13, 1), "thousand_ms": (17, 2), "compile_s": (12, 2)}
"""What is measured; width and digits in the table."""


def methods(most: int) -> dict[tuple[str, int], Method]:
    """Every method by family and inner steps."""
    return {
        (family, s): build(s)
        for family, (build, last) in FAMILIES.items()
        for s in range(1, min(last, most) + 1)
    }


def measure(shots: int, *, quick: bool) -> list[dict[str, Any]]:
    """A row for each method, all of which take turns."""
    tasks, tx = lavajax.Sine(shots=shots), lavajax.outer_optimizer(10_000)
    steps, calls, repeats = (2, 2, 2) if quick else (measuring.STEPS, 50, 11)
    thousand = jax.vmap(tasks.sample)(jax.random.split(jax.random.key(1), 1000)).support
    one = jax.tree.map(lambda leaf: leaf[0], thousand)
    every = methods(1 if quick else 8)
    compiling: dict[tuple[str, int], float] = {}
    runs: dict[str, dict[str, Callable[[], Any]]] = {name: {} for name in list(TIMES)[:-1]}
    for cell, method in every.items():
        state = start_state(method, tasks, tx)
        chunk = jax.jit(lambda s: run_steps(s, tasks, tx, 0, steps, meta_batch=META_BATCH))
        begun = time.perf_counter()
        step = chunk.lower(state).compile()
        compiling[cell] = time.perf_counter() - begun
        label, params = f"{cell}", state.params
        runs["step_ms"][label] = partial(step, state)
        runs["latency_us"][label] = partial(jax.jit(lavajax.adapt), params, one)
        adapt = jax.jit(lambda params: jax.vmap(lambda s: lavajax.adapt(params, s))(thousand))
        runs["thousand_ms"][label] = partial(adapt, params)
    found = {
        "step_ms": measuring.interleaved(runs["step_ms"], repeats=repeats),
        "latency_us": measuring.interleaved(runs["latency_us"], repeats=repeats, calls=calls),
        "thousand_ms": measuring.interleaved(runs["thousand_ms"], repeats=repeats),
    }
    units = {"step_ms": 1e3 / steps, "latency_us": 1e6, "thousand_ms": 1e3}
    return [
        {"shots": shots, "method": cell[0], "inner_steps": cell[1]}
        | {name: seconds[f"{cell}"] * units[name] for name, seconds in found.items()}
        | {"compile_s": compiling[cell]}
        for cell in every
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = ["   N  method              S   step, ms  latency, us  1,000 tasks, ms  compile, s"]
    for row in rows:
        line = f"{row['shots']:4d}  {row['method']:18s}{row['inner_steps']:3d}"
        lines.append(line + "".join(f"{row[name]:{w}.{d}f}" for name, (w, d) in TIMES.items()))
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """The time of an outer step against inner steps, a panel for each N."""
    plt = figures.pyplot()
    shots = sorted({row["shots"] for row in rows})
    figure, axes = plt.subplots(
        *(1, len(shots)),
        figsize=(2.4 * len(shots) + 0.6, 3.0),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axis, n in zip(axes[0], shots, strict=True):
        for family in FAMILIES:
            here = [r for r in rows if r["shots"] == n and r["method"] == family]
            colour, dashes = figures.LOOKS[family]
            axis.plot(
                [r["inner_steps"] for r in here],
                [r["step_ms"] / META_BATCH for r in here],
                "*" if family.startswith("LAVA") else "o",
                ls=dashes,
                color=colour,
                ms=8 if family.startswith("LAVA") else 4,
                label=family,
            )
        axis.set_title(f"N = {n}", fontsize=9)
        axis.set_xlabel("inner steps, S")
    axes[0, 0].set_ylim(bottom=0)  # of all: they share it
    axes[0, 0].set_ylabel("training step, ms per task")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figures.save(figure, path)


def main() -> int:
    """Measures every N, prints the table and writes the results."""
    parser = measuring.options(__doc__)
    parser.add_argument("--shots", type=int, nargs="+", action=measuring.Part, help="only these N")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for n in args.shots or (SHOTS[:1] if args.quick else SHOTS):
        rows += measure(n, quick=args.quick)
        print(f"N = {n} measured", flush=True)
    text = table(rows)
    print(text)
    path = measuring.write_results("inner_steps", {"cells": rows}, args.out)
    write_whole(path.with_suffix(".txt"), text + "\n")
    draw(rows, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
