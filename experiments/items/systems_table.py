"""The table of dynamical systems: test error by method and system."""

from __future__ import annotations

from functools import partial
from typing import Any

import lavajax
from lavajax.config import to_json
from protocols import PAPER_ROWS, Row, Scale
from reference import field_errors
from tables import Table, describe, section
from works import Folders, Work

TITLE = "dynamical systems: test error by method and system"
NAME = "systems"
SYSTEMS: dict[str, Any] = {
    "FitzHugh-Nagumo": lavajax.FitzHughNagumo(),
    "mass-spring": lavajax.MassSpring(),
    "pendulum": lavajax.Pendulum(),
    "Van der Pol": lavajax.VanDerPol(),
    "cartpole": lavajax.Cartpole(),
}
QUICK_SYSTEMS = ("mass-spring", "Van der Pol")
_LEFT_OUT = (
    *("LAVA, learned epsilon", "LAVA, context", "LAVA, context, at prior", "LAVA, all weights"),
)
ROWS = tuple(row for row in PAPER_ROWS if row.name not in _LEFT_OUT)
QUICK_ROWS = tuple(
    row for row in ROWS if row.name in ("ANIL", "CAVIA", "LAVA, the paper's setting")
)


def systems(scale: Scale) -> dict[str, Any]:
    """The systems of a scale, by name."""
    names = QUICK_SYSTEMS if scale.quick else tuple(SYSTEMS)
    return {name: SYSTEMS[name] for name in names}


def row(name: str) -> Row:
    """A method of the table."""
    return next(each for each in ROWS if each.name == name)


def table(scale: Scale, folders: Folders | None = None) -> Table:
    """The cells."""
    rows = QUICK_ROWS if scale.quick else ROWS
    return Table(NAME, systems(scale), scale.protocol, rows, folders)


def works(scale: Scale) -> list[Work]:
    """All cells."""
    return [*table(scale).works(), *_references(scale).values()]


def _references(scale: Scale) -> dict[str, Work]:
    """Errors without learning, by system."""
    number = scale.protocol.test_tasks
    return {
        name: Work(
            NAME,
            f"references {name}",
            {"task": to_json(task), "test_tasks": number},
            partial(_compute_references, task, number),
            seconds=10.0,
        )
        for name, task in systems(scale).items()
    }


def _compute_references(task: Any, test_tasks: int, folders: Folders) -> dict[str, float]:
    del folders
    return field_errors(task, test_tasks)


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    if not cells.found:
        return ""
    references = {k: w.result(folders) for k, w in _references(scale).items()}
    lines = [
        f"- {name}: " + ", ".join(f"{what} {value:.3g}" for what, value in errors.items()) + "."
        for name, errors in references.items()
        if errors
    ]
    return section(
        "## Dynamical systems",
        "Mean squared error of the time derivative, or of the cart's force, N = 10; in brackets "
        "the LAVA paper's value. It describes its cartpole too little for numbers to be compared. "
        + describe(scale.protocol),
        cells.show_errors(),
        "Medians over tasks, which few extreme ones cannot move:",
        cells.show_errors(what="median"),
        "Without learning:\n\n" + "\n".join(lines) if lines else "",
        cells.exceptions(),
        cells.compare(),
        cells.show_settings(),
        cells.at_the_edge(),
        cells.given_up(),
    )
