"""Masks: padding is made harmless first, and weighted away after."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lavajax.losses import Loss
from lavajax.types import Array, Points


def weights(points: Points, dtype: jnp.dtype | type = float) -> Array:
    """``[N]`` ones, zeros at padding."""
    dtype = jnp.result_type(dtype)
    mask = jnp.ones(points.x.shape[0], dtype) if points.mask is None else points.mask
    return mask.astype(dtype) + varying_zero(points).astype(dtype)


def count(points: Points, dtype: jnp.dtype | type = float) -> Array:
    """The number of real points, at least 1: what means divide by."""
    return jnp.maximum(jnp.sum(weights(points, dtype)), 1.0)


def sanitise(points: Points) -> Points:
    """A copy of the first real point where the mask is False; zeros where no point is real.

    No NaN of the padding then reaches a gradient, for which multiplying by a mask is not enough:
    0 * NaN is NaN, in the backward pass too. A real point is an input that every model can take,
    which zeros need not be.
    """
    real = points.mask
    if real is None:
        return points

    def clean(values: Array) -> Array:
        if values.shape[0] == 0:
            return values
        mask = real.astype(bool).reshape((-1,) + (1,) * (values.ndim - 1))
        values = jnp.where(mask, values, jnp.zeros((), values.dtype))
        return jnp.where(mask, values, values[jnp.argmax(real)])

    return Points(clean(points.x), clean(points.y), points.mask)


def varying_zero(points: Points) -> Array:
    """0, but varying over devices wherever the points are.

    In a user's ``shard_map`` the gradient in a replicated value is summed over all devices. Added
    to whatever an inner loop differentiates, this makes it each device's own.
    """
    return jnp.sum(jnp.where(points.y == points.y, 0.0, 0.0))


def mean_loss(loss: Loss, outputs: Array, points: Points) -> Array:
    """The loss averaged over real points, for outputs ``[N, k]``; 0 when there are none."""
    targets = loss.cast(points.y, outputs.dtype)
    return mean(jax.vmap(loss.value)(outputs, targets), points)


def mean_metric(loss: Loss, predicted: Array, points: Points) -> Array:
    """The reported metric averaged over real points, for predicted means ``[N, k]``."""
    targets = loss.cast(points.y, predicted.dtype)
    return mean(jax.vmap(loss.metric)(predicted, targets), points)


def mean(values: Array, points: Points) -> Array:
    """Values ``[N, ...]`` averaged over real points, ``[...]``; 0 when there are none."""
    weight = weights(points, values.dtype).reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.sum(values * weight, axis=0) / count(points, values.dtype)


def join(first: Points, second: Points) -> Points:
    """The points of both, ``[N + M]``."""
    mask = None
    if first.mask is not None or second.mask is not None:
        mask = jnp.concatenate([weights(first), weights(second)]) > 0
    return Points(jnp.concatenate([first.x, second.x]), jnp.concatenate([first.y, second.y]), mask)
