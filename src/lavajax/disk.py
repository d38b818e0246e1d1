"""What cannot be written is said so that its user can help it: where, why, and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""What a full disk, or a quota that is used up, is to the system."""
_NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)
_TOLD = (*FULL, errno.EFBIG, errno.EIO, *_NOT_ALLOWED)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tells of a failure to write what it was meant to become.

    Args:
        path: what is being written: not the name that it has while it is unfinished.

    Raises:
        OSError: with the number of the one that was raised inside, and so of its class
            (``PermissionError``, say). The message has the path, the reason, and what to do: for a
            full disk also how much is free.
    """
    try:
        yield
    except OSError as error:
        number, reason = error.errno or errno.EIO, error.strerror or str(error)
        if number == errno.EEXIST:  # what making a folder below a file is
            number, reason = errno.ENOTDIR, f"{error.filename} is a file"
        advice = "; write elsewhere"
        if number in FULL:
            advice = f"; {size(_free(path))} free there: make room, or write elsewhere"
        elif number in _NOT_ALLOWED:
            advice = "; write where this process may"
        raise OSError(number, f"{path} cannot be written: {reason}{advice}") from error


def check_room(path: Path, needed: int) -> None:
    """Refuses to begin what a disk has no room for.

    Args:
        path: where; what of it is not there yet does not matter.
        needed: bytes.

    Raises:
        OSError: fewer are free.
    """
    if _free(path) < needed:
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}; {size(needed)} needed")


def number_in(text: str) -> int | None:
    """The number of the system's error that a library tells of in words alone, or None."""
    return next((number for number in _TOLD if os.strerror(number) in text), None)


def remove(folder: Path, seconds: float = 5.0) -> None:
    """Removes a folder that threads may still be writing to, which are about to be stopped."""
    end = time.monotonic() + seconds
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < end:
        time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)


def size(number: int) -> str:
    """Bytes as a user reads them."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number} bytes"


def _free(path: Path) -> int:
    """Free bytes where a path is, or would be; 0 where nobody can tell."""
    for folder in (path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return 0
