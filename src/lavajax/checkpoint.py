"""Save and load meta-parameters, and the whole state of a run.

A saved model is a folder (``lavajax.store``) whose record names the method with its
hyperparameters, what a point looks like, and every leaf with its shape and dtype. Loading builds
the method from the record, asks it for the leaves that it would make, and compares them one by one
before any array is read.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from lavajax import leaves, store
from lavajax.atomic import remove
from lavajax.config import MissingPartError, changed, differences, from_json, to_json
from lavajax.methods.base import Method, expected_params
from lavajax.store import DamagedError
from lavajax.types import MetaParams, PointSpec, PyTree, TrainState
from lavajax.units import Units

CHECKPOINTS = "checkpoints"  # in the folder of a run: its training states, one for each step


def save(params: MetaParams, path: str | Path, *, overwrite: bool = False) -> Path:
    """Saves meta-parameters, of one seed or of several trained together.

    Args:
        params: from ``train`` or a method's ``init``.
        path: the folder to make.
        overwrite: replace an older saved model, which stays until the new one is whole.

    Returns:
        The folder, absolute.

    Raises:
        ValueError: ``path`` is in use, or the leaves are not those that the method makes (they
            were cast, say), so that they could not be loaded.
        ModuleNotFoundError: Orbax is missing; the message has the command that installs it.
        OSError: the disk is full, or the folder cannot be written to; the message says which, how
            much is free, and what to do. Nothing is left half written, and an older model stays.
    """
    if not isinstance(params, MetaParams):
        hint = "; give its .params" if hasattr(params, "params") else ""
        raise ValueError(f"params must be MetaParams, got {type(params).__name__}{hint}")
    seeds = seeds_of(params)
    return _write(params, Path(path), params, seeds=seeds, kind="params", overwrite=overwrite)


def load(
    path: str | Path,
    *,
    model: Any = None,
    loss: Any = None,
    method: Method | None = None,
) -> MetaParams:
    """Loads meta-parameters that ``save`` or a run has written.

    Args:
        path: a saved model, or the folder of a run, whose newest whole checkpoint is loaded.
        model: the backbone, where the model was saved with a user's own, such as
            ``Linen(module)``; or the whole that it was a part of, such as
            ``Correlated(Linen(module))``.
        loss: the loss of a point, likewise.
        method: the method, where it was a user's own.

    Returns:
        The meta-parameters; with a leading axis of seeds where several were trained together.

    Warns:
        UserWarning: a part that is given describes itself otherwise than the saved one; or a
            checkpoint of a run is damaged, as below.

    Raises:
        FileNotFoundError: there is nothing at ``path``.
        DamagedError: a file is not what was written (a ``ValueError``); the message names it. In
            the folder of a run a damaged checkpoint is a warning, and the one before it is used.
        ValueError: a part must be given and is not, or a leaf has another shape or dtype than the
            method makes.
        ModuleNotFoundError: Orbax is missing; the message has the command that installs it.
    """
    path = Path(path).absolute()

    def read(folder: Path) -> MetaParams:
        record = _record(folder)
        found, spec = _method_of(record["method"], model, loss, method), _spec_of(record["spec"])
        like = _stack(expected_params(found, spec), record["seeds"])
        prefix = "params/" if record["kind"] == "state" else ""
        units = _units_of(record)
        return dataclasses.replace(_read(folder, record, like, prefix), spec=spec, units=units)

    own = (path / store.MANIFEST).exists() or (path / store.ARRAYS).exists()  # of a saved model
    is_run = (path / store.RECORD).is_file() and not own
    if is_run or (path / CHECKPOINTS).is_dir():
        newest = _newest(path / CHECKPOINTS, read)
        if newest is None:
            raise FileNotFoundError(f"{path} is a run without any checkpoint yet")
        return newest
    return read(path)


def save_state(
    state: TrainState, run: str | Path, *, settings: dict[str, Any] | None = None, keep: int = 2
) -> Path:
    """Saves the state of a run beside its earlier ones, of which the newest stay.

    Args:
        state: of one seed or several.
        run: the folder of the run; the state goes to ``checkpoints/<step>`` in it.
        settings: of the run, as JSON: ``restore_state`` compares them.
        keep: how many checkpoints to keep, this one included; at least 1.

    Returns:
        The folder of the state.

    Raises:
        ValueError: that step is saved already, or ``keep`` is below 1.
        OSError: as ``save``; earlier checkpoints are untouched.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    seeds = None if state.step.ndim == 0 else state.step.shape[0]
    step = int(np.max(state.step))
    folder = Path(run).absolute() / CHECKPOINTS
    path = folder / f"{step:09d}"
    if path.exists():
        raise ValueError(f"state must be of a step that is not saved yet, {path} is there")
    written = _write(state, path, state.params, seeds=seeds, kind="state", settings=settings)
    others = [old for old in _steps(folder) if old != path]  # a later step is not newer
    for old in others[keep - 1 :]:
        remove(old)
    return written


def restore_state(
    run: str | Path, like: TrainState, *, settings: dict[str, Any] | None = None
) -> TrainState | None:
    """The newest whole state of a run, or None where it has saved none.

    Args:
        run: the folder of the run.
        like: the state that the run starts from, or its ``jax.eval_shape``: method,
            hyperparameters, shapes and dtypes must be those of the saved one.
        settings: of the run, where they were saved with it; likewise.

    Warns:
        UserWarning: a user's own module, loss or method describes itself otherwise than when it
            was saved; or JAX has another version.

    Raises:
        DamagedError: there are checkpoints, and every one of them is damaged. One that is not the
            last resort is a warning.
        ValueError: the run was of another method or other settings, or its leaves have other
            shapes or dtypes.
    """

    def read(folder: Path) -> TrainState:
        record = _record(folder)
        _check_same("method", record["method"], to_json(like.params.method, describe=True))
        # The means of other data: its rows have changed since.
        _check_same("units of the data", record.get("units"), _units_record(like.params))
        if (version := record["versions"]["jax"]) != jax.__version__:
            warnings.warn(
                f"{folder} was written with JAX {version}, and this is {jax.__version__}: the run "
                "goes on, and not to the same bits",
                stacklevel=4,
            )
        if settings is not None:
            _check_same("settings", record["settings"], json.loads(json.dumps(settings)))
        return _read(folder, record, like, "")

    return _newest(Path(run).absolute() / CHECKPOINTS, read)


def saved_steps(run: str | Path) -> list[int]:
    """The outer steps of which a run has checkpoints, newest first."""
    return [int(path.name) for path in _steps(Path(run) / CHECKPOINTS)]


def set_aside_after(run: str | Path, step: int) -> list[Path]:
    """Renames a run's checkpoints beyond ``step``, which it could not go on from; returns them."""
    found = []
    for folder in _steps(Path(run).absolute() / CHECKPOINTS):
        if int(folder.name) > step:
            aside = folder.with_name(folder.name + ".damaged")
            remove(aside)
            found.append(folder.rename(aside))
    return found


def _newest(folder: Path, read: Callable[[Path], Any]) -> Any:
    """What ``read`` makes of the newest checkpoint that is whole; None where there is none."""
    damage: list[str] = []
    for path in _steps(folder):
        try:
            return read(path)
        except DamagedError as error:
            damage.append(str(error))
            warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=3)
        except FileNotFoundError:  # a run that goes on has removed it meanwhile
            continue
    if damage:
        raise DamagedError(f"every checkpoint in {folder} is damaged: {'; '.join(damage)}")
    return None


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a run, newest first."""
    if not folder.is_dir():
        return []
    found = [p for p in folder.iterdir() if p.name.isdecimal() and p.is_dir()]
    return sorted(found, key=lambda p: int(p.name), reverse=True)


def _write(
    tree: PyTree,
    path: Path,
    params: MetaParams,
    *,
    seeds: int | None,
    kind: str,
    settings: dict[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    entries, arrays = leaves.pack(tree)
    record = {
        "kind": kind,
        "seeds": seeds,
        "method": to_json(params.method, describe=True),
        "spec": dataclasses.asdict(params.spec),
        "units": _units_record(params),
        "settings": settings,
        "leaves": entries,
        "versions": {"jax": jax.__version__},
    }
    store.write(path, arrays, record, replace=overwrite)
    return path.absolute()


def _record(folder: Path) -> dict[str, Any]:
    """The record of a verified folder, with every entry that this module reads."""
    record = store.open_record(folder)
    try:
        _spec_of(record["spec"])
        _units_of(record)
        whole = record["kind"] in ("params", "state") and record.keys() >= {"method", "settings"}
        whole = whole and isinstance(record["method"], dict)
        whole = whole and isinstance(record["versions"]["jax"], str)
        whole = whole and (record["seeds"] is None or int(record["seeds"]) > 0)
        for entry in record["leaves"].values():
            whole = whole and all(int(size) >= 0 for size in leaves.stored(entry)[0])
    except (KeyError, TypeError, ValueError, AttributeError):
        whole = False
    if not whole:
        raise DamagedError(f"{folder / store.RECORD} is damaged: it is not the record of a model")
    return record


def _read(folder: Path, record: dict[str, Any], like: PyTree, prefix: str) -> Any:
    """The leaves of ``like``, which must be those of the record under ``prefix``."""
    entries = record["leaves"]
    saved = {name: entry for name, entry in entries.items() if name.startswith(prefix)}
    leaves.check(str(folder), saved, leaves.named(like, prefix))
    every = {name: leaves.stored(entry) for name, entry in entries.items()}
    arrays = store.read_arrays(folder, every, saved)
    return leaves.unpack(like, saved, arrays, prefix)


def seeds_of(params: MetaParams) -> int | None:
    """How many seeds these are, or None for a single one.

    Raises:
        ValueError: the leaves are not those that the method makes, once for each seed.
    """
    expected = expected_params(params.method, params.spec)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=False)
    leads = {leaf.shape[: leaf.ndim - like.ndim] for leaf, like in pairs}
    lead: tuple[int, ...] = leads.pop() if len(leads) == 1 else ()
    seeds = lead[0] if len(lead) == 1 else None
    actual = {name: leaves.describe(leaf) for name, leaf in leaves.named(params).items()}
    leaves.check("params", actual, leaves.named(_stack(expected, seeds)))
    return seeds


def _stack(like: PyTree, seeds: int | None) -> PyTree:
    if seeds is None:
        return like
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((seeds, *leaf.shape), leaf.dtype), like)


def _method_of(record: Any, model: Any, loss: Any, method: Method | None) -> Method:
    """The method of a record, with the parts that were given in the place of a user's own."""
    if method is not None:
        _check_same("method", record, to_json(method, describe=True))
        return method
    given = {"model": _within(model, record.get("model")), "point_loss": loss}
    try:
        found = from_json(record, given)
    except MissingPartError as missing:
        argument = {"model": "model", "point_loss": "loss"}.get(missing.field, "method")
        raise ValueError(
            f"{argument} must be given to load: the model was saved with {missing.description}, "
            f"which is not one of lavajax's own; load(path, {argument}=...)"
        ) from None
    for name, argument, value in (("model", "model", model), ("point_loss", "loss", loss)):
        saved = getattr(found, name, None)
        taken = name == "model" and value is _within(saved, record.get("model"))
        if value is not None and saved != value and not taken:
            raise ValueError(
                f"{argument} is saved as {saved!r} and need not be given, got {value!r}"
            )
    return found


def _within(model: Any, record: Any) -> Any:
    """What stands where a record has a user's own object, which another model may hold."""
    while isinstance(record, dict) and "own" not in record and "model" in record:
        if type(model).__name__ != record.get("class"):
            break
        model, record = model.model, record["model"]
    return model


def _check_same(name: str, saved: Any, given: Any) -> None:
    if different := differences(saved, given, name):
        raise ValueError(f"the {name} must be the saved one: {'; '.join(different)}")
    for line in changed(saved, given, name):
        warnings.warn(line, stacklevel=5)


def _units_record(params: MetaParams) -> Any:
    return None if params.units is None else to_json(params.units)


def _units_of(record: dict[str, Any]) -> Units | None:
    """The units of a record, which one of an earlier version has not.

    Raises:
        ValueError: the entry is something else.
    """
    units = from_json(record.get("units"))
    if not isinstance(units, Units | None):
        raise ValueError(f"units must be Units, got {units!r}")
    return units


def _spec_of(record: dict[str, Any]) -> PointSpec:
    return PointSpec(
        tuple(record["x_shape"]), record["x_dtype"], tuple(record["y_shape"]), record["y_dtype"]
    )
