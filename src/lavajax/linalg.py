"""Symmetric positive definite matrices: solves, log-determinants, variances and draws.

All in float32 or better, differentiated as solves, and for matrices that are a sum over rows by the
smaller of the two Gram matrices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from lavajax.types import Array, PyTree

Route = Literal["auto", "primal", "dual"]

# Products that feed a solve. On accelerators the default one of float32 is rounded to fewer digits.
matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST)
einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def lift(tree: PyTree) -> PyTree:
    """All leaves in float32 or better."""
    return jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), tree)


def solve_positive(matrix: Array, rhs: Array) -> Array:
    """matrix^-1 rhs for a symmetric positive definite ``[n, n]`` and ``[n]`` or ``[n, m]``.

    Differentiated as a solve, not through the factorisation, which costs many times more.
    """
    root = lax.linalg.cholesky(lax.stop_gradient(matrix))
    return _by_root(root, lambda x: matmul(matrix, x), rhs)


def solve_regularised(gram: Array, rhs: Array, ridge: Array | float) -> Array:
    """(G + ridge I)^-1 rhs for a Gram matrix G ``[n, n]`` and ``[n]`` or ``[n, m]``.

    However small the ridge is beside G: see ``above_rounding``.
    """
    return solve_positive(add_diagonal(gram, above_rounding(ridge, gram)), rhs)


def solve_gram(rows: Array, rhs: Array, ridge: Array | float, *, tried: bool = True) -> Array:
    """(R R^T + ridge I)^-1 rhs for rows R ``[n, p]`` and right-hand sides ``[n, m]``.

    The derivative is that of the products R (R^T x), and costs n p m: the n x n matrix, whose own
    would cost n n p, is factored and no more. A ridge that is hardly ever near rounding need not be
    ``tried``, see ``above_rounding``: in training on 50 points that costs a tenth of a step.
    """
    held = lax.stop_gradient(rows)
    gram = matmul(held, held.T)
    ridge = above_rounding(ridge, gram) if tried else jnp.maximum(ridge, 0.5 * _rounding(gram))
    held = add_diagonal(gram, lax.stop_gradient(ridge))
    root = lax.linalg.cholesky(held, symmetrize_input=False)

    def product(x: Array) -> Array:
        inner = matmul(rows.T, x)
        return matmul(rows, inner) + ridge * x

    return _by_root(root, product, rhs)


def _by_root(root: Array, product: Callable[[Array], Array], rhs: Array) -> Array:
    """The x with product(x) = rhs, by the Cholesky factor of the product's matrix."""

    def solve(_: Callable[[Array], Array], b: Array) -> Array:
        return jax.scipy.linalg.cho_solve((root, True), b)

    return lax.custom_linear_solve(product, rhs, solve, symmetric=True)


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
    gram = matmul(left, left.T)
    log_det = log_det_positive(add_diagonal(gram, above_rounding(ridge, gram)))
    return log_det + (n - r) * jnp.log(jnp.asarray(ridge, gram.dtype)) if dual else log_det


def above_rounding(ridge: Array | float, gram: Array) -> Array:
    """A regulariser of a Gram matrix ``[n, n]``, or one with which it can be factored for sure.

    Rounding takes from the eigenvalues of a Gram matrix about half an eps of its trace, the least
    ridge there is here, and more where its rows are nearly multiples of one another. By how much is
    seen only by factoring, which a ridge near rounding is tried by, and raised until it suffices,
    up to 1e3 eps of the trace. Beyond that its factor is NaN, as it is for a gram that is not
    finite. A ridge that suffices is left as it is, and has its derivative.
    """
    ridge = jnp.asarray(ridge, gram.dtype)
    held, start = lax.stop_gradient((gram, ridge))
    rounding = _rounding(held)

    def untried(state: tuple[Array, Array]) -> Array:
        least, suffices = state
        return ~suffices & (least < 100 * rounding)

    def attempt(state: tuple[Array, Array]) -> tuple[Array, Array]:
        least, _ = state
        suffices = jnp.isfinite(jnp.trace(lax.linalg.cholesky(add_diagonal(held, least))))
        return jnp.where(suffices, least, 8 * least), suffices

    start = jnp.maximum(start, 0.5 * rounding)
    least, _ = lax.while_loop(untried, attempt, (start, jnp.isnan(start)))
    return jnp.where(ridge < least, least, ridge)


def _rounding(gram: Array) -> Array:
    """An eps of the trace; not differentiated."""
    return jnp.finfo(gram.dtype).eps * lax.stop_gradient(jnp.trace(gram))


def add_diagonal(matrix: Array, value: Array | float) -> Array:
    """matrix + value I."""
    return matrix + value * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)


def solve_kronecker_head(
    z: Array, targets: Array, ridge: Array | float, route: Route = "auto", *, tried: bool = False
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
        tried: whether the ridge may be near rounding, and is raised where it does not suffice.

    Returns:
        ``[P, k]``.
    """
    n, p = z.shape
    if route == "dual" or (route == "auto" and n < p):
        return matmul(z.T, solve_gram(z, targets, ridge, tried=tried))
    return solve_gram(z.T, matmul(z.T, targets), ridge, tried=tried)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def posterior_variance(z: Array, at: Array, route: Route = "auto") -> Array:
    """a^T (I + Z^T Z)^-1 a for every row a of ``at`` ``[M, P]``, given Z ``[N, P]``; ``[M]``.

    A sum of squares, ||r||^2 + ||Z r||^2 with r = (I + Z^T Z)^-1 a: neither cancellation nor a
    rounding error can make it negative. Its differential is 2 r^T da - 2 (Z r)^T dZ r, a fifth of
    the cost of going back through the solve.
    """
    return _squared(*_residuals(z, at, route))


@posterior_variance.defjvp
def _posterior_variance_jvp(
    route: Route, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    (z, at), (dz, da) = primals, tangents
    r, u = _residuals(z, at, route)
    return _squared(r, u), 2 * jnp.sum(r * (da - matmul(u, dz)), axis=1)


def _squared(r: Array, u: Array) -> Array:
    """||r||^2 + ||u||^2 of every row."""
    return jnp.sum(r**2, axis=1) + jnp.sum(u**2, axis=1)


def _residuals(z: Array, at: Array, route: Route) -> tuple[Array, Array]:
    """r = (I + Z^T Z)^-1 a ``[M, P]`` and Z r ``[M, N]`` for every row a.

    In the dual r = a - Z^T u, u = (I + Z Z^T)^-1 Z a = Z r.
    """
    n, p = z.shape
    if n == 0:
        return at, jnp.zeros((at.shape[0], 0), at.dtype)
    if route == "dual" or (route == "auto" and n < p):
        u = solve_gram(z, matmul(z, at.T), 1.0).T
        return at - matmul(u, z), u
    r = solve_gram(z.T, at.T, 1.0).T
    return r, matmul(r, z.T)


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
        misfit = matmul(z, a.T) - b.T
        a = a - solve_kronecker_head(z, misfit, 1.0, route, tried=True).T
    return a.reshape(*shape, p)
