"""What MAML, ANIL, CAVIA and their relatives share: gradient steps on the mean support loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lavajax import points, validate
from lavajax.inner import descend
from lavajax.methods.base import (
    NetworkMethod,
    RateMethod,
    bind_support,
    check_parts,
    init_network,
    inner_rate,
    learned_rate,
    prior_of,
)
from lavajax.subspace import Bound
from lavajax.types import Adapted, Array, MetaParams, Points, PyTree


class GradientMethod(NetworkMethod, RateMethod, Protocol):
    """A method with the fields of an inner loop of gradient steps."""

    @property
    def inner_steps(self) -> int:
        """Number of steps S."""

    @property
    def first_order(self) -> bool:
        """Whether inner gradients are constants to the outer loop."""


def check_gradient(method: GradientMethod) -> None:
    """Validates and coerces the fields of a gradient method; its ``__post_init__``."""
    validate.integer(method, "inner_steps", minimum=0)
    validate.number(method, "inner_rate", minimum=0.0)
    validate.flag(method, "learn_inner_rate")
    validate.flag(method, "first_order")
    check_parts(method)


def init_gradient(method: GradientMethod, key: Array, x: Array, y: Array) -> MetaParams:
    """The network, and the inner rate where it is learned."""
    return init_network(method, key, x, y, learned_rate(method))


def adapt_gradient(
    method: GradientMethod, params: MetaParams, support: Points, *, key: Array | None = None
) -> Adapted:
    """Takes S gradient steps from the prior block on the mean loss of the support."""
    del key  # deterministic
    if support.x.shape[0] == 0:
        return prior_of(method, params)
    support, bound = bind_support(method, params, support)
    block = descend(
        support_loss(method, support, bound),
        bound.prior,
        inner_rate(method, params),
        method.inner_steps,
        first_order=method.first_order,
    )
    return Adapted(block)


def support_loss(method: NetworkMethod, support: Points, bound: Bound) -> Callable[[PyTree], Array]:
    """The mean loss of a support as a function of the block, given ``bind_support``."""

    def objective(block: PyTree) -> Array:
        f = bound.apply(block, bound.inputs, support.mask)
        return points.mean_loss(method.point_loss, f, support)

    return objective
