"""Error against time, for methods of 1 to 8 inner steps and for LAVA, which needs one."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

import figures
import lavajax
from comparison import PREDICTED, Job, machine, predictor
from items.systems_table import CLIPS, systems
from lavajax.start import start_state
from lavajax.steps import MOST_DRAWN, run_steps
from protocols import CONTEXT, Protocol, Row, Scale
from tables import Table, section
from works import Folders, Work

TITLE = "sine waves and systems: error against time by inner steps"
NAME = "time"
FIGURE = "time.png"
STEPS = range(1, 9)
_SHORT = Protocol(
    "short", steps=2_000, search_steps=2_000, seeds=3, validation_tasks=2_000, test_tasks=4_000
)
FAMILIES = ("ANIL", "CAVIA", "LAVA, the paper's setting")


def table(scale: Scale, folders: Folders | None = None) -> Table:
    """The cells: a row for each method and number of inner steps, a column for each problem."""
    steps = (1,) if scale.quick else STEPS
    rows = [Row(f"ANIL S={s}", lavajax.Anil(inner_steps=s)) for s in steps]
    rows += [Row(f"CAVIA S={s}", lavajax.Cavia(subspace=CONTEXT, inner_steps=s)) for s in steps]
    rows += [Row("LAVA, the paper's setting", lavajax.Lava())]
    columns: dict[str, Any] = {f"sine, N = {n}": lavajax.Sine(shots=n) for n in (2, 5, 10, 20)}
    titles = {name: f"{name}, N = 5" for name in systems(scale)}
    columns |= {
        titles[name]: dataclasses.replace(task, shots=5) for name, task in systems(scale).items()
    }
    clips = {titles[name]: clips for name, clips in CLIPS.items() if name in titles}
    if scale.quick:
        columns = {"sine, N = 2": columns["sine, N = 2"]}
        return Table(NAME, columns, scale.protocol, tuple(rows), folders)
    return Table(NAME, columns, _SHORT, tuple(rows), folders, clips)


def works(scale: Scale) -> list[Work]:
    """All cells, and the times of each column."""
    cells = table(scale)
    timed = [_timed(cells, column) for column in cells.columns] if scale.times else []
    return [*cells.works(), *timed]


def _timed(cells: Table, column: str) -> Work:
    """The times of a column's rows, measured together: from process to process they differ."""
    jobs = {row.name: cells.job(row, column) for row in cells.rows}
    return Work(
        *(NAME, f"{column} times", {name: job.key for name, job in jobs.items()}),
        partial(_measure, jobs),
        after=tuple(job.work for job in jobs.values()),
        alone=True,
        seconds=6.0 * len(jobs),
    )


def _measure(jobs: Mapping[str, Job], folders: Folders) -> dict[str, Any]:
    """By row, medians over turns: ``step_ms``, of an outer step; ``task_us``, of a scored task."""
    some = next(iter(jobs.values())).protocol
    steps, turns = min(MOST_DRAWN, some.steps), 7
    runs: dict[tuple[str, str], tuple[Callable[[], Any], float]] = {}
    for name, job in jobs.items():
        chosen, source = job.chosen(folders), folders.source(job.task)
        tx = lavajax.outer_optimizer(some.steps, rate=chosen.rate, clip=chosen.clip)
        train = partial(_some_steps, source, tx, steps, some.meta_batch)
        state = start_state(chosen.method, source, tx)
        runs[name, "step_ms"] = partial(jax.jit(train), state), 1e3 / steps
        predict = predictor(chosen.method, source)
        runs[name, "task_us"] = partial(_repeat, predict, 10), 1e6 / (10 * PREDICTED)
    times: dict[tuple[str, str], list[float]] = {each: [] for each in runs}
    for turn in range(turns + 1):
        for each, (run, unit) in runs.items():
            begun = time.perf_counter()
            jax.block_until_ready(run())
            if turn:  # the first compiles
                times[each].append((time.perf_counter() - begun) * unit)
    found: dict[str, Any] = {"machine": machine(), "rows": {name: {} for name in jobs}}
    for (name, what), values in times.items():
        found["rows"][name][what] = float(np.median(values))
    return found


def _some_steps(
    source: Any, tx: Any, steps: int, meta_batch: int, state: lavajax.TrainState
) -> Any:
    return run_steps(state, source, tx, 0, steps, meta_batch=meta_batch)


def _repeat(run: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        jax.block_until_ready(run())


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    times = {
        column: found
        for column in cells.columns
        if all((r.name, column) in cells.found for r in cells.rows)
        and (found := _timed(cells, column).result(folders))
    }
    if not times:
        return ""
    every = {
        column: {r.name: _point(cells, found, r, column) for r in cells.rows}
        for column, found in times.items()
    }
    draw(every, folders.results / FIGURE)
    lines = []
    for column, found in times.items():
        points = dict(every[column])
        lost = [name for name, point in points.items() if not np.isfinite(point).all()]
        own = points.pop(FAMILIES[-1])
        better = [n for n, (time, error) in points.items() if time < own[0] and error < own[1]]
        end = ", but for " + ", ".join(better) if better else ""
        end += "; left out, since a seed diverged: " + ", ".join(lost) if lost else ""
        if np.isfinite(own).all():
            lines.append(
                f"- {column}: LAVA is left of or below every other method{end}. Adaptation and "
                "prediction of a task, in a batch of 100, from the fewest inner steps to the most: "
                f"{_adaptation(found)}."
            )
    return section(
        "## Error against time",
        f"After {cells.protocol.steps:,} outer steps, {cells.protocol.seeds} seeds; the outer rate "
        "and, at Van der Pol, the bound on the meta-gradient are chosen on validation tasks; the "
        "time is that of an outer step over the 10 tasks of a meta-batch, on "
        f"{next(iter(times.values()))['machine']}, the median of those of a panel taking turns. "
        "Numbers at the ends of a line: inner steps.",
        f"![Error against time]({folders.results.name}/{FIGURE})",
        "\n".join(lines),
    )


def _point(cells: Table, times: Any, row: Row, column: str) -> tuple[float, float]:
    """Milliseconds for a task, and the error."""
    per_task = times["rows"][row.name]["step_ms"] / cells.protocol.meta_batch
    return per_task, float(cells.errors(row.name, column).mean())


def _adaptation(found: Any) -> str:
    """Microseconds for a task at the fewest and the most inner steps of each family."""
    parts = []
    for family in FAMILIES:
        rows = [name for name in found["rows"] if name.startswith(family)]
        ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
        times = [found["rows"][name]["task_us"] for name in ends]
        parts.append(f"{figures.short(family)} {' to '.join(f'{time:.3g}' for time in times)} µs")
    return ", ".join(parts)


def draw(points: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> None:
    """A panel for each problem, of time and error by method."""
    plt = figures.pyplot()
    wide = min(len(points), 3)
    tall = -(-len(points) // wide)
    figure, axes = plt.subplots(
        tall,
        wide,
        figsize=(2.7 * wide + 0.4, 2.5 * tall + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(points) :]:
        axis.remove()
    for axis, (column, every) in zip(axes.flat, points.items(), strict=False):
        for family in FAMILIES:
            rows = [name for name in every if name.startswith(family)]
            x, y = np.transpose([every[name] for name in rows])
            lava = family.startswith("LAVA")
            axis.plot(
                *(x, y, "*-" if lava else "o-"),
                color=figures.LOOKS[family][0],
                ms=10 if lava else 4,
                lw=0.8,
                label=figures.short(family),
            )
            for end in () if lava else (0, len(rows) - 1):
                label = rows[end].split("=")[-1]
                axis.annotate(
                    label, (x[end], y[end]), (5, 3), textcoords="offset points", fontsize=7
                )
        axis.set_xlim(left=0)
        axis.set_yscale("log")
        axis.set_title(column, fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("training step, ms per task")
    for axis in axes[:, 0]:
        axis.set_ylabel("test MSE")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figures.save(figure, path)
