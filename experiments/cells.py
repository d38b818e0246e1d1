"""Results that are computed once, each in a small JSON file of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Cells:
    """A folder of results of one setting; stopped anywhere, work goes on with what is missing."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """Opens or makes the folder.

        Args:
            folder: where.
            settings: what all results depend on, as JSON.

        Raises:
            ValueError: the folder holds results of other settings.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / "settings.json"
        text = json.dumps(settings, indent=1) + "\n"
        if not record.exists():
            _write(record, text)
        elif record.read_text() != text:
            found = " ".join(record.read_text().split())
            raise ValueError(f"--out must be new for other settings: {folder} is of {found}")

    def get(self, name: str) -> Any:
        """The result called ``name``, or None."""
        file = self._file(name)
        return json.loads(file.read_text()) if file.exists() else None

    def put(self, name: str, value: Any) -> None:
        """Keeps a result, whole or not at all."""
        _write(self._file(name), json.dumps(value, indent=1) + "\n")

    def compute(self, name: str, fn: Callable[[], Any]) -> Any:
        """The result called ``name``; ``fn`` computes it where it is missing."""
        found = self.get(name)
        if found is None:
            found = fn()
            self.put(name, found)
        return found

    def _file(self, name: str) -> Path:
        return self.folder / (re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-") + ".json")


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f".{file.name}.unfinished")
    temporary.write_text(text)
    temporary.replace(file)
