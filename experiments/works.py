"""The parts that tables and figures are computed in, and who computes them."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cells import Cells
from lavajax.datasets.base import fingerprint
from protocols import Scale

CONTENT = "content"
"""The entry of a key that says which content of its files a result is of."""


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where things are kept.

    Attributes:
        results: cells and figures, in the repository.
        work: trained parameters and half-done cells.
        data: published files, in the folders that the settings of tasks name; None without any.
    """

    results: Path
    work: Path
    data: Path | None = None

    def cells(self, item: str) -> Cells:
        """The results of an item."""
        return Cells(self.results / item)

    def pieces(self, item: str) -> Cells:
        """What half-done cells of an item go on from."""
        return Cells(self.work / item / "pieces")

    def models(self, item: str) -> Path:
        """The folder of trained parameters."""
        return self.work / item / "models"

    def source(self, task: Any) -> Any:
        """The source of tasks of a setting; one that names a file reads it in the data folder."""
        return _load(task, self.data) if hasattr(task, "load") else task

    def has(self, data: str | None) -> bool:
        """Whether the data folder has a file or folder, where one is needed."""
        return data is None or (self.data is not None and (self.data / data).exists())

    def content(self, data: str | None) -> dict[str, str]:
        """What a result that is computed from a file or folder depends on beside its settings.

        Empty where none is read, whose keys are the settings alone, and where it is not there.
        """
        if self.data is None or data is None or not self.has(data):
            return {}
        return {CONTENT: _content(self.data / data)}


@functools.cache
def _content(path: Path) -> str:
    """A name for what is in a file, or in all files of a folder; hidden ones do not count."""
    inside = [path] if path.is_file() else [f for f in sorted(path.rglob("*")) if f.is_file()]
    files = [f for f in inside if f.name[0] != "."]
    return fingerprint(files) if files else ""


@functools.lru_cache(maxsize=2)  # a cell asks for its tasks many times
def _load(task: Any, data: Path | None) -> Any:
    if getattr(task, "data", None) is not None:
        assert data is not None
        task = dataclasses.replace(task, data=str(data / task.data))
    return task.load()


@dataclasses.dataclass(frozen=True)
class Work:
    """A cell to compute.

    Attributes:
        item: the table or figure.
        name: of the cell.
        key: all that its result depends on, ready for JSON; beside the content of ``data``.
        compute: makes the result, ready for JSON.
        after: the cells that this one reads.
        alone: whether it measures times, and wants an idle machine.
        seconds: about how long it takes on one core.
        data: the file or folder of the data folder that it reads, or None.
    """

    item: str
    name: str
    key: dict[str, Any]
    compute: Callable[[Folders], Any]
    after: tuple[Work, ...] = ()
    alone: bool = False
    seconds: float = 60.0
    data: str | None = None

    @property
    def label(self) -> str:
        """Unique over all items."""
        return f"{self.item}: {self.name}"

    def result(self, folders: Folders) -> Any:
        """What is there, or None; without the data folder, of whatever content of the files."""
        whatever = None if folders.has(self.data) else CONTENT
        return folders.cells(self.item).get(self.name, self._whole_key(folders), whatever=whatever)

    def do(self, folders: Folders) -> Any:
        """Computes what is missing, and keeps it."""
        for each in self.after:
            each.do(folders)
        cells, key = folders.cells(self.item), self._whole_key(folders)
        return cells.compute(self.name, key, lambda: self.compute(folders))

    def _whole_key(self, folders: Folders) -> dict[str, Any]:
        return self.key | folders.content(self.data)


class Item(Protocol):
    """A table or a figure: a module of ``items``."""

    TITLE: str
    """What it shows, for the list of items."""

    def works(self, scale: Scale) -> list[Work]:
        """All its cells."""

    def render(self, scale: Scale, folders: Folders) -> str:
        """Draws its figures from the cells that are there; its section of RESULTS.md, or ""."""


class Clock:
    """How long is left, from how fast work went so far."""

    def __init__(self, works: Sequence[Work], workers: int) -> None:
        self._left = sum(work.seconds for work in works)
        self._workers, self._begun, self._done = workers, time.monotonic(), 0.0

    def done(self, work: Work) -> None:
        """Counts a cell."""
        self._left -= work.seconds
        self._done += work.seconds

    def __str__(self) -> str:
        pace = 1 / self._workers
        if self._done:
            pace = (time.monotonic() - self._begun) / self._done
        minutes = round(self._left * pace / 60)
        if minutes < 1:
            return "less than a minute left"
        hours, minutes = divmod(minutes, 60)
        return f"about {hours} h {minutes:02d} min left" if hours else f"about {minutes} min left"
