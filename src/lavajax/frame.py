"""A user's table: its file, and its columns as numbers, with a plain message for what is none.

A table is a pandas DataFrame, whatever else has ``columns`` and gives one by ``table[name]``, or a
dict of arrays.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lavajax.extras import require
from lavajax.validate import nearest

MOST_BYTES = 2**32
"""What a packed file may unpack to: more is refused before it fills the memory."""


def is_table(value: Any) -> bool:
    """Whether columns can be taken from it by name."""
    return hasattr(value, "columns") or isinstance(value, Mapping)


def column_names(table: Any) -> list[str]:
    """The names of its columns, in order."""
    return [str(name) for name in (table.columns if hasattr(table, "columns") else table)]


def _label(table: Any, name: str) -> Any:
    """What the table itself calls a column: a number, say, where its name is that in text."""
    labels = table.columns if hasattr(table, "columns") else table
    return next(label for label in labels if str(label) == name)


def take(table: Any, names: Sequence[str], argument: str) -> np.ndarray:
    """Columns as numbers.

    Args:
        table: a DataFrame or a dict of arrays.
        names: of the columns.
        argument: what a message calls them.

    Returns:
        ``[rows, len(names)]`` float64, NaN where an entry is missing.

    Raises:
        ValueError: a column is not there, is there twice, or holds text, dates or infinities; the
            message names it, the row, and what to do.
    """
    check_names(column_names(table), names, argument)
    columns = [_numbers(table, name, f"{argument} column {name!r}") for name in names]
    _check_lengths(columns, names, argument)
    return np.stack(columns, axis=1)


def take_complete(table: Any, names: Sequence[str], argument: str) -> np.ndarray:
    """``take``, of columns without a missing entry.

    Raises:
        ValueError: as ``take``; or an entry is missing, and the message names column and row.
    """
    values = take(table, names, argument)
    missing = np.argwhere(np.isnan(values))
    if len(missing):
        row, column = missing[0]
        raise ValueError(
            f"{argument} column {names[column]!r} must hold a number on every row, and "
            f"{_row(table, row)} has none: leave such rows out ({len(missing)} entries are missing)"
        )
    return values


def take_text(table: Any, names: Sequence[str], argument: str) -> tuple[np.ndarray, np.ndarray]:
    """Columns as text, such as the names of groups.

    Args:
        table: a DataFrame or a dict of arrays.
        names: of the columns.
        argument: what a message calls them.

    Returns:
        Text ``[rows, len(names)]``, and whether an entry is missing, likewise. A float that is an
        integer is written as one: a column of integers has floats where an entry is missing.

    Raises:
        ValueError: a column is not there, is there twice, or has another length.
    """
    check_names(column_names(table), names, argument)
    texts, missing = [], []
    for name in names:
        values = _column(table, name)
        missing.append(np.array([is_missing(value) for value in values], bool))
        dates = values.dtype.kind == "M"
        text = np.datetime_as_string(values, unit="auto") if dates else values
        texts.append(np.array([_text(value) for value in text], object))
    _check_lengths(texts, names, argument)
    return np.stack(texts, axis=1), np.stack(missing, axis=1)


def _column(table: Any, name: str) -> np.ndarray:
    """A column as an array; what is hidden by the mask of a masked array is missing."""
    column = table[_label(table, name)]
    if not isinstance(column, np.ma.MaskedArray):
        return np.asarray(column)
    if column.dtype.kind == "M":
        return column.filled(np.datetime64("NaT"))
    if not np.ma.is_masked(column):
        return column.data
    values: np.ndarray = column.data.astype(object)
    values[np.ma.getmaskarray(column)] = None
    return values


def _text(value: Any) -> str:
    if isinstance(value, (float, np.floating)) and value.is_integer() and abs(float(value)) < 2**53:
        return str(int(value))
    return str(value)


def is_missing(value: Any) -> bool:
    """Whether an entry is None, NaN, or what pandas has for them."""
    return not isinstance(value, str) and str(value) in ("None", "nan", "<NA>", "NaT")


def check_names(there: Sequence[str], wanted: Sequence[str], argument: str) -> None:
    """Requires every wanted column, once.

    Raises:
        ValueError: one is missing, with the nearest name and all that are there; or is there twice.
    """
    for name in wanted:
        if (count := list(there).count(name)) > 1:
            raise ValueError(
                f"{argument} column {name!r} is there {count} times: rename all but one"
            )
        if not count:
            shown = ", ".join(map(repr, there[:20])) + (" ..." if len(there) > 20 else "")
            raise ValueError(
                f"{argument} names the column {name!r}, and the table has none of that name"
                f"{nearest(name, there)}; its columns are {shown or 'none'}"
            )


def read(path: str | Path, names: tuple[str, ...], groups: tuple[str, ...] = ()) -> Any:
    """Reads a CSV or Parquet file as a pandas DataFrame.

    Args:
        path: a file ending in ``.csv``, ``.csv.gz``, ``.parquet`` or ``.pq``.
        names: columns that must be there.
        groups: likewise; in CSV these stay text, so that 007 is not 7.

    Returns:
        A DataFrame with all columns of the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read as what its name says, lacks a column, has rows with
            more fields than its header, or is packed and unpacks to more than ``MOST_BYTES``.
        ModuleNotFoundError: pandas or pyarrow is missing.
    """
    pandas = require("pandas", "data", "reading a table")
    path = Path(path)
    name = path.name.lower()
    if not path.is_file():
        raise FileNotFoundError(
            "data must be the path of a table of your own, a CSV or Parquet file with a header and "
            f"a row for each point, got {path}, which is "
            f"{'a folder' if path.is_dir() else 'not there'}"
        )
    wanted = (*groups, *names)
    try:
        if name.endswith((".parquet", ".pq")):
            pyarrow = require("pyarrow", "data", "reading a Parquet file")
            try:
                table = _read_parquet(path)
            except pyarrow.ArrowException as error:
                raise ValueError(
                    f"data must be a Parquet file that can be read, {path} is not: {error}"
                ) from None
            check_names(column_names(table), wanted, "data")
            return table
        if not name.endswith((".csv", ".csv.gz")):
            raise ValueError(
                f"data must end in .csv, .csv.gz, .parquet or .pq, got {path}: save the table as "
                "one of these"
            )
        if name.endswith(".gz"):
            _check_unpacked(path, _gzip_size(path))
        # pandas renames the second of two columns of one name: the header is looked at first.
        options: dict[str, Any] = {"encoding": "utf-8-sig"}
        as_text = {"dtype": str, "keep_default_na": False}  # a column may be called NA
        header = pandas.read_csv(path, header=None, nrows=1, **as_text, **options)
        check_names([str(each) for each in header.iloc[0]], wanted, "data")
        table = pandas.read_csv(path, low_memory=False, **options)
        if len(table) and not isinstance(table.index, pandas.RangeIndex):
            # pandas takes the first fields for names of rows, and all columns are then shifted.
            raise ValueError(
                f"data must have as many fields in a row as in its header, {path} has more: leave "
                "out a comma at the end of rows, or name every column"
            )
        if groups:  # as text: 007 is not 7, and NA may be Namibia; only an empty entry is missing
            names_of_groups = pandas.read_csv(path, usecols=list(groups), **as_text, **options)
            for group in groups:
                table[group] = names_of_groups[group].replace("", None)
        return table
    except (pandas.errors.ParserError, pandas.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise ValueError(
            f"data must be a CSV file in UTF-8 with commas between its columns, {path} is not: "
            f"{error}"
        ) from None
    except (OSError, EOFError, zlib.error) as error:  # a .gz that is none, or is cut short
        raise ValueError(f"data must be a whole, readable file, {path} is not: {error}") from None


def _check_unpacked(path: Path, size: int) -> None:
    if size > MOST_BYTES:
        raise ValueError(
            f"data must unpack to at most {MOST_BYTES:,} bytes, {path} to more: give a part of its "
            "rows or columns"
        )


def _gzip_size(path: Path) -> int:
    """The bytes that a file unpacks to, which are counted and not kept; at most one block more."""
    size = 0
    with gzip.open(path) as stream:
        while size <= MOST_BYTES and (block := stream.read(2**20)):
            size += len(block)
    return size


def _read_parquet(path: Path) -> Any:
    """The table of a file, whose own account of what it unpacks to is not believed.

    A few bytes may stand for a column that repeats a value, and a value may be long. Text is kept
    as numbers of its values, which may be in the file so, and what memory it takes is watched.

    Raises:
        ValueError: it unpacks to more than ``MOST_BYTES``, or has a column of lists and
            the like.
        pyarrow.ArrowException: it is no Parquet file.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    def is_text(kind: Any) -> bool:
        tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        return any(test(kind) for test in tests)

    def is_plain(kind: Any) -> bool:
        tests = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_null)
        return any(test(kind) for test in tests)

    with ParquetFile(path) as file:
        fields = {
            f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type
            for f in file.schema_arrow
        }
        texts = [name for name, kind in fields.items() if is_text(kind)]
        for name, kind in fields.items():
            if not is_text(kind) and not is_plain(kind):
                raise ValueError(
                    f"data must have columns of numbers, text or dates, column {name!r} of {path} "
                    f"is of {kind}: leave it out, or make it one of these"
                )
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        columns = [g.column(i) for g in groups for i in range(g.num_columns)]
        # Text of which each value is told by the one before cannot be read as such numbers.
        deltas = {c.path_in_schema for c in columns if any("DELTA" in e for e in c.encodings)}
        # A number takes up to 8 bytes, however few it is encoded in.
        size = sum(max(g.total_byte_size, 8 * g.num_rows * g.num_columns) for g in groups)
        _check_unpacked(path, size)
    before, batches = pa.total_allocated_bytes(), []
    with ParquetFile(path, read_dictionary=[name for name in texts if name not in deltas]) as file:
        for batch in file.iter_batches(batch_size=4096):
            batches.append(batch)
            _check_unpacked(path, pa.total_allocated_bytes() - before)
        schema = batches[0].schema if batches else file.schema_arrow
    table = pa.Table.from_batches(batches, schema=schema).to_pandas()
    return table.astype(dict.fromkeys(set(texts) & set(table.columns), object))


def _check_lengths(columns: Sequence[np.ndarray], names: Sequence[str], argument: str) -> None:
    if len({len(column) for column in columns}) > 1:
        raise ValueError(
            f"{argument} columns must have one length, got "
            + ", ".join(f"{name!r}: {len(c)}" for name, c in zip(names, columns, strict=True))
        )


def _row(table: Any, row: int) -> str:
    """A row as its user would look for it."""
    index: Any = getattr(table, "index", None)
    if hasattr(index, "__getitem__"):
        return f"row {index[row]} of its index"
    return f"row {row} (counted from 0)"


def _numbers(table: Any, column: str, name: str) -> np.ndarray:
    """A column ``[rows]`` in float64; ``name`` is for messages."""
    try:
        values = _column(table, column)
    except jax.errors.TracerArrayConversionError:
        raise ValueError(
            f"{name} must hold numbers that are known, and not those of a function that is being "
            "compiled or differentiated: give arrays x and y there"
        ) from None
    if values.dtype.kind == "c":
        raise ValueError(f"{name} must be real: give real and imaginary parts as two columns")
    if values.ndim != 1:
        raise ValueError(f"{name} must have one number on each row, got shape {values.shape}")
    if values.dtype.kind in "mM":
        raise ValueError(
            f"{name} must hold numbers, and holds dates or durations: give them as numbers, such "
            "as hours since some time, or hour of the day"
        )
    numbers = (
        values.astype(np.float64) if values.dtype.kind in "biuf" else _parse(table, values, name)
    )
    infinite = np.flatnonzero(np.isinf(numbers))
    if len(infinite):
        raise ValueError(
            f"{name} must be finite, and {_row(table, infinite[0])} has "
            f"{numbers[infinite[0]]}: leave such rows out, or mark them as missing "
            f"({len(infinite)} entries are infinite)"
        )
    return numbers


def _parse(table: Any, values: np.ndarray, name: str) -> np.ndarray:
    """Entries that are objects: numbers, text, or missing."""
    numbers = np.empty(len(values))
    for row, value in enumerate(values):
        try:
            numbers[row] = np.nan if is_missing(value) else float(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} must hold numbers, and {_row(table, row)} has {value!r}: leave "
                "the column out, or encode it as numbers (a category as one column of 0 and 1 for "
                "each of its values, a date as hours since some time)"
            ) from None
    return numbers
