"""Meta-SGD: gradient steps with a learned rate for every parameter."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from lavajax import validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import init_network, predict_mean, prior_of
from lavajax.methods.gradient import adapt_at_rate, check_descent
from lavajax.methods.task_loss import one_pass_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Full, Subspace
from lavajax.types import Adapted, Array, MetaParams, Points

_UNIFORM = (0.005, 0.1)


@dataclasses.dataclass(frozen=True)
class MetaSgd:
    """Meta-SGD (Li, Zhou, Chen and Li 2017, algorithm 1).

    theta_{s+1} = theta_s - a * grad L(theta_s), elementwise, L the mean loss of the support; the
    outer loop learns theta_0 and the rates a, which have the structure of the adapted block. A
    rate may become negative, which is the method's intention.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what adapts: ``Head()``, ``Context(size)`` or ``Full()``, all weights.
        inner_steps: S, 0 or more, all at the same rates.
        rate_init: where the rates start. ``"uniform"``: each drawn from U[0.005, 0.1];
            ``"constant"``: all at ``inner_rate``.
        inner_rate: where the rates start with ``rate_init="constant"``; unused otherwise.
        first_order: take inner gradients as constants in the outer gradient.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Full()
    inner_steps: int = 1
    rate_init: Literal["uniform", "constant"] = "uniform"
    inner_rate: float = 0.1
    first_order: bool = False

    def __post_init__(self) -> None:
        validate.choice(self, "rate_init", ("uniform", "constant"))
        validate.number(self, "inner_rate")
        check_descent(self)

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, and ``learned["rates"]`` with the structure of the adapted block.

        Raises:
            ValueError: the points do not fit the model or the loss.
        """
        net_key, rate_key = jax.random.split(key)
        params = init_network(self, net_key, x, y, learned={})
        leaves, treedef = jax.tree.flatten(prior_of(self, params).block)
        if self.rate_init == "uniform":
            keys = jax.random.split(rate_key, len(leaves))
            rates = [
                jax.random.uniform(k, leaf.shape, leaf.dtype, *_UNIFORM)
                for k, leaf in zip(keys, leaves, strict=True)
            ]
        else:
            rates = [jnp.full_like(leaf, self.inner_rate) for leaf in leaves]
        return params.replace_learned(
            {**params.learned, "rates": jax.tree.unflatten(treedef, rates)}
        )

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """Takes S gradient steps from the prior block on the mean loss of the support."""
        del key  # deterministic
        return adapt_at_rate(self, params, support, params.learned["rates"])

    predict = predict_mean
    loss = one_pass_loss
    memory = no_memory
    step = gradient_step
