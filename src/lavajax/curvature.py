"""The losses of a task's points taken apart: their steps, Jacobians and curvatures.

A *fan* of blocks is the block's pytree with a leading axis ``[N]``, one block for each point.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from lavajax import points
from lavajax.inner import descend
from lavajax.losses import Loss
from lavajax.precision import solve_positive
from lavajax.subspace import Bound
from lavajax.types import Array, Points, PyTree


class Linearised(NamedTuple):
    """The outputs at every point to first order in the block.

    Attributes:
        f: outputs, ``[N, k]``.
        rows: J = df/dtheta, the block's pytree with leaves ``[N, k, ...]``; 0 for padding.
    """

    f: Array
    rows: PyTree


@dataclasses.dataclass(frozen=True)
class PointLosses:
    """The losses l_i of the points of one task as functions of the adapted block.

    Attributes:
        loss: the loss of one point.
        outputs: ``(block, input) -> [k]`` at one point.
        inputs: ``[N, ...]``.
        targets: ``[N, ...]``.
        weight: ``[N]``, 0 for padding, whose loss is then 0.
        count: N as means divide by it, the number of real points and at least 1.
        out_dim: k.
    """

    loss: Loss
    outputs: Callable[[PyTree, Array], Array]
    inputs: Array
    targets: Array
    weight: Array
    count: Array
    out_dim: int

    @staticmethod
    def of(loss: Loss, support: Points, bound: Bound) -> PointLosses:
        """The losses of a support, whose padding has been made harmless."""

        def outputs(block: PyTree, point: Array) -> Array:
            return bound.apply(block, point[None], None)[0]

        like = jax.eval_shape(outputs, bound.prior, bound.inputs[0])
        shape, dtype = like.shape, like.dtype
        targets = loss.cast(support.y, dtype)
        weight = points.weights(support, dtype)
        return PointLosses(
            loss, outputs, bound.inputs, targets, weight, points.count(support, dtype), shape[0]
        )

    def mask(self, fan: PyTree) -> PyTree:
        """A fan with the entries of padding set to 0."""
        return jax.tree.map(
            lambda leaf: leaf * self.weight.reshape((-1,) + (1,) * (leaf.ndim - 1)), fan
        )

    def mean_scale(self, traces: Array) -> Array:
        """mean_i tr(H_i) / k over the real points, given ``[N]`` traces: the scale of a curvature."""
        return jnp.sum(traces) / (self.count * self.out_dim)

    def linearise(self, theta: PyTree, *, fan: bool) -> Linearised:
        """Outputs and Jacobians at a block, or, with ``fan``, at each point's own.

        Reverse mode: k passes back for each point.
        """

        def at_point(theta: PyTree, point: Array, weight: Array) -> Linearised:
            f, pull = jax.vjp(lambda t: self.outputs(t, point), theta)
            (rows,) = jax.vmap(pull)(weight * jnp.eye(f.shape[0], dtype=f.dtype))
            return Linearised(f, rows)

        return jax.vmap(at_point, in_axes=(0 if fan else None, 0, 0))(
            theta, self.inputs, self.weight
        )

    def factors(self, at: Linearised) -> PyTree:
        """A with leaves ``[N, r, ...]``: the Gauss-Newton matrices are H_i = A_i^T A_i.

        A_i = S_i^T J_i, S_i S_i^T the curvature of the loss in the outputs. For a ReLU network
        H_i is the exact Hessian in a head or a context; it is always positive semi-definite.
        """
        if (c := self.loss.constant_curvature(at.f.shape[1])) is not None:
            return jax.tree.map(lambda j: math.sqrt(c) * j, at.rows)
        s = jax.vmap(self.loss.factor)(at.f)
        return jax.tree.map(lambda j: jnp.einsum("ikr,ik...->ir...", s, j), at.rows)

    def hessians(self, theta: PyTree, *, fan: bool) -> Array:
        """Exact Hessians ``[N, n, n]`` at a block, or at each point's own."""
        unravel = ravel_pytree(_first(theta) if fan else theta)[1]

        def at_point(theta: PyTree, point: Array, y: Array, weight: Array) -> Array:
            flat = ravel_pytree(theta)[0]
            return jax.hessian(
                lambda v: weight * self.loss.value(self.outputs(unravel(v), point), y)
            )(flat)

        return jax.vmap(at_point, in_axes=(0 if fan else None, 0, 0, 0))(
            theta, self.inputs, self.targets, self.weight
        )

    def descend(self, theta: PyTree, rate: Array | float, steps: int) -> PyTree:
        """The fan of steps d_i: gradient steps of each point on its own loss, from ``theta``."""

        def at_point(point: Array, y: Array, weight: Array) -> PyTree:
            end = descend(
                lambda t: weight * self.loss.value(self.outputs(t, point), y), theta, rate, steps
            )
            return jax.tree.map(jnp.subtract, end, theta)

        return jax.vmap(at_point)(self.inputs, self.targets, self.weight)

    def gradient_step(self, at: Linearised, rate: Array | float) -> PyTree:
        """``descend`` of one step, from Jacobians that are there already: -rate J_i^T dl/df."""
        slope = jax.vmap(jax.grad(self.loss.value))(at.f, self.targets)
        return _combine(at.rows, -rate * slope)

    def newton_step(self, at: Linearised, damping: Array | float) -> PyTree:
        """The fan of minimisers of (1/2) ||f_i + J_i d - y_i||^2 + (damping/2) ||d||^2.

        d_i = -J_i^T (J_i J_i^T + damping I)^-1 (f_i - y_i). Where damping is 0 this is the
        smallest d that fits the linearised point; rounding then damps it.
        """
        k = at.f.shape[1]
        gram = sum(
            jnp.einsum("ikn,iln->ikl", j, j)
            for j in (leaf.reshape(*leaf.shape[:2], -1) for leaf in jax.tree.leaves(at.rows))
        )
        # Relative to the point's own scale; 1 for padding, whose rows are 0.
        rounding = 10 * jnp.finfo(gram.dtype).eps * jnp.trace(gram, axis1=1, axis2=2) / k
        ridge = damping + rounding + (1 - self.weight)
        system = gram + ridge[:, None, None] * jnp.eye(k, dtype=gram.dtype)
        return _combine(at.rows, -jax.vmap(solve_positive)(system, at.f - self.targets))


def squared_norms(factors: PyTree) -> Array:
    """tr H_i ``[N]`` of H_i = A_i^T A_i, given A with leaves ``[N, r, ...]``."""
    return sum(jnp.sum(a.reshape(a.shape[0], -1) ** 2, axis=1) for a in jax.tree.leaves(factors))


def dense(factors: PyTree) -> Array:
    """H_i = A_i^T A_i, ``[N, n, n]``, given A with leaves ``[N, r, ...]``."""
    rows = jax.vmap(jax.vmap(lambda row: ravel_pytree(row)[0]))(factors)
    return jnp.einsum("irn,irm->inm", rows, rows)


def _combine(rows: PyTree, coefficients: Array) -> PyTree:
    """J_i^T a_i for every point: leaves ``[N, ...]``, given a ``[N, k]``."""
    return jax.tree.map(lambda j: jnp.einsum("ik...,ik->i...", j, coefficients), rows)


def _first(fan: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[0], fan)
