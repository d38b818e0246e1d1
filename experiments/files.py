"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".unfinished"


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives a path to write to, which takes the place of ``path`` when all is written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_whole(path: Path, text: str) -> None:
    """Writes a text file."""
    with whole(path) as temporary:
        temporary.write_text(text)
