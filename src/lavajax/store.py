"""A folder of named arrays and a JSON record: written whole or not at all, verified before read.

Layout of the folder: ``manifest.json`` with the SHA-256 of every other file and of itself,
``config.json`` with the record, ``arrays/`` written by Orbax. The manifest is ours because Orbax
reads a flipped byte as if it were data. Nothing here can carry code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lavajax import disk
from lavajax.atomic import Kind, previous, unfinished
from lavajax.extras import require
from lavajax.zarr import BLOCK, Header, read_header

FORMAT, VERSION = "lavajax", 3
MANIFEST, RECORD, ARRAYS = "manifest.json", "config.json", "arrays"
SMALL_BYTES = 2**30  # arrays of so many are read whatever their files have
MOST_PACKED = 100  # larger ones take at most so many times their files: weights are hardly packed
_HEADER, _OTHERS = ".zarray", ("zarr.json", "manifest.ocdbt")  # of our layout, and of all others
_MOST_JSON = 2**26  # bytes; what is larger is not ours, and is not read
_SAVED = Kind("a saved model", frozenset({MANIFEST}), frozenset({MANIFEST, RECORD, ARRAYS}))
_ROOM_BESIDE, _ROOM_OF_EACH = 2**18, 2**13  # bytes: of records, and the blocks of an array's files


class DamagedError(ValueError):
    """A stored folder is not what was written; the message names the file."""


def write(
    path: Path, arrays: dict[str, np.ndarray], record: dict[str, Any], *, replace: bool = False
) -> None:
    """Writes a folder under a temporary name beside ``path``, and renames it when it is whole.

    Args:
        path: the folder, new; its parents are made.
        arrays: any names without a leading slash, any shapes.
        record: what JSON can hold.
        replace: put it in the place of an older one, which stays until this one is whole.

    Raises:
        ValueError: ``path`` is in use and ``replace`` is False, also where another process has
            written it meanwhile; or it is no stored folder.
        OSError: the disk is full, or the folder cannot be written to, as ``disk.writing`` tells it;
            what stood at ``path`` still stands there, and nothing is left of what was begun.
    """
    checkpointer = _checkpointer()
    path = Path(path).resolve()  # a link stays, and what it points to is replaced
    with disk.writing(path):
        _SAVED.check_free(path, replace)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Asked before: on a full disk Orbax fails in many threads at once, and loudly.
        needed = sum(array.nbytes + _ROOM_OF_EACH for array in arrays.values())
        disk.check_room(path.parent, needed + _ROOM_BESIDE)
        with unfinished(path, replace, _SAVED) as temporary:
            (temporary / RECORD).write_bytes((json.dumps(record, indent=1) + "\n").encode())
            full = {name: value for name, value in arrays.items() if value.size}
            _save_arrays(checkpointer, temporary / ARRAYS, full)  # Orbax has no arrays of size 0
            (temporary / MANIFEST).write_bytes(_manifest_text(temporary).encode())


def _save_arrays(checkpointer: Any, path: Path, arrays: dict[str, np.ndarray]) -> None:
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what goes wrong is raised
    try:
        checkpointer.save(path, arrays)
    except ValueError as error:  # what a full disk is to Orbax
        number = disk.number_in(str(error))
        plain = OSError(str(error)) if number is None else OSError(number, os.strerror(number))
        raise plain from error
    finally:
        logger.setLevel(level)


def open_record(path: Path) -> dict[str, Any]:
    """Verifies every file of a folder, and returns its record.

    Raises:
        FileNotFoundError: there is no such folder.
        DamagedError: a file is missing, too many, or not what was written.
        ValueError: the folder was written by another version of the format.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        aside = previous(path)
        hint = f"; an overwrite was interrupted: the older one is {aside}" if aside.exists() else ""
        raise FileNotFoundError(f"path must be a saved model or a run folder, {path} is none{hint}")
    manifest = _read_manifest(path)
    present = {p.relative_to(path).as_posix() for p in (path / ARRAYS).rglob("*") if p.is_file()}
    for name in sorted(present - manifest.keys()):
        raise DamagedError(f"{path / name} is damaged: it does not belong to the saved model")
    for name, entry in manifest.items():
        file = path / name
        if not file.is_file():
            raise DamagedError(f"{file} is damaged: it is missing")
        size = file.stat().st_size
        if size != entry["bytes"]:
            raise DamagedError(
                f"{file} is damaged: it has {size} bytes, and had {entry['bytes']} when written"
            )
        if _digest(file) != entry["sha256"]:
            raise DamagedError(f"{file} is damaged: its SHA-256 is not the one it was written with")
    try:
        record = json.loads(read_small(path / RECORD))
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path / RECORD} is damaged: {error}") from None
    if not isinstance(record, dict):
        raise DamagedError(f"{path / RECORD} is damaged: it is no record")
    return record


def read_arrays(
    path: Path,
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]],
    wanted: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Arrays of a verified folder.

    Args:
        path: the folder.
        shapes: shape and dtype of every array in it.
        wanted: the names of those to read, no others of which take any memory; None: all.

    Raises:
        DamagedError: an array is missing or of another shape or dtype.
    """
    ocp = require("orbax.checkpoint", "experiments", "loading a model")
    names = [name for name, (shape, _) in shapes.items() if 0 not in shape]
    chosen = {name: shapes[name] for name in (shapes if wanted is None else wanted)}
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in names if name in chosen}
    folder = Path(path).absolute() / ARRAYS
    _check_stored(folder, {name: shapes[name] for name in names})
    checkpointer = _checkpointer()
    try:
        found = {}
        if as_numpy:
            part = {"item": dict.fromkeys(as_numpy, 0), "partial_restore": True}
            args = ocp.args.PyTreeRestore(restore_args=as_numpy, **part)
            found = checkpointer.restore(folder, args=args)
    except (ValueError, KeyError) as error:  # an OSError is the machine's, not the file's
        raise DamagedError(f"{folder} is damaged: Orbax cannot read it ({error})") from error
    return found | {name: np.zeros(s, dtype) for name, (s, dtype) in chosen.items() if 0 in s}


def _check_stored(folder: Path, shapes: dict[str, tuple[tuple[int, ...], np.dtype]]) -> None:
    """Requires the arrays to be those of the record, before memory is taken for any of them.

    Orbax lets another shape or dtype than the one asked for pass; and a few bytes of zarr can stand
    for an array, or a piece of one, of any size. Their headers are read here: Orbax's own account
    of them loses memory with every call.
    """
    needed = sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values())
    there = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    if needed > max(SMALL_BYTES, MOST_PACKED * there):
        raise DamagedError(
            f"{folder} is damaged: its arrays would take {needed:,} bytes, its files have {there:,}"
        )
    stored = {h.parent.relative_to(folder).as_posix(): h for h in folder.rglob(_HEADER)}
    strange = {f.relative_to(folder).as_posix() for name in _OTHERS for f in folder.rglob(name)}
    if extra := sorted(stored.keys() - shapes.keys() | strange):
        raise DamagedError(f"{folder} is damaged: it also holds {', '.join(extra[:5])}")
    for name, (shape, dtype) in shapes.items():
        found = _header(stored[name]) if name in stored else None
        if found is None or (found.shape, found.dtype) != (shape, dtype):
            got = "nothing" if found is None else f"{found.shape} {found.dtype}"
            raise DamagedError(f"{folder} is damaged: {name} is {shape} {dtype}, it holds {got}")
        pieces = found.pieces
        if any(piece > max(size, 1) for piece, size in zip(pieces, shape, strict=True)):
            raise DamagedError(f"{folder} is damaged: {name} {shape} is in pieces of {pieces}")
        if found.unpacked > math.prod(pieces) * dtype.itemsize + BLOCK:
            raise DamagedError(
                f"{folder} is damaged: {name} {shape} unpacks to {found.unpacked:,} bytes"
            )


def _header(file: Path) -> Header:
    """What the header of a stored array, and its pieces, say."""
    pieces = (f for f in file.parent.iterdir() if f.is_file() and f.name != _HEADER)
    try:
        return read_header(read_small(file), (piece.read_bytes() for piece in pieces))
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise DamagedError(f"{file} is damaged: {error}") from None


def _checkpointer() -> Any:
    ocp = require("orbax.checkpoint", "experiments", "saving and loading a model")
    # A file for each array: Orbax's other layout, one database of all (OCDBT), loses some 30 kB of
    # memory with every save.
    if jax.process_count() == 1:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False))
    # What is stored is whole in every process: the one that calls this waits for no other.
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _manifest_text(path: Path) -> str:
    files = {
        p.relative_to(path).as_posix(): {"sha256": _digest(p), "bytes": p.stat().st_size}
        for p in sorted(path.rglob("*"))
        if p.is_file()
    }
    return _sign({"format": FORMAT, "version": VERSION, "files": files})


def _sign(manifest: dict[str, Any]) -> str:
    """The manifest with the digest of its own text, so that no byte of it can change unseen."""
    digest = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    return json.dumps({**manifest, "digest": digest}, indent=1) + "\n"


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    file = path / MANIFEST
    if not file.is_file():
        raise DamagedError(f"{file} is missing: {path} is no saved model, or a damaged one")
    text = read_small(file)
    try:
        manifest = json.loads(text)
        manifest.pop("digest")
        whole = _sign(manifest) == text
        written_by = manifest["format"], manifest["version"]
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise DamagedError(f"{file} is damaged: it is not the text that was written")
    if written_by != (FORMAT, VERSION):
        raise ValueError(
            f"{file} must be of format {FORMAT!r}, version {VERSION}, got {written_by[0]!r}, "
            f"version {written_by[1]}: use the lavajax that wrote it"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise DamagedError(f"{file} is damaged: it is not the list of the files of a saved model")
    for name in files:
        if not re.fullmatch(r"[^/\\]+(/[^/\\]+)*", name) or ".." in name.split("/"):
            raise DamagedError(f"{file} is damaged: it names {name!r}, outside the folder")
    if RECORD not in files:
        raise DamagedError(f"{file} is damaged: it does not name {RECORD}")
    return files


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.keys() >= {"sha256", "bytes"}


def read_small(file: Path) -> str:
    """A text file of at most 64 MiB.

    Raises:
        DamagedError: it is larger, or no text in UTF-8.
    """
    size = file.stat().st_size
    if size > _MOST_JSON:
        raise DamagedError(f"{file} is damaged: it has {size} bytes, more than can be meant")
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DamagedError(f"{file} is damaged: {error}") from None


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
