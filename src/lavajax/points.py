"""Masks: padding is made harmless first, and weighted away after."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from lavajax.losses import CrossEntropy, Loss
from lavajax.types import Array, Points


def weights(points: Points, dtype: jnp.dtype | type = float) -> Array:
    """``[N]`` ones, zeros at padding."""
    dtype = jnp.result_type(dtype)
    mask = jnp.ones(points.x.shape[0], bool) if points.mask is None else points.mask.astype(bool)
    return mask.astype(dtype) + varying_zero(points.y).astype(dtype)


def count(points: Points, dtype: jnp.dtype | type = float) -> Array:
    """The number of real points, at least 1: what means divide by."""
    return jnp.maximum(jnp.sum(weights(points, dtype)), 1.0)


def any_real(points: Points) -> Array:
    """Whether there is a real point at all, a boolean scalar."""
    return jnp.any(weights(points) > 0)


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


def concatenate(first: Points, second: Points) -> Points:
    """The points of both; without a mask where neither has one."""
    x, y = (jnp.concatenate([getattr(p, name) for p in (first, second)]) for name in "xy")
    if first.mask is None and second.mask is None:
        return Points(x, y)
    masks = [jnp.ones(p.x.shape[0], bool) if p.mask is None else p.mask for p in (first, second)]
    return Points(x, y, jnp.concatenate([mask.astype(bool) for mask in masks]))


def varying_zero(*arrays: Array) -> Array:
    """0, but varying over devices wherever one of the arrays does, such as the targets of points.

    In a user's ``shard_map`` the gradient in a replicated value is summed over all devices. Added
    to whatever an inner loop differentiates, this makes it each device's own. ``zeros_like`` varies
    as its argument does, and is a constant to the compiler, with which products with masks vanish.
    """
    zeros = (jnp.zeros_like(array, dtype=float, shape=()) for array in arrays)
    return functools.reduce(jnp.add, zeros)


def mean_loss(loss: Loss, outputs: Array, points: Points) -> Array:
    """The loss averaged over real points, for outputs ``[N, k]``; 0 when there are none."""
    targets = loss.cast(points.y, outputs.dtype)
    return average(jax.vmap(loss.value)(outputs, targets), points)


def mean_metric(loss: Loss, predicted: Array, points: Points) -> Array:
    """The reported metric averaged over real points, for predicted means ``[N, k]``."""
    targets = loss.cast(points.y, predicted.dtype)
    return average(jax.vmap(loss.metric)(predicted, targets), points)


def average(values: Array, points: Points) -> Array:
    """Values ``[N, ...]`` averaged over real points, ``[...]``; 0 when there are none."""
    weight = weights(points, values.dtype).reshape((-1,) + (1,) * (values.ndim - 1))
    return jnp.sum(values * weight, axis=0) / count(points, values.dtype)


def pairs(loss: Loss, points: Points) -> Array:
    """[x_i, y_i], ``[N, d + k]``, as an encoder reads them; labels of classes are one-hot.

    Raises:
        ValueError: an input is not a vector.
    """
    if points.x.ndim != 2:
        raise ValueError(
            f"x must have shape [N, d] for a method whose encoder reads the support, got "
            f"{points.x.shape}; a single input per point is x[:, None], and other inputs need a "
            "method that adapts a network, such as Lava"
        )
    dtype = jnp.result_type(float)
    y = loss.cast(points.y, dtype)
    if isinstance(loss, CrossEntropy):
        y = loss.one_hot(y, dtype)
    return jnp.concatenate([points.x.astype(dtype), y], axis=1)
