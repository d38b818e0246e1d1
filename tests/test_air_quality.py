"""The air-quality tasks, on files made in the published format, and on the real ones if there."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest

import lavajax
from lavajax.tasks import air_quality as air

ROOT = Path(__file__).resolve().parents[1]
REAL = Path(os.environ.get("LAVAJAX_DATA", ROOT.parent / "shared" / "data"))
REAL_ZIP = REAL / "beijing_air_quality" / "PRSA2017_Data_20130301-20170228.zip"

HEADER = '"No","year","month","day","hour","PM2.5","PM10","SO2","NO2","CO","O3",'
HEADER += '"TEMP","PRES","DEWP","RAIN","wd","WSPM","station"'


def measurement(hours: np.ndarray) -> np.ndarray:
    return 50 + 30 * np.sin(hours / 7.0)


def station_file(station: str, *, header: str = HEADER, rows: int = air.HOURS) -> bytes:
    """A file in the published layout: CRLF, quoted strings, NA unquoted; every 100th is missing."""
    values = measurement(np.arange(rows))
    lines = [header]
    for i, value in enumerate(values):
        pm = "NA" if i % 100 == 0 else f"{value:.4f}"
        lines.append(
            f'{i + 1},2013,3,1,{i % 24},{pm},4,4,7,300,77,-0.7,1023,-18.8,0,"NNW",4.4,"{station}"'
        )
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
    return {name_of(s): content.replace(b"@@@@", s.encode()) for s in air.STATIONS}


@pytest.fixture(scope="module")
def published(files, tmp_path_factory) -> Path:
    return write_zip(tmp_path_factory.mktemp("air") / "data.zip", files)


def test_values_and_missing_entries_are_read(published):
    measured = air.read_air_quality(published)
    assert measured.shape == (12, air.HOURS)
    missing = np.arange(air.HOURS) % 100 == 0
    np.testing.assert_array_equal(np.isnan(measured), np.broadcast_to(missing, measured.shape))
    expected = measurement(np.arange(air.HOURS))
    np.testing.assert_allclose(measured[3, ~missing], expected[~missing], atol=1e-4)


def test_zip_within_a_zip_is_read(published, tmp_path):
    outer = write_zip(tmp_path / "outer.zip", {"inner.zip": published.read_bytes()})
    np.testing.assert_array_equal(
        air.read_air_quality(outer, "TEMP"), air.read_air_quality(published, "TEMP")
    )


def test_sampled_windows_are_those_of_the_file_and_of_their_period(published):
    settings = lavajax.AirQuality(str(published), shots=4, queries=6)
    source = settings.load()
    measured = air.read_air_quality(published)
    mean, std = np.nanmean(measured[:, : air.TEST_START]), np.nanstd(measured[:, : air.TEST_START])
    assert float(source.mean) == pytest.approx(mean)
    assert float(source.std) == pytest.approx(std)
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


def test_splits_share_no_hour_and_windows_miss_no_target(published):
    source = lavajax.AirQuality(str(published)).load()
    hours = {
        split: {
            int(h)
            for start in np.unique(np.asarray(starts) % air.HOURS)
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


def test_linear_interpolation_reference_against_numpy(published):
    source = lavajax.AirQuality(str(published), shots=5, queries=8).load()
    task = source.sample(jax.random.key(3), "test")
    x, y = np.asarray(task.support.x[:, 0]), np.asarray(task.support.y[:, 0])
    order = np.argsort(x)
    expected = np.interp(np.asarray(task.query.x[:, 0]), x[order], y[order])
    error = np.mean((expected - np.asarray(task.query.y[:, 0])) ** 2)
    assert float(air.interpolation_error(task, jax.random.key(0))) == pytest.approx(error, rel=1e-4)


def test_training_on_stored_windows_beats_the_support_mean(published):
    source = lavajax.AirQuality(str(published)).load()
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
    with pytest.raises(FileNotFoundError, match=r"not there.*UCI.*CC BY 4\.0"):
        air.read_air_quality(tmp_path / "none.zip")
    with pytest.raises(FileNotFoundError, match="a folder"):
        air.read_air_quality(tmp_path)


def test_missing_station_is_named(files, tmp_path):
    some = {n: c for n, c in files.items() if "Dongsi" not in n}
    with pytest.raises(ValueError, match=r"12 stations.*lacks Dongsi"):
        air.read_air_quality(write_zip(tmp_path / "a.zip", some))


def test_truncated_zip_is_refused(published, tmp_path):
    path = tmp_path / "cut.zip"
    path.write_bytes(published.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="must be a whole, plain zip file"):
        air.read_air_quality(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"header": HEADER.replace("PM10", "PM1")}, "must have the columns"),
        ({"rows": air.HOURS - 1}, "must have 35064 hourly rows"),
    ],
)
def test_changed_file_is_refused_by_name(files, tmp_path, change, message):
    name = name_of("Tiantan")
    changed = {**files, name: station_file("Tiantan", **change)}
    with pytest.raises(ValueError, match=f"PRSA_Data_Tiantan.*{message}"):
        air.read_air_quality(write_zip(tmp_path / "b.zip", changed))


def test_text_where_numbers_belong_is_refused(files, tmp_path):
    name = name_of("Aotizhongxin")
    changed = {**files, name: files[name].replace(b",300,77,", b",high,77,", 5)}
    path = write_zip(tmp_path / "c.zip", changed)
    with pytest.raises(ValueError, match=r"PRSA_Data_Aotizhongxin.*column CO must hold numbers"):
        air.read_air_quality(path, "CO")


def test_oversized_member_is_refused_before_it_is_read(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inner.zip", b"\0" * (air._MOST_BYTES + 1))
    path = tmp_path / "bomb.zip"
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match="more than the published file can have"):
        air.read_air_quality(path)


def test_settings_are_checked():
    with pytest.raises(ValueError, match=r"AirQuality\.column must be one of 'PM2\.5'.*got 'PM25'"):
        lavajax.AirQuality("x.zip", column="PM25")
    with pytest.raises(ValueError, match="at most 168 hours"):
        lavajax.AirQuality("x.zip", shots=100, queries=100)


@pytest.mark.skipif(not REAL_ZIP.is_file(), reason="the Beijing air-quality zip is not here")
def test_real_files_have_the_published_counts_and_reference_error():
    """Counts of missing entries by the files' own NA; linear interpolation on 20-hour windows."""
    measured = air.read_air_quality(REAL_ZIP)
    assert np.isnan(measured).sum() == 8739
    assert measured[0, :4].tolist() == [4.0, 8.0, 7.0, 6.0]
    source = lavajax.AirQuality(str(REAL_ZIP)).load()
    errors = lavajax.score(air.interpolation_error, source, num_tasks=20_000)
    assert errors.mean() == pytest.approx(0.060, abs=0.004)
