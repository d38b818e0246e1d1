"""The losses of a task's points taken apart: their steps, Jacobians and curvatures.

A *fan* of blocks is the block's pytree with a leading axis ``[N]``, one block for each point.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from lavajax import points
from lavajax.inner import descend
from lavajax.losses import Loss, constant_curvature
from lavajax.precision import add_diagonal_each, solve_positive
from lavajax.subspace import Bound
from lavajax.tangent import Rows
from lavajax.types import Array, Points, PyTree


@dataclasses.dataclass(frozen=True)
class PointLosses:
    """The losses l_i of the points of one task as functions of the adapted block.

    Attributes:
        loss: the loss of one point.
        outputs: ``(block, input) -> [k]`` at one point.
        inputs: ``[N, ...]``.
        targets: ``[N, ...]``.
        weight: ``[N]``, 0 for padding, whose loss is then 0.
        count: N as means divide by it: the number of real points, at least 1.
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
        """The losses of a support whose padding has been made harmless."""

        def outputs(block: PyTree, point: Array) -> Array:
            return bound.apply(block, point[None], None)[0]

        like = jax.eval_shape(outputs, bound.prior, bound.inputs[0])
        return PointLosses(
            loss,
            outputs,
            bound.inputs,
            loss.cast(support.y, like.dtype),
            points.weights(support, like.dtype),
            points.count(support, like.dtype),
            like.shape[0],
        )

    def descend(self, theta: PyTree, rate: Array | float, steps: int) -> PyTree:
        """The fan of steps d_i: gradient steps of each point on its own loss, from ``theta``."""

        def at_point(point: Array, y: Array, weight: Array) -> PyTree:
            end = descend(
                lambda t: weight * self.loss.value(self.outputs(t, point), y), theta, rate, steps
            )
            return jax.tree.map(jnp.subtract, end, theta)

        return jax.vmap(at_point)(self.inputs, self.targets, self.weight)

    def jacobian(self, theta: PyTree, *, fan: bool) -> tuple[Array, Rows]:
        """Outputs ``[N, k]`` and their Jacobian at a block, or, with ``fan``, each point's own.

        Reverse mode: k passes back for each point.
        """

        def at_point(theta: PyTree, point: Array, weight: Array) -> tuple[Array, PyTree]:
            f, pull = jax.vjp(lambda t: self.outputs(t, point), theta)
            (rows,) = jax.vmap(pull)(weight * jnp.eye(f.shape[0], dtype=f.dtype))
            return f, rows

        f, rows = jax.vmap(at_point, in_axes=(0 if fan else None, 0, 0))(
            theta, self.inputs, self.weight
        )
        return f, Rows(rows)

    def gradient_coefficients(self, f: Array, rate: Array | float) -> Array:
        """a ``[N, k]`` of one gradient step, d_i = J_i^T a_i: a_i = -rate dl/df."""
        return -rate * jax.vmap(jax.grad(self.loss.value))(f, self.targets)

    def newton_coefficients(self, f: Array, gram: Array, damping: Array | float) -> Array:
        """a ``[N, k]`` of the least of l_i(f_i + J_i d) + (c damping/2) ||d||^2.

        For a loss of constant curvature c, with r_i = (dl/df)/c, f_i - y_i for squared error:
        d_i = J_i^T a_i, a_i = -(J_i J_i^T + damping I)^-1 r_i, given the J_i J_i^T as
        ``[N, k, k]``. At damping 0 it is the smallest d that fits the linearised point.
        """
        ridge = self._ridge(gram, damping)
        return -jax.vmap(solve_positive)(add_diagonal_each(gram, ridge), self.residual(f))

    def newton_steps(self, f: Array, jacobian: Rows, damping: Array | float) -> PyTree:
        """The fan of the same d_i, solved in the smaller of the two spaces.

        With fewer parameters n than outputs k, J_i J_i^T is singular, and d_i is
        -(J_i^T J_i + damping I)^-1 J_i^T r_i instead.
        """
        if sum(leaf[0, 0].size for leaf in jax.tree.leaves(jacobian.rows)) >= self.out_dim:
            a = self.newton_coefficients(f, jacobian.blocks(), damping)
            return jacobian.spread(a)
        single = jax.tree.map(lambda leaf: leaf[0, 0], jacobian.rows)
        unravel = ravel_pytree(single)[1]
        rows = jax.vmap(jax.vmap(lambda row: ravel_pytree(row)[0]))(jacobian.rows)  # [N, k, n]
        normal = jnp.einsum("nka,nkb->nab", rows, rows, precision="highest")
        pulled = jnp.einsum("nka,nk->na", rows, self.residual(f), precision="highest")
        system = add_diagonal_each(normal, self._ridge(normal, damping))
        return jax.vmap(unravel)(-jax.vmap(solve_positive)(system, pulled))

    def residual(self, f: Array) -> Array:
        """(dl/df)/c ``[N, k]``, for a loss of constant curvature c."""
        slope = jax.vmap(jax.grad(self.loss.value))(f, self.targets)
        return slope / constant_curvature(self.loss, self.out_dim)

    def _ridge(self, gram: Array, damping: Array | float) -> Array:
        """Damping plus what rounding needs, relative to each point's own scale; 1 without one.

        A point that does not depend on the block, and padding, have no scale, and take no step.
        """
        scale = jnp.trace(gram, axis1=1, axis2=2) / gram.shape[-1]
        rounding = 10 * jnp.finfo(gram.dtype).eps * scale
        return damping + jnp.where(scale > 0, rounding, 1.0)

    def loss_factors(self, f: Array) -> Array:
        """S ``[N, k, r]``, with S_i S_i^T the curvature of the loss in the outputs ``[N, k]``."""
        return jax.vmap(self.loss.factor)(f)

    def factors(self, f: Array, jacobian: Rows) -> PyTree:
        """A with leaves ``[N, r, ...]``: the Gauss-Newton matrices are H_i = A_i^T A_i.

        A_i = S_i^T J_i. For a ReLU network H_i is the exact Hessian in a head or a context; for
        any network it is positive semi-definite.
        """
        if (c := self.loss.constant_curvature(self.out_dim)) is not None:
            return jax.tree.map(lambda j: math.sqrt(c) * j, jacobian.rows)
        s = self.loss_factors(f)
        return jax.tree.map(
            lambda j: jnp.einsum("ikr,ik...->ir...", s, j, precision="highest"), jacobian.rows
        )

    def hessians(self, theta: PyTree, *, fan: bool) -> Array:
        """Exact Hessians ``[N, n, n]`` at a block, or, with ``fan``, at each point's own."""
        single = jax.tree.map(lambda leaf: leaf[0], theta) if fan else theta
        _, unravel = ravel_pytree(single)

        def at_point(theta: PyTree, point: Array, y: Array, weight: Array) -> Array:
            flat, _ = ravel_pytree(theta)
            return jax.hessian(
                lambda v: weight * self.loss.value(self.outputs(unravel(v), point), y)
            )(flat)

        return jax.vmap(at_point, in_axes=(0 if fan else None, 0, 0, 0))(
            theta, self.inputs, self.targets, self.weight
        )

    def mean_scale(self, traces: Array) -> Array:
        """mean_i tr(H_i) / k over real points, given ``[N]`` traces; at least 0."""
        return jnp.maximum(jnp.sum(traces), 0.0) / (self.count * self.out_dim)
