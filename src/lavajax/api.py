"""The library calls: the pure methods, compiled, behind one check of what they are given."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import validate
from lavajax.arguments import (
    check_adapted,
    check_estimate,
    check_key,
    check_params,
    check_points,
    check_query,
    with_finite,
)
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction


def adapt(
    params: MetaParams, support: Points | tuple[Any, Any] | Any, *, key: Array | None = None
) -> Adapted:
    """Adapts a meta-learned model to one task.

    Works as it stands under ``jit``, ``vmap`` and ``grad``. Called outside them it is compiled,
    once for each shape of the support; a mask makes supports of different size one shape.

    Args:
        params: meta-parameters, from ``train`` or a method's ``init``.
        support: ``Points``, or a pair ``(x, y)`` of NumPy or JAX arrays: x ``[N, ...]`` and y
            ``[N, k]`` (labels ``[N]`` for classification), N >= 0. No points, or a mask that is
            all False, give the prior. Integer and float64 values are converted to the dtype that
            the model computes in. Where ``params.units`` are known, numbers are in the user's
            units; and with names, a DataFrame (or a dict of NumPy arrays) may stand for the pair,
            or for x or y: its columns are taken by name, in any order and among others.
        key: PRNG key, for stochastic methods; None asks for the deterministic answer.

    Returns:
        The adapted block, for ``predict``.

    Raises:
        ValueError: shapes do not fit the model; ``key`` is none of JAX's; a column is missing or
            holds anything but numbers; or, outside ``jit``, a real point is NaN or infinite, a
            label is out of range, or there is no finite estimate: exact Hessians left none (see
            ``Lava.curvature``), inner steps grew without bound, or a system could not be solved.
            Under ``jit`` such values, and an estimate that is not finite, propagate.
    """
    check_params(params)
    if key is not None:
        check_key(key)
    adapted, finite = _adapt(params.standardised, check_points(params, support), key)
    check_estimate(params.method, finite)
    return adapted


def predict(params: MetaParams, adapted: Adapted, x: Any) -> Prediction:
    """Predicts the targets of an adapted task.

    Args:
        params: the meta-parameters given to ``adapt``.
        adapted: what ``adapt`` returned.
        x: inputs ``[M, ...]``, M >= 0, NumPy or JAX; or a DataFrame with the named columns, see
            ``adapt``. Where an array is NaN, so is the prediction; of a table it is refused. All
            are computed at once: error bars of n adapted weights take M k n numbers, kernels of
            ``Dkt`` M N D. Call it for parts of many.

    Returns:
        ``Prediction`` with ``mean`` ``[M, k]`` in the units of the targets, or class
        probabilities; ``epistemic`` and ``noise`` are None for methods without error bars.

    Raises:
        ValueError: the shape of x does not fit the model, a column is missing or holds anything
            but numbers, ``adapted`` is not of one task of this model, or x is a single vector for
            a model with batch normalisation, which leaves nothing of it.
    """
    check_params(params)
    check_adapted(params, adapted)
    x = check_query(params, x)
    prediction = _predict(params.standardised, adapted, x)
    return prediction if params.units is None else params.units.restore_prediction(prediction)


def sample(params: MetaParams, adapted: Adapted, x: Any, key: Array, *, number: int = 1) -> Array:
    """Draws functions from what a method believes of an adapted task.

    Args:
        params: the meta-parameters given to ``adapt``.
        adapted: what ``adapt`` returned.
        x: inputs as for ``predict``, M >= 0 of them. One draw is one function at all of them.
        key: PRNG key.
        number: how many functions.

    Returns:
        ``[number, M, k]`` in the units of the targets, without the noise of observations.

    Raises:
        ValueError: the method has no posterior of functions, ``number`` is below 1, ``key`` is none
            of JAX's; or as ``predict`` does.
    """
    check_params(params)
    check_adapted(params, adapted)
    if adapted.posterior is None or not hasattr(params.method, "sample"):
        raise ValueError(
            "params must be of a method with a posterior of functions, such as Alpaca() or Lava "
            f"with noise, got {params.method!r}"
        )
    number = validate.whole("number", number, 1)
    check_key(key)
    x = check_query(params, x)
    drawn = _sample(params.standardised, adapted, x, key, number)
    return drawn if params.units is None else params.units.y.restore(drawn)


def diagnose(params: MetaParams, support: Points | tuple[Any, Any] | Any) -> Any:
    """What a method can say of how it adapts to one task: ``Lava`` and ``IMaml`` can.

    Args:
        params: meta-parameters.
        support: at least one real point, as for ``adapt``; for ``Lava``, whose Hessians are written
            out, no more than 2^28 numbers of them.

    Returns:
        ``LavaDiagnostics`` or ``IMamlDiagnostics``.

    Raises:
        ValueError: as ``adapt`` does; the method has no diagnosis, there is no point, or too many.
    """
    check_params(params)
    method: Any = params.method
    if not hasattr(method, "diagnose"):
        raise ValueError(f"params must be of Lava or IMaml, which have a diagnosis, got {method!r}")
    support = check_points(params, support)
    masked = support.mask is not None and not isinstance(support.mask, jax.core.Tracer)
    if support.x.shape[0] == 0 or (masked and not np.any(support.mask)):
        raise ValueError("support must have a point to diagnose, got none")
    return method.diagnose(params.standardised, jax.tree.map(jnp.asarray, support))


# Without units, which are no concern of the compiled functions: one for all data of a shape.
_adapt = jax.jit(
    lambda params, support, key: with_finite(params.method.adapt(params, support, key=key))
)
_predict = jax.jit(lambda params, adapted, x: params.method.predict(params, adapted, x))
_sample = jax.jit(
    lambda params, adapted, x, key, number: params.method.sample(params, adapted, x, key, number),
    static_argnums=4,
)
