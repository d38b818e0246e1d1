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
import math
from collections.abc import Callable
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from lavajax.types import Array, PyTree

Route = Literal["auto", "primal", "dual"]

# On accelerators the default product of float32 matrices is rounded to fewer digits.
_EXACT = lax.Precision.HIGHEST


def lift(tree: PyTree) -> PyTree:
    """Floating leaves in float32 or better."""
    return jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), tree)


def solve_positive(matrix: Array, rhs: Array) -> Array:
    """matrix^-1 rhs for a symmetric positive definite ``[n, n]`` and ``[n]`` or ``[n, m]``.

    Differentiated as a solve, not through the factorisation, which costs many times more.
    """
    return jax.scipy.linalg.solve(matrix, rhs, assume_a="pos")


def solve_gram(rows: Array, rhs: Array, ridge: Array | float) -> Array:
    """(R R^T + ridge I)^-1 rhs for rows R ``[n, p]`` and a few right-hand sides ``[n, m]``.

    The derivative is that of the products R (R^T x), and costs n p m: the n x n matrix, whose own
    would cost n n p, is factored and no more.
    """

    def product(x: Array) -> Array:
        inner = jnp.matmul(rows.T, x, precision=_EXACT)
        return jnp.matmul(rows, inner, precision=_EXACT) + ridge * x

    held, held_ridge = lax.stop_gradient((rows, ridge))
    gram = add_diagonal(jnp.matmul(held, held.T, precision=_EXACT), held_ridge)
    factor = jax.scipy.linalg.cho_factor(gram, lower=True)
    return lax.custom_linear_solve(
        product, rhs, lambda _, b: jax.scipy.linalg.cho_solve(factor, b), symmetric=True
    )


@jax.custom_jvp
def log_det_positive(matrix: Array) -> Array:
    """log det of a symmetric positive definite ``[n, n]``; NaN where it is not.

    Differentiated by a solve, d log det A = tr(A^-1 dA), not through the factorisation.
    """
    return 2 * jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(matrix))))


@log_det_positive.defjvp
def _log_det_positive_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (matrix,), (tangent,) = primals, tangents
    return log_det_positive(matrix), jnp.trace(solve_positive(matrix, tangent))


def log_det_rows(rows: Array, ridge: Array | float, route: Route = "auto") -> Array:
    """log det(A^T A + ridge I_n), a scalar, for rows A ``[r, n]``, of any rank.

    Args:
        rows: A; rows of zeros change nothing.
        ridge: scalar above 0.
        route: ``"primal"`` factors the n x n matrix, ``"dual"`` the r x r one,
            (n - r) log ridge + log det(A A^T + ridge I_r); ``"auto"`` the smaller.
    """
    r, n = rows.shape
    dual = route == "dual" or (route == "auto" and r < n)
    left = rows if dual else rows.T
    gram = jnp.matmul(left, left.T, precision=_EXACT)
    # Raised by what rounding may take away, so that the matrix can always be factored.
    rounding = 10 * jnp.finfo(gram.dtype).eps * jnp.trace(gram) / max(gram.shape[0], 1)
    log_det = log_det_positive(add_diagonal(gram, ridge + rounding))
    return log_det + (n - r) * jnp.log(jnp.asarray(ridge, gram.dtype)) if dual else log_det


def add_diagonal(matrix: Array, value: Array | float) -> Array:
    """matrix + value I."""
    return matrix + value * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)


def solve_kronecker_head(
    z: Array, targets: Array, ridge: Array | float, route: Route = "auto"
) -> Array:
    """(Z^T Z + ridge I_P)^-1 Z^T T: one solve for all k outputs, of size min(N, P).

    For a linear head under a loss of constant curvature c, H_i = c z_i z_i^T (x) I_k, so the
    precision is a Kronecker product and no Hessian is ever built.

    Args:
        z: ``[N, P]``, zero rows for padding.
        targets: T, ``[N, k]``.
        ridge: scalar above 0, N eps / c.
        route: ``"primal"`` solves the P x P system, ``"dual"`` the N x N one,
            Z^T (Z Z^T + ridge I_N)^-1 T; ``"auto"`` the smaller.

    Returns:
        ``[P, k]``.
    """
    n, p = z.shape
    if route == "dual" or (route == "auto" and n < p):
        return jnp.matmul(z.T, solve_gram(z, targets, ridge), precision=_EXACT)
    return solve_gram(z.T, jnp.matmul(z.T, targets, precision=_EXACT), ridge)


def posterior_variance(z: Array, at: Array, route: Route = "auto") -> Array:
    """a^T (I + Z^T Z)^-1 a for every row a of ``at`` ``[M, P]``, given Z ``[N, P]``; ``[M]``.

    A sum of squares, ||r||^2 + ||Z r||^2 with r = (I + Z^T Z)^-1 a: neither cancellation nor a
    rounding error can make it negative. In the dual r = a - Z^T u, u = (I + Z Z^T)^-1 Z a = Z r.
    """
    n, p = z.shape
    if n == 0:
        return jnp.sum(at**2, axis=-1)
    if route == "dual" or (route == "auto" and n < p):
        gram = add_diagonal(jnp.matmul(z, z.T, precision=_EXACT), 1.0)
        u = solve_positive(gram, jnp.matmul(z, at.T, precision=_EXACT))
        r = at.T - jnp.matmul(z.T, u, precision=_EXACT)
    else:
        gram = add_diagonal(jnp.matmul(z.T, z, precision=_EXACT), 1.0)
        r = solve_positive(gram, at.T)
        u = jnp.matmul(z, r, precision=_EXACT)
    return jnp.sum(r**2, axis=0) + jnp.sum(u**2, axis=0)


def posterior_draw(key: Array, z: Array, shape: tuple[int, ...], route: Route = "auto") -> Array:
    """Draws from N(0, (I + Z^T Z)^-1), ``[*shape, P]``, given Z ``[N, P]``.

    (I + Z^T Z)^-1 (a + Z^T b) for standard normal a ``[P]`` and b ``[N]``: one solve for all draws,
    and no square root.
    """
    n, p = z.shape
    prior_key, point_key = jax.random.split(key)
    a = jax.random.normal(prior_key, (math.prod(shape), p), z.dtype)
    if n:
        b = jax.random.normal(point_key, (a.shape[0], n), z.dtype)
        # The prior's draw, moved by its misfit to the points: a - Z^T (I + Z Z^T)^-1 (Z a - b).
        misfit = jnp.matmul(z, a.T, precision=_EXACT) - b.T
        a = a - solve_kronecker_head(z, misfit, 1.0, route).T
    return a.reshape(*shape, p)


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
        rhs = jnp.einsum("iab,ib->a", self.hessians, flat, precision=_EXACT)
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
        return jnp.einsum("irn,irm->inm", rows, rows, precision=_EXACT)

    def correct(self, deviations: PyTree, ridge: Array) -> PyTree:
        """See ``Curvature``."""
        flat = self._flat()
        n, r, _ = flat[0].shape
        moves = [e.reshape(n, -1) for e in jax.tree.leaves(deviations)]
        projected = [
            jnp.einsum("irn,in->ir", a, e, precision=_EXACT)
            for a, e in zip(flat, moves, strict=True)
        ]
        rhs = functools.reduce(jnp.add, projected).reshape(n * r)
        rows = [a.reshape(n * r, -1) for a in flat]
        small = n * r < sum(a.shape[1] for a in rows)
        if self.route == "dual" or (self.route == "auto" and small):
            grams = [jnp.matmul(a, a.T, precision=_EXACT) for a in rows]
            system = add_diagonal(functools.reduce(jnp.add, grams), ridge)
            solution = solve_positive(system, rhs)
            out = [jnp.matmul(solution, a, precision=_EXACT) for a in rows]
        else:
            whole = self.rows()
            system = add_diagonal(jnp.matmul(whole.T, whole, precision=_EXACT), ridge)
            solution = solve_positive(system, jnp.matmul(rhs, whole, precision=_EXACT))
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
    own = jnp.einsum("nkl,nl->nk", diagonal, steps, precision=_EXACT)
    average = jnp.einsum("nkml,ml->nk", cross, steps, precision=_EXACT) / count
    rhs = jnp.einsum("nkr,nk->nr", loss_factors, own - average, precision=_EXACT)
    system = jnp.einsum(
        "nkr,nkml,mls->nrms", loss_factors, gram, loss_factors, precision=_EXACT
    ).reshape(n * r, n * r)
    solution = solve_positive(add_diagonal(system, count * epsilon), rhs.reshape(n * r))
    return jnp.einsum("nkr,nr->nk", loss_factors, solution.reshape(n, r), precision=_EXACT)


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
    rhs = jnp.einsum("iab,ib->a", regularised, flat, precision=_EXACT)
    return unravel(jnp.linalg.solve(jnp.sum(regularised, axis=0), rhs))


def _ravel_fan(fan: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """Blocks with leaves ``[N, ...]`` as ``[N, n]``, and how to shape ``[n]`` back."""
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], fan))
    return jax.vmap(lambda block: ravel_pytree(block)[0])(fan), unravel
