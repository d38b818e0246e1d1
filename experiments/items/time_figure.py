"""Error against time, for methods of 1 to 8 inner steps and for LAVA, which needs one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

import figures
import lavajax
from items.systems_table import CLIPS, systems
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
    """All cells and their times."""
    cells = table(scale)
    return cells.works(list(cells.columns) if scale.times else [])


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    done = [
        column
        for column in cells.columns
        if all((cells.found.get((r.name, column)) or {}).get("times") for r in cells.rows)
    ]
    if not done:
        return ""
    draw(cells, done, folders.results / FIGURE)
    lines = []
    for column in done:
        points = {r.name: _point(cells, r, column) for r in cells.rows}
        lost = [name for name, point in points.items() if not np.isfinite(point).all()]
        own = points.pop(FAMILIES[-1])
        better = [n for n, (time, error) in points.items() if time < own[0] and error < own[1]]
        end = ", but for " + ", ".join(better) if better else ""
        end += "; left out, since a seed diverged: " + ", ".join(lost) if lost else ""
        if np.isfinite(own).all():
            lines.append(
                f"- {column}: LAVA is left of or below every other method{end}. Adaptation and "
                "prediction of a task, in a batch of 100, from the fewest inner steps to the most: "
                f"{_adaptation(cells, column)}."
            )
    return section(
        "## Error against time",
        f"After {cells.protocol.steps:,} outer steps, {cells.protocol.seeds} seeds; the outer rate "
        "and, at Van der Pol, the bound on the meta-gradient are chosen on validation tasks; the "
        "time is that of an outer step over the 10 tasks of a meta-batch, on "
        f"{cells.machine(done[0])}. Numbers at the ends of a line: inner steps.",
        f"![Error against time]({folders.results.name}/{FIGURE})",
        "\n".join(lines),
    )


def _point(cells: Table, row: Row, column: str) -> tuple[float, float]:
    """Milliseconds for a task, and the error."""
    milliseconds = cells.found[row.name, column]["times"]["step_ms"]
    per_task = np.nan if milliseconds is None else milliseconds / cells.protocol.meta_batch
    return per_task, float(cells.errors(row.name, column).mean())


def _adaptation(cells: Table, column: str) -> str:
    """Microseconds for a task at the fewest and the most inner steps of each family."""
    parts = []
    for family in FAMILIES:
        rows = [row for row in cells.rows if row.name.startswith(family)]
        ends = [rows[0], rows[-1]] if len(rows) > 1 else rows
        times = [cells.found[row.name, column]["times"]["task_us"] for row in ends]
        parts.append(f"{figures.short(family)} {' to '.join(f'{time:.3g}' for time in times)} µs")
    return ", ".join(parts)


def draw(cells: Table, columns: list[str], path: Path) -> None:
    """A panel for each problem."""
    plt = figures.pyplot()
    wide = min(len(columns), 3)
    tall = -(-len(columns) // wide)
    figure, axes = plt.subplots(
        tall,
        wide,
        figsize=(2.7 * wide + 0.4, 2.5 * tall + 0.4),
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(columns) :]:
        axis.remove()
    for axis, column in zip(axes.flat, columns, strict=False):
        for family in FAMILIES:
            rows = [r for r in cells.rows if r.name.startswith(family)]
            x, y = np.transpose([_point(cells, r, column) for r in rows])
            lava = len(rows) == 1
            axis.plot(
                *(x, y, "*-" if lava else "o-"),
                color=figures.LOOKS[family][0],
                ms=10 if lava else 4,
                lw=0.8,
                label=figures.short(family),
            )
            for end in () if lava else (0, len(rows) - 1):
                label = rows[end].name.split("=")[-1]
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
