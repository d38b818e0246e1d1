"""LAVA's head under a loss of constant curvature: closed form, at the cost of one linear solve."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from lavajax import linalg
from lavajax.losses import constant_curvature
from lavajax.methods.base import bind_support, inner_rate, prior_of
from lavajax.methods.head import AtHead, at_head
from lavajax.posterior import DensePosterior
from lavajax.subspace import Bound
from lavajax.sums import Sums, solve_head, sums_behind, sums_of
from lavajax.types import Adapted, Array, MetaParams, Points

if TYPE_CHECKING:
    from lavajax.methods.lava import Lava


def adapt_head(method: Lava, params: MetaParams, support: Points, bound: Bound) -> Adapted:
    """The head under squared error.

    With z the features, R = Z W_0 - Y and s_i = ||z_i||^2, each point's S steps are
    d_i = -beta_i c z_i R_i, beta_i = alpha sum_{j<S} (1 - alpha c s_i)^j, and

        W' = W_0 - (Z^T Z + (N eps/c) I)^-1 Z^T diag(omega) R,   omega_i = beta_i (c s_i + eps);

    converged, beta_i = 1/(c s_i); at the point's own MAP, omega_i = 1.
    """
    at = at_head(method.point_loss, support, bound)
    c = constant_curvature(method.point_loss, bound.prior.shape[1])
    epsilon = method.epsilon_share(params, c * at.scale, at.n)
    curved, plain = _head_steps(method, params, at)
    targets, ridge = curved + epsilon / c * plain, at.n * epsilon
    move = linalg.solve_kronecker_head(at.z, targets, ridge / c, method.route)
    return method.outcome(params, bound.prior + move, jnp.sqrt(c / ridge) * at.z, ridge)


def absorb(method: Lava, params: MetaParams, points: Points) -> Sums:
    """The sums of some points ``[N]``, N >= 0, for adaptation as they arrive.

    Raises:
        ValueError: the setting has no closed form in a head.
    """
    if not method.closed_form:
        raise ValueError(
            "params must be of Lava with a head in closed form to adapt by sums over points, "
            f"got {method!r}"
        )
    points, bound = bind_support(method, params, points)
    at = at_head(method.point_loss, points, bound)
    return sums_of(at.z, *_head_steps(method, params, at), at.weight)


def conclude(method: Lava, params: MetaParams, sums: Sums) -> Adapted:
    """What ``adapt`` gives for all points of the sums."""
    prior = prior_of(method, params).block
    c, n = constant_curvature(method.point_loss, prior.shape[1]), sums.points
    epsilon = method.epsilon_share(params, c * jnp.trace(sums.features) / n, n)
    ridge = n * epsilon / c
    block = solve_head(prior, sums, ridge, epsilon / c)
    if method.noise is None:
        return Adapted(block)
    return Adapted(block, DensePosterior.of(sums.features / ridge, 1 / ridge))


def recall(method: Lava, params: MetaParams, adapted: Adapted) -> Sums:
    """The sums of the points that ``adapted`` came from.

    Raises:
        ValueError: it does not tell them: other steps than ``"map"`` count for less the more points
            there are, and without a noise nothing of the points is kept.
    """
    if not (method.closed_form and method.inner_steps == "map" and method.noise is not None):
        raise ValueError(
            "support must be the points themselves: what Lava adapted to tells them only for a "
            f"head with inner_steps='map' and a noise, such as lava_bayesian(); got {method!r}"
        )
    posterior, prior = adapted.posterior, prior_of(method, params).block
    z = posterior.rows / jnp.sqrt(posterior.prior)
    return sums_behind(z, adapted.block - prior, 1 / posterior.prior)


def _head_steps(method: Lava, params: MetaParams, at: AtHead) -> tuple[Array, Array]:
    """(s_i, t_i), both ``[N, k]``, with d_i = z_i t_i and z_i z_i^T d_i = z_i s_i.

    At a point's own MAP, where H_i d_i + eps d_i = -c z_i R_i whatever eps, (-R_i, 0).
    """
    c = constant_curvature(method.point_loss, at.residual.shape[1])
    s = jnp.sum(at.z**2, axis=-1)
    if method.inner_steps == "map":
        return -at.residual, jnp.zeros_like(at.residual)
    if method.inner_steps == "converged":
        return -at.residual, -at.residual / jnp.where(at.weight > 0, s, 1.0)[:, None]
    rate = inner_rate(method, params)
    plain = -c * rate * _geometric(1 - rate * c * s, method.counted_steps)[:, None] * at.residual
    return s[:, None] * plain, plain


def _geometric(ratio: Array, terms: int) -> Array:
    """sum_{j<terms} ratio^j by Horner's rule: the quotient form is 0/0 at ratio 1 and cancels."""
    if terms == 1:  # what a scan of no length would compute, without its overhead
        return jnp.ones_like(ratio)
    total, _ = lax.scan(
        lambda total, _: (1 + ratio * total, None), jnp.ones_like(ratio), length=terms - 1
    )
    return total
