"""MetaMix: MAML whose outer loss is on mixtures of points."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax

from lavajax import network, points, validate
from lavajax.inner import descend
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import bind_support, inner_rate, predict_mean, require_key
from lavajax.methods.gradient import adapt_gradient, check_gradient, init_gradient, support_loss
from lavajax.methods.task_loss import loss_at
from lavajax.mixture import Mixture, draw, mixed_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Full, net_of
from lavajax.types import Adapted, Array, MetaParams, Points, PyTree, Task


@dataclasses.dataclass(frozen=True)
class MetaMix:
    """Manifold mixup of points in the outer loss, with all weights adapted as in MAML.

    At a random layer l of the L linear layers, the head among them, the inputs h of that layer are
    mixed, and so are the targets: for a point j and its partner s,

        h_j <- lambda h_s + (1 - lambda) h_j,   y_j <- lambda y_s + (1 - lambda) y_j,

    with lambda from Beta(a, a), one for each point. Labels have no mixture: their losses are mixed
    by the same weights. New tasks adapt as in MAML, whatever the key.

    Mixing assumes that the tasks' functions are nearly linear between points. Backbones that do
    not show their layers (see ``LayeredModel``) are mixed at raw inputs and features alone.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        variant: ``"support_query"``: the adapted network is judged on query points mixed with
            support points, in place of the query loss (Yao et al., ICML 2021).
            ``"query_pairs"``: L(query) + w L(query points mixed with one another), after the
            virtual pairs of Chen et al. (ICPR 2020).
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient.
        concentration: a, above 0; None: 0.5 for ``"support_query"``, 1 for ``"query_pairs"``.
        mixed_weight: w, 0 or more; for ``"query_pairs"``.
        mix_inner: in the outer loop let the inner loss be L(support) + w L(support points mixed
            with one another); for ``"query_pairs"``.
    """

    subspace: ClassVar[Full] = Full()

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    variant: Literal["support_query", "query_pairs"] = "support_query"
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    first_order: bool = False
    concentration: float | None = None
    mixed_weight: float = 1.0
    mix_inner: bool = False

    def __post_init__(self) -> None:
        validate.choice(self, "variant", ("support_query", "query_pairs"))
        if self.concentration is not None:
            validate.number(self, "concentration", minimum=0.0, strict=True)
        validate.number(self, "mixed_weight", minimum=0.0)
        validate.flag(self, "mix_inner")
        check_gradient(self)
        if self.mix_inner and self.variant != "query_pairs":
            raise ValueError(
                f"MetaMix.mix_inner=True needs variant='query_pairs', got {self.variant!r}, which "
                "mixes in the outer loss alone"
            )

    init = init_gradient
    adapt = adapt_gradient
    predict = predict_mean
    memory = no_memory
    step = gradient_step

    def loss(self, params: MetaParams, task: Task, key: Array) -> Array:
        """The outer loss of one task at a random mixture; a scalar.

        Raises:
            ValueError: there is no key.
        """
        outer_key, inner_key = jax.random.split(require_key(self, key))
        outer = self._draw(outer_key, params, task.query, self._partners(task))
        inner = self._draw(inner_key, params, task.support, task.support)
        return self.loss_of(params, task, outer, inner if self.mix_inner else None)

    def loss_of(
        self, params: MetaParams, task: Task, outer: Mixture | None, inner: Mixture | None = None
    ) -> Array:
        """``loss`` at a given mixture of the query, and of the support for the inner loss.

        None stands for what is not mixed.
        """
        task = Task(points.sanitise(task.support), points.sanitise(task.query))
        adapted = self._adapt(params, task.support, inner)
        if outer is None:
            return loss_at(self, params, adapted, task.query)
        mixed = self._mixed_loss(params, adapted.block, task.query, self._partners(task), outer)
        if self.variant == "support_query":
            return mixed
        return loss_at(self, params, adapted, task.query) + self.mixed_weight * mixed

    def _partners(self, task: Task) -> Points:
        return task.support if self.variant == "support_query" else task.query

    def _draw(
        self, key: Array, params: MetaParams, own: Points, partners: Points
    ) -> Mixture | None:
        layers = network.layers(self.model, net_of(params))
        a = self.concentration or {"support_query": 0.5, "query_pairs": 1.0}[self.variant]
        return draw(key, own, partners, layers=layers, concentration=a)

    def _adapt(self, params: MetaParams, support: Points, mixture: Mixture | None) -> Adapted:
        """Gradient steps on the loss of the support and of its mixture."""
        if mixture is None:
            return self.adapt(params, support)
        support, bound = bind_support(self, params, support)
        plain = support_loss(self, support, bound)

        def objective(net: PyTree) -> Array:
            mixed = self._mixed_loss(params, net, support, support, mixture)
            return plain(net) + self.mixed_weight * mixed

        rate = inner_rate(self, params)
        return Adapted(
            descend(objective, bound.prior, rate, self.inner_steps, first_order=self.first_order)
        )

    def _mixed_loss(
        self, params: MetaParams, net: PyTree, own: Points, partners: Points, mixture: Mixture
    ) -> Array:
        return mixed_loss(
            *(self.model, self.point_loss, net, params.fixed["backbone"]),
            own=own,
            partners=partners,
            mixture=mixture,
        )
