"""LLAMA: gradient steps inside, a Laplace log determinant in the outer loss."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp

from lavajax import linalg, points, validate
from lavajax.curvature import PointLosses
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import bind_support, predict_mean
from lavajax.methods.batch_norm import check_apart
from lavajax.methods.gradient import adapt_gradient, check_gradient, init_gradient
from lavajax.methods.on_features import on_features
from lavajax.methods.task_loss import loss_at
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Full, Head, Subspace
from lavajax.types import Adapted, Array, MetaParams, Points, Task


@dataclasses.dataclass(frozen=True)
class Llama:
    """Recasting gradient-based meta-learning as hierarchical Bayes (Grant et al. 2018).

    Tasks adapt by gradient steps, as in ANIL or CAVIA. The outer loss of one task is

        L(theta'; query) + eta log det(H + tau I),   H the curvature of L(.; query) at theta',

    of its subroutine ML-LAPLACE, with the weight 1/2 replaced by eta as in its experiments. H has
    rank at most M k, so that without the damping tau its determinant is 0 for few query points.
    For a head under squared error H is a Kronecker product, (c/M) Z^T Z (x) I_k, with Z the query
    features; elsewhere it is the generalised Gauss-Newton matrix (the paper: K-FAC).

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what adapts: ``Head()`` or ``Context(size)``.
        inner_steps: S, 0 or more.
        inner_rate: alpha, or where it starts.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop.
        first_order: take inner gradients as constants in the outer gradient.
        eta: weight of the log determinant; 0 is ANIL or CAVIA.
        tau: damping, above 0.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Head()
    inner_steps: int = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    first_order: bool = False
    eta: float = 1e-6
    tau: float = 1e-3

    def __post_init__(self) -> None:
        validate.number(self, "eta", minimum=0.0)
        validate.number(self, "tau", minimum=0.0, strict=True)
        check_gradient(self)
        if isinstance(self.subspace, Full):
            raise ValueError(
                "Llama.subspace=Full() has no log determinant here: the curvature in all weights "
                "is too large to factor. Use Head() or Context(size), or Maml without it"
            )

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, and the inner rate where it is learned.

        Raises:
            ValueError: the points do not fit the model or the loss, or the backbone couples points
                that the curvature in a context takes apart.
        """
        params = init_gradient(self, key, x, y)
        check_apart(self, params)
        return params

    adapt = adapt_gradient
    predict = predict_mean

    def loss(self, params: MetaParams, task: Task, key: Array) -> Array:
        """The query loss after adapting, and the log determinant; a scalar."""
        method, params, task = on_features(self, params, task)
        adapted = method.adapt(params, task.support, key=key)
        fit = loss_at(method, params, adapted, task.query)
        if self.eta == 0:
            return fit
        return fit + self.eta * method.log_det(params, adapted, task.query)

    memory = no_memory
    step = gradient_step

    def log_det(self, params: MetaParams, adapted: Adapted, query: Points) -> Array:
        """log det(H + tau I), a scalar, of the mean loss of M query points at an adapted block."""
        query, bound = bind_support(self, params, query, "query")
        c = self.point_loss.constant_curvature(self.point_loss.out_dim(query.y.shape[1:]))
        if isinstance(self.subspace, Head) and c is not None:
            z = linalg.lift(bound.inputs)
            weight = points.weights(query, z.dtype) / points.count(query, z.dtype)
            rows = jnp.sqrt(c * weight)[:, None] * z
            return adapted.block.shape[1] * linalg.log_det_rows(rows, self.tau)
        if query.x.shape[0] == 0:
            return jnp.asarray(adapted.block.size * math.log(self.tau), adapted.block.dtype)
        apart = PointLosses.of(self.point_loss, query, bound)
        factors = apart.factors(*apart.jacobian(adapted.block, fan=False))
        rows = factors.reshape(-1, adapted.block.size) / jnp.sqrt(apart.count)
        return linalg.log_det_rows(rows, self.tau)
