"""TFDS builders of the data sets, prepared from files that the user names, without TensorFlow.

A builder is used like any of TFDS's, with one argument more, ``source``::

    builder = OmniglotDrawings(source="omniglot/")
    builder.download_and_prepare()  # downloads nothing
    drawings = builder.as_data_source("drawings")

What is prepared lies at ``<data_dir>/<name>/<fingerprint of the source>/<version>``. TFDS writes
into a folder called incomplete, which it renames at the end: what is there, is whole.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lavajax import disk
from lavajax.datasets import air_quality, mini_imagenet, omniglot, radio
from lavajax.datasets.base import fingerprint
from lavajax.extras import require

try:
    import fcntl
except ModuleNotFoundError:  # Windows: TFDS alone keeps two processes apart there
    fcntl = None  # type: ignore[assignment]

_LEAST_ROOM = 2**20  # bytes: what the files beside the data take

tfds: Any = require("tensorflow_datasets", "data", "preparing data sets")
for _package in ("array_record", "dill"):  # which TFDS imports without naming them
    require(_package, "data", "preparing data sets")


def prepared(
    builder: Any, source: str | Path, data_dir: str | Path | None
) -> dict[str, Sequence[dict[str, Any]]]:
    """The prepared splits of a data set, by name; prepares them if need be.

    Args:
        builder: one of the classes below.
        source: files as published.
        data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

    Returns:
        For each split its examples, read where they are asked for.

    Raises:
        ValueError, FileNotFoundError: as the reader of the data set.
        OSError: the disk is full, or ``data_dir`` cannot be written to.
    """
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)  # TFDS warns of every config that a builder did not list
    try:
        made = builder(source=source, data_dir=data_dir)
        made.download_and_prepare()
    except ValueError as error:  # of a missing file its reader says where it is published
        raise ValueError(f"{error}. {builder.published}; nothing is downloaded") from error
    finally:
        log.setLevel(level)
    return {name: made.as_data_source(name) for name in made.info.splits}


def _init(
    self: Any,
    *,
    source: str | Path | None = None,
    config: Any = None,
    file_format: str = "array_record",
    **options: Any,
) -> None:
    """``source`` or, to read what is prepared, the ``config`` of an earlier builder."""
    self.source = source
    if source is not None:
        # TFDS keeps the data of each config apart.
        config = tfds.core.BuilderConfig(
            name=fingerprint(self.files(source)), description=f"Prepared from {source}."
        )
    if config is None:
        raise ValueError(f"{type(self).__name__} needs source=..., the path of the published files")
    tfds.core.GeneratorBasedBuilder.__init__(
        self, config=config, file_format=file_format, **options
    )


def _download_and_prepare(self: Any, **options: Any) -> None:
    """Prepares the data unless that is done; downloads nothing.

    Raises:
        ValueError, FileNotFoundError: as the reader of the data set.
        OSError: the disk is full, or the folder cannot be written to; nothing is left half done.
    """
    if not self.is_prepared():
        folder = Path(self.data_dir).parent
        with _alone(folder), _told(folder):
            if not self.is_prepared():  # another process may have been at it
                tfds.core.GeneratorBasedBuilder.download_and_prepare(self, **options)
    self.info.read_from_directory(self.data_dir)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Holds the lock of a folder, which the system gives back when a process ends in any way."""
    with disk.writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        disk.check_room(folder, _LEAST_ROOM)
        lock = (folder / ".lock").open("a")
    with lock:
        if fcntl is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob("incomplete.*"):  # by a process that was killed
                shutil.rmtree(left)
        yield


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Tells of a failure to write, and of none that is the source's."""
    try:
        yield
    except RuntimeError as error:  # array_record says in words alone what it was
        if (number := disk.number_in(str(error))) is None:
            raise
        with disk.writing(folder):
            raise OSError(number, os.strerror(number)) from error
    except OSError as error:
        if error.errno not in (*disk.FULL, errno.EFBIG, errno.EROFS):
            raise
        with disk.writing(folder):
            raise


def _silent(self: Any) -> None:
    """In the place of TFDS's messages, which speak of downloading."""


def _info(self: Any, features: dict[str, Any], licence: str, homepage: str, citation: str) -> Any:
    return tfds.core.DatasetInfo(
        builder=self,
        description=type(self).__doc__,
        features=tfds.features.FeaturesDict(features),
        homepage=homepage,
        license=licence,
        citation=citation,
        disable_shuffling=True,
    )


def _tensor(shape: tuple[int, ...], dtype: Any) -> Any:
    """Raw bytes: as numbers of TensorFlow's own record a uint8 would take up to two."""
    return tfds.features.Tensor(shape=shape, dtype=dtype, encoding="bytes")


def _text() -> Any:
    return tfds.features.Tensor(shape=(), dtype=np.str_)


class BeijingAirQuality(tfds.core.GeneratorBasedBuilder):
    """Hourly air quality and weather of 12 stations in Beijing, 2013 to 2017, NaN where missing."""

    VERSION = tfds.core.Version("1.0.0")
    files = staticmethod(air_quality.files)
    published = air_quality.PUBLISHED
    __init__ = _init
    download_and_prepare = _download_and_prepare
    _log_download_bytes = _log_download_done = _silent

    def _info(self) -> Any:
        return _info(
            self,
            {
                "measurements": _tensor(
                    (air_quality.HOURS, len(air_quality.MEASUREMENTS)), np.float32
                ),
                "station": _text(),
            },
            licence="CC BY 4.0",
            homepage="https://archive.ics.uci.edu/dataset/501",
            citation="Chen: Beijing Multi-Site Air Quality. UCI Machine Learning Repository (2019)",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"stations": self._generate_examples()}

    def _generate_examples(self) -> Any:
        return enumerate(air_quality.examples(self.source))


class RadiomlFm(tfds.core.GeneratorBasedBuilder):
    """RadioML 2018.01A, frequency modulation at 20 dB and more: the first 100 steps, I and Q."""

    VERSION = tfds.core.Version("1.0.0")
    files = staticmethod(radio.files)
    published = radio.PUBLISHED
    __init__ = _init
    download_and_prepare = _download_and_prepare
    _log_download_bytes = _log_download_done = _silent

    def _info(self) -> Any:
        return _info(
            self,
            {
                "signal": _tensor((radio.STEPS, 2), np.float32),
                "snr": tfds.features.Scalar(np.int32),
            },
            licence="CC BY-NC-SA 4.0",
            homepage="https://www.deepsig.ai/datasets",
            citation="O'Shea, Roy, Clancy: Over-the-air deep learning based radio signal "
            "classification. IEEE Journal of Selected Topics in Signal Processing 12 (2018)",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"signals": self._generate_examples()}

    def _generate_examples(self) -> Any:
        return enumerate(radio.examples(self.source))


class OmniglotDrawings(tfds.core.GeneratorBasedBuilder):
    """Omniglot: drawings of handwritten characters, 28 x 28, ink 255 on 0."""

    VERSION = tfds.core.Version("1.0.0")
    files = staticmethod(omniglot.files)
    published = omniglot.PUBLISHED
    __init__ = _init
    download_and_prepare = _download_and_prepare
    _log_download_bytes = _log_download_done = _silent

    def _info(self) -> Any:
        return _info(
            self,
            {
                "image": _tensor((omniglot.SIDE, omniglot.SIDE, 1), np.uint8),
                "label": tfds.features.Scalar(np.int32),
                "alphabet": _text(),
                "character": _text(),
            },
            licence="MIT",
            homepage="https://github.com/brendenlake/omniglot",
            citation="Lake, Salakhutdinov, Tenenbaum: Human-level concept learning through "
            "probabilistic program induction. Science 350 (2015)",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {"drawings": self._generate_examples()}

    def _generate_examples(self) -> Any:
        return enumerate(omniglot.examples(self.source))


class MiniImagenetSplits(tfds.core.GeneratorBasedBuilder):
    """mini-ImageNet: 84 x 84 images of 100 classes, in the split of Ravi & Larochelle."""

    VERSION = tfds.core.Version("1.0.0")
    files = staticmethod(mini_imagenet.files)
    published = mini_imagenet.PUBLISHED
    __init__ = _init
    download_and_prepare = _download_and_prepare
    _log_download_bytes = _log_download_done = _silent

    def _info(self) -> Any:
        return _info(
            self,
            {
                "image": _tensor((mini_imagenet.SIDE, mini_imagenet.SIDE, 3), np.uint8),
                "label": tfds.features.Scalar(np.int32),
                "wnid": _text(),
            },
            licence="ImageNet's terms: research alone",
            homepage="https://github.com/twitter-research/meta-learning-lstm",
            citation="Ravi, Larochelle: Optimization as a model for few-shot learning. ICLR 2017",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in mini_imagenet.SPLITS}

    def _generate_examples(self, split: str) -> Any:
        return enumerate(mini_imagenet.examples(self.source, split))
