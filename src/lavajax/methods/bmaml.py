"""BMAML: particles of the adapted block, moved together by Stein variational gradient descent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lavajax import linalg, points, validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import (
    bind_support,
    check_parts,
    init_network,
    inner_rate,
    inner_start,
    learned_rate,
)
from lavajax.methods.ensemble import ensemble_outputs, predict_ensemble
from lavajax.methods.gradient import support_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.stein import stein_descend
from lavajax.subspace import Context, Head, Subspace, net_of
from lavajax.types import Adapted, Array, MetaParams, Points, PyTree, Task


@dataclasses.dataclass(frozen=True)
class Bmaml:
    r"""Bayesian model-agnostic meta-learning (Yoon et al. 2018, algorithms 2 and 3).

    K particles of the block, each with its own learned start, take Stein steps on the mean loss L
    of the support: every particle follows the gradients of its neighbours, weighted by a kernel k,
    and is pushed away from them,

        theta_m <- theta_m - (alpha/K) sum_j [k(theta_j, theta_m) grad L(theta_j)
                                              - T grad_{theta_j} k(theta_j, theta_m)].

    ``k`` is Gaussian with the median bandwidth. L stands for -log p, and is a mean: with N points
    and k outputs the posterior of unit noise variance has T = 2/(N k). One particle is MAML. The
    prediction is the mean over particles, and ``epistemic`` their variance.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what the particles are; other weights are shared. A head is much the cheapest.
        particles: K.
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        temperature: T, weight of the repulsion.
        outer: ``"query"``, the loss of the query, averaged over particles; or ``"chaser"``, the
            squared distance to the leader, summed over particles and parameters: the leader has
            taken further steps on support and query together, and is a constant.
        leader_steps: how many; unused for ``"query"``.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Head()
    particles: int = 10
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    temperature: float = 1.0
    outer: Literal["query", "chaser"] = "query"
    leader_steps: int = 1

    def __post_init__(self) -> None:
        validate.integer(self, "particles", minimum=1)
        validate.integer(self, "inner_steps", minimum=0)
        validate.number(self, "inner_rate", minimum=0.0)
        validate.flag(self, "learn_inner_rate")
        validate.number(self, "temperature", minimum=0.0)
        validate.choice(self, "outer", ("query", "chaser"))
        validate.integer(self, "leader_steps", minimum=1)
        check_parts(self)
        if isinstance(self.subspace, Context) and self.subspace.start != "normal_learned":
            raise ValueError(
                "Bmaml.subspace must start its particles apart, since equal ones never separate: "
                f"use Context(start='normal_learned'), got {self.subspace!r}"
            )

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """See ``Method``; ``particles`` has the structure of the block, with leaves ``[K, ...]``.

        The shared weights are those of the network that the block does not replace.
        """
        net_key, particle_key = jax.random.split(key)
        params = init_network(self, net_key, x, y, learned_rate(self))

        def draw(key: Array) -> PyTree:
            return self.subspace.block(net_of(init_network(self, key, x, y, {})))

        particles = jax.vmap(draw)(jax.random.split(particle_key, self.particles))
        replaced = self.subspace.merge({}, particles)
        shared = {name: leaf for name, leaf in params.learned.items() if name not in replaced}
        return params.replace_learned({**shared, "particles": particles})

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """See ``Method``; the block has leaves ``[K, ...]``."""
        del key  # deterministic
        if support.x.shape[0] == 0:
            return Adapted(linalg.lift(params["particles"]))
        start = inner_start(params["particles"], support)
        return Adapted(self._descend(params, support, start, self.inner_steps))

    def loss(self, params: MetaParams, task: Task, key: Array | None) -> Array:
        """What ``outer`` says, a scalar."""
        block = self.adapt(params, task.support, key=key).block
        if self.outer == "query":
            query = points.sanitise(task.query)
            f = ensemble_outputs(self, params, block, query.x, query.mask)
            return jnp.mean(jax.vmap(lambda f: points.mean_loss(self.point_loss, f, query))(f))
        both = points.concatenate(task.support, task.query)
        leader = lax.stop_gradient(self._descend(params, both, block, self.leader_steps))
        return optax.tree.norm(optax.tree.sub(block, leader), squared=True)

    def _descend(self, params: MetaParams, support: Points, start: PyTree, steps: int) -> PyTree:
        """Stein steps of the particles on the mean loss of the points."""
        # Without a point there is nothing to adapt to: repulsion alone would still move them.
        rate = jnp.where(points.any_real(support), inner_rate(self, params), 0.0)
        return stein_descend(self._objective(params, support), start, rate, steps, self.temperature)

    def _objective(self, params: MetaParams, support: Points) -> Callable[[PyTree], Array]:
        """The mean loss of one particle."""
        first = jax.tree.map(lambda leaf: leaf[0], params["particles"])
        net = self.subspace.merge(net_of(params), first)  # any particle makes the net whole
        whole = params.replace_learned({**params.learned, **net})
        support, bound = bind_support(self, whole, support)
        return support_loss(self, support, bound)

    predict = predict_ensemble
    memory = no_memory
    step = gradient_step
