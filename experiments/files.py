"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from lavajax import disk

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of ``path`` when all is written.

    Raises:
        OSError: the disk is full, or the folder cannot be written to, as ``disk.writing`` tells it;
            what stood at ``path`` stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    with disk.writing(path):
        try:
            yield temporary
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def write_whole(path: Path, text: str) -> None:
    """Writes a text file."""
    with whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
