"""VFML: inner gradients with a variance-reduction term that the outer loop keeps."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lavajax import points, validate
from lavajax.inner import descend
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import (
    bind_support,
    check_parts,
    init_network,
    inner_rate,
    learned_rate,
    predict_mean,
    prior_of,
)
from lavajax.methods.gradient import support_loss
from lavajax.methods.task_loss import loss_at, one_pass_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import Expectation, gradient_step, in_training, no_memory, storm
from lavajax.subspace import Full, Subspace
from lavajax.types import Adapted, Array, MetaParams, Points, PyTree, Task, TrainState


@dataclasses.dataclass(frozen=True)
class Vfml:
    """Variance-reduced first-order meta-learning (Wang, Huang, Ma, Gu and Huang, NAACL 2021).

    A running estimate v of the gradient that tasks share at the start theta_0 of the inner loop
    corrects every inner step on the mean loss L of the support:

        theta_{s+1} = theta_s - alpha [grad L(theta_s) + (1 - gamma) u],
        u = v ("released"),   u = v - grad L(theta_0) ("storm").

    After every outer step, theta_0^t to theta_0^{t+1}, on its batch and with all shared weights
    already updated,

        v <- g(theta_0^{t+1}) + (1 - beta) (v - g(theta_0^t)),   g the mean gradient over tasks.

    The paper's abstract speaks of a weighted sum of gradient and variance-reduction term;
    ``"released"`` is what the LAVA paper's published comparison runs, ``"storm"`` a reading in
    which the term is a control variate: at theta_0 it is gamma grad L + (1 - gamma) v.

    v is ``params.fixed["variance_reduction"]``, with the structure of the adapted block: it starts
    at 0, new tasks adapt with its last value, and nothing differentiates it.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what adapts: ``Head()``, ``Context(size)`` or ``Full()``, all weights.
        variant: ``"released"``, with g the gradient of the query loss, or ``"storm"``, with g that
            of the support loss.
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient; None: as the variant
            does, ``"storm"`` first order and ``"released"`` second.
        gamma: from 0 to 1; 1 leaves v out.
        beta: from 0 to 1; 1 makes v the gradient of the last batch.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Full()
    variant: Literal["released", "storm"] = "released"
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    first_order: bool | None = None
    gamma: float = 0.9
    beta: float = 0.5

    def __post_init__(self) -> None:
        validate.choice(self, "variant", ("released", "storm"))
        validate.integer(self, "inner_steps", minimum=0)
        validate.number(self, "inner_rate", minimum=0.0)
        validate.flag(self, "learn_inner_rate")
        if self.first_order is not None:
            validate.flag(self, "first_order")
        validate.number(self, "gamma", minimum=0.0, maximum=1.0)
        validate.number(self, "beta", minimum=0.0, maximum=1.0)
        check_parts(self)

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, the inner rate where it is learned, and v = 0.

        Raises:
            ValueError: the points do not fit the model or the loss.
        """
        params = init_network(self, key, x, y, learned_rate(self))
        v = jax.tree.map(jnp.zeros_like, prior_of(self, params).block)
        return dataclasses.replace(params, fixed={**params.fixed, "variance_reduction": v})

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """Takes S corrected gradient steps from the prior block."""
        del key  # deterministic
        if support.x.shape[0] == 0:
            return prior_of(self, params)
        support, bound = bind_support(self, params, support)
        objective = support_loss(self, support, bound)
        term = lax.stop_gradient(params.fixed["variance_reduction"])
        if self.variant == "storm":
            term = jax.tree.map(jnp.subtract, term, jax.grad(objective)(bound.prior))
        some = points.any_real(support)  # without any point the prior stays
        term = jax.tree.map(lambda t: jnp.where(some, (1 - self.gamma) * t, 0), term)
        first_order = self.variant == "storm" if self.first_order is None else self.first_order

        # A constant added to the gradient is a linear function added to the loss.
        block = descend(
            lambda block: objective(block) + optax.tree.vdot(term, block),
            bound.prior,
            inner_rate(self, params),
            self.inner_steps,
            first_order=first_order,
        )
        return Adapted(block)

    predict = predict_mean
    loss = one_pass_loss
    memory = no_memory

    def step(
        self, state: TrainState, expect: Expectation, tx: optax.GradientTransformation
    ) -> tuple[TrainState, dict[str, Array]]:
        """One optimiser step along the gradient of the query loss, and one update of v."""
        new, metrics = gradient_step(self, state, expect, tx)
        v = storm(
            state.params.fixed["variance_reduction"],
            self._shared_gradient(new.params, prior_of(self, new.params).block, expect),
            self._shared_gradient(new.params, prior_of(self, state.params).block, expect),
            self.beta,
        )
        params = dataclasses.replace(
            new.params, fixed={**new.params.fixed, "variance_reduction": v}
        )
        return dataclasses.replace(new, params=params), metrics

    def _shared_gradient(self, params: MetaParams, block: PyTree, expect: Expectation) -> PyTree:
        """The mean gradient over tasks at an unadapted block, a block."""

        def objective(block: PyTree, task: Task, key: Array) -> Array:
            at = task.query if self.variant == "released" else task.support
            return loss_at(self, in_training(params, key), Adapted(block), at)

        return expect.value_and_grad(objective, block)[1]
