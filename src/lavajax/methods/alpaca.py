"""ALPaCA: Bayesian linear regression in the last layer."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular

from lavajax import kernels, linalg, validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import (
    bind_support,
    check_gaussian,
    check_parts,
    init_network,
    prior_of,
)
from lavajax.methods.gaussian_head import head_features, predict_head, sample_head
from lavajax.methods.head import AtHead, at_head
from lavajax.methods.noise import learned_noise, outer_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.posterior import DensePosterior, Posterior
from lavajax.subspace import Head
from lavajax.sums import Sums, solve_head, sums_behind, sums_of
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction


@dataclasses.dataclass(frozen=True)
class Alpaca:
    r"""Bayesian regression on learned features (Harrison, Sharma and Pavone 2018, algorithm 1).

    The model of a task is y = K^T z + e, with e ~ N(0, diag sigma^2) and for each output o
    K_o ~ N(K0_o, sigma_o^2 Lambda0^-1). With features Z ``[N, P]`` and targets Y ``[N, k]``,

        Lambda = Z^T Z + Lambda0,   K = Lambda^-1 (Z^T Y + Lambda0 K0),

    and y at z is normal with mean K^T z and variances sigma_o^2 (1 + z^T Lambda^-1 z). K0, the
    leaf ``head``, and Lambda0 are learned, the latter by a factor of its inverse: Lambda0^-1 = C
    C^T with C lower triangular of positive diagonal, the softplus of that of the leaf
    ``prior_factor`` ``[P, P]``.

    The solves are done for the features C^T z, for which the prior precision is the identity: in
    float32 that keeps the digits that Lambda loses where the prior is much wider than the noise.

    Attributes:
        model: backbone.
        point_loss: ``SquaredError``: the loss of ``outer="mse"``, and the reported metric.
        noise: sigma, the standard deviation of the noise in units of the targets, or where it
            starts.
        learn_noise: learn log sigma ``[k]`` in the outer loop.
        prior_precision: Lambda0 starts at this times I.
        outer: what the outer loop minimises: ``"nll"``, the negative log density of the query, the
            mean over its points and outputs, in nats; or ``"mse"``, the loss of the mean alone.
        solver: ``"primal"`` or ``"dual"`` form of the linear system, or ``"auto"``, the smaller.
    """

    subspace: ClassVar[Head] = Head()

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    noise: float = 0.02
    learn_noise: bool = False
    prior_precision: float = 1.0
    outer: Literal["nll", "mse"] = "nll"
    solver: Literal["auto", "primal", "dual"] = "auto"

    def __post_init__(self) -> None:
        validate.number(self, "noise", minimum=0.0, strict=True)
        validate.flag(self, "learn_noise")
        validate.number(self, "prior_precision", minimum=0.0, strict=True)
        validate.choice(self, "outer", ("nll", "mse"))
        validate.choice(self, "solver", ("auto", "primal", "dual"))
        check_parts(self)
        check_gaussian(self)
        if self.learn_noise and self.outer == "mse":
            raise ValueError(
                "Alpaca.learn_noise=True needs outer='nll': the mean does not depend on the noise, "
                "and with outer='mse' there is nothing to learn"
            )

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, C before its softplus, and log sigma where it is learned.

        Raises:
            ValueError: the points do not fit the model or the loss.
        """
        params = init_network(self, key, x, y, {})
        p, k = params["head"].shape
        dtype = jnp.result_type(float)
        diagonal = kernels.unconstrained(1 / math.sqrt(self.prior_precision), 0.0)
        params.learned["prior_factor"] = diagonal * jnp.eye(p, dtype=dtype)
        params.learned.update(learned_noise(self, k))
        return params

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """The posterior of one task.

        Returns:
            ``block``: K, ``[P, k]``. ``posterior``: of C^-1 K, by the features C^T z of the
            support, ``[N, P]``; 0 for padding.
        """
        del key  # deterministic
        if support.x.shape[0] == 0:
            prior = prior_of(self, params).block
            rows = jnp.zeros((0, prior.shape[0]), prior.dtype)
            return Adapted(prior, Posterior(rows, jnp.ones((), prior.dtype)))
        z, at = self._at_head(params, support)
        move = linalg.solve_kronecker_head(z, at.residual, 1.0, self.solver, tried=True)
        return Adapted(self._moved(params, -move), Posterior(z, jnp.ones((), z.dtype)))

    def absorb(self, params: MetaParams, points: Points) -> Sums:
        """The sums of some points ``[N]``, N >= 0, for adaptation as they arrive."""
        z, at = self._at_head(params, points)
        return sums_of(z, -at.residual, jnp.zeros_like(at.residual), at.weight)

    def conclude(self, params: MetaParams, sums: Sums) -> Adapted:
        """What ``adapt`` gives for all points of the sums."""
        move = solve_head(jnp.zeros_like(sums.curved), sums, 1.0, 0.0)
        one = jnp.ones((), sums.features.dtype)
        return Adapted(self._moved(params, move), DensePosterior.of(sums.features, one))

    def recall(self, params: MetaParams, adapted: Adapted) -> Sums:
        """The sums of the points that ``adapted`` came from."""
        moved = adapted.block - prior_of(self, params).block
        move = solve_triangular(self._factor(params), moved, lower=True)
        return sums_behind(adapted.posterior.rows, move, 1.0)

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """The predictive density at x ``[M, ...]``; see ``Method``."""
        z = head_features(self, params, x, mask)
        at = self._whiten(params, z)
        return predict_head(self, params, adapted, z, at=at, route=self.solver)

    def sample(
        self, params: MetaParams, adapted: Adapted, x: Array, key: Array, number: int
    ) -> Array:
        """Functions drawn from the posterior, at x ``[M, ...]``: ``[number, M, k]``."""
        z = head_features(self, params, x)
        at, route = self._whiten(params, z), self.solver
        return sample_head(self, params, adapted, z, at=at, route=route, key=key, number=number)

    loss = outer_loss
    memory = no_memory
    step = gradient_step

    def _at_head(self, params: MetaParams, support: Points) -> tuple[Array, AtHead]:
        """The features C^T z of the support, and the support at its head."""
        support, bound = bind_support(self, params, support)
        at = at_head(self.point_loss, support, bound)
        return self._whiten(params, at.z), at

    def _moved(self, params: MetaParams, move: Array) -> Array:
        """K0 + C move, ``[P, k]``."""
        move = linalg.matmul(self._factor(params), move)
        return prior_of(self, params).block + move

    def _factor(self, params: MetaParams) -> Array:
        """C, ``[P, P]``."""
        raw = linalg.lift(params["prior_factor"])
        return jnp.tril(raw, -1) + jnp.diag(kernels.positive(jnp.diagonal(raw), 0.0))

    def _whiten(self, params: MetaParams, z: Array) -> Array:
        """C^T z for every row, ``[N, P]``."""
        return linalg.matmul(z, self._factor(params))
