"""Folders that are written whole or not at all, and what may take the place of an older one."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lavajax import disk

_TEMPORARY, _PREVIOUS = ".unfinished-", ".previous-"


@dataclasses.dataclass(frozen=True)
class Kind:
    """What a folder is, that is replaced only by another of its kind.

    Attributes:
        name: with its article.
        marks: the files without which it is none.
        files: all that it may hold.
    """

    name: str
    marks: frozenset[str]
    files: frozenset[str]

    def check_free(self, path: Path, replace: bool) -> None:
        """Requires a path that is new, empty or, to ``replace``, of this kind and no more.

        Raises:
            ValueError: it is not; the message says what is there.
        """
        if not path.exists():
            return
        found = {p.name for p in path.iterdir()} if path.is_dir() else {path.name}
        if not found:
            return
        if not replace:
            raise ValueError(
                f"path must be new, {path} is in use; overwrite=True replaces {self.name}"
            )
        if not path.is_dir() or not self.marks <= found:
            raise ValueError(
                f"path must be {self.name} to be overwritten, {path} is something else"
            )
        if foreign := sorted(found - self.files):
            raise ValueError(
                f"path must hold {self.name} alone to be overwritten, {path} also has "
                f"{', '.join(foreign[:5])}"
            )


@contextlib.contextmanager
def unfinished(path: Path, replace: bool, kind: Kind) -> Iterator[Path]:
    """A new folder under a temporary name beside ``path``, and ``path`` at the end; or nothing.

    Args:
        path: what the folder becomes; no link.
        replace: put it in the place of an older one.
        kind: what the older one must be, when the new one is whole.

    Raises:
        ValueError: something has appeared at ``path`` meanwhile that is not to be replaced.
    """
    temporary = path.with_name(f"{_TEMPORARY}{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.mkdir()
        yield temporary
        if replace:
            kind.check_free(path, replace)
        _move_in(temporary, path, replace)
    except BaseException:
        disk.remove(temporary)
        raise


def _move_in(temporary: Path, path: Path, replace: bool) -> None:
    """Puts a whole folder in the place of an older one, if there is any and ``replace``."""
    if not (replace and path.exists()):
        with contextlib.suppress(OSError):
            path.rmdir()  # an empty folder, in whose place not every system puts another
        try:
            temporary.rename(path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ValueError(
                f"path must be new, {path} is in use: it was written by another process meanwhile"
            ) from None
        return
    # A folder cannot be exchanged in one step everywhere: between these two the old one has
    # another name, which ``store.open_record`` tells whoever looks for it.
    aside = previous(path)
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)
    try:
        temporary.rename(path)
    except BaseException:
        if not path.exists():
            aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def previous(path: Path) -> Path:
    """Where an older folder is while a new one takes its place."""
    return path.with_name(f"{_PREVIOUS}{path.name}")


def remove_unfinished(parent: Path) -> None:
    """Removes what a killed ``unfinished`` has left in a folder that nobody else writes to."""
    for left in parent.glob(_TEMPORARY + "*"):
        shutil.rmtree(left, ignore_errors=True)


def remove(path: Path) -> None:
    """Removes a stored folder; under another name first, so that no half of it is ever found."""
    if path.exists():
        doomed = path.with_name(f"{_TEMPORARY}{path.name}-{os.getpid()}")
        path.rename(doomed)
        shutil.rmtree(doomed)
