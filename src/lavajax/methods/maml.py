"""MAML: gradient steps on all weights."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import predict_mean
from lavajax.methods.gradient import adapt_gradient, check_gradient, init_gradient
from lavajax.methods.task_loss import query_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Full


@dataclasses.dataclass(frozen=True)
class Maml:
    """Model-agnostic meta-learning (Finn, Abbeel and Levine 2017, algorithm 1).

    theta_{s+1} = theta_s - alpha grad L(theta_s), L the mean loss of the support, theta all
    weights; the outer loop minimises the loss of the query at theta_S.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient (FOMAML).
    """

    subspace: ClassVar[Full] = Full()

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
    loss = query_loss
    memory = no_memory
    step = gradient_step
