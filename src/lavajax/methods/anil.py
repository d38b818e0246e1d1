"""ANIL: gradient steps on the head."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import predict_mean
from lavajax.methods.gradient import adapt_gradient, check_gradient, init_gradient
from lavajax.methods.task_loss import one_pass_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Head


@dataclasses.dataclass(frozen=True)
class Anil:
    """Almost no inner loop (Raghu, Raghu, Bengio and Vinyals 2020).

    MAML whose inner steps move the head W alone: with features Z ``[N, P]`` and squared error,
    W <- W - alpha (c/N) Z^T (Z W - Y). Features are computed once, whatever the number of steps.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient.
    """

    subspace: ClassVar[Head] = Head()

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    first_order: bool = False

    def __post_init__(self) -> None:
        check_gradient(self)

    init = init_gradient
    adapt = adapt_gradient
    predict = predict_mean
    loss = one_pass_loss
    memory = no_memory
    step = gradient_step
