"""CAVIA: gradient steps on a context."""

from __future__ import annotations

import dataclasses

from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import predict_mean
from lavajax.methods.gradient import adapt_gradient, check_gradient, init_gradient
from lavajax.methods.task_loss import query_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Context


@dataclasses.dataclass(frozen=True)
class Cavia:
    """Fast context adaptation via meta-learning (Zintgraf et al. 2019, algorithm 1).

    c_{s+1} = c_s - alpha grad_c L(c_s) on a context c ``[C]`` that the backbone takes beside x; all
    weights are shared. The rate is scale-free in c and is often far larger than MAML's.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: the context: its size and where it starts.
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Context = Context(start="zeros")
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    first_order: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.subspace, Context):
            raise ValueError(
                f"Cavia.subspace must be a Context, got {self.subspace!r}; gradient steps on a "
                "head are Anil, on all weights Maml"
            )
        check_gradient(self)

    init = init_gradient
    adapt = adapt_gradient
    predict = predict_mean
    loss = query_loss
    memory = no_memory
    step = gradient_step
