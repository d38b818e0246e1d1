"""Time against the number of inner steps, and the error that equal training reaches.

    python benchmarks/inner_steps.py [--quick] [--only train|time] [--out FOLDER]

ANIL and CAVIA take 1 to 8 inner steps, MAML 1 to 3, LAVA 1 to 3 in its closed form and by the
paper's literal route (``naive``), with N = 2, 5, 10, 20 support points of a sine wave. Measured:

- ``step_ms``: one outer step, 10 tasks; the median of interleaved repeats of a compiled chunk;
- ``latency_us``: ``jax.jit(lavajax.adapt)`` of one task, likewise;
- ``thousand_ms``: adaptation to 1,000 tasks in one call, likewise;
- ``compile_s``: compilation of the outer step;
- ``mse``: on unseen tasks after equal training, for each seed; the outer rate is the better one of
  two on validation tasks, with the first seed.

Each result is a file of its own under ``--out``: stopped anywhere, the benchmark goes on where it
was (the times of one N belong together, and are taken again together). ``--only train`` may run in
several processes on one folder, each with its own ``--shots``; times want an idle machine. The
summary, of every N that is finished, goes to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lavajax
from lavajax.config import to_json
from lavajax.methods.base import Method
from lavajax.steps import run_steps
from lavajax.train import start_state

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "experiments"))

import figures  # noqa: E402
from cells import Cells  # noqa: E402
from files import write_whole  # noqa: E402

SHOTS = [2, 5, 10, 20]
FAMILIES: dict[str, tuple[Callable[[int], Method], int]] = {
    "anil": (lambda s: lavajax.Anil(inner_steps=s), 8),
    "cavia": (lambda s: lavajax.Cavia(inner_steps=s), 8),
    "maml": (lambda s: lavajax.Maml(inner_steps=s), 3),
    "lava": (lambda s: lavajax.Lava(inner_steps=s), 3),
    "lava naive": (lambda s: lavajax.Lava(inner_steps=s, curvature="hessian", solver="naive"), 3),
}
# In the figure: the family's name, and whose colour it has.
LABELS = {
    "anil": ("ANIL", "ANIL"),
    "cavia": ("CAVIA", "CAVIA"),
    "maml": ("MAML", "MAML"),
    "lava": ("LAVA, closed form", "LAVA, the paper's setting"),
    "lava naive": ("LAVA, naive", "LAVA, the paper's setting"),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the numbers depend on; other settings are computed anew.

    Attributes:
        steps: outer steps of training.
        rates: outer rates to choose from.
        seeds: trained and averaged.
        test_tasks: unseen tasks to score on.
        repeats: of every timing.
        chunk: outer steps in a timed chunk.
        calls: adaptations in a timed chunk.
        most: inner steps at most.
    """

    steps: int = 2000
    rates: tuple[float, ...] = (1e-3, 5e-3)
    seeds: int = 3
    test_tasks: int = 4000
    repeats: int = 11
    chunk: int = 20
    calls: int = 50
    most: int = 8


QUICK = Settings(
    steps=20, rates=(5e-3,), seeds=1, test_tasks=20, repeats=2, chunk=2, calls=2, most=1
)


def methods(most: int) -> dict[tuple[str, int], Method]:
    """Every method by family and inner steps."""
    return {
        (family, s): build(s)
        for family, (build, last) in FAMILIES.items()
        for s in range(1, min(last, most) + 1)
    }


def train(method: Method, shots: int, settings: Settings) -> dict[str, Any]:
    """Picks the outer rate on validation tasks, trains every seed, scores on test tasks."""
    tasks = lavajax.Sine(shots=shots)

    def trained(rate: float, seed: int) -> lavajax.MetaParams | None:
        tx = lavajax.outer_optimizer(settings.steps, rate=rate)
        options = {"steps": settings.steps, "seed": seed, "optimizer": tx}
        try:
            return lavajax.train(method, tasks, **options).params
        except FloatingPointError:  # diverged
            return None

    def mse(params: lavajax.MetaParams | None, split: Any) -> float | None:
        if params is None:
            return None
        return lavajax.evaluate(params, tasks, num_tasks=settings.test_tasks, split=split).mean

    first = {rate: trained(rate, 0) for rate in settings.rates}
    validation = {rate: mse(params, "validation") for rate, params in first.items()}
    rate = min(validation, key=lambda r: error({"mse": [validation[r]]}))
    seeds = [first[rate], *(trained(rate, seed) for seed in range(1, settings.seeds))]
    return {
        "mse": [mse(params, "test") for params in seeds],
        "outer_rate": rate,
        "validation": {str(r): v for r, v in validation.items()},
    }


def measure(shots: int, settings: Settings) -> dict[tuple[str, int], dict[str, float]]:
    """Times of all methods, which take turns, so that noise disturbs all of them alike."""
    tasks = lavajax.Sine(shots=shots)
    tx = lavajax.outer_optimizer(settings.steps)
    thousand = jax.vmap(tasks.sample)(jax.random.split(jax.random.key(1), 1000)).support
    one = jax.tree.map(lambda leaf: leaf[0], thousand)
    found: dict[tuple[str, int], dict[str, float]] = {}
    runs: dict[tuple[tuple[str, int], str], tuple[Callable[[], Any], float]] = {}
    for cell, method in methods(settings.most).items():
        state = start_state(method, tasks, tx)
        chunk = jax.jit(lambda state: run_steps(state, tasks, tx, 0, settings.chunk, meta_batch=10))
        begun = time.perf_counter()
        step = chunk.lower(state).compile()
        found[cell] = {"compile_s": time.perf_counter() - begun}
        adapt = jax.jit(lavajax.adapt)
        every = jax.jit(lambda params: jax.vmap(lambda s: lavajax.adapt(params, s))(thousand))
        params = state.params
        runs[cell, "step_ms"] = partial(step, state), 1e3 / settings.chunk
        runs[cell, "latency_us"] = (
            partial(repeat, partial(adapt, params, one), settings.calls),
            1e6 / settings.calls,
        )
        runs[cell, "thousand_ms"] = partial(every, params), 1e3
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for turn in range(settings.repeats + 1):
        for name, (run, unit) in runs.items():
            begun = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first warms up
                times[name].append((time.perf_counter() - begun) * unit)
    for (cell, what), values in times.items():
        found[cell][what] = statistics.median(values)
    return found


def repeat(call: Callable[[], Any], times: int) -> None:
    """Calls again and again, each when the last is done."""
    for _ in range(times):
        jax.block_until_ready(call())


def name_of(kind: str, shots: int, cell: tuple[str, int]) -> str:
    """The name of a result."""
    return f"{kind} n{shots} {cell[0]} {cell[1]}"


def key(cell: tuple[str, int], settings: Settings) -> dict[str, Any]:
    """All that a result depends on."""
    method = to_json(methods(settings.most)[cell])
    return {"settings": dataclasses.asdict(settings), "method": method}


def summary(cells: Cells, settings: Settings) -> list[dict[str, Any]]:
    """A row for each cell of every N that is finished."""
    rows = []
    for n in SHOTS:
        found = []
        for cell in methods(settings.most):
            parts = [
                cells.get(name_of(kind, n, cell), key(cell, settings)) for kind in ("time", "train")
            ]
            if all(parts):
                row = {"shots": n, "method": cell[0], "inner_steps": cell[1]}
                found.append({**row, **parts[0], **parts[1]})
        if len(found) == len(methods(settings.most)):
            rows += found
    return rows


def error(row: dict[str, Any]) -> float:
    """The mean error over seeds; infinite where one has diverged."""
    values = [np.inf if v is None else v for v in row["mse"]]
    return float(np.nan_to_num(np.mean(values), nan=np.inf, posinf=np.inf))


def beaten(rows: list[dict[str, Any]], shots: int) -> list[str]:
    """The ANIL and CAVIA points that one-step LAVA is neither left of nor below."""
    here = [r for r in rows if r["shots"] == shots]
    (lava,) = (r for r in here if r["method"] == "lava" and r["inner_steps"] == 1)
    return [
        f"{r['method']} S={r['inner_steps']}"
        for r in here
        if r["method"] in ("anil", "cavia")
        and r["step_ms"] < lava["step_ms"]
        and error(r) < error(lava)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    head = "   N  method      S   step ms  latency us  1,000 tasks ms  compile s  test MSE"
    lines = [head]
    for row in rows:
        times = "".join(
            f"{row[name]:{width}.{digits}f}"
            for name, width, digits in (
                *(("step_ms", 10, 3), ("latency_us", 12, 1)),
                *(("thousand_ms", 16, 2), ("compile_s", 11, 2)),
            )
        )
        lines.append(
            f"{row['shots']:4d}  {row['method']:10s}{row['inner_steps']:3d}{times}  {_shown(row)}"
        )
    return "\n".join(lines)


def _shown(row: dict[str, Any]) -> str:
    if not np.isfinite(error(row)):
        lost = sum(v is None or not np.isfinite(v) for v in row["mse"])
        return f"diverged in {lost} of {len(row['mse'])} seeds"
    spread = np.std(row["mse"], ddof=1) if len(row["mse"]) > 1 else 0.0
    return f"{error(row):.3g} ± {spread:.1g}"


def draw(rows: list[dict[str, Any]], shots: list[int], path: Path) -> None:
    """Test error against the time of an outer step, a panel for each N."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(
        1, len(shots), figsize=(2.6 * len(shots) + 0.4, 3.1), squeeze=False, layout="constrained"
    )
    for axis, n in zip(axes[0], shots, strict=True):
        for family in FAMILIES:
            points = [r for r in rows if r["shots"] == n and r["method"] == family]
            x = [r["step_ms"] / 10 for r in points]
            y = [error(r) for r in points]
            naive, lava = family == "lava naive", family.startswith("lava")
            axis.plot(
                x,
                y,
                "*-" if lava else "o-",
                color=figures.LOOKS[LABELS[family][1]][0],
                mfc="white" if naive else None,
                ms=9 if lava else 4,
                lw=0.8,
                label=LABELS[family][0],
            )
            if points and not lava:
                for end in sorted({0, len(points) - 1}):
                    steps = points[end]["inner_steps"]
                    axis.annotate(
                        str(steps), (x[end], y[end]), (5, 3), textcoords="offset points", fontsize=7
                    )
        axis.set_xlim(left=0)
        axis.set_yscale("log")
        axis.set_title(f"N = {n}", fontsize=9)
        axis.set_xlabel("training step, ms per task")
    axes[0, 0].set_ylabel("test MSE")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5)
    figures.save(figure, path)


def report(rows: list[dict[str, Any]]) -> str:
    """The table, and for each N the points that LAVA does not beat."""
    lines = [table(rows), ""]
    for n in sorted({row["shots"] for row in rows}):
        better = ", ".join(beaten(rows, n))
        end = f", but {better}" if better else ""
        lines.append(f"N = {n}: one-step LAVA is left of or below every ANIL and CAVIA point{end}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Runs the benchmark, or what is left of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shots", type=int, nargs="+", default=SHOTS, help="only these N")
    parser.add_argument("--quick", action="store_true", help="one inner step, hardly any training")
    parser.add_argument("--only", choices=("train", "time"), help="one half of the work")
    parser.add_argument("--out", type=Path, help="cells; runs/inner_steps where not given")
    parser.add_argument("--summary", type=Path, help="summary; benchmarks/results where not given")
    args = parser.parse_args()
    settings = QUICK if args.quick else Settings()
    folder = Path("runs/inner_steps_quick" if args.quick else "runs/inner_steps")
    results = folder if args.quick else HERE / "results"
    cells, results = Cells(args.out or folder), args.summary or results
    every = methods(settings.most)
    for n in args.shots:
        missing = [c for c in every if cells.get(name_of("time", n, c), key(c, settings)) is None]
        if args.only != "train" and missing:
            for cell, times in measure(n, settings).items():
                cells.put(name_of("time", n, cell), key(cell, settings), times)
        for cell, method in every.items():
            name = name_of("train", n, cell)
            if args.only != "time" and cells.get(name, key(cell, settings)) is None:
                cells.put(name, key(cell, settings), train(method, n, settings))
                print(f"N = {n}: {cell[0]} with {cell[1]} steps trained", flush=True)
    rows = summary(cells, settings)
    if not rows:
        print("the other half of the work is still to be done")
        return 0
    text = report(rows)
    print(text)
    results.mkdir(parents=True, exist_ok=True)
    machine = {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    record = {"settings": dataclasses.asdict(settings), **machine, "cells": rows}
    write_whole(results / "inner_steps.json", json.dumps(record, indent=1) + "\n")
    write_whole(results / "inner_steps.txt", text)
    draw(rows, sorted({row["shots"] for row in rows}), results / "inner_steps.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
