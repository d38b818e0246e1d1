"""What methods share that solve for a head in closed form."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from lavajax import linalg, points
from lavajax.losses import Loss, constant_curvature
from lavajax.subspace import Bound
from lavajax.types import Array, Points


class AtHead(NamedTuple):
    """The support as a linear regression around the prior head W_0 ``[P, k]``.

    Attributes:
        z: features, ``[N, P]``, in float32 or better; 0 for padding.
        residual: Z W_0 - Y, ``[N, k]``; 0 for padding.
        weight: ``[N]``, 0 for padding.
        n: N as means divide by it: the number of real points, at least 1.
    """

    z: Array
    residual: Array
    weight: Array
    n: Array

    @property
    def scale(self) -> Array:
        """mean_i ||z_i||^2 over real points, a scalar."""
        return jnp.sum(self.z**2) / self.n


def at_head(loss: Loss, support: Points, bound: Bound) -> AtHead:
    """Takes a support whose padding has been made harmless to the head that it is bound to.

    Raises:
        ValueError: the loss has no constant curvature.
    """
    head, z = bound.prior, linalg.lift(bound.inputs)
    weight = points.weights(support, z.dtype)
    z = z * weight[:, None]
    f = linalg.matmul(z, head)
    slope = jax.vmap(jax.grad(loss.value))(f, loss.cast(support.y, f.dtype))
    residual = slope / constant_curvature(loss, head.shape[1]) * weight[:, None]
    return AtHead(z, residual, weight, points.count(support, z.dtype))
