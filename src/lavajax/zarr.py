"""Headers of arrays in zarr's layout, version 2, packed by Zstandard: before any is unpacked.

A few bytes can stand for an array, or a piece of one, of any size: whoever reads files of others
asks first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

BLOCK = 2**17
"""Bytes that a packed block of Zstandard may have been, at most."""


class Header(NamedTuple):
    """What an array says of itself.

    Attributes:
        shape: of the array.
        dtype: likewise.
        pieces: the shape of the pieces that it is stored in.
        unpacked: the most bytes that any of them unpacks to.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[int, ...]
    unpacked: int


def read_header(text: str, packed: Iterable[bytes]) -> Header:
    """Reads an array's header.

    Args:
        text: of ``.zarray``.
        packed: the pieces, as they are stored.

    Raises:
        ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError: it is none, or
            is packed otherwise.
    """
    entry = json.loads(text)
    shape, pieces = (tuple(map(int, entry[key])) for key in ("shape", "chunks"))
    if len(shape) != len(pieces):
        raise ValueError("it has pieces of another rank")
    if entry["compressor"]["id"] != "zstd" or entry.get("filters"):
        raise ValueError(f"it is packed by {entry['compressor']}, {entry.get('filters')}")
    unpacked = max(map(most_unpacked, packed), default=0)
    return Header(shape, jnp.dtype(entry["dtype"]), pieces, unpacked)


def most_unpacked(frame: bytes) -> int:
    """The most bytes that a frame of Zstandard unpacks to, by the heads of its blocks (RFC 8878).

    Raises:
        ValueError: it is no single whole frame.
    """
    if frame[:4] != b"\x28\xb5\x2f\xfd":
        raise ValueError("a piece is no frame of Zstandard")
    flags, most, last = frame[4], 0, False
    alone, size_flag = flags >> 5 & 1, flags >> 6
    at = 5 + (not alone) + (0, 1, 2, 4)[flags & 3] + ((alone, 2, 4, 8)[size_flag])
    while not last:
        head = int.from_bytes(frame[at : at + 3], "little")
        last, kind, size = bool(head & 1), head >> 1 & 3, head >> 3
        most += size if kind < 2 else BLOCK  # as it is; one byte, so often; packed
        at += 3 + (1 if kind == 1 else size)
        if at > len(frame):
            raise ValueError("a piece ends early")
    if at + 4 * (flags >> 2 & 1) != len(frame):
        raise ValueError("a piece is no single frame of Zstandard")
    return most
