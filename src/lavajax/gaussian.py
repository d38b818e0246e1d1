"""Gaussian predictive densities: what probabilistic methods train on and are scored by."""

from __future__ import annotations

import math

import jax.numpy as jnp

from lavajax.types import Array


def negative_log_density(mean: Array, variance: Array, y: Array) -> Array:
    """-log N(y; mean, variance), elementwise, in nats; shapes broadcast.

    Args:
        mean: predicted means, in the units of the targets.
        variance: predicted variances, above 0, in squared units.
        y: targets.
    """
    return 0.5 * (jnp.log(variance) + math.log(2 * math.pi) + (y - mean) ** 2 / variance)
