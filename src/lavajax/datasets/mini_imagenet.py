"""mini-ImageNet: 100 classes of ImageNet with 600 images each, in the split of Ravi & Larochelle.

The split is published at github.com/twitter-research/meta-learning-lstm, folder
``data/miniImagenet`` (S. Ravi and H. Larochelle, "Optimization as a model for few-shot learning",
ICLR 2017). The images are ImageNet's, whose terms allow research alone; they are not published with
the split, and which of ImageNet's they are was never said: they must come from a copy.
"""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from lavajax.datasets.base import not_found, open_zip, warn_of_other
from lavajax.datasets.images import ImageArrays, decode
from lavajax.extras import require

PUBLISHED = (
    "The lists are published at github.com/twitter-research/meta-learning-lstm, in the folder "
    "data/miniImagenet; the images are ImageNet's (research alone)"
)
SPLITS = {"train": "train", "validation": "val", "test": "test"}
"""By split, the name of its file."""
CLASSES = {"train": 64, "validation": 16, "test": 20}
SIDE = 84
PER_CLASS = 600
MD5 = {
    "train": "9525e1538f67719f18f1936bf8d0782d",
    "validation": "ce315ce99b41fbf84fa6acd69315d918",
    "test": "5b89df877c6cbe5d291e43118a2a9591",
}
_FILENAME = re.compile(r"[A-Za-z0-9_-]+\.jpg")
_LABEL = re.compile(r"[A-Za-z0-9_-]+")
_MOST_CSV = 2**23  # train.csv has 1.3 MB
_MOST_JPG = 2**25


def load_mini_imagenet(path: str | Path, data_dir: str | Path | None = None) -> ImageArrays:
    """All images of the three splits, 84 x 84, in colour.

    The first call prepares them, once for each content of the files, where TFDS keeps its data.
    60,000 images take 1.3 GB of memory.

    Args:
        path: a folder with ``train.csv``, ``val.csv`` and ``test.csv`` (header ``filename,label``)
            and the images they name in ``images/``; or with ``train.npz``, ``val.npz`` and
            ``test.npz``, each with ``images`` ``[n, 84, 84, 3]`` uint8 and ``labels`` ``[n]``,
            strings such as ``n01532829``, or integers, which then name the classes.
        data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

    Returns:
        Images ``[n, 84, 84, 3]``; names ``<split>/<wnid>``, train before validation before test,
        sorted within each.

    Raises:
        ValueError: a file is not in this layout; the message says what was found.
        FileNotFoundError: one is missing; the message says where they are published.
        ModuleNotFoundError: a package is missing; the message has the command that installs it.
    """
    from lavajax.datasets import builders

    sources = builders.prepared(builders.MiniImagenetSplits, path, data_dir)
    n = sum(len(sources[split]) for split in SPLITS)
    images = np.empty((n, SIDE, SIDE, 3), np.uint8)
    labels = np.empty(n, np.int32)
    names: list[str] = []
    i = 0
    for split in SPLITS:
        first, found = len(names), {}
        for example in sources[split]:
            label = int(example["label"])
            images[i], labels[i] = example["image"], first + label
            found[label] = f"{split}/{example['wnid'].decode()}"
            i += 1
        names += [found[label] for label in sorted(found)]
    return ImageArrays(images, labels, tuple(names))


def files(path: str | Path) -> list[Path]:
    """The files that ``path`` stands for; warns of those that are not the published ones.

    Raises:
        FileNotFoundError: one is missing.
        ValueError: ``path`` is a pickle, a list of images is none or names one twice, or a class is
            in two splits.
    """
    path = Path(path)
    if path.suffix in (".pkl", ".pickle"):
        raise _pickled(path)
    arrays = [path / f"{stem}.npz" for stem in SPLITS.values()]
    if all(file.is_file() for file in arrays):
        _check_apart({split: _array_labels(path, split) for split in SPLITS}, path)
        return arrays
    lists = [path / f"{stem}.csv" for stem in SPLITS.values()]
    if not all(file.is_file() for file in lists):
        pickles = [*path.glob("*.pkl"), *path.glob("*.pickle")] if path.is_dir() else []
        if pickles:
            raise _pickled(pickles[0])
        raise not_found(
            path,
            "a folder with train.csv, val.csv, test.csv and images/, or with train.npz, val.npz "
            "and test.npz",
            PUBLISHED,
        )
    rows = {split: _listed(path, split) for split in SPLITS}
    _check_apart({split: [label for _, label in found] for split, found in rows.items()}, path)
    names = Counter(name for found in rows.values() for name, _ in found)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{path} must list every image once, {twice[0]} is there twice")
    images = [path / "images" / name for name in names]
    for image in images:
        if not image.is_file():
            raise not_found(
                image,
                "the images that the lists name",
                "mini-ImageNet's images are ImageNet's (research alone), under the names of the "
                "lists",
            )
    return [*lists, *images]


def examples(path: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """The images of one split, in the order of its file.

    Yields:
        ``image`` ``[84, 84, 3]`` uint8, reduced by Lanczos's filter; ``label`` int, counting the
        sorted classes of the split; ``wnid`` str.

    Raises:
        ValueError: as ``load_mini_imagenet``.
    """
    path = Path(path)
    if (path / f"{SPLITS[split]}.npz").is_file():
        yield from _from_arrays(path, split)
        return
    pillow = require("PIL.Image", "data", "reading images")
    listed = _listed(path, split)
    classes = _classes([label for _, label in listed], path / f"{SPLITS[split]}.csv", split)
    for name, label in listed:
        file = path / "images" / name
        if file.stat().st_size > _MOST_JPG:
            raise ValueError(f"{file} must have at most {_MOST_JPG} bytes")
        image = decode(file.read_bytes(), "JPEG", str(file)).convert("RGB")
        small = image.resize((SIDE, SIDE), pillow.Resampling.LANCZOS)
        yield {"image": np.asarray(small, np.uint8), "label": classes.index(label), "wnid": label}


def _listed(path: Path, split: str) -> list[tuple[str, str]]:
    """File name and label of each row of a split's list."""
    file = path / f"{SPLITS[split]}.csv"
    if file.stat().st_size > _MOST_CSV:
        raise ValueError(f"{file} must be a list of images, and has {file.stat().st_size} bytes")
    content = file.read_bytes()
    md5 = hashlib.md5(content.replace(b"\r\n", b"\n"), usedforsecurity=False).hexdigest()
    try:
        rows = list(csv.reader(io.StringIO(content.decode("ascii"))))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} must be a list of images: {error}") from None
    if not rows or rows[0] != ["filename", "label"]:
        got = ",".join(rows[0]) if rows else "nothing"
        raise ValueError(f"{file} must have the header filename,label, got {got[:100]}")
    for row in rows[1:]:
        if len(row) != 2 or not _FILENAME.fullmatch(row[0]) or not _LABEL.fullmatch(row[1]):
            raise ValueError(
                f"{file} must have rows such as n0153282900000005.jpg,n01532829, got "
                f"{','.join(row)[:100]!r}"
            )
    _classes(
        [label for _, label in rows[1:]],
        file,
        split,
        f"; its md5 is {md5}, and that of the published file {MD5[split]}",
    )
    if md5 != MD5[split]:
        warnings.warn(
            f"{file} is not the published list of {CLASSES[split]} x {PER_CLASS} images: its md5 "
            f"is {md5}, not {MD5[split]}; results are then not those of the usual split",
            stacklevel=2,
        )
    return [(name, label) for name, label in rows[1:]]


def _classes(labels: list[str], file: Path, split: str, hint: str = "") -> list[str]:
    """The sorted classes of a split.

    Raises:
        ValueError: they are not as many as published, or not all of one size.
    """
    counts = Counter(labels)
    if len(counts) != CLASSES[split] or len(set(counts.values())) != 1:
        sizes = f"{min(counts.values())} to {max(counts.values())}" if counts else "no"
        raise ValueError(
            f"{file} must have {CLASSES[split]} classes of one size ({PER_CLASS} images each, as "
            f"published), got {len(counts)} classes of {sizes} images{hint}"
        )
    return sorted(counts)


def _check_apart(labels: dict[str, list[str]], path: Path) -> None:
    """Requires splits without a class in common; integers may count the classes of each anew."""
    for one, other in itertools.combinations(labels, 2):
        both = sorted(set(labels[one]) & set(labels[other]))
        if named := [label for label in both if not label.isdecimal()]:
            raise ValueError(
                f"{path} must have splits of different classes, {SPLITS[one]} and {SPLITS[other]} "
                f"have {len(named)} in common: {', '.join(named[:5])}"
            )


def _array_labels(path: Path, split: str) -> list[str]:
    """The label of each image of a split's archive."""
    file = path / f"{SPLITS[split]}.npz"
    with open_zip(file, file) as archive:
        labels = _labels(archive, file, split)
    warn_of_other(file, len(labels), CLASSES[split] * PER_CLASS, "images")
    return labels


def _labels(archive: zipfile.ZipFile, file: Path, split: str) -> list[str]:
    most = 2 * CLASSES[split] * PER_CLASS
    for member in ("images.npy", "labels.npy"):
        if member not in archive.namelist():
            raise ValueError(
                f"{file} must hold the arrays images and labels, got "
                f"{', '.join(archive.namelist()[:5]) or 'none'}"
            )
    with archive.open("labels.npy") as stream:
        shape, _, dtype = _header(stream, file)
        if (
            len(shape) != 1
            or not 0 <= shape[0] <= most
            or dtype.kind not in "iuUS"
            or dtype.itemsize > 256
        ):
            raise ValueError(
                f"{file}: labels must be [n] integers or strings, n at most {most}, got shape "
                f"{shape} of {dtype}"
            )
        content = stream.read(shape[0] * dtype.itemsize)
    if len(content) != shape[0] * dtype.itemsize:
        raise ValueError(f"{file}: labels must be whole, and end early")
    values = np.frombuffer(content, dtype)
    labels = [v.decode("ascii", "replace") if isinstance(v, bytes) else str(v) for v in values]
    for label in set(labels):
        if not _LABEL.fullmatch(label):
            raise ValueError(f"{file}: labels must be such as n01532829, got {label!r}")
    return labels


def _from_arrays(path: Path, split: str) -> Iterator[dict[str, Any]]:
    file = path / f"{SPLITS[split]}.npz"
    with open_zip(file, file) as archive:
        labels = _labels(archive, file, split)
        classes = _classes(labels, file, split)
        with archive.open("images.npy") as stream:
            shape, fortran, dtype = _header(stream, file)
            if shape != (len(labels), SIDE, SIDE, 3) or dtype != np.uint8 or fortran:
                raise ValueError(
                    f"{file}: images must be [{len(labels)}, {SIDE}, {SIDE}, 3] uint8 in C order, "
                    f"got shape {shape} of {dtype}"
                )
            # One by one: the array of the whole split would take 0.8 GB.
            for label in labels:
                content = stream.read(SIDE * SIDE * 3)
                if len(content) != SIDE * SIDE * 3:
                    raise ValueError(f"{file}: images must be whole, and end early")
                image = np.frombuffer(content, np.uint8).reshape(SIDE, SIDE, 3)
                yield {"image": image, "label": classes.index(label), "wnid": label}


def _header(stream: Any, file: Path) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and dtype of an array in NumPy's format, nothing of which is executed."""
    try:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):  # a header of the others may claim 4 GB
            raise ValueError(f"version {version} of NumPy's format")
        return np.lib.format.read_array_header_1_0(stream)
    # What Python's parser makes of a header that is no dict is not a ValueError alone.
    except (ValueError, SyntaxError, TokenError, MemoryError, RecursionError) as error:
        raise ValueError(f"{file} must hold plain arrays: {error}") from None


def _pickled(path: Path) -> ValueError:
    return ValueError(
        f"data must not be a pickle, got {path}: opening one can run any code. Where you trust it, "
        "convert it: load it with pickle, and for each split call np.savez('train.npz', "
        "images=..., labels=...), then val.npz and test.npz, with images [n, 84, 84, 3] uint8 and "
        "labels [n]; give the folder of the three"
    )
