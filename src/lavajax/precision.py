r"""The sum of the points' precisions, and its solve.

Point i of a task has taken a step d_i from theta_0 and has curvature H_i. The estimate weighs each
step by the curvature of its own loss (equations 8 and 9 of the LAVA paper, with the regulariser
H_i + eps I, whose factor 1/(1 + eps) drops out):

    theta' = theta_0 + (sum_i H_i + N eps I)^-1 sum_i (H_i + eps I) d_i
           = theta_0 + dbar + (sum_i H_i + N eps I)^-1 sum_i H_i (d_i - dbar),   dbar = mean_i d_i.

The second line is what is computed: the plain average of the steps plus a correction. It has no
cancellation, is exact at N = 1 and for identical points, and is the average where the curvature
vanishes. The functions below give the correction for each representation of the H_i; the
ridge they take is N eps. Weights (0 for padding) have already been multiplied into H_i and d_i.

All of it computes in float32 or better, whatever the dtype of the network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

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


def add_diagonal(matrix: Array, value: Array | float) -> Array:
    """matrix + value I."""
    return matrix + value * jnp.eye(matrix.shape[-1], dtype=matrix.dtype)


def solve_kronecker_head(z: Array, targets: Array, ridge: Array, route: Route = "auto") -> Array:
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
        gram = add_diagonal(jnp.matmul(z, z.T, precision=_EXACT), ridge)
        return jnp.matmul(z.T, solve_positive(gram, targets), precision=_EXACT)
    gram = add_diagonal(jnp.matmul(z.T, z, precision=_EXACT), ridge)
    return solve_positive(gram, jnp.matmul(z.T, targets, precision=_EXACT))


def correct_dense(hessians: Array, deviations: PyTree, ridge: Array) -> PyTree:
    """The correction for H_i given as matrices.

    Exact Hessians may be indefinite, so this is a general (LU) solve.

    Args:
        hessians: ``[N, n, n]``.
        deviations: the block's pytree with leaves ``[N, ...]``, e_i = d_i - dbar.
        ridge: scalar, N eps.

    Returns:
        The block's pytree.
    """
    flat, unravel = _ravel_fan(deviations)
    rhs = jnp.einsum("iab,ib->a", hessians, flat, precision=_EXACT)
    return unravel(jnp.linalg.solve(add_diagonal(jnp.sum(hessians, axis=0), ridge), rhs))


def correct_low_rank(
    factors: PyTree, deviations: PyTree, ridge: Array, route: Route = "auto"
) -> PyTree:
    """The correction for H_i = A_i^T A_i.

    Args:
        factors: the block's pytree with leaves ``[N, r, ...]``, A.
        deviations: the block's pytree with leaves ``[N, ...]``, e_i = d_i - dbar.
        ridge: scalar above 0, N eps.
        route: ``"dual"`` solves in the space of the N r outputs,
            A^T (A A^T + ridge I)^-1 [A_i e_i]_i; ``"primal"`` in that of the n parameters,
            (A^T A + ridge I)^-1 A^T [A_i e_i]_i; ``"auto"`` in the smaller.

    Returns:
        The block's pytree.
    """
    leaves, treedef = jax.tree.flatten(factors)
    points, rank = leaves[0].shape[:2]
    flat = [a.reshape(points, rank, -1) for a in leaves]
    moves = [e.reshape(points, -1) for e in jax.tree.leaves(deviations)]
    projected = sum(
        jnp.einsum("irn,in->ir", a, e, precision=_EXACT) for a, e in zip(flat, moves, strict=True)
    )
    rows = [a.reshape(points * rank, -1) for a in flat]
    rhs = jnp.reshape(projected, (points * rank,))

    if route == "dual" or (route == "auto" and points * rank < sum(a.shape[1] for a in rows)):
        gram = sum(jnp.matmul(a, a.T, precision=_EXACT) for a in rows)
        solution = solve_positive(add_diagonal(gram, ridge), rhs)
        out = [jnp.matmul(solution, a, precision=_EXACT) for a in rows]
    else:
        stacked = jnp.concatenate(rows, axis=1)
        gram = add_diagonal(jnp.matmul(stacked.T, stacked, precision=_EXACT), ridge)
        whole = solve_positive(gram, jnp.matmul(rhs, stacked, precision=_EXACT))
        splits = [sum(a.shape[1] for a in rows[: i + 1]) for i in range(len(rows) - 1)]
        out = jnp.split(whole, splits)
    shaped = [o.reshape(a.shape[2:]) for o, a in zip(out, leaves, strict=True)]
    return jax.tree.unflatten(treedef, shaped)


def combine_in_span(
    gram: Array, steps: Array, loss_factors: Array, count: Array, epsilon: Array | float
) -> Array:
    """The whole estimate where every step lies in the span of the Jacobian: theta_0 + J^T u.

    With d_i = J_i^T a_i, K = J J^T, H_i = J_i^T S_i S_i^T J_i,

        u = a/N + S (S^T K S + N eps I)^-1 [S_i^T (K_ii a_i - mean_j K_ij a_j)]_i.

    Args:
        gram: K, ``[N, k, N, k]``; 0 where a row or column belongs to padding.
        steps: a, ``[N, k]``.
        loss_factors: S, ``[N, k, r]``.
        count: N, a scalar.
        epsilon: eps.

    Returns:
        u, ``[N, k]``.
    """
    n, _, r = loss_factors.shape
    diagonal = jnp.einsum("nknl->nkl", gram)
    own = jnp.einsum("nkl,nl->nk", diagonal, steps, precision=_EXACT)
    average = jnp.einsum("nkml,ml->nk", gram, steps, precision=_EXACT) / count
    rhs = jnp.einsum("nkr,nk->nr", loss_factors, own - average, precision=_EXACT)
    system = jnp.einsum(
        "nkr,nkml,mls->nrms", loss_factors, gram, loss_factors, precision=_EXACT
    ).reshape(n * r, n * r)
    solution = solve_positive(add_diagonal(system, count * epsilon), rhs.reshape(n * r))
    return steps / count + jnp.einsum(
        "nkr,nr->nk", loss_factors, solution.reshape(n, r), precision=_EXACT
    )


def literal(theta: PyTree, hessians: Array, weights: Array, epsilon: Array) -> PyTree:
    """The estimate exactly as the paper writes it: the oracle that the fast routes agree with.

    Args:
        theta: theta_i, the block's pytree with leaves ``[N, ...]``.
        hessians: H_i, ``[N, n, n]``.
        weights: ``[N]``, 0 for padding.
        epsilon: eps.

    Returns:
        (sum_i Ht_i)^-1 sum_i Ht_i theta_i with Ht_i = (H_i + eps I)/(1 + eps).
    """
    flat, unravel = _ravel_fan(theta)
    regularised = jax.vmap(lambda h: add_diagonal(h, epsilon))(hessians) / (1 + epsilon)
    regularised = regularised * weights[:, None, None]
    rhs = jnp.einsum("iab,ib->a", regularised, flat, precision=_EXACT)
    return unravel(jnp.linalg.solve(jnp.sum(regularised, axis=0), rhs))


def _ravel_fan(fan: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """Blocks with leaves ``[N, ...]`` as ``[N, n]``, and how to shape ``[n]`` back."""
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], fan))
    return jax.vmap(lambda block: ravel_pytree(block)[0])(fan), unravel
