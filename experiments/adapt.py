"""Adapt a model of a user's table to one group, and predict the rest of it.

python experiments/adapt.py --checkpoint=RUN --data=new.csv --group-value=Dongsi --out=predicted.csv

The rows of the group in which all targets are filled in are what the model adapts to; the others
are predicted, in the units of the table, with standard deviations where the method has them. The
same in Python, with rows of a pandas DataFrame:

    adapted = lavajax.adapt(params, labelled)
    prediction = lavajax.predict(params, adapted, others)
"""

from __future__ import annotations

import threads  # noqa: F401

# isort: split
import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import lavajax
from lavajax import checkpoint, frame
from lavajax.extras import require

try:
    for package in ("tyro", "docstring_parser", "rich", "orbax.checkpoint"):
        require(package, "experiments", "experiments/adapt.py")
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}")

import tyro

from files import whole
from folder import CONFIG, read_json
from lavajax.tasks.table import group_name
from options import Settings, Variant, split_names
from run import split_seeds
from unseen import was_trained_on


@dataclasses.dataclass(frozen=True)
class Options:
    """Adapt a model of a user's table to one group, and predict the rest of it.

    Attributes:
        checkpoint: folder of a run on --task=table, or a model that lavajax.save has written.
        data: CSV or Parquet file with the columns that the model was trained on; the group may be
            a new one.
        group_value: which group: its value in the group's column, or several with commas between.
        out: CSV file to write.
        group: the group's column, or several; the run's own where not given.
        support: how many labelled rows to adapt to, drawn at random by --seed; or the column that
            marks them, by true or a number other than 0; all labelled rows where not given.
        every_row: predict all rows of the group, those that the model has adapted to included.
        seed: of the draw, and of stochastic methods.
        model_seed: which of several models that were trained together, from 0.
        overwrite: replace the file --out.
    """

    checkpoint: Path
    data: Path
    group_value: str
    out: Path
    group: str | None = None
    support: str | None = None
    every_row: bool = False
    seed: int = 0
    model_seed: int = 0
    overwrite: bool = False

    def check(self) -> None:
        """Refuses what cannot be, before anything is read.

        Raises:
            ValueError: an option cannot be.
        """
        if self.out.suffix != ".csv":
            raise ValueError(f"--out must end in .csv, got {self.out}")
        if self.out.exists() and not self.overwrite:
            raise ValueError(f"--out must be a new file, {self.out} is there; --overwrite replaces")
        if self.out.exists() and self.data.exists() and self.out.samefile(self.data):
            raise ValueError(f"--out must not be --data itself, got {self.out} for both")
        if not self.out.parent.is_dir():
            raise ValueError(f"--out must be in a folder that is there, got {self.out}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must be between 0 and 2**32, got {self.seed}")


def main() -> int:
    """Runs the command line.

    Returns:
        0; 2 for what cannot be, 130 where it was stopped.
    """
    try:
        options = tyro.cli(Options, args=sys.argv[1:], prog="adapt.py")
        options.check()
        print(adapt(options))
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        print("stopped; nothing is written")
        return 130
    return 0


def adapt(options: Options) -> str:
    """Adapts, predicts and writes the file; returns what it did, in words.

    Raises:
        ValueError: an option does not fit the model or the data; the message says how.
        OSError: a file is not there, or cannot be written.
    """
    params = load_model(options)
    assert params.units is not None
    x_names, y_names = params.units.x.names, params.units.y.names
    assert x_names is not None
    assert y_names is not None
    columns = group_columns(options)
    table = frame.read(options.data, (*x_names, *y_names), columns)
    rows = table[rows_of_group(table, columns, split_names(options.group_value))]

    added = ["row", *(f"{name} {what}" for name in y_names for what in ("predicted", "std"))]
    if taken := [name for name in added if name in table.columns]:
        raise ValueError(
            f"--data must not have a column {taken[0]!r}, a name that --out has for what is new: "
            "rename it"
        )
    y = frame.take(rows, y_names, "y")
    complete = ~np.isnan(frame.take(rows, x_names, "x")).any(axis=1)
    labelled = ~np.isnan(y).any(axis=1)
    support = choose_support(rows, labelled & complete, options)
    asked = complete & (np.ones(len(rows), bool) if options.every_row else ~support)
    if not asked.any():
        raise ValueError(
            f"the group {options.group_value} must have a row to predict besides the "
            f"{support.sum()} that the model adapts to; --support=N takes fewer of them, "
            "--every-row predicts these too"
        )
    adapted = lavajax.adapt(params, rows[support], key=jax.random.key(options.seed))
    prediction = lavajax.predict(params, adapted, rows[asked])

    written = rows[asked].copy()
    mean = np.asarray(prediction.mean)
    for index, name in enumerate(y_names):
        written[f"{name} predicted"] = mean[:, index]
        if prediction.variance is not None:
            written[f"{name} std"] = np.sqrt(np.asarray(prediction.variance)[:, index])
    with whole(options.out) as temporary:
        written.to_csv(temporary, index=True, index_label="row")
    lines = [
        f"adapted to {support.sum():,} rows of {options.group_value}, "
        f"{asked.sum():,} predicted in {options.out}"
    ]
    if was_trained_on(options.checkpoint, group_name(split_names(options.group_value))):
        lines.append("the model was trained on this group: it is not unseen")
    if skipped := int((~complete).sum()):
        lines.append(f"left out, {skipped:,}: rows in which one of {', '.join(x_names)} is missing")
    known = (labelled & ~support)[asked]
    if known.any():
        errors = np.sqrt(np.mean((mean - y[asked])[known] ** 2, axis=0))
        told = ", ".join(f"{name} {e:.4g}" for name, e in zip(y_names, errors, strict=True))
        lines.append(
            f"root mean squared error on the {known.sum():,} of them that are labelled and were "
            f"not adapted to: {told}"
        )
    return "\n".join(lines)


def load_model(options: Options) -> lavajax.MetaParams:
    """The model, of one seed, which must know the names of its columns."""
    params = lavajax.load(options.checkpoint)
    seeds = split_seeds(params, checkpoint.seeds_of(params))
    if not 0 <= options.model_seed < len(seeds):
        raise ValueError(
            f"--model-seed must be below {len(seeds)}, the number of models in "
            f"{options.checkpoint}, got {options.model_seed}"
        )
    units = params.units
    if units is None or units.x.names is None or units.y.names is None:
        raise ValueError(
            f"--checkpoint must be a model of a table, such as of run.py --task=table, and "
            f"{options.checkpoint} knows no names of columns"
        )
    return seeds[options.model_seed]


def group_columns(options: Options) -> tuple[str, ...]:
    """The columns that name a row's group."""
    if options.group is not None:
        return split_names(options.group)
    config = options.checkpoint / CONFIG
    if config.is_file() and (options.checkpoint / checkpoint.CHECKPOINTS).is_dir():
        task, _ = Variant.split(Settings.from_json(read_json(config)).task)
        if isinstance(task, lavajax.Table):
            return task.group
    raise ValueError(
        f"--group must name the column of the groups: {options.checkpoint} is not the folder of a "
        "run on a table, which would know it"
    )


def rows_of_group(table: Any, columns: tuple[str, ...], values: tuple[str, ...]) -> np.ndarray:
    """Whether each row belongs to the group."""
    if len(values) != len(columns):
        raise ValueError(
            f"--group-value must have a value for each of {', '.join(columns)}, got {len(values)}"
        )
    text, missing = frame.take_text(table, columns, "--group")
    here = (text == np.array(values, object)) & ~missing
    for index, (name, value) in enumerate(zip(columns, values, strict=True)):
        if not here[:, index].any():
            there = list(dict.fromkeys(text[~missing[:, index], index]))
            more = ", ..." if len(there) > 10 else ""
            raise ValueError(
                f"--group-value must be a group of the table: column {name!r} never holds "
                f"{value!r}; it holds {', '.join(there[:10])}{more}"
            )
    found = here.all(axis=1)
    if not found.any():
        raise ValueError(
            f"--group-value must be a group of the table: no row has {', '.join(columns)} of "
            f"{', '.join(values)} together"
        )
    return found


def choose_support(rows: Any, usable: np.ndarray, options: Options) -> np.ndarray:
    """Whether the model adapts to each row: those that are labelled and asked for."""
    if not usable.any():
        raise ValueError(
            f"the group {options.group_value} must have a labelled row to adapt to, with every "
            "input and target filled in, and has none"
        )
    if options.support is None:
        return usable
    if options.support.lstrip("-").isdecimal():
        number, there = int(options.support), np.flatnonzero(usable)
        if not 1 <= number <= len(there):
            raise ValueError(
                f"--support must be from 1 to {len(there)}, the labelled rows of the group, got "
                f"{number}"
            )
        chosen = np.random.default_rng(options.seed).choice(there, number, replace=False)
        return np.isin(np.arange(len(rows)), chosen)
    marked = frame.take_complete(rows, (options.support,), "--support")[:, 0] != 0
    if not marked.any():
        raise ValueError(f"--support column {options.support!r} must mark a row, and marks none")
    unlabelled = np.flatnonzero(marked & ~usable)
    if len(unlabelled):
        raise ValueError(
            f"--support column {options.support!r} must mark rows in which every input and target "
            f"is filled in, and marks row {rows.index[unlabelled[0]]} of its index"
        )
    return marked


if __name__ == "__main__":
    sys.exit(main())
