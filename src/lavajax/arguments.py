"""Checks of what the library calls are given, and of the estimate that they give back."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import frame
from lavajax.methods.base import Method, expected_params, expected_points
from lavajax.methods.batch_norm import check_batch
from lavajax.types import Adapted, Array, MetaParams, Points, PointSpec


def check_params(params: Any) -> None:
    """Requires the meta-parameters of one seed.

    Raises:
        ValueError: they are something else.
    """
    if not isinstance(params, MetaParams):
        hint = "; give its .params" if hasattr(params, "params") else ""
        raise ValueError(f"params must be MetaParams, got {type(params).__name__}{hint}")
    leaves = jax.tree.leaves(params.learned)
    if leaves and jnp.ndim(leaves[0]) == _first_rank(params.method, params.spec) + 1:
        raise ValueError(
            f"params must be those of one seed, got {leaves[0].shape[0]} seeds: pick one with "
            "trained.seed(i), or vmap over the first axis"
        )


def check_key(key: Any) -> None:
    """Requires a single PRNG key of JAX, typed or of the older kind.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(key, jax.Array | np.ndarray):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        if key.ndim == 0 if typed else (key.shape, key.dtype) == ((2,), jnp.uint32):
            return
    raise ValueError(f"key must be one PRNG key, such as jax.random.key(0), got {key!r}")


@functools.lru_cache(maxsize=128)
def _first_rank(method: Method, spec: PointSpec) -> int:
    """The number of axes of the first learned leaf, of one seed."""
    return jax.tree.leaves(expected_params(method, spec).learned)[0].ndim


def check_points(params: MetaParams, support: Points | tuple[Any, Any]) -> Points:
    """Requires points like those that the parameters were made for; gives them standardised.

    Raises:
        ValueError: as ``adapt`` does.
    """
    if isinstance(support, tuple) and len(support) == 2:
        support = Points(*support)
    elif frame.is_table(support) and params.units is not None and params.units.x.names is not None:
        table: Any = support
        support = Points(table, table)
    if not isinstance(support, Points):
        raise ValueError(
            f"support must be Points(x, y, mask) or a pair (x, y), got {type(support).__name__}"
            + ("; this model knows no names of columns" if frame.is_table(support) else "")
        )
    masked = support.mask is not None
    x = _check_x(params, support.x, "support.x", masked)
    units = params.units
    given: Any = support.y
    if frame.is_table(given):
        given = _take(given, _names(params, "y", "support.y"), "support.y", masked)
    y = _array(given, "support.y")
    spec = params.spec
    if y.ndim == 0 or y.shape[1:] != spec.y_shape:
        hint = "; a single output is y[:, None]" if y.ndim == 1 and spec.y_shape == (1,) else ""
        raise ValueError(
            f"support.y must have shape {_shape(spec.y_shape)}, as in training, got {y.shape}{hint}"
        )
    if y.shape[0] != x.shape[0]:
        raise ValueError(
            f"support.x and support.y must have as many points, got {x.shape[0]} and {y.shape[0]}"
        )
    # Refuses wrong kinds; on the host, where looking at it costs nothing.
    none: Any = np.zeros((0, *y.shape[1:]), y.dtype)
    params.method.point_loss.cast(none, jnp.dtype(jnp.result_type(float)))
    if units is not None:
        y = units.y.standardise(given)
    mask = support.mask
    if mask is not None:
        mask = _array(mask, "support.mask")
        if mask.shape != x.shape[:1]:
            raise ValueError(
                f"support.mask must have shape ({x.shape[0]},), one for each point, got "
                f"{mask.shape}"
            )
        if not isinstance(mask, jax.core.Tracer) and not np.isin(np.asarray(mask), (0, 1)).all():
            raise ValueError(
                f"support.mask must be booleans, True where a point is real, got {np.asarray(mask)}"
            )
        mask = mask.astype(bool)
    _check_values(params, x, y, mask)
    return Points(x, y, mask)


def _check_values(params: MetaParams, x: Array, y: Array, mask: Array | None) -> None:
    """Looks at the values of real points, where there are values to look at."""
    if any(isinstance(a, jax.core.Tracer) for a in (x, y, mask)):
        return
    real = np.ones(x.shape[0], bool) if mask is None else np.asarray(mask)
    for name, values in (("support.x", np.asarray(x)[real]), ("support.y", np.asarray(y)[real])):
        if jnp.issubdtype(values.dtype, jnp.inexact):  # NumPy does not know bfloat16 as such
            finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
            if not finite.all():
                index = int(np.flatnonzero(real)[np.argmin(finite)])
                raise ValueError(
                    f"{name} must be finite in {values.dtype}, got NaN or infinity at point "
                    f"{index}; leave such points out, or set their mask to False"
                )
    check_batch(params, x, int(real.sum()))
    params.method.point_loss.check(np.asarray(y)[real])


def check_query(params: MetaParams, given: Any) -> Array:
    """Requires inputs ``[M, ...]`` to predict at, in the user's units; gives them standardised.

    Raises:
        ValueError: as ``predict`` does.
    """
    x = _check_x(params, given, "x")
    check_batch(params, x, x.shape[0], "x")
    return x


def _check_x(params: MetaParams, given: Any, name: str, masked: bool = False) -> Array:
    if frame.is_table(given):
        given = _take(given, _names(params, "x", name), name, masked)
    x = _array(given, name)
    shape = params.spec.x_shape
    if x.ndim == 0 or x.shape[1:] != shape:
        hint = "; a single input is x[:, None]" if x.ndim == 1 and shape == (1,) else ""
        raise ValueError(
            f"{name} must have shape {_shape(shape)}, as in training, got {x.shape}{hint}"
        )
    return x if params.units is None else params.units.x.standardise(given)


def _take(table: Any, names: tuple[str, ...], argument: str, masked: bool) -> np.ndarray:
    """Columns of a table; with a mask, an entry may be missing, and real points are looked at."""
    return (frame.take if masked else frame.take_complete)(table, names, argument)


def _names(params: MetaParams, part: Literal["x", "y"], argument: str) -> tuple[str, ...]:
    """The columns that the model takes from a table."""
    names = None if params.units is None else getattr(params.units, part).names
    if names is None:
        raise ValueError(
            f"{argument} must be an array: the model was not trained on a table, and knows no "
            "names of columns to take from one"
        )
    return names


_USUAL = frozenset(map(np.dtype, ("bool", "int32", "int64", "float32", "float64")))


def _array(value: Any, name: str) -> Any:
    """An array of what was given; integers that JAX's would not hold as numbers of ``float``.

    What is on the host stays there, if it has one of the usual dtypes, in the dtype that JAX would
    have for it: the compiled call that it is for moves it in a tenth of the time. It is a copy: JAX
    may compute from the memory that it was given after the call has returned, when that memory is
    the user's to write the next points to.
    """
    if np.ma.is_masked(value):  # an array alone would show what is behind the mask
        raise ValueError(
            f"{name} must have no masked entries; leave such points out (or, of a support, fill "
            "them with anything and set the mask of Points to False there)"
        )
    try:
        if not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(value)):
            value = np.asarray(value)
            if value.dtype.kind in "iu" and value.size:
                limits = np.iinfo(np.int32)
                if value.min() < limits.min or value.max() > limits.max:
                    value = value.astype(float)
        if isinstance(value, np.ndarray) and value.dtype in _USUAL:
            array: Any = np.array(value, jax.dtypes.canonicalize_dtype(value.dtype))
        else:
            array = jnp.asarray(value, copy=None if isinstance(value, jax.Array) else True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {error}") from None
    if name.endswith("x") and jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{name} must be real, got dtype {array.dtype}; give real and imaginary parts as two "
            "inputs"
        )
    return array


def _shape(point: tuple[int, ...]) -> str:
    return "(" + ", ".join(["N", *map(str, point)]) + ("," if not point else "") + ")"


def check_adapted(params: MetaParams, adapted: Any) -> None:
    """Requires an outcome of one task of this model.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(adapted, Adapted):
        raise ValueError(f"adapted must be what adapt returned, got {type(adapted).__name__}")
    found = tuple(jnp.shape(leaf) for leaf in jax.tree.leaves(adapted.block))
    forms = _block_shapes(params.method, params.spec)
    if forms and not any(_matches(found, form) for form in forms):
        raise ValueError(
            f"adapted must be of one task of this model, with a block of shapes {forms[0]} "
            f"(None: any), got {found}; for several tasks, vmap predict over them"
        )
    if adapted.posterior is None and _has_posterior(params.method, params.spec):
        raise ValueError(
            "adapted must have the posterior that adapt of this model gives, and has none: it is "
            "the outcome of another method"
        )


_Shapes = tuple[tuple[int | None, ...], ...]


def _matches(found: _Shapes, form: _Shapes) -> bool:
    return len(found) == len(form) and all(
        len(a) == len(b) and all(n is None or m == n for m, n in zip(a, b, strict=True))
        for a, b in zip(found, form, strict=True)
    )


@functools.lru_cache(maxsize=128)
def _block_shapes(method: Method, spec: PointSpec) -> tuple[_Shapes, ...]:
    """The shapes of a block's leaves, without a key and with one; None for the size of a support.

    Nothing for a method of which they cannot be told without values.
    """

    def shapes(number: int, key: Array | None) -> _Shapes:
        block = _outcome(method, spec, number, key).block
        return tuple(leaf.shape for leaf in jax.tree.leaves(block))

    forms: list[_Shapes] = []
    for key in (None, jax.random.key(0)):
        try:
            few, more = shapes(2, key), shapes(3, key)
        except ValueError:  # a stochastic method asks for a key
            continue
        form = tuple(
            tuple(m if m == n else None for m, n in zip(a, b, strict=True))
            for a, b in zip(few, more, strict=True)
        )
        if form not in forms:
            forms.append(form)
    return tuple(forms)


@functools.lru_cache(maxsize=128)
def _has_posterior(method: Method, spec: PointSpec) -> bool:
    """Whether the outcome of a method has what its error bars need."""
    for key in (None, jax.random.key(0)):
        with contextlib.suppress(ValueError):  # a stochastic method asks for a key
            return _outcome(method, spec, 2, key).posterior is not None
    return False


def _outcome(method: Method, spec: PointSpec, number: int, key: Array | None) -> Adapted:
    """What adapting to so many points gives, as shapes."""
    params, support = expected_params(method, spec), expected_points(spec, number)
    return jax.eval_shape(lambda p, s: method.adapt(p, s, key=key), params, support)


def with_finite(adapted: Adapted) -> tuple[Adapted, Array]:
    """The outcome, and whether its block is finite: a scalar, for ``check_estimate``."""
    leaves = [a for a in jax.tree.leaves(adapted.block) if jnp.issubdtype(a.dtype, jnp.inexact)]
    return adapted, jnp.all(jnp.array([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def check_estimate(method: Method, finite: Array) -> None:
    """Requires a finite estimate, where there is a value to look at.

    Raises:
        ValueError: it is not finite; the message says what may help.
    """
    if isinstance(finite, jax.core.Tracer) or finite:
        return
    why = getattr(method, "why_no_estimate", None) or (
        "inner steps grew without bound, a system could not be solved in this precision, or the "
        "parameters are not finite themselves; a smaller inner rate, a larger regulariser, or "
        "jax.config.update('jax_enable_x64', True) before the parameters are made may help"
    )
    raise ValueError(f"support must have a finite estimate, got NaN or infinity: {why}")
