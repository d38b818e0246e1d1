"""The inner loop: gradient steps on a support loss."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax import lax

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
