"""Beijing multi-site air quality: hourly measurements of 12 stations, windows of them as tasks.

The data set is UCI's number 501 (S. Chen, 2019; CC BY 4.0), file
``PRSA2017_Data_20130301-20170228.zip``, read as published: nothing is downloaded or unpacked.
"""

from __future__ import annotations

import dataclasses
import io
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import validate
from lavajax.extras import require
from lavajax.tasks.base import Split
from lavajax.types import Array, Points, Task

STATIONS = (
    *("Aotizhongxin", "Changping", "Dingling", "Dongsi", "Guanyuan", "Gucheng"),
    *("Huairou", "Nongzhanguan", "Shunyi", "Tiantan", "Wanliu", "Wanshouxigong"),
)
MEASUREMENTS = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "RAIN", "WSPM")
HEADER = ("No", "year", "month", "day", "hour", *MEASUREMENTS[:10], "wd", "WSPM", "station")
HOURS = 35_064
"""From 2013-03-01 00:00 to 2017-02-28 23:00, without a gap."""
TEST_START = 26_304
"""Hours before 2016-03-01 00:00: the training period."""
WEEK = 168
_MEMBER = re.compile(r"(?:.*/)?PRSA_Data_([A-Za-z]+)_20130301-20170228\.csv")
_MOST_BYTES = 2**24  # a station's file has 2.6 to 2.9 MB


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AirQuality:
    """Settings of the air-quality tasks; ``load`` reads the data.

    A task is a window of consecutive hours at one station, split at random into support and query:
    predict the measurement from the hour. The target is standardised over the training period of
    all stations, the hour runs from -1 to 1 over the window.

    Training windows lie before 2016-03-01, test windows after. Every tenth week of the training
    period is set apart for validation. A window with a missing target is skipped.

    Attributes:
        data: path of ``PRSA2017_Data_20130301-20170228.zip``, as published or inside another zip.
        column: the measurement, ``PM2.5`` by default.
        shots: N, support hours.
        queries: M, query hours; a window has N + M hours.
    """

    data: str
    column: str = "PM2.5"
    shots: int = 10
    queries: int = 10

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", str(self.data))
        validate.choice(self, "column", MEASUREMENTS)
        validate.integer(self, "shots", minimum=1)
        validate.integer(self, "queries", minimum=1)
        if self.shots + self.queries > WEEK:
            raise ValueError(
                f"AirQuality.shots + AirQuality.queries must be at most {WEEK} hours, a week, got "
                f"{self.shots} + {self.queries}"
            )

    def load(self) -> AirWindows:
        """Reads the zip.

        Raises:
            ValueError: the file is not the published one; the message says what was found.
            FileNotFoundError: there is no such file; the message says where it is published.
            ModuleNotFoundError: pandas is missing; the message has the command that installs it.
        """
        measured = read_air_quality(self.data, self.column)
        return windows(measured, shots=self.shots, queries=self.queries)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AirWindows:
    """Windows of stored series, drawn at random on the device.

    Attributes:
        series: standardised measurements, ``[stations, hours]``; 0 where missing.
        starts: for each split, the complete windows as ``station * hours + first hour``.
        mean: of the measurement over the training period, in its own units.
        std: standard deviation, likewise.
        shots: N; static.
        queries: M; static.
        skipped: fraction of all windows left out for a missing target; static.
    """

    series: Array
    starts: dict[str, Array]
    mean: Array
    std: Array
    shots: int = dataclasses.field(metadata={"static": True})
    queries: int = dataclasses.field(metadata={"static": True})
    skipped: float = dataclasses.field(metadata={"static": True})

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A window: support x, y ``[N, 1]``, query x, y ``[M, 1]``."""
        start_key, order_key = jax.random.split(key)
        starts = self.starts[split]
        start = starts[jax.random.randint(start_key, (), 0, starts.shape[0])]
        hours = self.shots + self.queries
        y = jax.lax.dynamic_slice(self.series.reshape(-1), (start,), (hours,))
        order = jax.random.permutation(order_key, hours)
        x = jnp.linspace(-1.0, 1.0, hours)[order][:, None]
        y, n = y[order][:, None], self.shots
        return Task(Points(x[:n], y[:n]), Points(x[n:], y[n:]))


def windows(measured: np.ndarray, *, shots: int, queries: int) -> AirWindows:
    """The windows of series ``[stations, hours]``, NaN where missing, in the units measured.

    Raises:
        ValueError: a split has no complete window.
    """
    hours = measured.shape[1]
    length = shots + queries
    train = measured[:, :TEST_START]
    mean, std = float(np.nanmean(train)), float(np.nanstd(train))
    present = np.isfinite(measured)
    covered = np.concatenate(
        [np.zeros((len(measured), 1), int), np.cumsum(present, axis=1, dtype=int)], axis=1
    )
    complete = covered[:, length:] - covered[:, :-length] == length  # [stations, first hours]

    first = np.arange(complete.shape[1])
    last = first + length - 1
    test = first >= TEST_START
    held_out = (first // WEEK % 10 == 9) & (first // WEEK == last // WEEK) & ~test
    touches = (first // WEEK % 10 == 9) | (last // WEEK % 10 == 9)
    learn = ~touches & (last < TEST_START)
    held_out &= last < TEST_START
    starts = {}
    for split, inside in (("train", learn), ("validation", held_out), ("test", test)):
        station, hour = np.nonzero(complete & inside)
        if not len(hour):
            raise ValueError(
                f"no window of {length} hours is complete in the {split} period: ask for fewer "
                "shots or queries, or another column"
            )
        starts[split] = jnp.asarray(station * hours + hour, jnp.int32)
    used = learn | held_out | test
    return AirWindows(
        series=jnp.asarray(np.nan_to_num((measured - mean) / std), jnp.result_type(float)),
        starts=starts,
        mean=jnp.asarray(mean),
        std=jnp.asarray(std),
        shots=shots,
        queries=queries,
        skipped=1 - float(complete[:, used].mean()),
    )


def read_air_quality(path: str | Path, column: str = "PM2.5") -> np.ndarray:
    """Reads one measurement of all stations from the published zip.

    Args:
        path: the zip, as published or nested in another zip.
        column: one of ``MEASUREMENTS``.

    Returns:
        ``[12, 35064]`` float64, stations in the order of ``STATIONS``, NaN where missing, in ug/m3
        (pollutants), degrees Celsius (TEMP, DEWP), hPa (PRES), mm (RAIN) or m/s (WSPM).

    Raises:
        ValueError: the file is not the published one; the message says what was found.
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: pandas is missing; the message has the command that installs it.
    """
    pandas = require("pandas", "data", "reading the air-quality files")
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"data must be the path of PRSA2017_Data_20130301-20170228.zip, got {path}, which is "
            f"{'a folder' if path.is_dir() else 'not there'}. The file is published as "
            "'Beijing Multi-Site Air Quality', number 501 of the UCI Machine Learning Repository "
            "(CC BY 4.0)"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_stations(archive, path, column, pandas)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # RuntimeError is what zipfile raises for an encrypted archive.
        raise ValueError(f"data must be a whole, plain zip file, got {path}: {error}") from None


def _read_stations(archive: zipfile.ZipFile, path: Path, column: str, pandas: Any) -> np.ndarray:
    members = {m[1]: name for name in archive.namelist() if (m := _MEMBER.fullmatch(name))}
    inner = [name for name in archive.namelist() if name.endswith(".zip")]
    if not members and len(inner) == 1:
        _check_size(archive, inner[0], path)
        with zipfile.ZipFile(io.BytesIO(archive.read(inner[0]))) as nested:
            return _read_stations(nested, path, column, pandas)
    if sorted(members) != list(STATIONS):
        missing = [s for s in STATIONS if s not in members]
        raise ValueError(
            f"data must hold the files of 12 stations, PRSA_Data_<station>_20130301-20170228.csv; "
            f"{path} lacks {', '.join(missing) or 'none'}, and has {len(archive.namelist())} "
            "files in all"
        )
    series = []
    for station in STATIONS:
        name = members[station]
        _check_size(archive, name, path)
        content = archive.read(name)
        header = tuple(pandas.read_csv(io.BytesIO(content), nrows=0).columns)
        if header != HEADER:
            raise ValueError(
                f"{name} must have the columns {', '.join(HEADER)}, got {', '.join(header)}"
            )
        table = pandas.read_csv(io.BytesIO(content), usecols=["No", column], low_memory=False)
        if len(table) != HOURS or not (table["No"] == np.arange(1, HOURS + 1)).all():
            raise ValueError(
                f"{name} must have {HOURS} hourly rows numbered from 1, got {len(table)} rows"
            )
        if not pandas.api.types.is_numeric_dtype(table[column]):
            raise ValueError(f"{name}: column {column} must hold numbers or NA, and holds text")
        series.append(table[column].to_numpy(np.float64))
    return np.stack(series)


def _check_size(archive: zipfile.ZipFile, name: str, path: Path) -> None:
    size = archive.getinfo(name).file_size
    if size > _MOST_BYTES:
        raise ValueError(
            f"{path}: {name} unpacks to {size} bytes, more than the published file can have"
        )


def interpolation_error(task: Task, key: Array) -> Array:
    """Squared error of linear interpolation between the support points, for x ``[N, 1]``.

    Beyond the first and last support point the nearest value is kept.
    """
    del key
    order = jnp.argsort(task.support.x[:, 0])
    x, y = task.support.x[order, 0], task.support.y[order, 0]
    return jnp.mean((jnp.interp(task.query.x[:, 0], x, y) - task.query.y[:, 0]) ** 2)
