"""Windows of hourly air quality at 12 stations in Beijing, as tasks.

The data set is UCI's number 501 (S. Chen, 2019; CC BY 4.0), read by ``lavajax.datasets``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import validate
from lavajax.tasks.base import Split
from lavajax.types import Array, Points, Task
from lavajax.units import Columns, Units

TEST_START = 26_304
"""Hours before 2016-03-01 00:00: the training period."""
WEEK = 168
TEST_STATIONS = ("Dingling", "Guanyuan", "Shunyi")
"""Held out by ``split="station"``: one rural, one in the city, one in its suburbs."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AirQuality:
    """Settings of the air-quality tasks; ``load`` reads the data.

    A task is a window of consecutive hours at one station, split at random into support and query:
    predict the measurement from the hour, and perhaps from other measurements of the same hour.
    The hour runs from -1 to 1 over the window; every measurement is standardised over the training
    period of the stations that are trained on.

    Training windows lie before 2016-03-01, test windows after. Every tenth week of the training
    period is set apart for validation. A window with a missing value in a column it uses is
    skipped.

    The weather of several sites is that of one weather station near them, column for column, so
    stations held out without hours held out would leak it: ``split="station"`` holds out both.

    Attributes:
        data: path of ``PRSA2017_Data_20130301-20170228.zip``, as published or inside another zip,
            or of a folder with the 12 files in it.
        column: the measurement to predict, ``PM2.5`` by default.
        shots: N, support hours.
        queries: M, query hours; a window has N + M hours.
        inputs: the hour alone; with the weather of the same hour (TEMP, PRES, DEWP, RAIN, WSPM);
            or with all other measurements of it. Never the column itself.
        split: train and test on the same stations at different times; or train on nine stations
            and test on three others, at different times too.
    """

    data: str
    column: str = "PM2.5"
    shots: int = 10
    queries: int = 10
    inputs: Literal["hour", "weather", "all"] = "hour"
    split: Literal["time", "station"] = "time"

    def __post_init__(self) -> None:
        from lavajax.datasets.air_quality import MEASUREMENTS

        object.__setattr__(self, "data", str(self.data))
        validate.choice(self, "column", MEASUREMENTS)
        validate.integer(self, "shots", minimum=1)
        validate.integer(self, "queries", minimum=1)
        validate.choice(self, "inputs", ("hour", "weather", "all"))
        validate.choice(self, "split", ("time", "station"))
        if self.shots + self.queries > WEEK:
            raise ValueError(
                f"AirQuality.shots + AirQuality.queries must be at most {WEEK} hours, a week, got "
                f"{self.shots} + {self.queries}"
            )

    @property
    def covariates(self) -> tuple[str, ...]:
        """The columns that are inputs beside the hour, in their order."""
        from lavajax.datasets.air_quality import MEASUREMENTS, WEATHER

        columns = {"hour": (), "weather": WEATHER, "all": MEASUREMENTS}[self.inputs]
        return tuple(c for c in columns if c != self.column)

    def load(self, data_dir: str | Path | None = None) -> AirWindows:
        """Reads the files; the first time it prepares them, see ``lavajax.datasets``.

        Args:
            data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

        Raises:
            ValueError: a file is not the published one, the message says what was found; or a
                split has no complete window.
            FileNotFoundError: there is none; the message says where it is published.
            ModuleNotFoundError: a package is missing; the message has the command that installs it.
        """
        from lavajax.datasets.air_quality import MEASUREMENTS, STATIONS, load_air_quality

        used = [MEASUREMENTS.index(c) for c in (self.column, *self.covariates)]
        measured = load_air_quality(self.data, data_dir)[:, :, used].astype(np.float64)
        tested = np.isin(STATIONS, TEST_STATIONS) if self.split == "station" else None
        names = (self.column, *self.covariates)
        return windows(measured, names=names, shots=self.shots, queries=self.queries, tested=tested)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AirWindows:
    """Windows of stored series, drawn at random on the device.

    Attributes:
        series: standardised measurements, ``[stations, hours]``; 0 where missing.
        covariates: standardised measurements that are inputs, ``[stations, hours, c]``, c >= 0.
        starts: for each split, the complete windows as ``station * hours + first hour``.
        units: those measured, by mean and standard deviation over the training period; the hour
            runs from -1 to 1 over the window; static.
        shots: N; static.
        queries: M; static.
        skipped: fraction of all windows left out for a missing value; static.
        skipped_windows: their number; static.
    """

    series: Array
    covariates: Array
    starts: dict[str, Array]
    units: Units = dataclasses.field(metadata={"static": True})
    shots: int = dataclasses.field(metadata={"static": True})
    queries: int = dataclasses.field(metadata={"static": True})
    skipped: float = dataclasses.field(metadata={"static": True})
    skipped_windows: int = dataclasses.field(metadata={"static": True})

    def __str__(self) -> str:
        """How many windows there are, and how many were left out."""
        found = ", ".join(f"{len(starts):,} for {split}" for split, starts in self.starts.items())
        lost = f"{self.skipped_windows:,} ({100 * self.skipped:.2g}%)"
        return f"{found}; {lost} left out, for a missing value"

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A window: support x ``[N, 1 + c]``, y ``[N, 1]``, query x ``[M, 1 + c]``, y ``[M, 1]``.

        The hour is the first input.
        """
        start_key, order_key = jax.random.split(key)
        starts = self.starts[split]
        start = starts[jax.random.randint(start_key, (), 0, starts.shape[0])]
        hours, c = self.shots + self.queries, self.covariates.shape[-1]
        y = jax.lax.dynamic_slice(self.series.reshape(-1), (start,), (hours,))
        rows = self.covariates.reshape(self.series.size, c)
        beside = jax.lax.dynamic_slice(rows, (start, 0), (hours, c))
        order = jax.random.permutation(order_key, hours)
        x = jnp.concatenate([jnp.linspace(-1.0, 1.0, hours)[:, None], beside], axis=1)[order]
        y, n = y[order][:, None], self.shots
        return Task(Points(x[:n], y[:n]), Points(x[n:], y[n:]))


def windows(
    measured: np.ndarray,
    *,
    names: tuple[str, ...],
    shots: int,
    queries: int,
    tested: np.ndarray | None = None,
) -> AirWindows:
    """The windows of measurements, NaN where missing, in the units measured.

    Args:
        measured: ``[stations, hours, 1 + c]``: what to predict, then what are inputs.
        names: of the 1 + c measurements.
        shots: N.
        queries: M.
        tested: ``[stations]`` booleans, the stations to test on, where those to train and validate
            on are the others; None: all are both.

    Raises:
        ValueError: a split has no complete window.
    """
    learned = np.ones(len(measured), bool) if tested is None else ~tested
    tested = np.ones(len(measured), bool) if tested is None else tested
    train = measured[learned, :TEST_START]
    mean, std = np.nanmean(train, axis=(0, 1)), np.nanstd(train, axis=(0, 1))
    std = np.where(std > 0, std, 1)  # a column that is constant, as no published one is, is 0
    scaled = jnp.asarray(np.nan_to_num((measured - mean) / std), jnp.result_type(float))
    units = Units(
        Columns((0.0, *mean[1:]), (1.0, *std[1:]), ("hour", *names[1:])),
        Columns(tuple(mean[:1]), tuple(std[:1]), names[:1]),
    )

    hours, length = measured.shape[1], shots + queries
    present = np.isfinite(measured).all(axis=2)
    covered = np.concatenate(
        [np.zeros((len(measured), 1), int), np.cumsum(present, axis=1, dtype=int)], axis=1
    )
    complete = covered[:, length:] - covered[:, :-length] == length  # [stations, first hours]

    first = np.arange(complete.shape[1])
    last = first + length - 1
    in_train = last < TEST_START
    begins, ends = first // WEEK, last // WEEK
    held_out, touches = begins % 10 == 9, (begins % 10 == 9) | (ends % 10 == 9)
    inside = {
        "train": np.outer(learned, in_train & ~touches),
        "validation": np.outer(learned, in_train & held_out & (begins == ends)),
        "test": np.outer(tested, first >= TEST_START),
    }
    starts = {}
    for split, chosen in inside.items():
        station, hour = np.nonzero(complete & chosen)
        if not len(hour):
            raise ValueError(
                f"no window of {length} hours is complete in the {split} period: ask for fewer "
                "shots or queries, or other columns"
            )
        starts[split] = jnp.asarray(station * hours + hour, jnp.int32)
    used = complete[np.logical_or.reduce(list(inside.values()))]
    return AirWindows(
        series=scaled[:, :, 0],
        covariates=scaled[:, :, 1:],
        starts=starts,
        units=units,
        shots=shots,
        queries=queries,
        skipped=1 - float(used.mean()),
        skipped_windows=int((~used).sum()),
    )
