"""The sine table: test error by method and number of support points."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import figures
import lavajax
from protocols import PAPER_ROWS, Scale
from reference import sine_errors
from tables import Table, describe, rows_of, section
from works import Folders, Work

TITLE = "sine waves: test error by method and N"
NAME = "sine"
SHOTS = (1, 2, 10, 20)
QUICK_ROWS = tuple(
    row for row in PAPER_ROWS if row.name in ("ANIL", "LAVA, the paper's setting", "ridge head")
)
FIGURE = "sine.png"


def table(scale: Scale, folders: Folders | None = None) -> Table:
    """The cells."""
    columns = {f"N = {n}": lavajax.Sine(shots=n) for n in ((2,) if scale.quick else SHOTS)}
    rows = QUICK_ROWS if scale.quick else rows_of(scale.extended)
    return Table(NAME, columns, scale.protocol, rows, folders)


def timed(scale: Scale) -> str:
    """The column whose times are measured."""
    return "N = 2" if scale.quick else "N = 10"


def works(scale: Scale) -> list[Work]:
    """All cells."""
    return table(scale).works([timed(scale)] if scale.times else [])


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    if not cells.found:
        return ""
    drawing, at = "", timed(scale)
    if any(column == at and result["times"] for (_, column), result in cells.found.items()):
        draw(cells, at, folders.results / FIGURE)
        drawing = (
            f"![Test error against training time]({folders.results.name}/{FIGURE})\n\n"
            "Test error on 500 unseen tasks against seconds of training, compilation apart, at "
            f"{at}, first seed: outer steps times the time of a step."
        )
    references = sine_errors(lavajax.Sine(shots=1)).items()
    return section(
        "## Sine waves",
        "Mean squared error; in brackets the LAVA paper's value. " + describe(scale.protocol),
        cells.show_errors(timed=at),
        f"Times at {at}, on 2 CPU cores: an outer step, and adaptation and prediction of a "
        "task as it is scored, in a batch of 100. "
        f"Without learning: {', '.join(f'{name} {value:g}' for name, value in references)}.",
        cells.compare(),
        cells.show_settings(),
        cells.at_the_edge(),
        cells.given_up(),
        cells.show_densities(),
        drawing,
    )


def draw(cells: Table, column: str, path: Path) -> None:
    """Test error against seconds of training."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for row in cells.rows:
        result = cells.found.get((row.name, column))
        if result is None or result["times"] is None:
            continue
        steps, errors = np.array(result["seeds"][0]["curve"], float).T
        seconds = steps * result["times"]["step_ms"] / 1e3
        axis.plot(seconds, errors, label=row.name, **figures.line(row.name))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("training, s")
    axis.set_ylabel("test MSE")
    figure.legend(loc="outside right upper", fontsize=7.5)
    figures.save(figure, path)
