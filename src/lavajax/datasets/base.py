"""Files of a data set as their publisher distributes them: found, told apart, and read safely."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import itertools
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

_WHOLE = 2**26
_BLOCK, _BLOCKS = 2**16, 256


def fingerprint(files: Sequence[Path]) -> str:
    """A name for the content of files, by which what was prepared from them is found again.

    Up to 64 MiB in all, every byte counts. Beyond, reading everything could take as long as
    preparing: then names, sizes and times of change count, and 256 blocks of 64 KiB evenly spaced
    over all files (shorter where a file ends), from the first bytes to the last.

    Returns:
        32 hexadecimal digits.
    """
    stats = [file.stat() for file in files]
    ends = list(itertools.accumulate(stat.st_size for stat in stats))
    total = ends[-1]
    digest = hashlib.sha256()
    for file, stat in zip(files, stats, strict=True):
        changed = stat.st_mtime_ns if total > _WHOLE else ""
        digest.update(f"{file.name}\0{stat.st_size}\0{changed}\0".encode())
    if total <= _WHOLE:
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:32]
    for block in range(_BLOCKS):
        at = block * (total - _BLOCK) // (_BLOCKS - 1)
        index = bisect.bisect_right(ends, at)  # the file that holds this byte of all
        with files[index].open("rb") as stream:
            stream.seek(at - ends[index] + stats[index].st_size)
            digest.update(stream.read(_BLOCK))
    return digest.hexdigest()[:32]


@contextlib.contextmanager
def open_zip(file: str | Path | IO[bytes], name: str | Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive to read from, never unpacked to disk.

    Args:
        file: the archive.
        name: what to call it.

    Raises:
        ValueError: it is damaged or encrypted, found on opening or on reading; or a member is
            compressed by another method than deflate.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                # Of bzip2 and LZMA a few bytes may unpack to any size, however little is asked for.
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise ValueError(
                        f"data must be a zip file of members that are stored or deflated, {name} "
                        f"has {member.filename}, compressed by method {member.compress_type}"
                    )
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # RuntimeError is what zipfile raises for an encrypted archive, and its subclass
        # NotImplementedError for a later version of the format than it knows.
        raise ValueError(f"data must be a whole, plain zip file, got {name}: {error}") from None


def read_member(archive: zipfile.ZipFile, member: str, most: int, name: str | Path) -> bytes:
    """One member of an archive, of at most ``most`` bytes.

    Raises:
        ValueError: it unpacks to more, whatever its header says.
    """
    size = archive.getinfo(member).file_size
    if size <= most:
        with archive.open(member) as stream:
            content = stream.read(most + 1)
        size = len(content)
    if size > most:
        raise ValueError(
            f"{name}: {member} unpacks to {size} bytes or more, more than the published file can "
            f"have, {most}"
        )
    return content


def warn_of_other(file: Path, found: int, published: int, what: str) -> None:
    """Warns of a file that is sound, and smaller or larger than the published one."""
    if found != published:
        warnings.warn(
            f"{file} is not the published file, which has {published} {what}: it has {found}; "
            "results are then not those of the published data",
            stacklevel=2,
        )


def not_found(path: Path, needed: str, published: str) -> FileNotFoundError:
    """The error for data that are not there.

    Args:
        path: what the user gave.
        needed: what it must be.
        published: where the data are published, and under which licence.
    """
    if path.is_dir():
        entries = sorted(entry.name for entry in path.iterdir())
        shown = ", ".join(entries[:5]) + (", ..." if len(entries) > 5 else "")
        found = f"a folder with {shown}" if entries else "an empty folder"
    else:
        found = "a file" if path.exists() else "not there"
    return FileNotFoundError(
        f"data must be {needed}, got {path}, which is {found}. {published}; nothing is downloaded: "
        "get it, and give its path"
    )
