"""The table of radio signals: test error by method and number of support points."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np

import lavajax
from comparison import Job
from protocols import COMPARED_ROWS, Row, Scale
from reference import PAPER_RADIO, noise_floor
from tables import Table, process_note, section, spread
from works import Folders, Work

TITLE = "radio signals, synthetic: test error by method and N"
NAME = "radio"
SHOTS = (10, 20)
DIRECTION = lavajax.DirectionError()
DIRECTION_ROWS = ("ANIL", "LAVA, the paper's setting", "LAVA, converged", "ridge head")
QUICK_ROWS = tuple(
    row for row in COMPARED_ROWS if row.name in ("ANIL", "LAVA, the paper's setting")
)


def table(scale: Scale, folders: Folders | None = None) -> Table:
    """The cells."""
    shots = SHOTS[:1] if scale.quick else SHOTS
    columns = {f"N = {n}": lavajax.Radio(shots=n) for n in shots}
    rows = QUICK_ROWS if scale.quick else COMPARED_ROWS
    return Table(NAME, columns, scale.protocol, rows, folders)


def directions(scale: Scale, folders: Folders | None = None) -> Table:
    """The cells of methods that know that the signals have one amplitude."""
    columns = {f"N = {n}, amplitude 1": lavajax.Radio(shots=n) for n in SHOTS}
    rows = [
        dataclasses.replace(row, method=dataclasses.replace(row.method, point_loss=DIRECTION))
        for row in COMPARED_ROWS
        if row.name in DIRECTION_ROWS
    ]
    return Table(NAME, columns, scale.protocol, tuple(rows), folders)


def works(scale: Scale) -> list[Work]:
    """All cells."""
    cells = table(scale)
    clean = [_clean(cells.job(row, column)) for column in cells.columns for row in cells.rows]
    further = [] if scale.quick else directions(scale).works()
    references = cells.references(scale.protocol.test_tasks).values()
    return [*cells.works(), *clean, *further, *references]


def _clean(job: Job) -> Work:
    """The errors of a cell's seeds against signals without noise."""
    key = {**job.key, "query": "clean"}
    compute = partial(_score_clean, job)
    return Work(NAME, f"{job.name} clean", key, compute, after=(job.work,), seconds=20.0)


def _score_clean(job: Job, folders: Folders) -> list[float]:
    source = dataclasses.replace(folders.source(job.task), clean_query=True)
    tasks = job.protocol.test_tasks
    return [
        lavajax.evaluate(params, source, num_tasks=tasks).mean for params in job.trained(folders)
    ]


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    if not cells.found:
        return ""

    def show_clean(row: Row, column: str) -> str:
        errors = _clean(cells.job(row, column)).result(folders)
        return spread(np.array(errors)) if errors else ""

    directed = directions(scale, folders)
    against_signal = cells.show("against the signal itself", show_clean)
    return section(
        "## Radio signals, synthetic",
        "Mean squared error of the two channels of frequency-modulated signals of unit power, "
        "generated, with noise of 20 to 30 dB on support and query, whose power, the last row, is "
        "the error of the signal itself. They stand in for RadioML 2018.01A, of which the LAVA "
        f"paper has {PAPER_RADIO['Lava']:g} for LAVA and {PAPER_RADIO['Anil']:g} for ANIL. The "
        "last rows have no network: linear interpolation between the labelled instants; the "
        "Gaussian process has a Matérn-3/2 kernel, whose parameters "
        f"are fitted to training signals{process_note(scale.protocol.test_tasks)}; and the best "
        "linear predictor, by the second moments of training signals, is about what a head can "
        "come to. " + cells.describe(),
        f"{cells.show_errors()}\n{cells.show_references(scale.protocol.test_tasks)}".strip(),
        cells.sampling(),
        "The same models against queries without noise; supports have theirs:"
        if against_signal
        else "",
        against_signal,
        cells.exceptions(),
        cells.compare(),
        cells.show_settings(),
        cells.at_the_edge(),
        cells.given_up(),
        *_directed(directed),
    )


def _directed(cells: Table) -> tuple[str, ...]:
    """The part of the methods that know that the signals have one amplitude."""
    if not cells.found:
        return ()
    floor = {column: noise_floor(task.load()) for column, task in cells.columns.items()}

    def times(row: Row, column: str) -> str:
        if (row.name, column) not in cells.found:
            return ""
        return f"{np.mean(cells.errors(row.name, column)) / floor[column]:.2f}"

    return (
        "The same methods with `DirectionError`: all these signals have an amplitude of 1, and "
        "what is predicted is the outputs' direction, no longer linear in the labels; the "
        "loss that is trained with is the same, and the choices are made by the error of these.",
        cells.show_errors(),
        "In units of the noise, mean over seeds:",
        cells.show("times the noise", times),
        cells.show_settings(),
        cells.given_up(),
    )
