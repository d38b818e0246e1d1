"""The air-quality tasks, on files made in the published format, and on the real ones if there."""

from __future__ import annotations

import datetime
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import lavajax
from helpers import REAL_AIR
from lavajax.datasets import air_quality as files_of_air
from lavajax.datasets import load_air_quality
from lavajax.tasks import air_quality as air
from reference import interpolation_error

STATIONS, HOURS = files_of_air.STATIONS, files_of_air.HOURS
HEADER = '"No","year","month","day","hour","PM2.5","PM10","SO2","NO2","CO","O3",'
HEADER += '"TEMP","PRES","DEWP","RAIN","wd","WSPM","station"'


def measurement(hours: np.ndarray) -> np.ndarray:
    return 50 + 30 * np.sin(hours / 7.0)


def station_file(station: str, *, header: str = HEADER, rows: int = HOURS) -> bytes:
    """A file in the published layout: CRLF, quoted strings, NA unquoted; every 100th is missing."""
    values = measurement(np.arange(rows))
    lines = [header]
    start = datetime.datetime(2013, 3, 1)
    for i, value in enumerate(values):
        hour = start + datetime.timedelta(hours=i)
        when = f"{hour.year},{hour.month},{hour.day},{hour.hour}"
        pm = "NA" if i % 100 == 0 else f"{value:.4f}"
        lines.append(f'{i + 1},{when},{pm},4,4,7,300,77,-0.7,1023,-18.8,0,"NNW",4.4,"{station}"')
    return ("\r\n".join(lines) + "\r\n").encode("ascii")


def name_of(station: str) -> str:
    return f"PRSA_Data_20130301-20170228/PRSA_Data_{station}_20130301-20170228.csv"


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    content = station_file("@@@@")
    return {name_of(s): content.replace(b"@@@@", s.encode()) for s in STATIONS}


@pytest.fixture(scope="module")
def published(files, tmp_path_factory) -> Path:
    return write_zip(tmp_path_factory.mktemp("air") / "data.zip", files)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Where what is prepared lies."""
    return tmp_path_factory.mktemp("prepared")


def refuse(path: Path, message: str, error: type[Exception] = ValueError) -> None:
    with pytest.raises(error, match=message):
        list(files_of_air.examples(path))


def test_values_and_missing_entries_are_read(published, data):
    every = load_air_quality(published, data)
    assert every.shape == (12, HOURS, 11)
    assert every.dtype == np.float32
    np.testing.assert_allclose(
        every[5, 7, 1:], [4, 4, 7, 300, 77, -0.7, 1023, -18.8, 0, 4.4], rtol=1e-6
    )
    measured = every[:, :, 0]
    missing = np.arange(HOURS) % 100 == 0
    np.testing.assert_array_equal(np.isnan(measured), np.broadcast_to(missing, measured.shape))
    expected = measurement(np.arange(HOURS))
    np.testing.assert_allclose(measured[3, ~missing], expected[~missing], atol=1e-4)


def test_zip_within_a_zip_and_a_folder_are_read(published, files, tmp_path):
    outer = write_zip(tmp_path / "outer.zip", {"inner.zip": published.read_bytes()})
    for name, content in files.items():
        (tmp_path / name.split("/")[1]).write_bytes(content)
    expected = [e["measurements"] for e in files_of_air.examples(published)]
    for path in (outer, tmp_path):
        found = [e["measurements"] for e in files_of_air.examples(path)]
        np.testing.assert_array_equal(found, expected)
    (tmp_path / name_of("Shunyi").split("/")[1]).unlink()
    refuse(tmp_path, r"12 stations.*lacks Shunyi")


def test_sampled_windows_are_those_of_the_file_and_of_their_period(published, data):
    settings = lavajax.AirQuality(str(published), shots=4, queries=6)
    source = settings.load(data)
    measured = load_air_quality(published, data)[:, :, 0].astype(np.float64)
    mean, std = np.nanmean(measured[:, : air.TEST_START]), np.nanstd(measured[:, : air.TEST_START])
    assert source.units.y.mean[0] == pytest.approx(mean)
    assert source.units.y.std[0] == pytest.approx(std)
    sample = jax.jit(jax.vmap(source.sample, in_axes=(0, None)), static_argnums=1)
    for split in ("train", "validation", "test"):
        tasks = sample(jax.random.split(jax.random.key(0), 50), split)
        x = np.concatenate([tasks.support.x, tasks.query.x], axis=1)[..., 0]
        y = np.concatenate([tasks.support.y, tasks.query.y], axis=1)[..., 0]
        order = np.argsort(x, axis=1)
        np.testing.assert_allclose(
            np.take_along_axis(x, order, 1), np.tile(np.linspace(-1, 1, 10), (50, 1)), atol=1e-6
        )
        series = (measured[0] - mean) / std
        every = np.lib.stride_tricks.sliding_window_view(series, 10)
        for window in np.take_along_axis(y, order, 1):
            start = np.nanargmin(np.abs(every - window).max(axis=1))
            np.testing.assert_allclose(every[start], window, atol=1e-4)


def test_splits_share_no_hour_and_windows_miss_no_target(published, data):
    source = lavajax.AirQuality(str(published)).load(data)
    hours = {
        split: {
            int(h)
            for start in np.unique(np.asarray(starts) % HOURS)
            for h in range(start, start + 20)
        }
        for split, starts in source.starts.items()
    }
    assert max(hours["train"]) < air.TEST_START <= min(hours["test"])
    assert not hours["train"] & hours["validation"]
    assert not hours["validation"] & hours["test"]
    for found in hours.values():
        assert not any(h % 100 == 0 for h in found)
    # 20 of the 100 positions relative to a missing hour spoil a window of 20 hours.
    assert source.skipped == pytest.approx(0.2, abs=0.01)


def test_training_on_stored_windows_beats_the_support_mean(published, data):
    source = lavajax.AirQuality(str(published)).load(data)
    method = lavajax.lava_converged(model=lavajax.MLP(hidden=(32, 32)))
    trained = lavajax.train(method, source, steps=600, meta_batch=8)
    score = lavajax.evaluate(trained.params, source, num_tasks=500)
    spread = lavajax.score(
        lambda task, key: ((task.query.y - task.support.y.mean()) ** 2).mean(),
        source,
        num_tasks=500,
    )
    assert score.mean < 0.3 * spread.mean()


def test_missing_file_says_where_it_is_published(tmp_path):
    refuse(tmp_path / "none.zip", r"not there.*UCI.*CC BY 4\.0", FileNotFoundError)
    refuse(tmp_path, "an empty folder", FileNotFoundError)


def test_missing_station_is_named(files, tmp_path):
    some = {n: c for n, c in files.items() if "Dongsi" not in n}
    refuse(write_zip(tmp_path / "a.zip", some), r"12 stations.*lacks Dongsi$")
    some[name_of("Dongsy")] = b""
    refuse(write_zip(tmp_path / "a.zip", some), r"lacks Dongsi, and has Dongsy more")


def test_truncated_zip_is_refused(published, tmp_path):
    path = tmp_path / "cut.zip"
    path.write_bytes(published.read_bytes()[:-1000])
    refuse(path, "must be a whole, plain zip file")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": HEADER.replace("PM10", "PM1")}, "must have the columns"),
        ({"rows": HOURS - 1}, "must have 35064 hourly rows.* got 35063"),
    ],
)
def test_changed_file_is_refused_by_name(files, tmp_path, change, message):
    name = name_of("Changping")
    changed = {**files, name: station_file("Changping", **change)}
    refuse(write_zip(tmp_path / "b.zip", changed), f"PRSA_Data_Changping.*{message}")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (b",300,77,", b",high,77,", "column CO must hold numbers"),
        (b",300,77,", b",,77,", "column CO must hold numbers"),  # what is missing is NA
        (b",300,77,", b",inf,77,", "column CO must hold numbers"),
        (
            b"\n7,2013",
            b"\n8,2013",
            "must have 35064 hourly rows numbered from 1, got 35064 rows, n",
        ),
        (
            b"\n49,2013,3,3,0,",
            b"\n49,2013,3,4,0,",
            "row 49 is of 2013-03-03T00, and says day 4",
        ),
        (
            b"Aotizhongxin",
            b"Dongsi",
            "must hold measurements of Aotizhongxin, row 1 is of 'Dongsi'",
        ),
        (b"\n9,2013,", b"\n9,,,,2013,", "must be a table of comma-separated values"),
    ],
)
def test_changed_values_are_refused_by_name(files, tmp_path, before, after, message):
    name = name_of("Aotizhongxin")
    changed = {**files, name: files[name].replace(before, after, 1)}
    path = write_zip(tmp_path / "c.zip", changed)
    refuse(path, rf"PRSA_Data_Aotizhongxin.*{message}")


def test_refusal_comes_through_the_preparation(files, tmp_path):
    name = name_of("Aotizhongxin")
    changed = {**files, name: files[name].replace(b",300,77,", b",high,77,", 5)}
    settings = lavajax.AirQuality(write_zip(tmp_path / "c.zip", changed))
    with pytest.raises(ValueError, match=r"PRSA_Data_Aotizhongxin.*column CO must hold numbers"):
        settings.load(tmp_path)
    assert not list(tmp_path.glob("*/*/1.*"))


def test_two_files_of_a_station_are_refused(tmp_path):
    names = [*map(name_of, STATIONS), "copy/" + name_of("Gucheng")]
    refuse(
        write_zip(tmp_path / "two.zip", dict.fromkeys(names, b"")),
        "holds two of Gucheng: PRSA.* and copy/PRSA",
    )


def test_oversized_member_is_refused_before_it_is_read(tmp_path):
    most = files_of_air._MOST_BYTES
    refuse(
        write_zip(tmp_path / "bomb.zip", {"inner.zip": b"\0" * (most + 1)}),
        "more than the published file can have",
    )


def filled(columns: int) -> np.ndarray:
    """Measurements of 12 stations without a gap, none of them constant."""
    hours = np.arange(HOURS)[None, :, None]
    station, column = np.arange(12)[:, None, None], np.arange(columns)
    return 10.0 * station + 5 * np.sin(hours / (7.0 + column)) + column


def test_covariates_are_those_of_the_same_hour_and_windows_miss_none():
    measured = filled(3)
    measured[:, 5000, 2] = np.nan
    source = air.windows(measured, names=("PM2.5", "TEMP", "PRES"), shots=4, queries=6)
    train = measured[:, : air.TEST_START]
    scaled = (measured - np.nanmean(train, (0, 1))) / np.nanstd(train, (0, 1))
    task = jax.jit(source.sample)(jax.random.key(1))
    x = np.concatenate([task.support.x, task.query.x])
    y = np.concatenate([task.support.y, task.query.y])
    assert x.shape == (10, 3)
    flat = scaled.reshape(-1, 3)
    for inputs, target in zip(x, y, strict=True):
        row = np.concatenate([target, inputs[1:]])
        assert np.nanmin(np.abs(flat - row).max(axis=1)) < 1e-4
    for starts in source.starts.values():
        hour = np.asarray(starts) % HOURS
        assert not ((hour <= 5000) & (hour + 10 > 5000)).any()
    assert source.skipped_windows == 12 * 10
    assert str(source).endswith("for test; 120 (0.029%) left out, for a missing value")
    assert source.skipped == pytest.approx(120 / (120 + sum(map(len, source.starts.values()))))


@pytest.mark.parametrize(
    ("inputs", "column", "covariates"),
    [
        ("hour", "O3", ()),
        ("weather", "PM2.5", ("TEMP", "PRES", "DEWP", "RAIN", "WSPM")),
        ("weather", "PRES", ("TEMP", "DEWP", "RAIN", "WSPM")),
        ("all", "CO", tuple(m for m in files_of_air.MEASUREMENTS if m != "CO")),
    ],
)
def test_inputs_beside_the_hour(published, data, inputs, column, covariates):
    settings = lavajax.AirQuality(published, column, inputs=inputs)
    assert settings.covariates == covariates
    assert settings.load(data).covariates.shape == (12, HOURS, len(covariates))


def test_held_out_stations_share_neither_station_nor_hour_with_training(published, data):
    source = lavajax.AirQuality(published, split="station").load(data)
    at = {
        split: (set(np.asarray(starts) // HOURS), np.asarray(starts) % HOURS)
        for split, starts in source.starts.items()
    }
    tested = {STATIONS.index(s) for s in air.TEST_STATIONS}
    assert at["test"][0] == tested
    assert at["train"][0] == at["validation"][0] == set(range(12)) - tested
    assert at["train"][1].max() + 20 <= air.TEST_START <= at["test"][1].min()


def test_standardised_by_the_stations_trained_on():
    tested = np.arange(12) == 3
    measured = filled(1)
    measured[3] += 1000
    source = air.windows(measured, names=("PM2.5",), shots=4, queries=6, tested=tested)
    expected = measured[~tested, : air.TEST_START].mean()
    assert source.units.y.mean[0] == pytest.approx(expected, rel=1e-6)


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"AirQuality\.column must be one of 'PM2\.5'.*got 'PM25'"):
        lavajax.AirQuality("x.zip", column="PM25")
    with pytest.raises(ValueError, match="at most 168 hours"):
        lavajax.AirQuality("x.zip", shots=100, queries=100)
    with pytest.raises(ValueError, match=r"AirQuality\.inputs must be one of 'hour', 'weather'"):
        lavajax.AirQuality("x.zip", inputs="wind")
    with pytest.raises(ValueError, match=r"AirQuality\.split must be one of 'time', 'station'"):
        lavajax.AirQuality("x.zip", split="hours")


@pytest.mark.skipif(not REAL_AIR.is_file(), reason="the Beijing air-quality zip is not here")
def test_real_files_have_the_published_counts_and_reference_error(data):
    """Counts of missing entries by the files' own NA; linear interpolation on 20-hour windows."""
    measured = load_air_quality(REAL_AIR, data)
    assert np.isnan(measured).sum(axis=(0, 1)).tolist() == [
        *(8739, 6449, 9021, 12116, 20701, 13277),
        *(398, 393, 403, 390, 318),
    ]
    assert measured[0, :4, 0].tolist() == [4.0, 8.0, 7.0, 6.0]
    source = lavajax.AirQuality(str(REAL_AIR)).load(data)
    errors = lavajax.score(interpolation_error, source, num_tasks=20_000)
    assert errors.mean() == pytest.approx(0.060, abs=0.004)
