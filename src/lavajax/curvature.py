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

from lavajax import linalg, points
from lavajax.inner import descend
from lavajax.linalg import solve_positive
from lavajax.losses import Loss, constant_curvature
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
        outputs = point_outputs(bound)
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
        return jacobian(self.outputs, theta, self.inputs, self.weight, fan=fan)

    def gradient_coefficients(self, f: Array, rate: Array | float) -> Array:
        """a ``[N, k]`` of one gradient step, d_i = J_i^T a_i: a_i = -rate dl/df."""
        return -rate * self._slope(f)

    def _slope(self, f: Array) -> Array:
        """dl/df at every point, ``[N, k]``."""
        return jax.vmap(jax.grad(self.loss.value))(f, self.targets)

    def newton_coefficients(
        self, f: Array, gram: Array, damping: Array | float, relative: float
    ) -> Array:
        """a ``[N, k]`` of the least of l_i(f_i + J_i d) + (c rho_i/2) ||d||^2.

        For a loss of constant curvature c, with r_i = (dl/df)/c, f_i - y_i for squared error:
        d_i = J_i^T a_i, a_i = -(J_i J_i^T + rho_i I)^-1 r_i.

        Args:
            f: outputs ``[N, k]``.
            gram: the J_i J_i^T, ``[N, k, k]``.
            damping: the part of rho_i that all points share.
            relative: the part of rho_i in units of each point's own scale, tr(J_i J_i^T)/k; never
                less than rounding needs.
        """
        residual = self._slope(f) / constant_curvature(self.loss, self.out_dim)
        scale = jnp.trace(gram, axis1=1, axis2=2) / self.out_dim
        relative = max(relative, 10 * float(jnp.finfo(gram.dtype).eps))
        # A point that does not depend on the block, and padding, have no scale and take no step.
        rho = damping + jnp.where(scale > 0, relative * scale, 1.0)
        system = gram + rho[:, None, None] * jnp.eye(self.out_dim, dtype=gram.dtype)
        return -jax.vmap(solve_positive)(system, residual)

    def loss_factors(self, f: Array) -> Array:
        """S ``[N, k, r]``, with S_i S_i^T the curvature of the loss in the outputs ``[N, k]``."""
        return jax.vmap(self.loss.factor)(f, self.targets)

    def factors(self, f: Array, jacobian: Rows) -> PyTree:
        """A with leaves ``[N, r, ...]``: the Gauss-Newton matrices are H_i = A_i^T A_i.

        A_i = S_i^T J_i. For a ReLU network H_i is the exact Hessian in a head or a context; for
        any network it is positive semi-definite.
        """
        if (c := self.loss.constant_curvature(self.out_dim)) is not None:
            return jax.tree.map(lambda j: math.sqrt(c) * j, jacobian.rows)
        s = self.loss_factors(f)
        return jax.tree.map(lambda j: linalg.einsum("ikr,ik...->ir...", s, j), jacobian.rows)

    def hessians(self, theta: PyTree, *, fan: bool) -> Array:
        """Exact Hessians ``[N, n, n]`` at a block, or, with ``fan``, at each point's own.

        Reverse mode twice: a loss or a backbone with a rule of its own, ``jax.custom_vjp``, has no
        forward mode, and for the rest it costs the same.
        """
        single = jax.tree.map(lambda leaf: leaf[0], theta) if fan else theta
        _, unravel = ravel_pytree(single)

        def at_point(theta: PyTree, point: Array, y: Array, weight: Array) -> Array:
            flat, _ = ravel_pytree(theta)

            def value(flat: Array) -> Array:
                return weight * self.loss.value(self.outputs(unravel(flat), point), y)

            return jax.jacrev(jax.grad(value))(flat)

        return jax.vmap(at_point, in_axes=(0 if fan else None, 0, 0, 0))(
            theta, self.inputs, self.targets, self.weight
        )

    def mean_scale(self, traces: Array) -> Array:
        """mean_i tr(H_i) / k over real points, given ``[N]`` traces; at least 0."""
        return jnp.maximum(jnp.sum(traces), 0.0) / (self.count * self.out_dim)


def point_outputs(bound: Bound) -> Callable[[PyTree, Array], Array]:
    """``(block, input) -> [k]`` at one point, of a backbone that does not couple them."""

    def outputs(block: PyTree, point: Array) -> Array:
        return bound.apply(block, point[None], None)[0]

    return outputs


def jacobian(
    outputs: Callable[[PyTree, Array], Array],
    theta: PyTree,
    inputs: Array,
    weight: Array,
    *,
    fan: bool,
) -> tuple[Array, Rows]:
    """Outputs ``[N, k]`` and their Jacobian, with k passes back for each point.

    Args:
        outputs: ``(block, input) -> [k]`` at one point.
        theta: the block, or, with ``fan``, one for each point.
        inputs: ``[N, ...]``.
        weight: ``[N]``, by which rows of the Jacobian are multiplied: 0 for padding.
        fan: see ``theta``.
    """

    def at_point(theta: PyTree, point: Array, weight: Array) -> tuple[Array, PyTree]:
        f, pull = jax.vjp(lambda t: outputs(t, point), theta)
        (rows,) = jax.vmap(pull)(weight.astype(f.dtype) * jnp.eye(f.shape[0], dtype=f.dtype))
        return f, rows

    axes = (0 if fan else None, 0, 0)
    f, rows = jax.vmap(at_point, in_axes=axes)(theta, inputs, weight)
    return f, Rows(rows)
