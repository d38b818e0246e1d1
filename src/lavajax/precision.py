r"""The sum of the points' precisions, and its solve.

Point i of a task has taken a step d_i from theta_0 and has curvature H_i. The estimate weighs each
step by the curvature of its own loss (equations 8 and 9 of the LAVA paper, with the regulariser
H_i + eps I, whose factor 1/(1 + eps) drops out):

    theta' = theta_0 + (sum_i H_i + N eps I)^-1 sum_i (H_i + eps I) d_i
           = theta_0 + dbar + (sum_i H_i + N eps I)^-1 sum_i H_i (d_i - dbar),   dbar = mean_i d_i.

The second line is what is computed: the plain average of the steps plus a correction. It has no
cancellation, is exact at N = 1 and for identical points, and is the average where the curvature
vanishes. The classes below give the correction for each representation of the H_i. Weights (0 for
padding) have already been multiplied into H_i and d_i.

All of it computes in float32 or better, whatever the dtype of the network.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from lavajax.linalg import Route, add_diagonal, einsum, matmul, solve_regularised
from lavajax.types import Array, PyTree


class Curvature(Protocol):
    """The curvatures H_i of N points in a block of n parameters, in some representation."""

    def traces(self) -> Array:
        """tr H_i, ``[N]``."""

    def matrices(self) -> Array:
        """H_i, ``[N, n, n]``."""

    def correct(self, deviations: PyTree, ridge: Array) -> PyTree:
        """(sum_i H_i + ridge I)^-1 sum_i H_i e_i.

        Args:
            deviations: the block's pytree with leaves ``[N, ...]``, e_i = d_i - dbar.
            ridge: scalar above 0, N eps.

        Returns:
            The block's pytree.
        """


@dataclasses.dataclass(frozen=True)
class Dense:
    """Matrices. Exact Hessians may be indefinite: see ``definite``.

    Attributes:
        hessians: ``[N, n, n]``.
    """

    hessians: Array

    def definite(self, ridge: Array | float) -> Array:
        """1 where sum_i H_i + ridge I is positive definite, but for rounding, else NaN; a scalar.

        The factor of an estimate, which where it is NaN would be no minimum of anything. It makes
        the gradient NaN too.
        """
        total = lax.stop_gradient(jnp.sum(self.hessians, axis=0))
        ridge = lax.stop_gradient(ridge)
        rounding = 10 * jnp.finfo(total.dtype).eps * jnp.sum(jnp.abs(jnp.diagonal(total)))
        root = jnp.linalg.cholesky(add_diagonal(total, ridge + rounding))
        return jnp.where(jnp.all(jnp.isfinite(root)), 1.0, jnp.nan).astype(total.dtype)

    def traces(self) -> Array:
        """See ``Curvature``."""
        return jnp.trace(self.hessians, axis1=1, axis2=2)

    def matrices(self) -> Array:
        """See ``Curvature``."""
        return self.hessians

    def correct(self, deviations: PyTree, ridge: Array) -> PyTree:
        """See ``Curvature``."""
        flat, unravel = _ravel_fan(deviations)
        rhs = einsum("iab,ib->a", self.hessians, flat)
        total = add_diagonal(jnp.sum(self.hessians, axis=0), ridge)
        return unravel(jnp.linalg.solve(total, rhs))


@dataclasses.dataclass(frozen=True)
class LowRank:
    """H_i = A_i^T A_i, with as many rows as the loss has curved directions in the outputs.

    Attributes:
        factors: A, the block's pytree with leaves ``[N, r, ...]``.
        route: ``"dual"`` solves in the space of the N r rows, A^T (A A^T + ridge I)^-1 [A_i e_i]_i;
            ``"primal"`` in that of the n parameters, (A^T A + ridge I)^-1 A^T [A_i e_i]_i;
            ``"auto"`` in the smaller.
    """

    factors: PyTree
    route: Route = "auto"

    def traces(self) -> Array:
        """See ``Curvature``."""
        squares = [jnp.sum(a**2, axis=(1, 2)) for a in self._flat()]
        return functools.reduce(jnp.add, squares)

    def matrices(self) -> Array:
        """See ``Curvature``."""
        rows = jnp.concatenate(self._flat(), axis=2)
        return einsum("irn,irm->inm", rows, rows)

    def correct(self, deviations: PyTree, ridge: Array) -> PyTree:
        """See ``Curvature``."""
        flat = self._flat()
        n, r, _ = flat[0].shape
        moves = [e.reshape(n, -1) for e in jax.tree.leaves(deviations)]
        projected = [einsum("irn,in->ir", a, e) for a, e in zip(flat, moves, strict=True)]
        rhs = functools.reduce(jnp.add, projected).reshape(n * r)
        rows = [a.reshape(n * r, -1) for a in flat]
        small = n * r < sum(a.shape[1] for a in rows)
        if self.route == "dual" or (self.route == "auto" and small):
            grams = [matmul(a, a.T) for a in rows]
            solution = solve_regularised(functools.reduce(jnp.add, grams), rhs, ridge)
            out = [matmul(solution, a) for a in rows]
        else:
            whole = self.rows()
            solution = solve_regularised(matmul(whole.T, whole), matmul(rhs, whole), ridge)
            ends = list(itertools.accumulate(a.shape[1] for a in rows))
            out = jnp.split(solution, ends[:-1])
        leaves, treedef = jax.tree.flatten(self.factors)
        shaped = [o.reshape(a.shape[2:]) for o, a in zip(out, leaves, strict=True)]
        return jax.tree.unflatten(treedef, shaped)

    def rows(self) -> Array:
        """A, ``[N r, n]``."""
        return jnp.concatenate([a.reshape(-1, a.shape[-1]) for a in self._flat()], axis=1)

    def _flat(self) -> list[Array]:
        return [a.reshape(*a.shape[:2], -1) for a in jax.tree.leaves(self.factors)]


@dataclasses.dataclass(frozen=True)
class Flat:
    """H_i = 0: the estimate is the plain average of the steps.

    Attributes:
        points: N.
        size: n.
    """

    points: int
    size: int

    def traces(self) -> Array:
        """See ``Curvature``."""
        return jnp.zeros(self.points)

    def matrices(self) -> Array:
        """See ``Curvature``."""
        return jnp.zeros((self.points, self.size, self.size))

    def correct(self, deviations: PyTree, ridge: Array) -> PyTree:
        """See ``Curvature``."""
        del ridge
        return jax.tree.map(lambda e: jnp.zeros_like(e[0]), deviations)


def aggregate(
    prior: PyTree, steps: PyTree, curvature: Curvature, weight: Array, epsilon: Array | float
) -> PyTree:
    """theta', from the steps and curvatures of the points.

    Args:
        prior: theta_0.
        steps: d_i, the block's pytree with leaves ``[N, ...]``; 0 for padding.
        curvature: H_i; 0 for padding.
        weight: ``[N]``, 0 for padding.
        epsilon: eps.
    """
    count = jnp.maximum(jnp.sum(weight), 1.0)
    mean = jax.tree.map(lambda d: jnp.sum(d, axis=0) / count, steps)
    deviations = jax.tree.map(
        lambda d, m: (d - m) * weight.reshape((-1,) + (1,) * m.ndim), steps, mean
    )
    correction = curvature.correct(deviations, count * epsilon)
    return jax.tree.map(lambda t, m, c: t + m + c, prior, mean, correction)


def correct_in_span(
    gram: Array,
    cross: Array,
    steps: Array,
    loss_factors: Array,
    *,
    count: Array,
    epsilon: Array | float,
) -> Array:
    """The correction where steps and curvatures lie in spans of Jacobians: J'^T u.

    With d_i = J_i^T a_i and H_i = J'_i^T S_i S_i^T J'_i, and C = J' J^T, K = J' J'^T,

        u = S (S^T K S + N eps I)^-1 [S_i^T (C_ii a_i - mean_j C_ij a_j)]_i,

    which makes the whole estimate theta_0 + J^T a/N + J'^T u.

    Args:
        gram: K, ``[N, k, N, k]``; 0 where a row or column belongs to padding.
        cross: C, likewise; K itself where the curvature is taken at theta_0.
        steps: a, ``[N, k]``.
        loss_factors: S, ``[N, k, r]``.
        count: N, a scalar.
        epsilon: eps.

    Returns:
        u, ``[N, k]``.
    """
    n, _, r = loss_factors.shape
    diagonal = jnp.einsum("nknl->nkl", cross)
    own = einsum("nkl,nl->nk", diagonal, steps)
    average = einsum("nkml,ml->nk", cross, steps) / count
    rhs = einsum("nkr,nk->nr", loss_factors, own - average)
    system = einsum("nkr,nkml,mls->nrms", loss_factors, gram, loss_factors).reshape(n * r, n * r)
    solution = solve_regularised(system, rhs.reshape(n * r), count * epsilon)
    return einsum("nkr,nr->nk", loss_factors, solution.reshape(n, r))


def literal(theta: PyTree, curvature: Curvature, weight: Array, epsilon: Array | float) -> PyTree:
    """The estimate exactly as the paper writes it: the oracle that the fast routes agree with.

    Args:
        theta: theta_i, the block's pytree with leaves ``[N, ...]``.
        curvature: H_i.
        weight: ``[N]``, 0 for padding.
        epsilon: eps.

    Returns:
        (sum_i Ht_i)^-1 sum_i Ht_i theta_i with Ht_i = (H_i + eps I)/(1 + eps).
    """
    flat, unravel = _ravel_fan(theta)
    regularised = jax.vmap(lambda h: add_diagonal(h, epsilon))(curvature.matrices())
    # Without any real point the first entry of padding, which has not moved, stands in for theta_0.
    weight = jnp.where(jnp.any(weight > 0), weight, jnp.arange(weight.shape[0]) == 0)
    regularised = regularised / (1 + epsilon) * weight[:, None, None]
    rhs = einsum("iab,ib->a", regularised, flat)
    return unravel(jnp.linalg.solve(jnp.sum(regularised, axis=0), rhs))


def _ravel_fan(fan: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """Blocks with leaves ``[N, ...]`` as ``[N, n]``, and how to shape ``[n]`` back."""
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], fan))
    return jax.vmap(lambda block: ravel_pytree(block)[0])(fan), unravel
