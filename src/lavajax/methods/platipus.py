"""PLATIPUS: MAML from a random start, whose distribution is learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from lavajax import linalg, validate
from lavajax.gaussian import kl_divergence
from lavajax.inner import descend
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import (
    bind_support,
    init_network,
    inner_rate,
    learned_rate,
    predict_mean,
    prior_of,
    require_key,
    scalar,
)
from lavajax.methods.ensemble import predict_ensemble
from lavajax.methods.gradient import check_gradient, support_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Full, Subspace, net_of
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction, PyTree, Task


@dataclasses.dataclass(frozen=True)
class Platipus:
    r"""Probabilistic model-agnostic meta-learning (Finn, Xu and Levine 2018, algorithms 1 and 2).

    The block starts at a draw theta, and takes gradient steps from there as in MAML. With mu the
    block of the network, S the support, Q the query, L the mean loss and sigma, v learned:

        training    theta ~ q = N(mu - gamma_q grad L(mu; Q), v^2),
                    loss = L(phi; Q) + kl_weight KL(q || p)
        test        theta ~ p = N(mu - gamma_p grad L(mu; S), sigma^2)
        both        phi = theta after gradient steps of size alpha on L(.; S).

    The KL is a **sum** over the parameters of the block, of which all weights have thousands, while
    L is a mean: ``kl_weight`` keeps it from deciding alone.

    Without a key, ``adapt`` starts at the mean of p, and the block is a single one. With a key it
    draws ``samples`` starts, and every leaf of the block has a leading axis ``[samples]``; the
    prediction is then their mean, and ``epistemic`` their variance. ``loss`` needs a key.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what adapts, and is random; other weights are shared.
        inner_steps: S, 0 or more, from each draw.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient.
        samples: K, draws at test; training takes one for each task.
        kl_weight: weight of the KL.
        gamma_p: where the learned step size of the mean of p starts.
        gamma_q: where the learned step size of the mean of q starts.
        log_std: where log sigma and log v start, in every parameter.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Full()
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    first_order: bool = False
    samples: int = 10
    kl_weight: float = 0.1
    gamma_p: float = 0.01
    gamma_q: float = 0.01
    log_std: float = -4.0

    def __post_init__(self) -> None:
        check_gradient(self)
        validate.integer(self, "samples", minimum=1)
        for name in ("kl_weight", "gamma_p", "gamma_q"):
            validate.number(self, name, minimum=0.0)
        validate.number(self, "log_std")

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """See ``Method``; ``log_sigma`` and ``log_v`` have the structure of the block."""
        rates = {"gamma_p": scalar(self.gamma_p), "gamma_q": scalar(self.gamma_q)}
        params = init_network(self, key, x, y, {**rates, **learned_rate(self)})
        block = self.subspace.block(net_of(params))
        stds = {
            name: jax.tree.map(lambda leaf: jnp.full_like(leaf, self.log_std), block)
            for name in ("log_sigma", "log_v")
        }
        return params.replace_learned({**params.learned, **stds})

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """See ``Method``; with a key, the block has leaves ``[samples, ...]``."""
        center, refine = self._start(params, support)
        if key is None:
            return Adapted(refine(center))

        def sample(key: Array) -> PyTree:
            return refine(_draw(key, center, params["log_sigma"]))

        return Adapted(jax.vmap(sample)(jax.random.split(key, self.samples)))

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """See ``Method``; of one block, or of samples."""
        single = jax.tree.leaves(prior_of(self, params).block)[0].ndim
        sampled = jax.tree.leaves(adapted.block)[0].ndim > single
        predict = predict_ensemble if sampled else predict_mean
        return predict(self, params, adapted, x, mask=mask)

    def loss(self, params: MetaParams, task: Task, key: Array | None) -> Array:
        """L(phi; Q) + kl_weight KL(q || p), a scalar."""
        query, bound = bind_support(self, params, task.query, "query")
        objective = support_loss(self, query, bound)
        mean_q = descend(objective, bound.prior, params["gamma_q"], 1, first_order=self.first_order)
        mean_p, refine = self._start(params, task.support)
        phi = refine(_draw(require_key(self, key), mean_q, params["log_v"]))
        kl = jax.tree.map(kl_divergence, mean_q, params["log_v"], mean_p, params["log_sigma"])
        return objective(phi) + self.kl_weight * optax.tree.sum(kl)

    def _start(
        self, params: MetaParams, support: Points
    ) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """The mean of p, and the steps that a start takes on the support."""
        if support.x.shape[0] == 0:
            return prior_of(self, params).block, lambda theta: theta
        support, bound = bind_support(self, params, support)
        objective = support_loss(self, support, bound)

        def move(theta: PyTree, rate: Array | float, steps: int) -> PyTree:
            return descend(objective, theta, rate, steps, first_order=self.first_order)

        center = move(bound.prior, params["gamma_p"], 1)
        return center, lambda theta: move(theta, inner_rate(self, params), self.inner_steps)

    memory = no_memory
    step = gradient_step


def _draw(key: Array, mean: PyTree, log_std: PyTree) -> PyTree:
    """One draw of N(mean, exp(log_std)^2), as a differentiable function of both."""
    flat, unravel = ravel_pytree(mean)  # one draw for all leaves compiles faster than one for each
    noise = unravel(jax.random.normal(key, flat.shape, flat.dtype))
    return jax.tree.map(lambda m, s, e: m + jnp.exp(linalg.lift(s)) * e, mean, log_std, noise)
