"""The folder of a run: who may write to it, and the files in it.

config.json     what was asked for
groups.json     the groups of a user's table, by split
metrics.jsonl   one line for every report; null for a number that is not finite, as in results.json
checkpoints/    the newest states, each whole
results.json    scores of the final parameters
*.png           figures
"""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

from files import UNFINISHED, write_whole
from lavajax import disk, store
from lavajax.atomic import remove_unfinished
from lavajax.checkpoint import CHECKPOINTS

try:
    import fcntl
except ModuleNotFoundError:  # Windows: two runs on one folder are not told apart there
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, RESULTS, LOCK = "config.json", "metrics.jsonl", "results.json", ".lock"
GROUPS = "groups.json"
OWN = frozenset({"task_name", "method_name", "run"})
"""Entries by which the configuration of a run is known."""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}
"""Errors of file systems of clusters without locks: two runs on one folder are not told apart."""
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
            OSError: it cannot be made, or written to.
        """
        if path is None:
            return _new_under(Path("runs"), name)
        if path.exists() and not path.is_dir():
            raise ValueError(f"--out must be a new or empty folder, {path} is a file")
        with disk.writing(path):
            path.mkdir(parents=True, exist_ok=True)
        folder = RunFolder(path)._locked()
        found = {p.name for p in path.iterdir() if not p.name.endswith(UNFINISHED)} - {LOCK}
        if found and not (overwrite and _is_run(path)):
            folder.__exit__()
            hint = "--resume goes on with a run, --overwrite replaces one"
            if overwrite:
                hint = "what it holds is not the run of run.py that --overwrite replaces"
            raise ValueError(f"--out must be a new or empty folder, {path} is in use; {hint}")
        if found:
            folder._clear()
        return folder

    @staticmethod
    def of(path: Path) -> RunFolder:
        """The folder of an earlier run, locked, without what a killed process has left half done.

        Raises:
            ValueError: there is no run, or another process is at it.
            OSError: the folder cannot be written to.
        """
        if not (path / CONFIG).is_file():
            raise ValueError(f"{path} must be the folder of a run, and has no {CONFIG}")
        folder = RunFolder(path)._locked()
        if (path / CHECKPOINTS).is_dir():
            remove_unfinished(path / CHECKPOINTS)
        return folder

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def _locked(self) -> RunFolder:
        """Takes the lock, which the system gives back when the process ends in whatever way."""
        with disk.writing(self.path):
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
            except OSError as error:
                if error.errno not in NO_LOCKS:
                    raise
        self._lock.seek(0)
        with disk.writing(self.path):
            self._lock.truncate()
            self._lock.write(str(os.getpid()))
            self._lock.flush()
        return self

    def _clear(self) -> None:
        """Removes the files of an earlier run, and nothing else."""
        # The configuration goes last: what a kill leaves behind can still be overwritten.
        for name in (CHECKPOINTS, TENSORBOARD):
            if (self.path / name).exists():
                shutil.rmtree(self.path / name)
        for name in (METRICS, RESULTS, GROUPS, TASKS_FIGURE, LEARNING_FIGURE, CONFIG):
            (self.path / name).unlink(missing_ok=True)

    def write(self, name: str, value: Any) -> None:
        """Writes JSON, whole or not at all."""
        text = json.dumps(_finite(value), indent=2, allow_nan=False)
        write_whole(self.path / name, text + "\n")

    def metrics(self, up_to: float = float("inf")) -> list[dict[str, Any]]:
        """The reports up to a step. A last line that a kill has cut short is none.

        Raises:
            ValueError: another line is damaged.
        """
        file = self.path / METRICS
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        rows = []
        for index, line in enumerate(lines):
            try:
                rows.append(json.loads(line))
                rows[-1]["step"] + 0
            except (ValueError, TypeError, KeyError, RecursionError):
                if index < len(lines) - 1:
                    raise ValueError(
                        f"{file} is damaged: line {index + 1} is no report; remove the file, or "
                        "mend it, to go on"
                    ) from None
                rows = rows[:index]
        return [row for row in rows if row["step"] <= up_to]

    def keep_metrics(self, up_to: int) -> None:
        """Forgets the metrics of steps that will be taken again."""
        rows = self.metrics(up_to)
        write_whole(self.path / METRICS, "".join(json.dumps(row) + "\n" for row in rows))

    def add_metrics(self, row: dict[str, Any]) -> None:
        """Appends a line; what a full disk leaves of it is none to whoever reads it."""
        path = self.path / METRICS
        with disk.writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_finite(row), allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The value with None for each number that JSON has not: NaN and infinities."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(file: Path) -> Any:
    """Reads a JSON file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        return json.loads(store.read_small(file))
    except store.DamagedError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: {error}") from None


def _is_run(path: Path) -> bool:
    """Whether a folder has the configuration of a run: others have files of that name too."""
    try:
        found = read_json(path / CONFIG)
    except (ValueError, OSError):
        return False
    return isinstance(found, dict) and found.keys() >= OWN


def _new_under(parent: Path, name: str) -> RunFolder:
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ["", *(f"-{i}" for i in range(2, 100))]:
        path = parent / f"{name}-{stamp}{suffix}"
        with disk.writing(path):
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
        return RunFolder(path)._locked()
    raise ValueError(f"--out must be given: {parent} has no free name left for {name}-{stamp}")
