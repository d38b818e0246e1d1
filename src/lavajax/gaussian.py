"""Gaussian densities: what probabilistic methods train on and are scored by."""

from __future__ import annotations

import math

import jax
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


def inside_interval(mean: Array, variance: Array, y: Array, probability: float = 0.95) -> Array:
    """1 where y lies in the central interval of N(mean, variance) of that probability, else 0.

    Args:
        mean: predicted means, in the units of the targets.
        variance: predicted variances, in squared units.
        y: targets.
        probability: of the interval, between 0 and 1.
    """
    half = jax.scipy.stats.norm.ppf(0.5 + probability / 2) * jnp.sqrt(variance)
    return (jnp.abs(y - mean) <= half).astype(mean.dtype)


def crps(mean: Array, variance: Array, y: Array) -> Array:
    r"""Continuous ranked probability score of N(mean, variance) at y, elementwise.

    sigma [ z (2 Phi(z) - 1) + 2 phi(z) - 1/sqrt(pi) ], z = (y - mean)/sigma, in the units of the
    targets: the absolute error of a density without width (Gneiting and Raftery 2007, section 4.2).

    Args:
        mean: predicted means.
        variance: predicted variances, above 0.
        y: targets.
    """
    std = jnp.sqrt(variance)
    z = (y - mean) / std
    normal = jax.scipy.stats.norm
    return std * (z * (2 * normal.cdf(z) - 1) + 2 * normal.pdf(z) - 1 / math.sqrt(math.pi))


def kl_divergence(mean_q: Array, log_std_q: Array, mean_p: Array, log_std_p: Array) -> Array:
    """KL(q || p) of two normal densities, elementwise, in nats; shapes broadcast.

    Args:
        mean_q: means of q.
        log_std_q: log standard deviations of q.
        mean_p: means of p.
        log_std_p: log standard deviations of p.
    """
    log_ratio = log_std_q - log_std_p
    distance = (mean_q - mean_p) * jnp.exp(-log_std_p)
    return 0.5 * (distance**2 + jnp.exp(2 * log_ratio) - 1 - 2 * log_ratio)
