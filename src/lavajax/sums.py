r"""Sums over the points of a task: all that a head in closed form needs of them.

With steps d_i and curvatures H_i of the points, and an eps that a point brings,

    theta' = theta_0 + (sum_i H_i + N eps I)^-1 (sum_i H_i d_i + eps sum_i d_i).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lavajax import linalg
from lavajax.types import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the points of a task, for a head W ``[P, k]``.

    Attributes:
        features: sum_i z_i z_i^T, ``[P, P]``: the curvature of any one output, over c.
        curved: sum_i z_i z_i^T d_i, ``[P, k]``, likewise.
        steps: sum_i d_i, ``[P, k]``; 0 of methods whose regulariser leaves the steps alone.
        count: N, a scalar.
        lost: what rounding has taken from these four, as ``Sums``, where points come in one by one.
    """

    features: Array
    curved: Array
    steps: Array
    count: Array
    lost: Sums | None = None

    @property
    def points(self) -> Array:
        """N as regularisers count it: 1 where there is no point."""
        return jnp.where(self.count > 0, self.count, 1.0)


def followed(sums: Sums) -> Sums:
    """The sums of the first points, to ``add`` others to."""
    return dataclasses.replace(sums, lost=jax.tree.map(jnp.zeros_like, sums))


def add(old: Sums, new: Sums, forget: Array | float) -> Sums:
    """forget * old + new, and what rounding loses of it (Kahan 1965), for the next addition.

    In float32 ten thousand additions otherwise lose so much of the sums that a system of small
    regulariser is off by some thousandths.

    Args:
        old: of ``followed`` or ``add``.
        new: of further points.
        forget: what the old ones count for.
    """
    before, lost = dataclasses.replace(old, lost=None), old.lost
    more = jax.tree.map(lambda n, lo, b: n + forget * lo - (1 - forget) * b, new, lost, before)
    total = jax.tree.map(jnp.add, before, more)
    lost = jax.tree.map(lambda m, t, b: m - (t - b), more, total, before)
    return dataclasses.replace(total, lost=lost)


def sums_of(z: Array, steps: Array, extra: Array, weight: Array) -> Sums:
    """The sums of points whose steps lie along their features.

    Args:
        z: features ``[N, P]``; 0 for padding.
        steps: s ``[N, k]`` with z_i z_i^T d_i = z_i s_i.
        extra: t ``[N, k]`` with d_i = z_i t_i, or 0.
        weight: ``[N]``, 0 for padding.
    """
    return Sums(
        features=linalg.matmul(z.T, z),
        curved=linalg.matmul(z.T, steps),
        steps=linalg.matmul(z.T, extra),
        count=jnp.sum(weight),
    )


def sums_behind(z: Array, move: Array, ridge: Array | float) -> Sums:
    """The sums of points that an estimate came from, where those of its plain steps are 0.

    Args:
        z: features ``[N, P]``; 0 for padding.
        move: the estimate, from the prior, ``[P, k]``: that of ``solve_head``.
        ridge: of its system.
    """
    gram = linalg.matmul(z.T, z)
    return Sums(
        features=gram,
        curved=linalg.matmul(gram, move) + linalg.above_rounding(ridge, gram) * move,
        steps=jnp.zeros_like(move),
        count=jnp.sum(jnp.any(z != 0, axis=-1), dtype=z.dtype),
    )


def solve_head(prior: Array, sums: Sums, ridge: Array | float, share: Array | float) -> Array:
    """W_0 + (sum z z^T + ridge I)^-1 (curved + share steps), ``[P, k]``."""
    rhs = sums.curved + share * sums.steps
    return prior + linalg.solve_regularised(sums.features, rhs, ridge)
