"""Ridge regression of the head, with a meta-learned strength (R2D2)."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp

from lavajax import linalg, validate
from lavajax.losses import CrossEntropy, Loss, SquaredError
from lavajax.methods.base import (
    bind_support,
    check_parts,
    init_network,
    predict_mean,
    prior_of,
    regulariser,
    scalar,
)
from lavajax.methods.head import AtHead, at_head
from lavajax.methods.task_loss import one_pass_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Head
from lavajax.sums import Sums, solve_head, sums_of
from lavajax.types import Adapted, Array, MetaParams, Points


@dataclasses.dataclass(frozen=True)
class Ridge:
    r"""Ridge regression as the inner solver (Bertinetto, Henriques, Torr and Vedaldi 2019, R2D2).

    With features Z ``[N, P]`` and targets Y ``[N, k]`` the head is, in closed form,

        W = W_0 + Z^T (Z Z^T + N lambda I)^-1 (Y - Z W_0),

    the least of (1/N) ||Z W - Y||^2 + lambda ||W - W_0||^2. It is ``Lava(inner_steps="map")`` at
    eps = c lambda. Classes are regressed onto one-hot targets; the logits are a Z W + b with a
    learned scale a and learned offsets b ``[C]`` (a scalar b, as in the paper, cancels in a
    softmax), and the block holds the head of the logits.

    Attributes:
        model: backbone.
        point_loss: loss of one point: of constant curvature, or ``CrossEntropy``, by one-hot
            targets.
        centre: shrink towards a learned W_0; False, as in the paper, shrinks towards 0.
        ridge: lambda, or where it starts.
        learn_ridge: learn log lambda in the outer loop.
        ridge_floor: f; a learned lambda is replaced by lambda + f mean_i ||z_i||^2, without which
            it shrinks until float32 cannot solve the system. Unused for a fixed lambda.
        logit_scale: where a starts; unused without classes.
        solver: ``"primal"`` or ``"dual"`` form of the linear system, or ``"auto"``, the smaller.
    """

    subspace: ClassVar[Head] = Head()

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    centre: bool = True
    ridge: float = 0.05
    learn_ridge: bool = True
    ridge_floor: float = 2e-4
    logit_scale: float = 1.0
    solver: Literal["auto", "primal", "dual"] = "auto"

    def __post_init__(self) -> None:
        validate.flag(self, "centre")
        validate.number(self, "ridge", minimum=0.0, strict=True)
        validate.flag(self, "learn_ridge")
        validate.number(self, "ridge_floor", minimum=0.0, strict=True)
        validate.number(self, "logit_scale", minimum=0.0, strict=True)
        validate.choice(self, "solver", ("auto", "primal", "dual"))
        check_parts(self)
        if not self._has_classes and self.point_loss.constant_curvature(1) is None:
            raise ValueError(
                "Ridge.point_loss must have a constant curvature, as SquaredError(), or be "
                "CrossEntropy(classes), whose labels are regressed onto as one-hot targets; got "
                f"{self.point_loss!r}"
            )

    @property
    def _has_classes(self) -> bool:
        return isinstance(self.point_loss, CrossEntropy)

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, and log lambda and the logits' scale and offset where they are learned.

        Raises:
            ValueError: the points do not fit the model or the loss.
        """
        learned = {"log_ridge": jnp.log(scalar(self.ridge))} if self.learn_ridge else {}
        params = init_network(self, key, x, y, learned)
        if not self.centre:
            params.fixed["head"] = jnp.zeros_like(params.learned.pop("head"))
        if self._has_classes:
            params.learned["logit_scale"] = scalar(self.logit_scale)
            params.learned["logit_offset"] = jnp.zeros_like(params["head"][0])
        return params

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """Solves for the head ``[P, k]`` on the support of one task."""
        del key  # deterministic
        if support.x.shape[0] == 0:
            return Adapted(self._of_outputs(params, prior_of(self, params).block))
        at = self._at_head(params, support)
        ridge = at.n * self._strength(params, at.scale)
        move = linalg.solve_kronecker_head(at.z, at.residual, ridge, self.solver)
        return Adapted(self._of_outputs(params, prior_of(self, params).block - move))

    def absorb(self, params: MetaParams, points: Points) -> Sums:
        """The sums of some points ``[N]``, N >= 0, for adaptation as they arrive."""
        at = self._at_head(params, points)
        return sums_of(at.z, -at.residual, jnp.zeros_like(at.residual), at.weight)

    def conclude(self, params: MetaParams, sums: Sums) -> Adapted:
        """What ``adapt`` gives for all points of the sums."""
        n = sums.points
        ridge = n * self._strength(params, jnp.trace(sums.features) / n)
        head = solve_head(prior_of(self, params).block, sums, ridge, 0.0)
        return Adapted(self._of_outputs(params, head))

    predict = predict_mean
    loss = one_pass_loss
    memory = no_memory
    step = gradient_step

    def _at_head(self, params: MetaParams, support: Points) -> AtHead:
        """The support as a regression, of classes onto one-hot targets."""
        support, bound = bind_support(self, params, support)
        loss = self.point_loss
        if isinstance(loss, CrossEntropy):
            targets = loss.one_hot(loss.cast(support.y, bound.prior.dtype), bound.prior.dtype)
            support, loss = dataclasses.replace(support, y=targets), SquaredError()
        return at_head(loss, support, bound)

    def _strength(self, params: MetaParams, scale: Array) -> Array | float:
        """lambda, given mean_i ||z_i||^2."""
        return regulariser(params, "log_ridge", self.ridge, self.ridge_floor, scale)

    def _of_outputs(self, params: MetaParams, head: Array) -> Array:
        """The head of the outputs ``[P, k]``, given that of the regression."""
        if not self._has_classes:
            return head
        return (params["logit_scale"] * head).at[-1].add(params["logit_offset"])
