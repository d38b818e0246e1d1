"""The folder of a run: who may write to it, and the files in it.

config.json     what was asked for
metrics.jsonl   one line for every report
checkpoints/    the newest states, each whole
results.json    scores of the final parameters
*.png           figures
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
from pathlib import Path
from typing import Any

from lavajax import store
from lavajax.checkpoint import CHECKPOINTS

try:
    import fcntl
except ModuleNotFoundError:  # Windows: two runs on one folder are not told apart there
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, RESULTS, LOCK = "config.json", "metrics.jsonl", "results.json", ".lock"
TENSORBOARD = "tensorboard"
TASKS_FIGURE, LEARNING_FIGURE = "tasks.png", "learning.png"


class RunFolder:
    """A folder that this process alone writes to; hold it by ``with``."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: Any = None

    @staticmethod
    def new(path: Path | None, name: str, *, overwrite: bool) -> RunFolder:
        """A folder for a new run, locked.

        Args:
            path: where; None: a new folder under ``runs/``, named after the run and the time.
            name: of the run.
            overwrite: remove the run that ``path`` holds.

        Raises:
            ValueError: the folder is in use, or holds something that is not a run.
        """
        if path is None:
            return _new_under(Path("runs"), name)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out must be a new or empty folder, {path} is a file")
        found = {p.name for p in path.iterdir()} if path.is_dir() else set()
        if (found - {LOCK}) and not (overwrite and CONFIG in found):
            hint = "--resume goes on with a run, --overwrite replaces one"
            raise ValueError(f"--out must be a new or empty folder, {path} is in use; {hint}")
        path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)._locked()
        folder._clear()
        return folder

    @staticmethod
    def of(path: Path) -> RunFolder:
        """The folder of an earlier run, locked, without what a killed process left half done.

        Raises:
            ValueError: there is no run, or another process is at it.
        """
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} must be the folder of a run, and has no {CONFIG}")
        folder = RunFolder(path)._locked()
        if (path / CHECKPOINTS).is_dir():
            store.remove_unfinished(path / CHECKPOINTS)
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _locked(self) -> RunFolder:
        """Takes the lock, which the system gives back when the process ends in whatever way."""
        self._lock = (self.path / LOCK).open("a+")
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.seek(0)
                holder = self._lock.read().strip() or "unknown"
                self._lock.close()
                raise ValueError(
                    f"{self.path} is in use by another run, process {holder}"
                ) from None
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        return self

    def _clear(self) -> None:
        """Removes the files of an earlier run, and nothing else."""
        # The configuration goes last: what a kill leaves behind can still be overwritten.
        for name in (CHECKPOINTS, TENSORBOARD):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in (METRICS, RESULTS, TASKS_FIGURE, LEARNING_FIGURE, CONFIG):
            (self.path / name).unlink(missing_ok=True)

    def write(self, name: str, value: Any) -> None:
        """Writes JSON, whole or not at all."""
        temporary = self.path / f".{name}.unfinished"
        temporary.write_text(json.dumps(value, indent=2) + "\n")
        temporary.replace(self.path / name)

    def read(self, name: str) -> Any:
        """Reads JSON.

        Raises:
            ValueError: it is not JSON.
        """
        try:
            return json.loads((self.path / name).read_text())
        except ValueError as error:
            raise ValueError(f"{self.path / name} is damaged: {error}") from None

    def metrics(self, up_to: float = float("inf")) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl up to a step; a line that a kill cut short is not one."""
        file = self.path / METRICS
        rows = []
        for line in file.read_text().splitlines() if file.is_file() else ():
            try:
                row = json.loads(line)
            except ValueError:
                break
            if row["step"] <= up_to:
                rows.append(row)
        return rows

    def keep_metrics(self, up_to: int) -> None:
        """Forgets the metrics of steps that will be taken again."""
        rows = self.metrics(up_to)
        temporary = self.path / f".{METRICS}.unfinished"
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
        temporary.replace(self.path / METRICS)

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Appends a line."""
        with (self.path / METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")


def _new_under(parent: Path, name: str) -> RunFolder:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ["", *(f"-{i}" for i in range(2, 100))]:
        path = parent / f"{name}-{stamp}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return RunFolder(path)._locked()
    raise ValueError(f"--out must be given: {parent} has no free name left for {name}-{stamp}")
