"""Beijing multi-site air quality: hourly measurements of 12 stations, 2013 to 2017.

Number 501 of the UCI Machine Learning Repository (S. Chen, 2019; CC BY 4.0), file
``PRSA2017_Data_20130301-20170228.zip``.
"""

from __future__ import annotations

import contextlib
import io
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lavajax.datasets.base import not_found, open_zip, read_member
from lavajax.extras import require

STATIONS = (
    *("Aotizhongxin", "Changping", "Dingling", "Dongsi", "Guanyuan", "Gucheng"),
    *("Huairou", "Nongzhanguan", "Shunyi", "Tiantan", "Wanliu", "Wanshouxigong"),
)
WEATHER = ("TEMP", "PRES", "DEWP", "RAIN", "WSPM")
MEASUREMENTS = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3", *WEATHER)
HEADER = ("No", "year", "month", "day", "hour", *MEASUREMENTS[:10], "wd", "WSPM", "station")
HOURS = 35_064
"""From 2013-03-01 00:00 to 2017-02-28 23:00, without a gap."""
PUBLISHED = (
    "It is published as 'Beijing Multi-Site Air Quality', number 501 of the UCI Machine Learning "
    "Repository (CC BY 4.0)"
)
_FILE = "PRSA_Data_{}_20130301-20170228.csv"
_MEMBER = re.compile(r"(?:.*/)?" + _FILE.format("([A-Za-z]+)").replace(".csv", r"\.csv"))
_MOST_BYTES = 2**24  # a station's file has 2.6 to 2.9 MB

Read = Callable[[str], bytes]


def load_air_quality(path: str | Path, data_dir: str | Path | None = None) -> np.ndarray:
    """All numeric columns of all stations.

    The first call prepares them, once for each content of the files, where TFDS keeps its data.
    The wind's direction, ``wd``, is text and left out.

    Args:
        path: the zip, as published or nested in another zip, or a folder with the 12 files in it.
        data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

    Returns:
        ``[12, 35064, 11]`` float32, stations in the order of ``STATIONS``, columns in that of
        ``MEASUREMENTS``, NaN where missing, in ug/m3 (pollutants), degrees Celsius (TEMP, DEWP),
        hPa (PRES), mm (RAIN) or m/s (WSPM).

    Raises:
        ValueError: a file is not the published one; the message says what was found.
        FileNotFoundError: there is none; the message says where it is published.
        ModuleNotFoundError: a package is missing; the message has the command that installs it.
    """
    from lavajax.datasets import builders

    stations = builders.prepared(builders.BeijingAirQuality, path, data_dir)["stations"]
    return np.stack([station["measurements"] for station in stations])


def files(path: str | Path) -> list[Path]:
    """The files that ``path`` stands for: the zip, or those of the stations.

    Raises:
        FileNotFoundError: there is none.
        ValueError: a folder has those of some stations alone.
    """
    path = Path(path)
    if path.is_file():
        return [path]
    found = {s: path / _FILE.format(s) for s in STATIONS if (path / _FILE.format(s)).is_file()}
    if not found:
        raise not_found(
            path,
            "the path of PRSA2017_Data_20130301-20170228.zip, or of a folder with the files "
            f"{_FILE.format('<station>')} that it holds",
            PUBLISHED,
        )
    _check_stations(list(found), path)
    return list(found.values())


def examples(path: str | Path) -> Iterator[dict[str, Any]]:
    """The stations, in the order of ``STATIONS``.

    Yields:
        ``measurements`` ``[35064, 11]`` float32, as ``load_air_quality``; ``station`` str.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: as ``load_air_quality``.
    """
    with _reader(Path(path)) as read:
        for station in STATIONS:
            table = _table(read(station), station)
            yield {"measurements": table, "station": station}


@contextlib.contextmanager
def _reader(path: Path) -> Iterator[Read]:
    """The content of a station's file, by the station's name."""
    if len(files(path)) > 1:

        def read(station: str) -> bytes:
            file = path / _FILE.format(station)
            if file.stat().st_size > _MOST_BYTES:
                raise ValueError(f"{file} has more than {_MOST_BYTES} bytes, the published has not")
            return file.read_bytes()

        yield read
        return
    with contextlib.ExitStack() as stack:
        archive = stack.enter_context(open_zip(path, path))
        inner = [name for name in archive.namelist() if name.endswith(".zip")]
        if len(inner) == 1 and not _members(archive):
            nested = io.BytesIO(read_member(archive, inner[0], _MOST_BYTES, path))
            archive = stack.enter_context(open_zip(nested, f"{path}: {inner[0]}"))
        members = _members(archive)
        _check_stations(list(members), path)
        yield lambda station: read_member(archive, members[station], _MOST_BYTES, path)


def _members(archive: zipfile.ZipFile) -> dict[str, str]:
    """The files of stations in an archive, by station."""
    found: dict[str, str] = {}
    for name in archive.namelist():
        if match := _MEMBER.fullmatch(name):
            if other := found.get(match[1]):
                raise ValueError(
                    f"data must hold one file of each station, and holds two of {match[1]}: "
                    f"{other} and {name}"
                )
            found[match[1]] = name
    return found


def _check_stations(found: list[str], path: Path) -> None:
    if sorted(found) != list(STATIONS):
        missing = [s for s in STATIONS if s not in found]
        strange = [s for s in found if s not in STATIONS]
        raise ValueError(
            f"data must hold the files of 12 stations, {_FILE.format('<station>')}; {path} lacks "
            f"{', '.join(missing) or 'none'}"
            + (f", and has {', '.join(strange)} more" if strange else "")
        )


def _table(content: bytes, station: str) -> np.ndarray:
    """The numeric columns of a station's file, ``[35064, 11]``."""
    pandas = require("pandas", "data", "reading the air-quality files")
    name = _FILE.format(station)

    def parse(**options: Any) -> Any:
        try:
            return pandas.read_csv(io.BytesIO(content), **options)
        except ValueError as error:  # pandas' own errors are ValueErrors too
            raise ValueError(f"{name} must be a table of comma-separated values: {error}") from None

    header = tuple(parse(nrows=0).columns)
    if header != HEADER:
        raise ValueError(
            f"{name} must have the columns {', '.join(HEADER)}, got {', '.join(header)}"
        )
    table = parse(low_memory=False, keep_default_na=False, na_values=["NA"])
    numbered = len(table) == HOURS and (table["No"] == np.arange(1, HOURS + 1)).all()
    if not numbered:
        raise ValueError(
            f"{name} must have {HOURS} hourly rows numbered from 1, got {len(table)} rows"
            + (", numbered otherwise" if len(table) == HOURS else "")
        )
    hours = np.datetime64("2013-03-01T00") + np.arange(HOURS)
    days = hours.astype("datetime64[D]")
    expected = {
        "year": hours.astype("datetime64[Y]").astype(int) + 1970,
        "month": hours.astype("datetime64[M]").astype(int) % 12 + 1,
        "day": (days - days.astype("datetime64[M]")).astype(int) + 1,
        "hour": (hours - days).astype(int),
    }
    for column, values in expected.items():
        if not (table[column] == values).all():
            row = int(np.argmax(np.asarray(table[column] != values)))
            raise ValueError(
                f"{name} must have a row for each hour from 2013-03-01 00:00 on: row {row + 1} is "
                f"of {hours[row]}, and says {column} {table[column].iloc[row]}"
            )
    other = table["station"] != station
    if other.any():
        row = int(np.argmax(np.asarray(other)))
        raise ValueError(
            f"{name} must hold measurements of {station}, row {row + 1} is of "
            f"{table['station'].iloc[row]!r}"
        )
    for column in MEASUREMENTS:
        if not pandas.api.types.is_numeric_dtype(table[column]) or np.isinf(table[column]).any():
            raise ValueError(
                f"{name}: column {column} must hold numbers or NA, and holds something else"
            )
    return table[list(MEASUREMENTS)].to_numpy(np.float32)
