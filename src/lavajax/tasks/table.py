"""A user's own table of grouped data: every group (a station, a machine, a patient) is a task."""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import frame, validate
from lavajax.tasks.base import SPLITS, Split, distinct
from lavajax.types import Array, Points, Task
from lavajax.units import Columns, Units


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Table:
    """Settings of tasks from a table with a row for each point; ``load`` reads a file of it.

    A task is a group, a set of its rows drawn at random: predict the columns y from the columns x,
    having seen some rows of the group. Whole groups are held out for validation and test, at random
    by ``split_seed`` and the groups' names, whatever the order of rows. Inputs and targets are
    standardised over the rows of the training groups. Rows with a missing entry are left out.

    With a DataFrame in memory, and a model that takes and gives numbers in its units::

        tasks = Table("station", x=("TEMP", "PRES"), y="PM2.5").tasks(frame)
        params = lavajax.train(lavajax.lava_converged(), tasks).params
        adapted = lavajax.adapt(params, labelled_rows_of_one_station)
        prediction = lavajax.predict(params, adapted, its_other_rows)

    Attributes:
        group: the column that names a row's group, or several: a group is then rows that agree in
            all of them.
        x: the columns that are inputs.
        y: the columns that are targets.
        data: path of a CSV or Parquet file with a header; None for a table in memory.
        shots: N, support rows.
        queries: M, query rows. A group of fewer than N + M rows gives what it has, in proportion
            and by mask, with at least one row of each.
        validation_share: of all groups, for validation; at least one group.
        test_share: of all groups, for test; at least one group.
        split_seed: fixes which groups these are.
    """

    group: tuple[str, ...]
    x: tuple[str, ...]
    y: tuple[str, ...]
    data: str | None = None
    shots: int = 10
    queries: int = 10
    validation_share: float = 0.15
    test_share: float = 0.15
    split_seed: int = 0

    def __post_init__(self) -> None:
        for field in ("group", "x", "y"):
            validate.names(self, field)
        if self.data is not None:
            object.__setattr__(self, "data", str(self.data))
        validate.integer(self, "shots", minimum=1)
        validate.integer(self, "queries", minimum=1)
        validate.number(self, "validation_share", minimum=0.0, strict=True)
        validate.number(self, "test_share", minimum=0.0, strict=True)
        validate.integer(self, "split_seed", minimum=0)
        if self.validation_share + self.test_share >= 1:
            raise ValueError(
                "Table.validation_share + Table.test_share must be below 1, for training to have "
                f"groups, got {self.validation_share:g} + {self.test_share:g}"
            )
        for one, other in (("x", "y"), ("group", "x"), ("group", "y")):
            if both := set(getattr(self, one)) & set(getattr(self, other)):
                why = "would tell the answer" if one == "x" else "is the same on all rows of a task"
                raise ValueError(
                    f"Table.{one} and Table.{other} must share no column, both have "
                    f"{sorted(both)[0]!r}: it {why}"
                )

    def load(
        self, *, units: Units | None = None, known: Mapping[Split, Sequence[str]] | None = None
    ) -> TableTasks:
        """Reads the file ``data``, and makes tasks of it; see ``tasks``.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: ``data`` is None or no readable table; or as ``tasks``.
            ModuleNotFoundError: pandas is missing; the message has the command that installs it.
        """
        if self.data is None:
            raise ValueError(
                "Table.data must be the path of a CSV or Parquet file, got None; a table in memory "
                "is given to Table(...).tasks(table)"
            )
        table = frame.read(self.data, (*self.x, *self.y), self.group)
        return self.tasks(table, units=units, known=known)

    def tasks(
        self,
        table: Any,
        *,
        units: Units | None = None,
        known: Mapping[Split, Sequence[str]] | None = None,
    ) -> TableTasks:
        """Makes tasks of a table in memory.

        To score a model on another table than it was trained on, and not on groups that it has
        seen, give its ``units`` and, as ``known``, ``{"train": trained.groups("train")}``.

        Args:
            table: a pandas DataFrame, or a dict with an array ``[rows]`` for each column.
            units: those of a model, to standardise as its training data was; None: by the mean and
                standard deviation over the training groups.
            known: the names of groups whose split is settled; all others are then for test, at
                least one. They need not be in the table, and a split may be left with none, from
                which nothing can be drawn. Names are compared as text: ``"002"`` is not 2. None:
                groups are held out by ``split_seed``.

        Warns:
            UserWarning: none of the groups known of a split is in the table.

        Raises:
            ValueError: a column is missing, constant, or holds text, dates or infinities; there
                are too few groups or rows; the units are of other columns, or are not given where
                no group is for training. The message names the column, the row, and what to do.
        """
        keys, missing = frame.take_text(table, self.group, "group")
        x, y = frame.take(table, self.x, "x"), frame.take(table, self.y, "y")
        if not len(keys) == len(x) == len(y):
            raise ValueError(
                "the table's columns must have one length, got "
                f"group: {len(keys)}, x: {len(x)}, y: {len(y)}"
            )
        keep = np.ones(len(x), bool)
        dropped: list[tuple[str, int]] = []

        def drop(bad: np.ndarray, why: str) -> None:
            """Counts each row once, for the first reason."""
            nonlocal keep
            if found := int((bad & keep).sum()):
                dropped.append((why, found))
                keep = keep & ~bad

        for index, name in enumerate(self.group):
            drop(missing[:, index], f"without {name}")
        for names, values in ((self.x, x), (self.y, y)):
            for index, name in enumerate(names):
                drop(np.isnan(values[:, index]), f"without {name}")
        if not keep.any():
            raise ValueError(
                "the table must have rows in which no entry of group, x and y is missing, and has "
                f"none: {_listed(dropped) or 'it has no rows at all'}"
            )
        # Names by number: as an array of text, every row would be as long as the longest name.
        text = [group_name(key) for key in keys]
        labels = sorted({text[row] for row in np.flatnonzero(keep)})
        number = {label: index for index, label in enumerate(labels)}
        numbers = np.array([number.get(label, -1) for label in text], int)
        sizes = np.bincount(numbers[keep])
        alone = np.zeros(len(x), bool)
        alone[keep] = sizes[numbers[keep]] < 2
        drop(alone, "alone in their group")
        rows = np.flatnonzero(keep)[np.argsort(numbers[keep], kind="stable")]
        left, group = np.unique(numbers[rows], return_inverse=True)
        names = tuple(labels[each] for each in left)
        return self._standardised(
            *(x[rows], y[rows], names, group), units=units, known=known, dropped=tuple(dropped)
        )

    def _standardised(
        self,
        x: np.ndarray,
        y: np.ndarray,
        labels: tuple[str, ...],
        group: np.ndarray,
        *,
        units: Units | None,
        known: Mapping[Split, Sequence[str]] | None,
        dropped: tuple[tuple[str, int], ...],
    ) -> TableTasks:
        """Tasks of complete rows, sorted by group."""
        splits = self._split(labels, dropped) if known is None else _settled(labels, known)
        if units is None:
            if not len(splits["train"]):
                raise ValueError(
                    "units must be given, those of a model, where no group of the table is for "
                    "training: there is nothing to standardise by"
                )
            learn = np.isin(group, splits["train"])
            units = Units(_columns(x[learn], self.x, "x"), _columns(y[learn], self.y, "y"))
        elif (units.x.names, units.y.names) != (self.x, self.y):
            raise ValueError(
                f"units must be of x {self.x} and y {self.y}, got {units.x.names} and "
                f"{units.y.names}"
            )
        sizes = np.bincount(group, minlength=len(labels))
        return TableTasks(
            x=units.x.standardise(x),
            y=units.y.standardise(y),
            starts=jnp.asarray(np.cumsum(sizes) - sizes, jnp.int32),
            sizes=jnp.asarray(sizes, jnp.int32),
            splits={name: jnp.asarray(found, jnp.int32) for name, found in splits.items()},
            shots=self.shots,
            queries=self.queries,
            units=units,
            labels=labels,
            dropped=dropped,
            masked=bool(sizes.min() < self.shots + self.queries),
        )

    def _split(
        self, labels: tuple[str, ...], dropped: tuple[tuple[str, int], ...]
    ) -> dict[str, np.ndarray]:
        """Groups of each split, by their number.

        They are ranked by a hash of seed and name: the same groups on every machine and version.
        """
        shares = {"validation": self.validation_share, "test": self.test_share}
        counts = {name: max(1, round(share * len(labels))) for name, share in shares.items()}
        if sum(counts.values()) >= len(labels):
            raise ValueError(
                f"group must tell apart at least {1 + sum(counts.values())} groups of two rows or "
                "more, one for each of training, validation and test at the least, "
                f"got {len(labels)} by {' and '.join(map(repr, self.group))}: "
                f"{', '.join(labels[:5]) or 'none'}"
                + (f" (left out: {_listed(dropped)})" if dropped else "")
                + "; give a column, or several, of more values, or smaller shares"
            )
        digests = [
            hashlib.sha256(f"{self.split_seed}/{label}".encode()).digest() for label in labels
        ]
        order = np.array(sorted(range(len(labels)), key=lambda i: digests[i]))
        first, second = counts["test"], counts["test"] + counts["validation"]
        parts = {"train": order[second:], "validation": order[first:second], "test": order[:first]}
        return {name: np.sort(part) for name, part in parts.items()}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TableTasks:
    """Groups of rows, drawn at random on the device.

    Attributes:
        x: standardised inputs, ``[rows, d]``, sorted by group.
        y: standardised targets, ``[rows, k]``.
        starts: the first row of each group, ``[groups]``.
        sizes: the rows of each group, ``[groups]``, at least 2.
        splits: the groups of each split, by their number.
        shots: N; static.
        queries: M; static.
        units: of the table; static.
        labels: names of the groups, ``[groups]``; static.
        dropped: why rows of the table were left out, and how many; static.
        masked: whether a group has fewer than N + M rows; static.
    """

    x: Array
    y: Array
    starts: Array
    sizes: Array
    splits: dict[str, Array]
    shots: int = dataclasses.field(metadata={"static": True})
    queries: int = dataclasses.field(metadata={"static": True})
    units: Units = dataclasses.field(metadata={"static": True})
    labels: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    dropped: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    masked: bool = dataclasses.field(metadata={"static": True})

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A group of the split: support x ``[N, d]``, y ``[N, k]``, query ``[M, d]``, ``[M, k]``.

        All rows are different. Both have a mask where any group is too small for all of them.

        Raises:
            ValueError: no group of the table is of that split.
        """
        group_key, row_key = jax.random.split(key)
        groups = self.splits[split]
        if not groups.shape[0]:
            raise ValueError(f"split must be one that the table has groups for, got {split!r}")
        group = groups[jax.random.randint(group_key, (), 0, groups.shape[0])]
        size = self.sizes[group]
        shots, total = self.shots, self.shots + self.queries
        rows = self.starts[group] + distinct(row_key, size, total)
        if not self.masked:
            return Task(self._points(rows[:shots]), self._points(rows[shots:]))
        share = jnp.floor(size * (shots / total) + 0.5).astype(jnp.int32)
        support = jnp.where(size < total, jnp.clip(share, 1, size - 1), shots)
        place = support + jnp.arange(self.queries)
        return Task(
            self._points(rows[:shots], jnp.arange(shots) < support),
            self._points(rows[jnp.minimum(place, total - 1)], place < jnp.minimum(size, total)),
        )

    def _points(self, rows: Array, mask: Array | None = None) -> Points:
        return Points(self.x[rows], self.y[rows], mask)

    def groups(self, split: Split) -> tuple[str, ...]:
        """The names of the groups of a split."""
        return tuple(self.labels[i] for i in np.asarray(self.splits[split]))

    def __str__(self) -> str:
        """How many rows and groups there are, and what was left out."""
        parts = []
        for split in SPLITS:
            names = self.groups(split)
            parts.append(f"{split} {len(names)}" + (f" ({shorten(names)})" if names else ""))
        left_out = _listed(self.dropped)
        sizes = np.asarray(self.sizes)
        return (
            f"{self.x.shape[0]:,} rows in {len(self.labels)} groups of {sizes.min():,} to "
            f"{sizes.max():,}; {'; '.join(parts)}; rows left out: {left_out or 'none'}"
        )


def _settled(
    labels: tuple[str, ...], known: Mapping[Split, Sequence[str]]
) -> dict[str, np.ndarray]:
    """Groups of each split, by their number: of those that are known, and all others for test."""
    split_of: dict[str, Split] = {}
    for split, names in known.items():
        if split not in SPLITS:
            raise ValueError(f"known must have splits of {', '.join(SPLITS)}, got {split!r}")
        if isinstance(names, str):
            raise ValueError(f"known must have a list of names for each split, got {names!r}")
        if len(names) and not set(names) & set(labels):
            warnings.warn(
                f"known has {len(names)} groups for {split} ({shorten(list(map(repr, names)))}), "
                "and none of them is in the table, whose groups are "
                f"{shorten(list(map(repr, labels)))}: all of these count as unseen",
                stacklevel=4,
            )
        for name in names:
            if split_of.setdefault(name, split) != split:
                raise ValueError(
                    f"known must have each group in one split, got {name!r} in "
                    f"{split_of[name]} and {split}"
                )
    splits = [split_of.get(label, "test") for label in labels]
    if "test" not in splits:
        raise ValueError(
            "the table must have a group to test on, and every one of its "
            f"{len(labels)} is known, and not for test: {shorten(labels)}"
        )
    return {split: np.flatnonzero(np.array(splits) == split) for split in SPLITS}


def shorten(names: Sequence[str]) -> str:
    """The first five of some names."""
    apart = "; " if any("," in name for name in names) else ", "
    return apart.join([*names[:5], *(["..."] if len(names) > 5 else [])])


def group_name(key: Sequence[str]) -> str:
    """The name of a group of several columns; what has a comma is quoted, as in CSV."""
    if len(key) == 1:
        return key[0]
    return ",".join(f'"{value}"' if "," in value else value for value in key)


def _columns(values: np.ndarray, names: tuple[str, ...], part: str) -> Columns:
    """Mean and standard deviation of columns ``[rows, d]``, which must not be constant."""
    for index, name in enumerate(names):
        column = values[:, index]
        if column.min() == column.max():
            advice = "leave it out" if part == "x" else "there is nothing to predict"
            raise ValueError(
                f"{part} column {name!r} must vary, and is {column[0]:g} on every row of the "
                f"training groups: {advice}"
            )
    return Columns(tuple(values.mean(axis=0)), tuple(values.std(axis=0)), names)


def _listed(dropped: Any) -> str:
    return ", ".join(f"{count:,} {why}" for why, count in dropped)
