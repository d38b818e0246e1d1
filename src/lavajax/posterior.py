r"""Gaussian posteriors of an adapted block, by square roots of their precision.

A point of the support has curvature A_i^T A_i in the block. With the rows R = [A_i]_i / sqrt(ridge)
of all of them, and in units of the noise sigma_o^2 of output o, the posterior of the block is

    N(theta', v (I + R^T R)^-1),

where v is the prior variance. No matrix is inverted, and none of n x n is formed for few points.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from lavajax import linalg
from lavajax.linalg import Route
from lavajax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Posterior:
    """The spread of a block of n parameters around its estimate, in units of sigma_o^2.

    Attributes:
        rows: R, ``[r, n]``; 0 for padding.
        prior: v, a scalar.
    """

    rows: Array
    prior: Array

    def variance(self, at: Array, route: Route = "auto") -> Array:
        """v a^T (I + R^T R)^-1 a for every row a of ``at`` ``[..., n]``; ``[...]``."""
        flat = at.reshape(-1, at.shape[-1])
        variance = linalg.posterior_variance(self.rows, flat, route)
        return self.prior * variance.reshape(at.shape[:-1])

    def draw(self, key: Array, shape: tuple[int, ...], route: Route = "auto") -> Array:
        """Deviations from the estimate for sigma_o = 1, ``[*shape, n]``."""
        return jnp.sqrt(self.prior) * linalg.posterior_draw(key, self.rows, shape, route)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DensePosterior:
    """The same, for a precision that is known as a matrix: where points are not kept.

    Attributes:
        factor: L, ``[n, n]``, lower triangular, with L L^T = I + R^T R.
        prior: v, a scalar.
    """

    factor: Array
    prior: Array

    @staticmethod
    def of(precision_in_priors: Array, prior: Array) -> DensePosterior:
        """The posterior for R^T R ``[n, n]``: the points' precision, in units of the prior's."""
        unit = linalg.above_rounding(1.0, precision_in_priors)
        whole = linalg.add_diagonal(precision_in_priors, unit)
        return DensePosterior(jnp.linalg.cholesky(whole), prior)

    def variance(self, at: Array, route: Route = "auto") -> Array:
        """v a^T (I + R^T R)^-1 a for every row a of ``at`` ``[..., n]``; ``[...]``."""
        del route
        flat = at.reshape(-1, at.shape[-1])
        solved = jax.scipy.linalg.solve_triangular(self.factor, flat.T, lower=True)
        return self.prior * jnp.sum(solved**2, axis=0).reshape(at.shape[:-1])

    def draw(self, key: Array, shape: tuple[int, ...], route: Route = "auto") -> Array:
        """Deviations from the estimate for sigma_o = 1, ``[*shape, n]``."""
        del route
        n = self.factor.shape[0]
        normal = jax.random.normal(key, (math.prod(shape), n), self.factor.dtype)
        drawn = jax.scipy.linalg.solve_triangular(self.factor, normal.T, lower=True, trans="T")
        return jnp.sqrt(self.prior) * drawn.T.reshape(*shape, n)
