"""VR-MAML: gradient steps inside, a variance-reduced meta-gradient outside."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lavajax import validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import predict_mean
from lavajax.methods.gradient import adapt_gradient, check_gradient, init_gradient
from lavajax.methods.task_loss import one_pass_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import Expectation, apply_gradient, gradient_norms, meta_gradient, storm
from lavajax.rescue import all_finite
from lavajax.subspace import Full, Subspace
from lavajax.types import Array, MetaParams, PyTree, TrainState


@dataclasses.dataclass(frozen=True)
class VrMaml:
    """Variance reduction of the meta-gradient (Yang and Kwok, ICML 2022), by STORM.

    Tasks adapt by gradient steps, as in MAML. At outer step t, with g_t the meta-gradient in all
    learned leaves on this step's tasks, and d_t that at the **previous** learned leaves on the same
    tasks, the optimiser is given

        c_t = g_t + (1 - gamma) (c_{t-1} - d_t),   c_0 = g_0.

    Where d_t is not finite the recursion begins anew.

    ``vr_maml_tuned`` is the setting that we recommend; ``vr_maml_released`` that of the LAVA
    paper's published comparison, which hardly adapts. A step costs two meta-gradients.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what adapts: ``Head()``, ``Context(size)`` or ``Full()``, all weights.
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient.
        gamma: above 0, at most 1; 1 is plain MAML, ANIL or CAVIA.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Full()
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    first_order: bool = False
    gamma: float = 0.9

    def __post_init__(self) -> None:
        validate.number(self, "gamma", minimum=0.0, maximum=1.0, strict=True)
        check_gradient(self)

    init = init_gradient
    adapt = adapt_gradient
    predict = predict_mean
    loss = one_pass_loss

    def memory(self, params: MetaParams) -> dict[str, PyTree]:
        """What the recursion starts from.

        Returns:
            ``previous``, the learned leaves one step ago; ``direction``, c, of the same structure;
            ``started``, a boolean, whether these two are those of a step that has been taken.
        """
        return {
            "previous": jax.tree.map(jnp.copy, params.learned),
            "direction": jax.tree.map(jnp.zeros_like, params.learned),
            "started": jnp.zeros((), bool),
        }

    def step(
        self, state: TrainState, expect: Expectation, tx: optax.GradientTransformation
    ) -> tuple[TrainState, dict[str, Array]]:
        """One optimiser step along c.

        Returns:
            The next state, and metrics ``loss`` and the norms of c.
        """
        params, memory = state.params, state.memory
        loss, now = meta_gradient(self, params, expect)
        _, before = meta_gradient(self, params.replace_learned(memory["previous"]), expect)
        running = storm(memory["direction"], now, before, self.gamma)
        # A task that can be no more at the previous parameters must not end the run.
        goes_on = memory["started"] & all_finite(before)
        direction = jax.tree.map(lambda c, g: jnp.where(goes_on, c, g), running, now)
        new = dataclasses.replace(
            apply_gradient(state, direction, tx),
            memory={
                "previous": params.learned,
                "direction": direction,
                "started": jnp.ones((), bool),
            },
        )
        return new, {"loss": loss, **gradient_norms(direction)}


def vr_maml_released(**settings: Any) -> VrMaml:
    """The setting of the LAVA paper's published comparison: for reproduction.

    Train it with ``optimizer=optax.sgd(0.01)``. At an inner rate of 0.001 it hardly adapts.

    Args:
        **settings: any other field of ``VrMaml``.
    """
    return VrMaml(**{"gamma": 0.99, "inner_rate": 0.001, "learn_inner_rate": False, **settings})


def vr_maml_tuned(**settings: Any) -> VrMaml:
    """The setting of ``VrMaml`` that we recommend: first order, for Adam.

    Args:
        **settings: any other field of ``VrMaml``.
    """
    return VrMaml(**{"gamma": 0.9, "inner_rate": 0.1, "first_order": True, **settings})
