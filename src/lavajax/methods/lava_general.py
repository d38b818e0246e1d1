"""LAVA for any block and any loss: steps and curvatures by differentiation, point by point."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from lavajax import linalg, points, precision, tangent
from lavajax.curvature import PointLosses
from lavajax.losses import constant_curvature
from lavajax.methods.base import bind_support, inner_rate, prior_of
from lavajax.methods.noise import outer_loss
from lavajax.models.base import TappedModel
from lavajax.subspace import Bound, Context, Full, Head
from lavajax.types import Adapted, Array, MetaParams, Points, PyTree, Task

if TYPE_CHECKING:
    from lavajax.methods.lava import Lava


def adapt_general(method: Lava, params: MetaParams, support: Points, bound: Bound) -> Adapted:
    """Any block and any loss: steps and curvatures by differentiation, point by point."""
    prior = bound.prior
    apart = PointLosses.of(method.point_loss, support, bound)
    if _in_span(method, apart, prior):
        return _adapt_in_span(method, params, apart, prior)
    if _head_in_span(method, apart, prior):
        return Adapted(_adapt_head_in_span(method, params, apart, prior))
    steps, curvature = _fan(method, params, apart, prior)
    epsilon = method.epsilon_share(params, apart.mean_scale(curvature.traces()), apart.count)
    if method.solver == "naive":
        fan = jax.tree.map(jnp.add, prior, steps)
        block = precision.literal(fan, curvature, apart.weight, epsilon)
    else:
        block = precision.aggregate(prior, steps, curvature, apart.weight, epsilon)
    if isinstance(curvature, precision.Dense):
        definite = curvature.definite(apart.count * epsilon)
        block = jax.tree.map(lambda leaf: leaf * definite, block)
    if not isinstance(curvature, precision.LowRank):
        return Adapted(block)
    ridge = apart.count * epsilon
    return method.outcome(params, block, curvature.rows() / jnp.sqrt(ridge), ridge)


MOST_DIAGNOSED = 2**28  # a GiB in float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LavaDiagnostics:
    """The parts of one LAVA estimate, for N points and a block of n parameters.

    Attributes:
        theta: theta_i, the block's pytree with leaves ``[N, ...]``.
        hessians: H_i, ``[N, n, n]``; 0 for padding.
        epsilon: eps as used, a scalar.
        eigenvalues: of the precision sum_i H_i + N eps I, ``[n]``, ascending. One at or below 0
            says that exact Hessians made it indefinite: there is then no estimate. The condition
            number is the ratio of the last to the first.
    """

    theta: PyTree
    hessians: Array
    epsilon: Array
    eigenvalues: Array


def diagnose(method: Lava, params: MetaParams, support: Points) -> LavaDiagnostics:
    """What the estimate for one task is made of, by the literal route: for small blocks.

    Args:
        params: meta-parameters of this method.
        support: at least one point.

    Raises:
        ValueError: the Hessians would have more than ``MOST_DIAGNOSED`` numbers.
    """
    support, bound = bind_support(method, params, support)
    prior = bound.prior
    number, size = support.x.shape[0], sum(leaf.size for leaf in jax.tree.leaves(prior))
    if number * size**2 > MOST_DIAGNOSED:
        raise ValueError(
            f"support must have few enough points for their Hessians to be held, {MOST_DIAGNOSED} "
            f"numbers in all, got {number} points, with {size} x {size} numbers each: diagnose a "
            "smaller network, or fewer points"
        )
    apart = PointLosses.of(method.point_loss, support, bound)
    steps, curvature = _fan(method, params, apart, prior)
    epsilon = method.epsilon_share(params, apart.mean_scale(curvature.traces()), apart.count)
    hessians = curvature.matrices()
    total = linalg.add_diagonal(jnp.sum(hessians, axis=0), apart.count * epsilon)
    return LavaDiagnostics(
        theta=jax.tree.map(jnp.add, prior, steps),
        hessians=hessians,
        epsilon=jnp.asarray(epsilon),
        eigenvalues=jnp.linalg.eigvalsh(total),
    )


def _fan(
    method: Lava, params: MetaParams, apart: PointLosses, prior: PyTree
) -> tuple[PyTree, precision.Curvature]:
    """The steps d_i, with leaves ``[N, ...]``, and the curvatures H_i."""
    f, jacobian = apart.jacobian(prior, fan=False)  # compiled only where it is used
    if method.linear_steps:
        steps = jacobian.spread(_newton(method, params, apart, f, jacobian.blocks()))
    elif method.at_prior and method.inner_steps == 1:
        steps = jacobian.spread(apart.gradient_coefficients(f, inner_rate(method, params)))
    else:
        steps = apart.descend(prior, inner_rate(method, params), method.counted_steps)
    if method.curvature == "flat":
        size = sum(leaf.size for leaf in jax.tree.leaves(prior))
        return steps, precision.Flat(apart.weight.shape[0], size)
    fan = not method.at_prior
    theta = jax.tree.map(jnp.add, prior, steps) if fan else prior
    if method.curvature == "hessian":
        return steps, precision.Dense(apart.hessians(theta, fan=fan))
    if fan:
        f, jacobian = apart.jacobian(theta, fan=True)
    return steps, precision.LowRank(apart.factors(f, jacobian), method.route)


def _newton(method: Lava, params: MetaParams, apart: PointLosses, f: Array, blocks: Array) -> Array:
    """a ``[N, k]``, d_i = J_i^T a_i, of steps to the least of each linearised point."""
    # A few context parameters may move some outputs hardly or not at all: without damping
    # they would move without bound. A head moves all alike, and is part of all weights.
    relative = 1e-4 if isinstance(method.subspace, Context) else 0.0
    if method.inner_steps == "converged":
        return apart.newton_coefficients(f, blocks, 0.0, relative)
    epsilon = _epsilon_at(method, params, apart, f, blocks)
    damping = epsilon / constant_curvature(method.point_loss, apart.out_dim)
    return apart.newton_coefficients(f, blocks, damping, relative)


def _epsilon_at(
    method: Lava, params: MetaParams, apart: PointLosses, f: Array, blocks: Array
) -> Array | float:
    """eps, given outputs and J_i J_i^T ``[N, k, k]`` where curvatures are taken."""
    s = apart.loss_factors(f)
    traces = linalg.einsum("nkr,nkl,nlr->n", s, blocks, s)
    return method.epsilon_share(params, apart.mean_scale(traces), apart.count)


def _in_span(method: Lava, apart: PointLosses, prior: PyTree) -> bool:
    """Whether all of it can happen in the space of the N k outputs, which is the smaller.

    For all weights only: their J_i J_i^T contains ||z_i||^2 I, from the head, and is never
    near singular as that of a context can be, which would spoil the coefficients.
    """
    if not isinstance(method.subspace, Full) or method.curvature != "ggn":
        return False
    if not (method.linear_steps or method.inner_steps == 1):
        return False
    if not tangent.is_tapped(method.model) and not (method.at_prior and method.noise is None):
        return False
    size = sum(leaf.size for leaf in jax.tree.leaves(prior))
    small = apart.weight.shape[0] * apart.out_dim < size
    return method.solver == "dual" or (method.solver == "auto" and small)


def _adapt_in_span(method: Lava, params: MetaParams, apart: PointLosses, prior: PyTree) -> Adapted:
    """theta_0 + J^T u, without a step or, where there is no noise, a curvature ever written out."""
    if not tangent.is_tapped(method.model):
        return Adapted(jax.tree.map(jnp.add, prior, _move(method, params, apart, prior)))
    layers = _moves_by_layers(method, method.model, params, apart)
    block = jax.tree.map(jnp.add, prior, tangent.combined(layers.moves))
    if method.noise is None:
        return Adapted(block)
    ridge = apart.count * layers.epsilon
    rows = layers.curved.written_out(layers.factors / jnp.sqrt(ridge)).matrix()
    return method.outcome(params, block, rows.reshape(-1, rows.shape[-1]), ridge)


def loss(method: Lava, params: MetaParams, task: Task, key: Array | None) -> Array:
    """The loss of the query after adapting; see ``Method``.

    Where all weights adapt by their layers' inputs and signals, at few points of wide layers, no
    task has a copy of the weights: they are moved by matrices of low rank, in the pass itself.
    """
    model, number, queries = method.model, task.support.x.shape[0], task.query.x.shape[0]
    if not (isinstance(method.subspace, Full) and tangent.is_tapped(model) and number):
        return outer_loss(method, params, task, key)
    if method.outer == "nll":
        return outer_loss(method, params, task, key)
    support, bound = bind_support(method, params, task.support)
    apart = PointLosses.of(method.point_loss, support, bound)
    widest = max(layer["bias"].shape[0] for layer in bound.prior["weights"])
    rank = number if method.at_prior else 2 * number
    # Per step of rank one a copy costs the product of a layer's widths, and the pass their sum for
    # each query point; with less of each than a layer is wide it takes less memory too.
    if max(rank, 2 * queries) > widest or not _in_span(method, apart, bound.prior):
        return outer_loss(method, params, task, key)
    moves = _moves_by_layers(method, model, params, apart).moves
    query = points.sanitise(task.query)
    shared = prior_of(method, params).block
    after = tangent.outputs_after(model, shared, params.fixed["backbone"], query.x, moves)
    return points.mean_loss(method.point_loss, linalg.lift(after), query)


def _move(method: Lava, params: MetaParams, apart: PointLosses, prior: PyTree) -> PyTree:
    """What theta_0 moves by: J^T u, of the Jacobian J at it."""
    f, jacobian = apart.jacobian(prior, fan=False)
    gram = jacobian.gram()
    steps = _coefficients(method, params, apart, f, jnp.einsum("nknl->nkl", gram))
    epsilon, factors = _epsilon_of(method, params, apart, f, gram), apart.loss_factors(f)
    u = precision.correct_in_span(gram, gram, steps, factors, count=apart.count, epsilon=epsilon)
    return jacobian.combine(steps / apart.count + u)


class ByLayers(NamedTuple):
    """An estimate by the inputs and signals of layers.

    Attributes:
        moves: what theta_0 moves by, Jacobians J and their u ``[N, k]`` of J^T u.
        curved: J', the Jacobian where curvatures are taken.
        factors: S ``[N, k, r]``, of the curvatures J'_i^T S_i S_i^T J'_i.
        epsilon: eps.
    """

    moves: list[tuple[tangent.LayerRows, Array]]
    curved: tangent.LayerRows
    factors: Array
    epsilon: Array | float


def _moves_by_layers(
    method: Lava, model: TappedModel, params: MetaParams, apart: PointLosses
) -> ByLayers:
    """The same by inputs and signals of layers, with curvatures at theta_0 or at the theta_i.

    By weights that all tasks share: the prior block of ``bind_support`` varies with the task, and
    would be one for each.
    """
    shared, fixed = prior_of(method, params).block, params.fixed["backbone"]
    at = model, shared, fixed, apart.inputs, apart.weight
    f, rows = tangent.layer_rows(*at)
    gram = rows.gram()
    steps = _coefficients(method, params, apart, f, jnp.einsum("nknl->nkl", gram))
    average = steps / apart.count
    curved, cross = rows, gram
    if not method.at_prior:
        f, curved = tangent.layer_rows(*at, steps=rows.steps(steps))
        gram, cross = curved.gram(), curved.products(rows)
    epsilon, factors = _epsilon_of(method, params, apart, f, gram), apart.loss_factors(f)
    u = precision.correct_in_span(gram, cross, steps, factors, count=apart.count, epsilon=epsilon)
    moves = [(rows, average + u)] if method.at_prior else [(rows, average), (curved, u)]
    return ByLayers(moves, curved, factors, epsilon)


def _coefficients(
    method: Lava, params: MetaParams, apart: PointLosses, f: Array, blocks: Array
) -> Array:
    """a ``[N, k]``, d_i = J_i^T a_i, given outputs and J_i J_i^T ``[N, k, k]`` at the prior."""
    if method.linear_steps:
        return _newton(method, params, apart, f, blocks)
    return apart.gradient_coefficients(f, inner_rate(method, params))


def _epsilon_of(
    method: Lava, params: MetaParams, apart: PointLosses, f: Array, gram: Array
) -> Array | float:
    """eps, given outputs and K ``[N, k, N, k]`` where curvatures are taken."""
    return _epsilon_at(method, params, apart, f, jnp.einsum("nknl->nkl", gram))


def _head_in_span(method: Lava, apart: PointLosses, prior: PyTree) -> bool:
    """Whether the head of a loss of any curvature, as of classes, is adapted by its features.

    Where points are fewer than features; then no Jacobian is written out, of N k rows of P k.
    """
    if not isinstance(method.subspace, Head) or method.curvature != "ggn" or method.linear_steps:
        return False
    small = apart.weight.shape[0] < prior.shape[0]
    return method.solver == "dual" or (method.solver == "auto" and small)


def _adapt_head_in_span(method: Lava, params: MetaParams, apart: PointLosses, head: Array) -> Array:
    """W_0 + Z^T u: every step of a point is a multiple of its features, d_i = z_i a_i^T.

    With f_i = W_0^T z_i and s_i = ||z_i||^2, a gradient step is a_i <- a_i - alpha dl/df at
    f_i + s_i a_i, and the Jacobians' products are J_i J_j^T = (z_i z_j) I.
    """
    z = apart.inputs * apart.weight[:, None]
    f = linalg.matmul(z, head)
    squares = jnp.sum(z**2, axis=-1)[:, None]
    rate = inner_rate(method, params)
    steps = jnp.zeros_like(f)
    if method.counted_steps == 1:  # what the scan would compute, without its overhead
        steps = apart.gradient_coefficients(f, rate)
    else:
        steps, _ = lax.scan(
            lambda a, _: (a + apart.gradient_coefficients(f + squares * a, rate), None),
            steps,
            length=method.counted_steps,
        )
    factors = apart.loss_factors(f if method.at_prior else f + squares * steps)
    traces = squares[:, 0] * jnp.sum(factors**2, axis=(1, 2))
    epsilon = method.epsilon_share(params, apart.mean_scale(traces), apart.count)
    kernel = linalg.matmul(z, z.T)
    gram = kernel[:, None, :, None] * jnp.eye(apart.out_dim, dtype=z.dtype)[:, None, :]
    u = precision.correct_in_span(gram, gram, steps, factors, count=apart.count, epsilon=epsilon)
    u = steps / apart.count + u
    return head + linalg.matmul(z.T, u)
