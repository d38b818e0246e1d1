"""The library calls ``adapt`` and ``predict``: the pure methods behind one check of the input."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lavajax.methods.base import Method, expected_params
from lavajax.types import Adapted, Array, MetaParams, Points, PointSpec, Prediction


def adapt(
    params: MetaParams, support: Points | tuple[Any, Any], *, key: Array | None = None
) -> Adapted:
    """Adapts a meta-learned model to one task.

    Works as it stands under ``jit``, ``vmap`` and ``grad``. Called outside them it is compiled,
    once for each shape of the support; a mask makes supports of different size one shape.

    Args:
        params: meta-parameters, from ``train`` or a method's ``init``.
        support: ``Points``, or a pair ``(x, y)`` of NumPy or JAX arrays: x ``[N, ...]`` and y
            ``[N, k]`` (labels ``[N]`` for classification), N >= 0. No points, or a mask that is
            all False, give the prior. Integer and float64 values are converted to the dtype that
            the model computes in.
        key: PRNG key, for stochastic methods; None asks for the deterministic answer.

    Returns:
        The adapted block, for ``predict``.

    Raises:
        ValueError: shapes do not fit the model; or, outside ``jit``, a real point is NaN or
            infinite or a label is out of range. Under ``jit`` such values propagate.
    """
    check_params(params)
    return _adapt(params, check_points(params, support), key)


def predict(params: MetaParams, adapted: Adapted, x: Any) -> Prediction:
    """Predicts the targets of an adapted task.

    Args:
        params: the meta-parameters given to ``adapt``.
        adapted: what ``adapt`` returned.
        x: inputs ``[M, ...]``, M >= 0, NumPy or JAX.

    Returns:
        ``Prediction`` with ``mean`` ``[M, k]`` in the units of the targets, or class
        probabilities; ``epistemic`` and ``noise`` are None for methods without error bars.

    Raises:
        ValueError: the shape of x does not fit the model.
    """
    check_params(params)
    _check_adapted(adapted)
    x = _check_x(params, x, "x")
    return _predict(params, adapted, x)


def sample(params: MetaParams, adapted: Adapted, x: Any, key: Array, *, number: int = 1) -> Array:
    """Draws functions from what a method believes of an adapted task.

    Args:
        params: the meta-parameters given to ``adapt``.
        adapted: what ``adapt`` returned.
        x: inputs ``[M, ...]``, M >= 0, NumPy or JAX. One draw is one function at all of them.
        key: PRNG key.
        number: how many functions.

    Returns:
        ``[number, M, k]``, without the noise of observations.

    Raises:
        ValueError: the method has no posterior of functions, ``number`` is below 1, or the shape of
            x does not fit the model.
    """
    check_params(params)
    _check_adapted(adapted)
    if adapted.posterior is None or not hasattr(params.method, "sample"):
        raise ValueError(
            "params must be of a method with a posterior of functions, such as Alpaca() or Lava "
            f"with noise, got {params.method!r}"
        )
    if number < 1:
        raise ValueError(f"number must be at least 1, got {number}")
    return _sample(params, adapted, _check_x(params, x, "x"), key, number)


_adapt = jax.jit(lambda params, support, key: params.method.adapt(params, support, key=key))
_predict = jax.jit(lambda params, adapted, x: params.method.predict(params, adapted, x))
_sample = jax.jit(
    lambda params, adapted, x, key, number: params.method.sample(params, adapted, x, key, number),
    static_argnums=4,
)


def _check_adapted(adapted: Any) -> None:
    if not isinstance(adapted, Adapted):
        raise ValueError(f"adapted must be what adapt returned, got {type(adapted).__name__}")


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


@functools.lru_cache(maxsize=128)
def _first_rank(method: Method, spec: PointSpec) -> int:
    """The number of axes of the first learned leaf, of one seed."""
    return jax.tree.leaves(expected_params(method, spec).learned)[0].ndim


def check_points(params: MetaParams, support: Points | tuple[Any, Any]) -> Points:
    """Requires points like those that the parameters were made for.

    Raises:
        ValueError: as ``adapt`` does.
    """
    if isinstance(support, tuple) and len(support) == 2:
        support = Points(*support)
    if not isinstance(support, Points):
        raise ValueError(
            f"support must be Points(x, y, mask) or a pair (x, y), got {type(support).__name__}"
        )
    x = _check_x(params, support.x, "support.x")
    y = _array(support.y, "support.y")
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
    params.method.point_loss.cast(y[:0], jnp.dtype(jnp.result_type(float)))  # refuses wrong kinds
    mask = support.mask
    if mask is not None:
        mask = _array(mask, "support.mask")
        if mask.shape != x.shape[:1]:
            raise ValueError(
                f"support.mask must have shape ({x.shape[0]},), one for each point, got "
                f"{mask.shape}"
            )
        mask = mask.astype(bool)
    _check_values(params, x, y, mask)
    return Points(x, y, mask)


def _check_x(params: MetaParams, x: Any, name: str) -> Array:
    x = _array(x, name)
    shape = params.spec.x_shape
    if x.ndim == 0 or x.shape[1:] != shape:
        hint = "; a single input is x[:, None]" if x.ndim == 1 and shape == (1,) else ""
        raise ValueError(
            f"{name} must have shape {_shape(shape)}, as in training, got {x.shape}{hint}"
        )
    return x


def _check_values(params: MetaParams, x: Array, y: Array, mask: Array | None) -> None:
    """Looks at the values of real points, where there are values to look at."""
    if any(isinstance(a, jax.core.Tracer) for a in (x, y, mask)):
        return
    real = np.ones(x.shape[0], bool) if mask is None else np.asarray(mask)
    for name, values in (("support.x", np.asarray(x)[real]), ("support.y", np.asarray(y)[real])):
        if np.issubdtype(values.dtype, np.inexact):
            finite = np.isfinite(values).all(axis=tuple(range(1, values.ndim)))
            if not finite.all():
                index = int(np.flatnonzero(real)[np.argmin(finite)])
                raise ValueError(
                    f"{name} must be finite in {values.dtype}, got NaN or infinity at point "
                    f"{index}; leave such points out, or set their mask to False"
                )
    params.method.point_loss.check(np.asarray(y)[real])


def _array(value: Any, name: str) -> Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {error}") from None
    if name.endswith("x") and jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise ValueError(
            f"{name} must be real, got dtype {array.dtype}; give real and imaginary parts as two "
            "inputs"
        )
    return array


def _shape(point: tuple[int, ...]) -> str:
    return "(" + ", ".join(["N", *map(str, point)]) + ("," if not point else "") + ")"
