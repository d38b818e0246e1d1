"""The table of dynamical systems: test error by method and system."""

from __future__ import annotations

import dataclasses
from typing import Any

import lavajax
from protocols import COMPARED_ROWS, ERROR_BAR_ROWS, USUAL_CLIP, Row, Scale
from tables import Table, listed, section
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
CLIPS = {"Van der Pol": (USUAL_CLIP, 100.0)}
"""Its targets' mean square is eight times that of the next, and its meta-gradients have a norm of
about 1,000: the usual bound would cut all of them to one length."""
QUICK_SYSTEMS = ("mass-spring", "Van der Pol")
_FLOOR = 1e-5
_LOW: dict[str, Any] = {
    "LAVA, converged": lavajax.lava_converged(epsilon_floor=_FLOOR),
    "ridge head": lavajax.Ridge(ridge_floor=_FLOOR),
}
ROWS = tuple(
    dataclasses.replace(row, method=_LOW[row.name]) if row.name in _LOW else row
    for row in COMPARED_ROWS
)
_EXCEPTIONS = (
    f"The learned regularisers of {' and '.join(_LOW)} stand above a floor of {_FLOOR:g} in place "
    f"of {lavajax.Lava().epsilon_floor:g}, which serves few points of a sine: the best of 1e-5, "
    "5e-5 and 2e-4 on validation tasks of mass-spring, whose targets are exact. That of LAVA, "
    f"Bayesian is {lavajax.lava_bayesian().epsilon_floor:g} everywhere. "
    f"At {' and '.join(CLIPS)}, whose meta-gradients have a norm of about 1,000, the bound on it "
    f"is chosen as the outer rate is, from {listed(next(iter(CLIPS.values())))}."
)
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
    more = ERROR_BAR_ROWS if scale.extended else ()
    rows = QUICK_ROWS if scale.quick else ROWS + more
    return Table(NAME, systems(scale), scale.protocol, rows, folders, {} if scale.quick else CLIPS)


def works(scale: Scale) -> list[Work]:
    """All cells."""
    cells = table(scale)
    return [*cells.works(), *cells.references(scale.protocol.test_tasks).values()]


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    if not cells.found:
        return ""
    references = cells.show_references(scale.protocol.test_tasks)
    return section(
        "## Dynamical systems",
        "Mean squared error of the time derivative, or of the cart's force, N = 10; in brackets "
        "the LAVA paper's value. The last rows learn nothing. The paper describes its cartpole too "
        "little for numbers to be compared. " + cells.describe(),
        f"{cells.show_errors()}\n{references}".strip(),
        cells.sampling(),
        "Medians over tasks, which few extreme ones cannot move:",
        cells.show_errors(what="median"),
        cells.exceptions(),
        "" if scale.quick else _EXCEPTIONS,
        cells.compare(),
        cells.show_settings(),
        cells.at_the_edge(),
        cells.given_up(),
        cells.show_densities(),
    )
