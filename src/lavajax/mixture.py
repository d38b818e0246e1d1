"""Manifold mixup: points mixed with partners at the inputs of one layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lavajax import linalg, network, points
from lavajax.losses import Loss
from lavajax.models.base import Model
from lavajax.types import Array, Points, PyTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mixture:
    """How M points are mixed with partners.

    Attributes:
        layer: index of the layer whose inputs are mixed, 0 for the raw inputs; a scalar.
        partner: index of each point's partner, ``[M]``.
        weight: lambda, the partner's weight, ``[M]``; the point itself has 1 - lambda.
    """

    layer: Array
    partner: Array
    weight: Array


def draw(
    key: Array, own: Points, partners: Points, *, layers: int, concentration: float
) -> Mixture | None:
    """A random mixture of the points ``own``; None where either set has size 0.

    The layer is uniform, and so is the partner of every point among the real ones, with
    replacement; lambda is from Beta(concentration, concentration), one for each point, and 0 where
    no partner is real.
    """
    size = own.x.shape[0]
    if size == 0 or partners.x.shape[0] == 0:
        return None
    layer_key, partner_key, weight_key = jax.random.split(key, 3)
    layer = jax.random.randint(layer_key, (), 0, layers)
    real = points.weights(partners)
    partner = jax.random.choice(partner_key, real.shape[0], (size,), p=real)
    weight = jax.random.beta(weight_key, concentration, concentration, (size,))
    return Mixture(layer, partner, jnp.where(jnp.any(real > 0), weight, 0))


def mixed_loss(
    model: Model,
    loss: Loss,
    net: dict[str, PyTree],
    fixed: PyTree,
    *,
    own: Points,
    partners: Points,
    mixture: Mixture,
) -> Array:
    """The mean loss of a net at the points ``own``, mixed inside it with ``partners``; a scalar.

    Targets are mixed as the layer's inputs are; labels have no mixture, and their losses are mixed.
    """
    seen: list[Array] = []

    def record(index: int, h: Array) -> Array:
        del index
        seen.append(h)
        return h

    def mix(index: int, h: Array) -> Array:
        mixed = _blend(mixture.weight, seen[index][mixture.partner], h)
        return jnp.where(mixture.layer == index, mixed, h)

    network.layered_outputs(model, net, fixed, partners.x, record, mask=partners.mask)
    f = network.layered_outputs(model, net, fixed, own.x, mix, mask=own.mask)
    f = linalg.lift(f)
    y = loss.cast(own.y, f.dtype)
    other = loss.cast(partners.y, f.dtype)[mixture.partner]
    value = jax.vmap(loss.value)
    if jnp.issubdtype(y.dtype, jnp.inexact):
        values = value(f, _blend(mixture.weight, other, y))
    else:
        values = _blend(mixture.weight, value(f, other), value(f, y))
    return points.average(values, own)


def _blend(weight: Array, partner: Array, own: Array) -> Array:
    """lambda a + (1 - lambda) b along the first axis of ``[M, ...]``; in the dtype of a float b."""
    dtype = own.dtype if jnp.issubdtype(own.dtype, jnp.inexact) else weight.dtype
    weight = weight.reshape((-1,) + (1,) * (own.ndim - 1)).astype(dtype)
    return weight * partner + (1 - weight) * own
