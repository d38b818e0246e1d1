"""Which groups of a table a run was trained on, so that none of them is ever scored as unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lavajax
from folder import CONFIG, GROUPS, read_json
from lavajax.tasks.base import SPLITS, Split
from lavajax.tasks.table import shorten
from options import Settings, Variant
from targets import table_of

_SETTLED = ("group", "validation_share", "test_share", "split_seed")


def groups_of(source: Any) -> dict[str, list[str]] | None:
    """The groups of each split of a table, as the folder of a run keeps them; None of no table."""
    table = table_of(source)
    return None if table is None else {split: list(table.groups(split)) for split in SPLITS}


def was_trained_on(run: Path, group: str) -> bool:
    """Whether a run has learned from a group of its table; by those of validation none chooses."""
    file = run / GROUPS
    return file.is_file() and group in read_json(file).get("train", ())


def known_groups(run: Path, task: Any) -> Mapping[Split, Sequence[str]] | None:
    """The groups whose split is settled, for a run that is scored on a table.

    In the run's own table all keep their splits. In another one, those that the run was trained on
    do, and all others are for test.

    Args:
        run: its folder, or a saved model, which remembers nothing.
        task: the settings of what it is scored on.

    Returns:
        Names by split; None where nothing is remembered, or ``task`` is no table.

    Raises:
        ValueError: the groups would not be those of the run, or the record is damaged.
    """
    table, _ = Variant.split(task)
    if not isinstance(table, lavajax.Table) or not (run / GROUPS).is_file():
        return None
    own, _ = Variant.split(Settings.from_json(read_json(run / CONFIG)).task)
    for field in _SETTLED:
        if getattr(table, field) != getattr(own, field):
            raise ValueError(
                f"--{field.replace('_', '-')} must be left as it is, {getattr(own, field)}, for "
                "groups that the run was trained on to be known again, got "
                f"{getattr(table, field)}"
            )
    found = read_json(run / GROUPS)
    if not isinstance(found, dict) or not all(isinstance(found.get(s), list) for s in SPLITS):
        raise ValueError(f"{run / GROUPS} is damaged: it has no list of groups for each split")
    if Path(table.data or "").resolve() == Path(own.data or "").resolve():
        return found
    return {"train": found["train"]}


def left_out(source: Any, *, known: bool) -> str:
    """What of a table is scored and what is not, in words."""
    table = table_of(source)
    if not known:
        return (
            "the model does not remember the groups that it was trained on: those scored are "
            "unseen in the table of its training alone, and with the options of it"
        )
    seen, kept = table.groups("train"), table.groups("validation")
    parts = [f"scored: {len(table.groups('test'))} groups", f"left out: {len(seen)}"]
    parts[1] += f" that the model was trained on ({shorten(seen)})" if seen else ""
    parts[1] += f", {len(kept)} held out for validation" if kept else ""
    return "; ".join(parts)
