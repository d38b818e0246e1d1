"""The table of air quality: test error by method and window."""

from __future__ import annotations

import dataclasses
from typing import Any

import lavajax
from protocols import COMPARED_ROWS, ERROR_BAR_ROWS, FULL, Protocol, Row, Scale
from tables import Table, process_note, section
from works import Folders, Work

TITLE = "air quality: test error by method and window"
NAME = "air"
WINDOW = lavajax.AirQuality(data="beijing_air_quality/PRSA2017_Data_20130301-20170228.zip")
WINDOWS = {
    "N = 10, M = 10": WINDOW,
    "N = 10, M = 50": dataclasses.replace(WINDOW, queries=50),
}
COVARIATES = {
    "hour and weather": dataclasses.replace(WINDOW, inputs="weather"),
    "hour and all others": dataclasses.replace(WINDOW, inputs="all"),
}
LENGTHS = {
    f"N = 10, M = {queries}": dataclasses.replace(WINDOW, queries=queries)
    for queries in (2, 4, 6, 8, 10, 15)
}
MORE_TASKS = {"N = 10, M = 10, 100 tasks a step": WINDOW}
LONGER = {"N = 10, M = 10, 100 tasks a step, 20,000 steps": WINDOW}
# By validation windows, of one seed: 20,000 steps of 40 tasks are 1% higher, of 10 tasks 2%; at 40
# tasks ReLU is 0.5% higher, and at 10 a gradient step for each point, with the curvature at the
# prior, 3%.
ALL_WEIGHTS = lavajax.Lava(
    model=lavajax.MLP(activation="tanh"),
    subspace=FULL,
    inner_steps="map",
    epsilon=1.0,
    learn_epsilon=True,
    prior_correction=True,
    curvature_at="adapted",
)
# Features that read the targets of the support. By validation windows, of one seed and 6,000 steps
# of a prototype, the gain over interpolation is 8% less with a length-scale of 1.
CONDITIONED = lavajax.Conditioned(
    lavajax.Lava(
        model=lavajax.MLP(linear_features=False, activation="silu", initializer="lecun"),
        inner_steps="map",
        prior_correction=True,
        learn_epsilon=True,
    ),
    lengthscale=0.3,
)
SHORT_ROWS = ("ANIL", "LAVA, the paper's setting", "LAVA, converged", "ridge head")
MORE_ROWS = ("LAVA, converged", "LAVA, Bayesian", "ridge head")
LENGTH_ROWS = ("LAVA, the paper's setting",)
QUICK_ROWS = ("ANIL", "LAVA, the paper's setting")


def _rows(names: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(row for row in COMPARED_ROWS if row.name in names)


def tables(scale: Scale, folders: Folders | None = None) -> dict[str, Table]:
    """The cells: of the paper's table, with covariates, and by the length of the window."""
    protocol = _protocol(scale)

    def make(columns: dict[str, Any], rows: tuple[Row, ...], **other: Any) -> Table:
        if scale.quick:
            columns, rows = dict(list(columns.items())[:1]), _rows(QUICK_ROWS)
        return Table(NAME, columns, dataclasses.replace(protocol, **other), rows, folders)

    found = {
        "windows": make(WINDOWS, COMPARED_ROWS + (ERROR_BAR_ROWS if scale.extended else ())),
        "more": make(
            MORE_TASKS,
            (*_rows(MORE_ROWS), Row("LAVA, all weights", ALL_WEIGHTS, by_hand=True)),
            steps=10_000,
            search_steps=2_500,
            meta_batch=100,
            rates=(1e-3, 3e-3),
        ),
        "longer": make(
            LONGER,
            (Row("LAVA, conditioned", CONDITIONED, by_hand=True),),
            steps=20_000,
            search_steps=2_500,
            meta_batch=100,
            rates=(1e-3, 3e-3),
        ),
        "covariates": make(COVARIATES, _rows(SHORT_ROWS)),
        "lengths": make(LENGTHS, _rows(LENGTH_ROWS)),
    }
    return {"windows": found["windows"]} if scale.quick else found


def _protocol(scale: Scale) -> Protocol:
    """Errors of windows differ so much that ten times as many are scored."""
    return (
        scale.protocol if scale.quick else dataclasses.replace(scale.protocol, test_tasks=100_000)
    )


def works(scale: Scale) -> list[Work]:
    """All cells."""
    return [
        work
        for name, table in tables(scale).items()
        for work in [*table.works(), *table.references(table.protocol.test_tasks).values()]
    ]


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    shown = {name: table for name, table in tables(scale, folders).items() if table.found}
    if "windows" not in shown:
        return ""

    def show(name: str) -> str:
        table = shown.get(name)
        if table is None:
            return ""
        return f"{table.show_errors()}\n{table.show_references(table.protocol.test_tasks)}".strip()

    windows = shown["windows"]
    return section(
        "## Air quality",
        "Mean squared error of PM2.5 in units of its variance, on windows of N + M hours of a year "
        "that nothing was trained on; in brackets the LAVA paper's value, whose window is not "
        "stated (its VR-MAML ended in NaN). The last rows have no network: linear interpolation; "
        "a Gaussian process with a Matérn-3/2 kernel, whose parameters are fitted to windows of "
        "the training years"
        f"{process_note(windows.protocol.test_tasks)}; and the best linear predictor by the second "
        "moments of training windows, which is about what a head that knows the hour alone can "
        "come to. "
        "Test windows are drawn from all of that year, and overlap: the sampling error of this "
        "year is not known from them. Measured once, for linear interpolation at N = M = 10, the "
        "standard error was 0.0034 with windows taken together by station and week, and 0.0106 by "
        "week; on the validation windows, of the year before, its error was 0.0465. Differences "
        "between rows, which all see the same windows, are known better: measured once likewise, "
        "the error of LAVA on all weights as below, of one seed on 200,000 windows, was 0.956 "
        "times that of linear interpolation, with a standard error of 0.006 by week. The best "
        "linear predictor by second moments of the test year itself, which none can know, has "
        "0.951. "
        "± is the spread over seeds alone. " + windows.describe(),
        show("windows"),
        windows.exceptions(),
        windows.compare(),
        windows.show_settings(),
        windows.at_the_edge(),
        windows.given_up(),
        windows.show_densities(),
        "With more tasks in a step, since the errors of windows differ by orders of magnitude, and "
        "with LAVA on all weights, which no linear predictor bounds (tanh, each point at its own "
        f"MAP and the curvature there, chosen by validation windows). {shown['more'].describe()}"
        if "more" in shown
        else "",
        show("more"),
        *_below(shown.get("more")),
        "Nor does one bound LAVA's head where features read the labels of the other points: "
        "`Conditioned`, with SiLU, a length-scale of 0.3 and each point at its own MAP, which is "
        "ridge regression around a learned head; chosen by validation windows. Earlier forms, "
        "with a length-scale of 1 and half as many steps, had been scored on these test windows. "
        f"{shown['longer'].describe()}"
        if "longer" in shown
        else "",
        show("longer"),
        *_below(shown.get("longer")),
        "With measurements of the same hour as further inputs, at N = 10 and M = 10: of the "
        "weather, or of all others, which include PM10:"
        if "covariates" in shown
        else "",
        show("covariates"),
        *_below(shown.get("covariates")),
        "What the length of the window, N + M hours, does; the paper has 0.0465:"
        if "lengths" in shown
        else "",
        show("lengths"),
        *_below(shown.get("lengths")),
    )


def _below(table: Table | None) -> tuple[str, ...]:
    """What stands below a table: what was chosen, and what gave way."""
    return () if table is None else (table.show_settings(), table.given_up())
