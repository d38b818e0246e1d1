"""Compiled adaptation for programs that have JAX, and not this library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export as jax_export

from lavajax import api, disk, leaves, validate
from lavajax.arguments import check_params
from lavajax.atomic import Kind, unfinished
from lavajax.extras import require
from lavajax.types import Array, MetaParams, Points, PyTree

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
ADAPT, PREDICT = "adapt.jax", "predict.jax"
_EXPORT = Kind("an export", frozenset({ADAPT, PREDICT}), frozenset({ADAPT, PREDICT}))


def export(
    params: MetaParams,
    path: str | Path,
    *,
    shots: int = 64,
    platforms: str | Sequence[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes ``adapt`` and ``predict`` as programs of StableHLO, with the parameters inside.

    Both take and return plain dicts of arrays. A program that calls them needs jax and flatbuffers:

        from jax import export, numpy
        numpy.linalg.cholesky(numpy.eye(1))  # before 0.10 JAX loads LAPACK for its own calls alone
        adapt = export.deserialize(bytearray(open("model/adapt.jax", "rb").read())).call
        predict = export.deserialize(bytearray(open("model/predict.jax", "rb").read())).call
        adapted = adapt({"x": x, "y": y, "mask": mask})   # x [shots, ...], y [shots, k]
        prediction = predict(adapted, {"x": at})          # at [M, ...]: {"mean": [M, k], ...}

    Values are not checked: what is not finite propagates. Where the parameters know the units of a
    table, the programs take and give them, columns in the order of ``params.units``.

    Args:
        params: meta-parameters of one seed, of a method whose answer without a key is defined.
        path: the folder to make.
        shots: the most support points; fewer have a mask that is False for the rest.
        platforms: what to compile for, one or more of ``"cpu"``, ``"cuda"``, ``"rocm"`` and
            ``"tpu"``; None: that of this process.
        overwrite: replace an older export, which stays until the new one is whole.

    Returns:
        The folder, absolute.

    Raises:
        ValueError: an argument cannot be, or ``path`` is in use.
        ModuleNotFoundError: flatbuffers is missing; the message has the command that installs it.
        OSError: the folder cannot be written; the message says why, and an older export stays.
    """
    require("flatbuffers", "export", "exporting a model")
    check_params(params)
    shots = validate.whole("shots", shots, 1)
    if isinstance(platforms, str):
        platforms = (platforms,)
    unknown = set(platforms or ()) - set(PLATFORMS)
    if unknown:
        raise ValueError(
            f"platforms must be of {', '.join(PLATFORMS)}, got {', '.join(sorted(unknown))}"
        )
    _check_offsets(params)
    path = Path(path).absolute()
    target = path.resolve()  # a link stays, and what it points to is replaced
    _EXPORT.check_free(target, overwrite)
    programs = _programs(params, shots, platforms)
    with disk.writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished(target, overwrite, _EXPORT) as temporary:
            for name, program in programs.items():
                (temporary / name).write_bytes(program)
    return path


def _check_offsets(params: MetaParams) -> None:
    """Refuses units of which float32, in which a program takes its inputs, has too few digits."""
    if params.units is None:
        return
    for columns in (params.units.x, params.units.y):
        names = columns.names or tuple(map(str, range(len(columns.mean))))
        for name, mean, std in zip(names, columns.mean, columns.std, strict=True):
            if abs(mean) > 1e4 * std:
                raise ValueError(
                    f"params must have units that float32 can tell apart: column {name} has a mean "
                    f"of {mean:g} and a standard deviation of {std:g}; train on it less its mean"
                )


def _programs(
    params: MetaParams, shots: int, platforms: Sequence[str] | None
) -> dict[str, bytearray]:
    spec = params.spec

    def adapt(support: dict[str, Array]) -> dict[str, Array]:
        return leaves.named(api.adapt(params, Points(**support)))

    support = {
        "x": jax.ShapeDtypeStruct((shots, *spec.x_shape), _canonical(spec.x_dtype)),
        "y": jax.ShapeDtypeStruct((shots, *spec.y_shape), _canonical(spec.y_dtype)),
        "mask": jax.ShapeDtypeStruct((shots,), jnp.bool_),
    }
    like = jax.eval_shape(lambda support: api.adapt(params, Points(**support)), support)

    def predict(adapted: dict[str, Array], at: dict[str, Array]) -> dict[str, Array]:
        parts = [adapted[name] for name in leaves.named(like)]
        whole = jax.tree.unflatten(jax.tree.structure(like), parts)
        prediction = api.predict(params, whole, at["x"])
        return {name: leaf for name, leaf in vars(prediction).items() if leaf is not None}

    (m,) = jax_export.symbolic_shape("m")
    at = {"x": jax.ShapeDtypeStruct((m, *spec.x_shape), _canonical(spec.x_dtype))}
    adapted = jax.eval_shape(adapt, support)

    def serialize(fn: Any, *args: PyTree) -> bytearray:
        return jax_export.export(jax.jit(fn), platforms=platforms)(*args).serialize()

    return {ADAPT: serialize(adapt, support), PREDICT: serialize(predict, adapted, at)}


def _canonical(dtype: str) -> jnp.dtype:
    return jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
