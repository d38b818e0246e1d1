"""Results that are computed once, each in a small JSON file of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from files import write_whole
from lavajax import disk
from lavajax.store import DamagedError


def rounded(values: Any) -> list[float]:
    """The numbers of an array, of a figure's precision, ready for JSON."""
    return np.round(np.asarray(values, float).reshape(-1), 3).tolist()


class Cells:
    """A folder of results; stopped anywhere, work goes on with what is missing.

    Every result stands beside its key, all that it depends on: it is computed again where the key
    has changed.
    """

    def __init__(self, folder: Path) -> None:
        """The results in a folder, which is made with the first of them."""
        self.folder = folder

    def get(self, name: str, key: Any, *, whatever: str | None = None) -> Any:
        """The result called ``name``, or None where there is none of that key.

        Args:
            name: of the result.
            key: all that it depends on.
            whatever: an entry of the key that may be anything.

        Raises:
            DamagedError: its file cannot be read.
        """
        file = self._file(name)
        if not file.exists():
            return None
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            found, result = record["key"], record["result"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedError(
                f"{file} is damaged, and is no result: remove it, or bring it back ({error!r})"
            ) from None
        wanted = json.loads(json.dumps(key))
        if whatever is not None:
            for each in (found, wanted):
                each.pop(whatever, None)
        return result if found == wanted else None

    def put(self, name: str, key: Any, result: Any) -> None:
        """Keeps a result, whole or not at all.

        Raises:
            ValueError: it has a number that is not finite, which JSON has not.
            OSError: the disk is full, or the folder cannot be written to.
        """
        text = json.dumps({"key": key, "result": result}, indent=1, allow_nan=False) + "\n"
        with disk.writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._file(name), text)

    def compute(self, name: str, key: Any, fn: Callable[[], Any]) -> Any:
        """The result called ``name``; ``fn`` computes it where it is missing."""
        found = self.get(name, key)
        if found is None:
            found = fn()
            self.put(name, key, found)
        return found

    def _file(self, name: str) -> Path:
        return self.folder / (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") + ".json")
