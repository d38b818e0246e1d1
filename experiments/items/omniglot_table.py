"""The table of Omniglot: accuracy on alphabets unseen in training."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np

import lavajax
from lavajax import Conv4, CrossEntropy
from lavajax.tasks.base import SPLITS
from protocols import Protocol, Row, Scale
from tables import Table, section
from works import Folders, Work

TITLE = "Omniglot: accuracy by method and shots"
NAME = "omniglot"
WAYS = 5
# Five queries for each class: what is averaged is 600 episodes, and images are what costs time.
COLUMNS = {
    f"{WAYS}-way {shots}-shot": lavajax.Omniglot(NAME, ways=WAYS, shots=shots, queries=5)
    for shots in (1, 5)
}
WIDE, NARROW = 64, 16
# Where LAVA's learned rate starts. From 0.1 it must first come down to 0.02 or so, as it does from
# any start: after 600 outer steps at width 32 that costs 1 to 2 points of validation accuracy.
LAVA_RATE = 0.01
_FOR = {"train": "for training", "validation": "for validation", "test": "for test"}
PROTOCOL = Protocol(
    name="omniglot",
    steps=1_200,
    search_steps=200,
    rates=(3e-3, 1e-2),  # of so short a schedule: at 1e-3 LAVA is 4 points lower
    inner_steps=(1, 5),
    inner_steps_full=(1, 3),
    seeds=3,
    meta_batch=4,
    validation_tasks=200,
    test_tasks=600,
)


def rows(wide: int = WIDE, narrow: int = NARROW) -> tuple[Row, ...]:
    """The methods: a head at full width, and what adapts more than a head at a small one."""
    loss, head, other = CrossEntropy(WAYS), Conv4(wide), Conv4(narrow)
    lava = lavajax.Lava(head, loss, inner_rate=LAVA_RATE)
    context = lavajax.Context(size=100, start="zeros")  # as in CAVIA's own experiments on images
    return (
        Row("LAVA, the paper's setting", lava),
        Row("LAVA, learned epsilon", dataclasses.replace(lava, learn_epsilon=True)),
        Row("ANIL", lavajax.Anil(head, loss), True),
        Row("ridge head", lavajax.Ridge(head, loss)),
        Row("MAML", lavajax.Maml(other, loss), True),
        Row("CAVIA", lavajax.Cavia(other, loss, context, inner_rate=1.0), True),
    )


def table(scale: Scale, folders: Folders | None = None) -> Table:
    """The cells."""
    if scale.quick:
        columns: dict[str, Any] = dict(list(COLUMNS.items())[:1])
        return Table(NAME, columns, scale.protocol, rows(2, 2)[:1], folders)
    return Table(NAME, COLUMNS, PROTOCOL, rows(), folders)


def works(scale: Scale) -> list[Work]:
    """All cells, and what is in the data."""
    return [*table(scale).works(), _characters()]


def _characters() -> Work:
    """The number of characters for each split, turned ones not counted."""
    task = next(iter(COLUMNS.values()))
    key = {"split": task.split}
    return Work(NAME, "characters", key, partial(_count, task), seconds=5.0, data=task.data)


def _count(task: lavajax.Omniglot, folders: Folders) -> dict[str, int]:
    classes = folders.source(task).classes
    return {split: len(np.unique(np.asarray(classes[split]) // 4)) for split in SPLITS}


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    if not cells.found:
        return ""
    counts = _characters().result(folders) or {}
    listed = ", ".join(f"{number:,} {_FOR[split]}" for split, number in counts.items())
    queries = next(iter(COLUMNS.values())).queries
    return section(
        "## Omniglot",
        "Accuracy on characters of alphabets that were not seen in training, "
        f"{queries} queries for each class; chance is {1 / WAYS:g}. "
        + (f"The data has {sum(counts.values()):,} characters: {listed}. " if counts else "")
        + f"The network is Conv4 with batch normalisation, of {_widths(cells)}. The paper has no "
        "such table. " + cells.describe("100 numbers and start at 0"),
        cells.show_errors(),
        "LAVA's inner rate starts at "
        f"{LAVA_RATE:g}, chosen by hand on validation episodes; those of the others start at their "
        "defaults, and of CAVIA at 1, as in its own experiments. The 95% interval of a seed over "
        f"the {cells.protocol.test_tasks:,} episodes, and how long its training took:",
        cells.show("method", partial(_interval, cells)),
        cells.exceptions(),
        cells.show_settings(),
        cells.at_the_edge(),
        cells.given_up(),
    )


_SHOWN = ("standard_error", "seconds")


def _interval(cells: Table, row: Row, column: str) -> str:
    """Half the interval of accuracy, and minutes, both the median over seeds."""
    result = cells.found.get((row.name, column), {"seeds": ()})
    seeds = [s for s in result["seeds"] if s["accuracy"] is not None]
    if not seeds:
        return ""
    error, seconds = (np.median([s.get(name, np.nan) for s in seeds]) for name in _SHOWN)
    return f"± {100 * 1.96 * error:.2g}%, {seconds / 60:.2g} min"


def _widths(cells: Table) -> str:
    """The channels of each row."""
    by_width: dict[int, list[str]] = {}
    for row in cells.rows:
        by_width.setdefault(row.method.model.width, []).append(row.name)
    parts = [f"{width} channels ({'; '.join(names)})" for width, names in by_width.items()]
    small = ", whose steps cost more, and which are no measure for the others"
    return " and of ".join(parts) + (small if len(parts) > 1 else "")
