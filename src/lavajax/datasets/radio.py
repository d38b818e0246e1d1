"""RadioML 2018.01A: simulated radio signals of 24 modulations; here, those of frequency modulation.

Published by DeepSig (T. O'Shea, T. Roy, T. C. Clancy, "Over-the-air deep learning based radio
signal classification", IEEE Journal of Selected Topics in Signal Processing 12, 2018; CC BY-NC-SA
4.0, not for commercial use) as ``2018.01.OSC.0001_1024x2M.h5.tar.gz``, which holds
``GOLD_XYZ_OSC.0001_1024.hdf5``, 21 GB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lavajax.datasets.base import not_found, warn_of_other
from lavajax.extras import require
from lavajax.tasks.radio import STEPS

PUBLISHED = (
    "It is published by DeepSig as RadioML 2018.01A (CC BY-NC-SA 4.0, not for commercial use), "
    "packed in 2018.01.OSC.0001_1024x2M.h5.tar.gz"
)
FILE = "GOLD_XYZ_OSC.0001_1024.hdf5"
CLASSES, FRAMES, LENGTH = 24, 4096, 1024
SNRS = tuple(range(-20, 31, 2))
"""In dB."""
FM = 21
"""The class in the columns of Y. The file ``classes.txt`` beside the data, which says 3, is in
another order: https://github.com/radioML/dataset/issues/25"""
LEAST_SNR = 20
_ROWS = 1024  # read at once, 8 MB at most
_MOST_CHUNK = 2**28


class RadioArrays(NamedTuple):
    """Signals of frequency modulation, whole in memory.

    Attributes:
        signals: ``[n, 100, 2]`` float32, in-phase and quadrature of the first 100 steps.
        snr: ``[n]`` int32, signal-to-noise ratio in dB, as the file has it.
    """

    signals: np.ndarray
    snr: np.ndarray


def load_radio(path: str | Path, data_dir: str | Path | None = None) -> RadioArrays:
    """The signals of frequency modulation with an SNR of at least 20 dB, 24,576 of them.

    The first call prepares them, once for each content of the file, where TFDS keeps its data.

    Args:
        path: ``GOLD_XYZ_OSC.0001_1024.hdf5``, or the folder it lies in. A file in the same layout
            with fewer frames of each class and SNR is read as well.
        data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

    Raises:
        ValueError: the file is not in the published layout, or its class 21 not what frequency
            modulation must look like; the message says what was found.
        FileNotFoundError: there is none; the message says where it is published.
        ModuleNotFoundError: a package is missing; the message has the command that installs it.
    """
    from lavajax.datasets import builders

    found = builders.prepared(builders.RadiomlFm, path, data_dir)["signals"]
    signals = np.empty((len(found), STEPS, 2), np.float32)
    snr = np.empty(len(found), np.int32)
    for i, example in enumerate(found):
        signals[i], snr[i] = example["signal"], example["snr"]
    return RadioArrays(signals, snr)


def files(path: str | Path) -> list[Path]:
    """The file that ``path`` stands for; warns of one that is smaller than the published one.

    Raises:
        FileNotFoundError: there is none.
        ValueError: its arrays are not of the published layout.
        ModuleNotFoundError: a package is missing; the message has the command that installs it.
    """
    file = _file(Path(path))
    with _opened(file) as h5:
        x, y, z = (_dataset(h5, name, file) for name in "XYZ")
        frames = _frames(x, y, z, file)
    warn_of_other(file, frames, FRAMES, "frames of each class and SNR")
    return [file]


def _file(path: Path) -> Path:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise not_found(
            path,
            f"the path of {FILE}, or of its folder",
            PUBLISHED,
        )
    return file


def examples(path: str | Path) -> Iterator[dict[str, Any]]:
    """The signals, in the order of the file.

    Yields:
        ``signal`` ``[100, 2]`` float32; ``snr`` int, in dB.

    Raises:
        ValueError, FileNotFoundError, ModuleNotFoundError: as ``load_radio``.
    """
    file = _file(Path(path))
    with _opened(file) as h5:
        x, y, z = (_dataset(h5, name, file) for name in "XYZ")
        frames = _frames(x, y, z, file)
        snr = _block_snr(y, z, FM, frames, file)
        _check_fm(x, z, frames, file)
        first = FM * len(SNRS) * frames
        for begin in range(0, len(snr), _ROWS):
            rows = np.flatnonzero(snr[begin : begin + _ROWS] >= LEAST_SNR)
            if not len(rows):
                continue
            start = first + begin + rows[0]
            slab = x[start : first + begin + rows[-1] + 1, :STEPS].astype(np.float32)
            for row in rows:
                signal = slab[row - rows[0]]
                if not np.isfinite(signal).all() or not signal.any():
                    raise ValueError(
                        f"{file}: row {first + begin + row} of X must be a signal, and holds NaN, "
                        "infinity, or zeros alone"
                    )
                yield {"signal": signal, "snr": int(snr[begin + row])}


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    h5py = require("h5py", "data", "reading RadioML")
    try:
        with h5py.File(file, "r") as h5:
            yield h5
    except OSError as error:
        hint = "; unpack the archive first" if file.suffix in (".gz", ".tar", ".zip") else ""
        raise ValueError(f"data must be a whole HDF5 file, got {file}: {error}{hint}") from None


def _dataset(h5: Any, name: str, file: Path) -> Any:
    """A dataset of the file that is stored in the file itself, and can be read by slices."""
    found = h5.get(name)
    shape = getattr(found, "shape", None)
    if shape is None:
        raise ValueError(
            f"{file} must hold the arrays X, Y and Z, got {', '.join(sorted(h5)[:5]) or 'none'}"
        )
    if found.is_virtual or found.external or found.file.filename != h5.filename:
        raise ValueError(f"{file}: {name} must be stored in the file, and refers to another")
    if found.chunks and np.prod(found.chunks, dtype=float) * found.dtype.itemsize > _MOST_CHUNK:
        raise ValueError(f"{file}: {name} is stored in pieces of more than {_MOST_CHUNK} bytes")
    return found


def _frames(x: Any, y: Any, z: Any, file: Path) -> int:
    """The number of frames of each class and SNR, 4,096 as published.

    Rows go by class first, in blocks of one size. So they are looked at where each block begins and
    ends, which no file passes that was cut, or put in another order.
    """
    n = x.shape[0] if x.shape else 0
    frames, rest = divmod(n, CLASSES * len(SNRS))
    kinds = (x.dtype.kind, y.dtype.kind, z.dtype.kind)
    published = CLASSES * len(SNRS) * FRAMES
    if (
        x.shape[1:] != (LENGTH, 2)
        or y.shape != (n, CLASSES)
        or z.shape not in ((n, 1), (n,))
        or kinds[0] != "f"
        or any(kind not in "iuf" for kind in kinds[1:])
        or rest
        or not 1 <= frames <= FRAMES
    ):
        raise ValueError(
            f"{file} must hold X [n, {LENGTH}, 2] of real numbers, Y [n, {CLASSES}] and Z [n, 1], "
            f"with n = {CLASSES} classes x {len(SNRS)} SNRs x {FRAMES} frames = {published}, or "
            f"fewer frames alike; got X {x.shape} of {x.dtype}, Y {y.shape} of {y.dtype}, "
            f"Z {z.shape} of {z.dtype}"
        )
    block = len(SNRS) * frames
    for label in range(CLASSES):
        for row in (label * block, (label + 1) * block - 1):
            _check_labels(y[row : row + 1], label, row, file)
    return frames


def _check_labels(y: np.ndarray, label: int, first: int, file: Path) -> None:
    """Requires labels ``[rows, 24]`` to be one-hot, of one class."""
    wrong = (y != np.eye(CLASSES)[label]).any(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(
            f"{file} must have its rows by class, {CLASSES} blocks of one size; row {first + row} "
            f"must be of class {label}, got {y[row].tolist()}"
        )


def _block_snr(y: Any, z: Any, label: int, frames: int, file: Path) -> np.ndarray:
    """The SNRs of a class's rows, ``[26 * frames]``, each as often as the others."""
    block = len(SNRS) * frames
    rows = slice(label * block, (label + 1) * block)
    _check_labels(y[rows], label, rows.start, file)
    snr = np.ravel(z[rows])
    if not np.array_equal(np.sort(snr), np.repeat(SNRS, frames)):
        levels, counts = np.unique(snr, return_counts=True)
        raise ValueError(
            f"{file} must have {frames} frames of each SNR from {SNRS[0]} to {SNRS[-1]} dB in "
            f"class {label}, got {counts.min()} to {counts.max()} of each of {len(levels)} from "
            f"{levels[0]} to {levels[-1]}"
        )
    return snr.astype(np.int64)


def _check_fm(x: Any, z: Any, frames: int, file: Path) -> None:
    """Requires class 21 to look like frequency modulation.

    Its amplitude is constant; and its square, unlike that of real-valued modulations such as BPSK,
    is not of one phase.
    """
    found = _looks(x, z, FM, frames)
    if not _is_fm(*found):
        passing = [
            label
            for label in range(CLASSES)
            if label != FM and _is_fm(*_looks(x, z, label, frames))
        ]
        hint = f"class {', '.join(map(str, passing))} would pass" if passing else "no class passes"
        raise ValueError(
            f"{file}: class {FM} must be frequency modulation, with a spread of its amplitude "
            f"below {_MOST_SPREAD} of its mean and an impropriety below {_MOST_IMPROPRIETY}, got "
            f"{found[0]:.2g} and {found[1]:.2g} on frames at {SNRS[-1]} dB; {hint}. Are the "
            "classes in another order?"
        )


# At 30 dB, noise gives a constant amplitude a spread of 0.022.
_MOST_SPREAD, _MOST_IMPROPRIETY = 0.1, 0.7


def _is_fm(spread: float, impropriety: float) -> bool:
    return spread < _MOST_SPREAD and impropriety < _MOST_IMPROPRIETY


def _looks(x: Any, z: Any, label: int, frames: int) -> tuple[float, float]:
    """Spread of the amplitude and impropriety of a class, on 256 frames at 30 dB.

    std |s| / mean |s|, and |mean s^2| / mean |s|^2, of each frame; means over frames.
    """
    block = len(SNRS) * frames
    snr = np.ravel(z[label * block : (label + 1) * block])
    rows = label * block + np.flatnonzero(snr == SNRS[-1])[:256]
    if not len(rows):
        return np.inf, np.inf
    # One row after the other, wherever they lie: 8 KB each.
    pairs = np.stack([x[int(row)] for row in rows]).astype(np.float64)
    s = pairs[..., 0] + 1j * pairs[..., 1]
    size = np.abs(s)
    with np.errstate(invalid="ignore", divide="ignore"):  # silence is no signal: NaN passes nothing
        spread = size.std(axis=1) / size.mean(axis=1)
        impropriety = np.abs((s**2).mean(axis=1)) / (size**2).mean(axis=1)
    return float(spread.mean()), float(impropriety.mean())
