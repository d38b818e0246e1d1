"""The inner loop: gradient steps on a support loss, and the gradient of where they end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from lavajax.types import Array, PyTree


def descend(
    objective: Callable[[PyTree], Array],
    theta: PyTree,
    rate: PyTree,
    steps: int,
    *,
    first_order: bool = False,
) -> PyTree:
    """Takes gradient steps, theta <- theta - rate * grad objective(theta).

    Args:
        objective: scalar loss of the block: the mean over the support for MAML, ANIL and CAVIA,
            a single point's for LAVA, which vmaps this function.
        theta: where to start; any pytree.
        rate: step size, a scalar, or a pytree with the structure of ``theta`` and a rate, scalar or
            elementwise, for each leaf; may be traced and differentiated.
        steps: number of steps, static, 0 or more.
        first_order: treat the gradients as constants in the backward pass (FOMAML). The rate and
            the start keep their gradients.

    Returns:
        The block after the last step.
    """
    rates = jax.tree.broadcast(rate, theta)

    def step(theta: PyTree, _: None) -> tuple[PyTree, None]:
        grads = jax.grad(objective)(theta)
        if first_order:
            grads = lax.stop_gradient(grads)
        moved = jax.tree.map(lambda t, r, g: t - (r * g).astype(t.dtype), theta, rates, grads)
        return moved, None

    if steps == 1:  # what a scan of length one would compute, without its overhead
        return step(theta, None)[0]
    return lax.scan(step, theta, length=steps)[0]


def descend_monotone(
    objective: Callable[[PyTree], Array], theta: PyTree, rate: float, steps: int
) -> PyTree:
    """Gradient steps that never raise the objective: one that would is not taken, and halves rate.

    Rounding does not count as raising. For a path that nothing differentiates.

    Args:
        objective: scalar function of the block.
        theta: where to start; any pytree.
        rate: size of the first step.
        steps: number of steps, taken or not; static, 1 or more.

    Returns:
        The block after the last step; ``theta`` itself where no step lowers the objective.
    """
    value_and_grad = jax.value_and_grad(objective)

    def step(state: PyTree, _: None) -> tuple[PyTree, None]:
        here, (value, grads), rate = state
        there = jax.tree.map(lambda t, g: t - (rate * g).astype(t.dtype), here, grads)
        new = value_and_grad(there)
        lower = new[0] <= value + 10 * jnp.finfo(value.dtype).eps * jnp.abs(value)  # not for NaN
        kept = jax.tree.map(lambda a, b: jnp.where(lower, a, b), (there, new), state[:2])
        return (*kept, jnp.where(lower, rate, rate / 2)), None

    value, grads = value_and_grad(theta)
    start = (theta, (value, grads), rate + jnp.zeros_like(value))
    return lax.scan(step, start, length=steps)[0][0]


def implicit(
    equation: Callable[[PyTree], PyTree],
    slope: Callable[[PyTree], PyTree],
    solution: PyTree,
    steps: int,
) -> PyTree:
    """A solution of F(phi) = 0, with the gradient of the implicit function theorem.

    The value is ``solution``; a change dF of the equation moves it by -F'(phi)^-1 dF.

    Args:
        equation: F, from and to pytrees of one structure.
        slope: the product with F'(phi), or with what stands for it: linear and symmetric;
            everything that it depends on is held constant.
        solution: phi, held constant.
        steps: most steps of conjugate gradients, in the backward pass.

    Returns:
        phi; NaN where F(phi) is not finite, as of a task whose labels are not. The gradient is NaN
        where the slope turns out not to be positive definite.
    """
    residual = equation(solution)
    change = jax.tree.map(lambda r: r - lax.stop_gradient(r), residual)  # 0, but for its gradient
    eps = float(jnp.finfo(jnp.result_type(*jax.tree.leaves(solution))).eps)
    flat, unravel = ravel_pytree(change)  # one array, not many: a tenth less to compile

    def product(v: Array) -> Array:
        return ravel_pytree(slope(unravel(v)))[0]

    solve = partial(conjugate_gradients, tolerance=eps, steps=steps)
    move = unravel(lax.custom_linear_solve(product, flat, solve, symmetric=True))
    return jax.tree.map(jnp.subtract, solution, move)


def conjugate_gradients(
    product: Callable[[Array], Array], b: Array, *, tolerance: float, steps: int
) -> Array:
    """A^-1 b, as far as so many steps of conjugate gradients lead (Hestenes and Stiefel 1952).

    A search direction p with p^T A p <= 0 shows that A is not positive definite, of which the
    routines that JAX and SciPy have say nothing.

    Args:
        product: the product with A, symmetric.
        b: ``[n]``.
        tolerance: stop where the residual is so small, relative to b.
        steps: at most so many.

    Returns:
        ``[n]``; NaN where a search direction has no positive curvature, and of a b that is not
        finite.
    """
    largest = jnp.max(jnp.abs(b))
    scale = jnp.where(largest == 0, 1.0, largest)
    b = b / scale  # its square neither overflows nor underflows
    limit = tolerance**2 * jnp.sum(b**2)

    def goes_on(state: Any) -> Array:
        *_, size, number, definite = state
        return (size > limit) & (number < steps) & definite

    def step(state: Any) -> Any:
        x, residual, direction, size, number, _ = state
        bent = product(direction)
        curvature = jnp.sum(direction * bent)
        rate = size / curvature
        residual = residual - rate * bent
        new = jnp.sum(residual**2)
        direction_new = residual + (new / size) * direction
        return x + rate * direction, residual, direction_new, new, number + 1, curvature > 0

    # Varying over devices as b does.
    definite = jnp.ones_like(largest, bool)
    start = (jnp.zeros_like(b), b, b, jnp.sum(b**2), jnp.zeros((), int), definite)
    x, *_, definite = lax.while_loop(goes_on, step, start)
    return jnp.where(definite, scale * x, jnp.nan)
