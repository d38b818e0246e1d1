"""The radio tasks: synthetic signals against their definition, and files in RadioML's layout."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import h5py
import jax
import numpy as np
import pytest

import lavajax
from lavajax.datasets import load_radio, radio
from lavajax.tasks.radio import stored

FRAMES = 2
KEYS = jax.random.split(jax.random.key(0), 200)


def drawn(source, split="train"):
    return jax.jit(jax.vmap(lambda key: source.sample(key, split)))(KEYS)


def signals(source):
    return np.asarray(jax.jit(jax.vmap(source.clean))(KEYS))


# Synthetic signals


def test_synthetic_signals_have_unit_power_and_the_stated_frequencies():
    source = lavajax.SyntheticFm(carrier=(1.0, 1.0), deviation=(0.5, 0.5))
    clean = signals(source)
    assert clean.shape == (200, 100, 2)
    np.testing.assert_allclose((clean**2).sum(axis=2), 1, atol=1e-5)
    s = clean[..., 0] + 1j * clean[..., 1]
    # turns per 100 steps, from one step to the next
    frequency = 100 * np.angle(s[:, 1:] / s[:, :-1]) / (2 * np.pi)
    peak = np.abs(frequency - 1).max(axis=1)
    assert peak.max() < 0.501
    assert np.median(peak) > 0.499  # it may lie at the first step, which has none before it


def test_synthetic_carriers_and_messages_fill_their_ranges():
    s = signals(lavajax.SyntheticFm(deviation=(0, 0)))
    s = s[..., 0] + 1j * s[..., 1]
    carrier = 100 * np.angle(s[:, 50] / s[:, 49]) / (2 * np.pi)
    assert -2 <= carrier.min() < -1.8
    assert 1.8 < carrier.max() <= 2.001
    start = np.angle(s[:, 0])
    assert start.min() < -2.8
    assert start.max() > 2.8
    pure = lavajax.SyntheticFm(message=(1.5, 1.5), carrier=(0, 0), deviation=(2, 2))
    s = signals(pure).astype(np.float64)
    s = s[..., 0] + 1j * s[..., 1]
    frequency = np.angle(s[:, 1:] / s[:, :-1])
    angle = 2 * np.pi * 1.5 * np.arange(1, 100)[:, None] / 100
    basis = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    rest = frequency.T - basis @ np.linalg.lstsq(basis, frequency.T, rcond=None)[0]
    assert np.abs(rest).max() < 1e-3 * np.abs(frequency).max()


def test_synthetic_steps_are_distinct_and_noise_is_on_support_and_query_alike():
    source = lavajax.SyntheticFm(shots=30, queries=70, snr=(20.0, 20.0))
    task, clean = drawn(source), signals(source)
    t = np.concatenate([task.support.x, task.query.x], axis=1)[..., 0]
    steps = np.rint((t + 1) / 2 * 99).astype(int)
    np.testing.assert_array_equal(np.sort(steps, axis=1), np.tile(np.arange(100), (200, 1)))
    np.testing.assert_allclose(t, np.linspace(-1, 1, 100)[steps], atol=1e-6)
    for points, of in ((task.support, slice(None, 30)), (task.query, slice(30, None))):
        noise = np.asarray(points.y) - np.take_along_axis(clean, steps[:, of, None], axis=1)
        assert (noise**2).mean() == pytest.approx(0.005, rel=0.05)
        assert source.noise_floor == pytest.approx(0.005)


def test_clean_query_is_the_same_task_without_the_querys_noise():
    noisy, source = drawn(lavajax.SyntheticFm()), lavajax.SyntheticFm(clean_query=True)
    clean = drawn(source)
    np.testing.assert_allclose(noisy.support.y, clean.support.y, atol=1e-6)
    np.testing.assert_array_equal(noisy.query.x, clean.query.x)
    np.testing.assert_allclose((np.asarray(clean.query.y) ** 2).sum(axis=2), 1, atol=1e-5)


def test_noise_floor_is_the_mean_over_the_range_of_snr():
    source = lavajax.SyntheticFm()
    levels = np.linspace(20, 30, 100_001)
    assert source.noise_floor == pytest.approx(np.mean(10 ** (-levels / 10) / 2), rel=1e-4)
    noisy, clean = drawn(source), drawn(dataclasses.replace(source, clean_query=True))
    found = np.mean((np.asarray(noisy.query.y) - clean.query.y) ** 2)
    assert found == pytest.approx(source.noise_floor, rel=0.1)


def test_splits_of_synthetic_signals_never_coincide():
    points = np.concatenate([drawn(lavajax.SyntheticFm(), s).query.y for s in ("train", "test")])
    assert len(np.unique(points[:, 0, 0])) == 400


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lavajax.SyntheticFm(shots=51), r"SyntheticFm.*at most 100, the steps .* 51 \+ 50"),
        (lambda: lavajax.Radio(queries=91), r"Radio.*at most 100, the steps .* 10 \+ 91"),
        (lambda: lavajax.Radio(shots=0), r"Radio\.shots must be an integer of at least 1"),
        (lambda: lavajax.SyntheticFm(message=(0, 1)), r"SyntheticFm\.message must be above 0"),
        (lambda: lavajax.SyntheticFm(deviation=(-1, 1)), "deviation must be at least 0"),
        (lambda: lavajax.SyntheticFm(snr=(30, 20)), r"SyntheticFm\.snr must be a pair"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_radio_without_data_is_synthetic():
    settings = lavajax.Radio(shots=20, queries=30)
    assert settings.synthetic
    assert settings.load() == lavajax.SyntheticFm(shots=20, queries=30)
    assert not lavajax.Radio("a.hdf5").synthetic


# RadioML


def signal(label: int, rng: np.random.Generator, steps: int = 1024) -> np.ndarray:
    """Constant amplitude for class 21, random signs of one phase for the others."""
    turns = np.cumsum(rng.uniform(0.01, 0.02) + 0.01 * np.sin(np.arange(steps) / 20))
    s = np.exp(2j * np.pi * turns) if label == radio.FM else rng.choice([-1.0, 1.0], steps)
    s = 3 * s * np.exp(2j * np.pi * rng.uniform())
    return np.stack([s.real, s.imag], axis=1)


@functools.cache
def layout(frames: int) -> dict[str, np.ndarray]:
    """The arrays of a file in the published layout."""
    rng = np.random.default_rng(0)
    label = np.repeat(np.arange(24), 26 * frames)
    return {
        "X": np.stack([signal(each, rng) for each in label]).astype(np.float32),
        "Y": np.eye(24, dtype=np.int64)[label],
        "Z": np.tile(np.repeat(radio.SNRS, frames), 24)[:, None],
    }


def write_radioml(path: Path, frames: int = FRAMES, **changed) -> Path:
    """A file of few frames; ``changed`` are functions of an array, by its name."""
    with h5py.File(path, "w") as h5:
        for name, values in layout(frames).items():
            h5[name] = changed.get(name, lambda v: v)(values)
    return path


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    return write_radioml(tmp_path_factory.mktemp("radio") / radio.FILE)


def test_strong_signals_of_class_21_are_read(published, tmp_path):
    found = load_radio(published, tmp_path)
    with h5py.File(published) as h5:
        z = h5["Z"][:, 0]
        rows = np.flatnonzero((h5["Y"][:, 21] == 1) & (z >= 20))
        np.testing.assert_array_equal(found.signals, h5["X"][:][rows, :100])
    np.testing.assert_array_equal(found.snr, z[rows])
    assert found.signals.shape == (6 * FRAMES, 100, 2)
    np.testing.assert_array_equal(load_radio(published.parent, tmp_path).snr, found.snr)


def test_snr_is_what_the_file_says_whatever_its_order_and_shape(tmp_path):
    """Z is read as [n], too, and as floats; the SNRs of a class may stand in any order."""

    def descending(z):
        return z.reshape(24, 26, FRAMES)[:, ::-1].reshape(-1).astype(np.float32)

    found = list(radio.examples(write_radioml(tmp_path / "a.hdf5", Z=descending)))
    expected = np.repeat(np.arange(30, 18, -2), FRAMES)
    np.testing.assert_array_equal([example["snr"] for example in found], expected)


def moved(label: int):
    """The order of classes in which ``label`` and 21 have changed places."""

    def change(x):
        blocks = x.reshape(24, 26 * FRAMES, *x.shape[1:]).copy()
        blocks[[label, 21]] = blocks[[21, label]]
        return blocks.reshape(x.shape)

    return change


def spoiled(index, value):
    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


FIRST_STRONG = 21 * 26 * FRAMES + 20 * FRAMES


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"X": moved(3)},
            r"class 21 must be frequency .* got [0-9.e-]+ and 1 .*class 3 would pass",
        ),
        ({"X": np.ones_like}, "no class passes"),
        ({"X": lambda x: x[:, :512]}, r"X \[n, 1024, 2\].* got X \(1248, 512, 2\) of float32"),
        ({"X": lambda x: x[:-1]}, r"2555904, or fewer frames alike; got X \(1247, 1024, 2\)"),
        ({"X": lambda x: x.astype(np.int16)}, "of real numbers.*of int16"),
        ({"Y": lambda y: y[:, :23]}, r"Y \(1248, 23\)"),
        ({"Z": lambda z: z[:-1]}, r"Z \(1247, 1\)"),
        ({"Y": moved(4)}, "rows by class.*row 208 must be of class 4, got .*1"),
        ({"Y": spoiled((FIRST_STRONG, 0), 1)}, f"row {FIRST_STRONG} must be of class 21"),
        ({"Z": spoiled(FIRST_STRONG, 18)}, "2 frames of each SNR .* class 21, got 1 to 3 of each"),
        ({"X": spoiled((FIRST_STRONG, 5), np.nan)}, f"row {FIRST_STRONG} of X must be a signal"),
        ({"X": spoiled(FIRST_STRONG, 0)}, f"row {FIRST_STRONG} of X must be a signal"),
    ],
)
def test_changed_file_is_refused_by_name(changed, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        list(radio.examples(write_radioml(tmp_path / "changed.hdf5", **changed)))
    assert "changed.hdf5" in str(error.value)


def test_file_that_was_cut_at_a_multiple_of_frames_is_refused(published, tmp_path):
    half = {name: lambda a: a[: len(a) // 2] for name in "XYZ"}
    with pytest.raises(ValueError, match="rows by class"):
        list(radio.examples(write_radioml(tmp_path / "cut.hdf5", **half)))
    path = tmp_path / "short.hdf5"
    path.write_bytes(published.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"whole HDF5 file, got .*short\.hdf5"):
        list(radio.examples(path))


def test_arrays_outside_the_file_are_refused(published, tmp_path):
    path = tmp_path / "links.hdf5"
    with h5py.File(path, "w") as h5:
        h5["X"] = h5py.ExternalLink(published, "X")
    with pytest.raises(ValueError, match="X must be stored in the file, and refers to another"):
        list(radio.examples(path))
    with h5py.File(path, "w") as h5:
        h5["other"] = 1
    with pytest.raises(ValueError, match="must hold the arrays X, Y and Z, got other"):
        list(radio.examples(path))


def test_huge_arrays_are_refused_before_they_are_read(tmp_path):
    """Empty arrays of any size take no place in the file; nor do their pieces, before reading."""
    n = 24 * 26 * 4097
    path = tmp_path / "huge.hdf5"
    with h5py.File(path, "w") as h5:
        h5.create_dataset("X", (n, 1024, 2), np.float32)
        h5.create_dataset("Y", (n, 24), np.int64)
        h5.create_dataset("Z", (n, 1), np.int64)
    with pytest.raises(ValueError, match=rf"got X \({n}, 1024, 2\)"):
        list(radio.examples(path))
    with h5py.File(path, "w") as h5:
        h5.create_dataset("X", (n, 1024, 2), np.float32, chunks=(40_000, 1024, 2))
    with pytest.raises(ValueError, match="X is stored in pieces of more than"):
        list(radio.examples(path))


def test_missing_file_says_where_it_is_published(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not there.*DeepSig.*CC BY-NC-SA 4\.0"):
        load_radio(tmp_path / "none.hdf5", tmp_path)
    packed = tmp_path / "2018.01.OSC.0001_1024x2M.h5.tar.gz"
    packed.write_bytes(b"\x1f\x8b")
    with pytest.raises(ValueError, match="unpack the archive first"):
        list(radio.examples(packed))


def test_stored_signals_are_normalised_and_split_by_snr():
    rng = np.random.default_rng(1)
    snr = np.repeat([20, 24, 30], 40)
    measured = rng.normal(size=(120, 100, 2)) * rng.uniform(1, 5, (120, 1, 1))
    source = stored(measured, snr, shots=10, queries=20)
    power = (np.asarray(source.signals) ** 2).sum(axis=2).mean(axis=1)
    np.testing.assert_allclose(power, 1, rtol=1e-5)
    members = {split: np.asarray(m) for split, m in source.members.items()}
    np.testing.assert_array_equal(np.sort(np.concatenate([*members.values()])), np.arange(120))
    for split, each in (("test", 10), ("validation", 3), ("train", 27)):
        np.testing.assert_array_equal(np.bincount(snr[members[split]])[[20, 24, 30]], each)
    assert source.noise_floor == pytest.approx(
        np.mean([0.5 / 101, 0.5 / (1 + 10**2.4), 0.5 / 1001])
    )
    task = drawn(source, "validation")
    steps = np.rint((np.asarray(task.query.x[..., 0]) + 1) / 2 * 99).astype(int)
    own = np.asarray(source.signals)[members["validation"]]
    for row, at in zip(np.asarray(task.query.y), steps, strict=True):
        assert np.abs(own[:, at] - row).max(axis=(1, 2)).min() < 1e-6
    with pytest.raises(ValueError, match=r"at least 3 signals of each SNR.* got 2 at 24 dB"):
        stored(measured[:42], snr[:42], shots=1, queries=1)


def test_settings_load_the_file(tmp_path):
    path = write_radioml(tmp_path / "a.hdf5", frames=3)
    source = lavajax.Radio(path, shots=4, queries=5).load(tmp_path)
    assert {split: len(m) for split, m in source.members.items()} == {
        "train": 6,
        "validation": 6,
        "test": 6,
    }
    task = source.sample(jax.random.key(0), "test")
    assert (task.support.y.shape, task.query.x.shape) == ((4, 2), (5, 1))
