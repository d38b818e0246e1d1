"""Reptile: the start moves toward where plain training on each task ends."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import optax

from lavajax import points, validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import predict_mean
from lavajax.methods.gradient import adapt_gradient, check_gradient, init_gradient
from lavajax.methods.task_loss import loss_at
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import Expectation, apply_gradient, gradient_norms, in_training, no_memory
from lavajax.subspace import Full, net_of
from lavajax.types import Array, MetaParams, PyTree, Task, TrainState


@dataclasses.dataclass(frozen=True)
class Reptile:
    """Reptile (Nichol, Achiam and Schulman 2018, algorithm 2 with plain SGD inside).

    Every task is trained on for S steps from theta, on all of its points together, support and
    query alike, and theta moves toward the ends: with alpha the inner rate, the optimiser is given

        (theta - mean over tasks of theta_S) / (alpha S)

    as if it were a gradient. No gradient passes through the inner steps, so only what adapts
    learns: all weights. At S = 1 this is the gradient of joint training, which does not learn to
    adapt. New tasks adapt to their support alone, by the same steps.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        inner_steps: S, 1 or more.
        inner_rate: alpha, above 0.
        pseudo_gradient: ``"scaled"``, as above, of the size of a gradient whatever alpha and S;
            ``"difference"``, theta - theta_S itself: plain SGD at rate e is then the paper's update
            theta + e (theta_S - theta).
    """

    subspace: ClassVar[Full] = Full()
    learn_inner_rate: ClassVar[bool] = False
    first_order: ClassVar[bool] = False

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    inner_steps: int = 8
    inner_rate: float = 0.02
    pseudo_gradient: Literal["scaled", "difference"] = "scaled"

    def __post_init__(self) -> None:
        validate.integer(self, "inner_steps", minimum=1)
        validate.number(self, "inner_rate", minimum=0.0, strict=True)
        validate.choice(self, "pseudo_gradient", ("scaled", "difference"))
        check_gradient(self)

    init = init_gradient
    adapt = adapt_gradient
    predict = predict_mean

    def loss(self, params: MetaParams, task: Task, key: Array) -> Array:
        """The mean loss of support and query together after the S steps on them; a scalar.

        It says how well a task can be learned from theta. ``step`` does not follow its gradient.
        """
        return self._train_on(params, task)[0]

    memory = no_memory

    def step(
        self, state: TrainState, expect: Expectation, tx: optax.GradientTransformation
    ) -> tuple[TrainState, dict[str, Array]]:
        """One optimiser step along the mean of theta - theta_S.

        Returns:
            The next state, and metrics ``loss`` and norms, of what the optimiser is given.
        """
        learned = state.params.learned

        def one(task: Task, key: Array) -> tuple[Array, PyTree]:
            return self._train_on(in_training(state.params, key), task)

        loss, moves = expect(one)
        scale = self.inner_rate * self.inner_steps if self.pseudo_gradient == "scaled" else 1.0
        grads = jax.tree.map(lambda leaf, m: (m / scale).astype(leaf.dtype), learned, moves)
        return apply_gradient(state, grads, tx), {"loss": loss, **gradient_norms(grads)}

    def _train_on(self, params: MetaParams, task: Task) -> tuple[Array, PyTree]:
        """The loss after training on all points of one task, and theta - theta_S."""
        union = points.concatenate(task.support, task.query)
        adapted = adapt_gradient(self, params, union)
        start = self.subspace.block(net_of(params))
        moves = jax.tree.map(lambda t, end: t - end, start, adapted.block)
        return loss_at(self, params, adapted, union), moves
