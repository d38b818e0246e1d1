"""LAVA: per-point steps, weighed by the curvature of each point's own loss."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lavajax import linalg, points, tangent, validate
from lavajax.curvature import jacobian, point_outputs
from lavajax.losses import Loss, SquaredError, constant_curvature
from lavajax.methods.base import (
    bind_support,
    check_gaussian,
    check_parts,
    init_network,
    learned_rate,
    predict_mean,
    prior_of,
    regulariser,
    scalar,
)
from lavajax.methods.batch_norm import check_apart
from lavajax.methods.gaussian_head import head_features, predict_head, sample_head
from lavajax.methods.lava_general import adapt_general, diagnose, loss
from lavajax.methods.lava_head import absorb, adapt_head, conclude, recall
from lavajax.methods.noise import learned_noise, noise_variance
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.posterior import Posterior
from lavajax.subspace import Full, Head, Subspace, bind
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction, PyTree


@dataclasses.dataclass(frozen=True)
class Lava:
    r"""Laplace approximation for variance-reduced adaptation (Reichlin et al., TMLR 2024).

    Every support point takes its own descent, theta_i = theta_0 + d_i, on its own loss l_i, and
    the steps are combined by the curvature H_i of l_i at theta_i (equations 8 and 9):

        theta' = theta_0 + (sum_i H_i + N eps I)^-1 sum_i (H_i + eps I) d_i.

    The defaults are the paper's setting. ``lava_converged`` is the setting that we recommend.

    For a head under squared error everything is closed form, at the cost of one linear solve of
    size min(N, P), and amounts to a ridge regression onto pseudo-targets. Elsewhere H_i is the
    generalised Gauss-Newton matrix, or the exact Hessian. The two are equal for the context or head
    of a ReLU network, under a loss whose ``factor`` is its Hessian (``GaussianNll``'s is not).

    With ``noise`` the predictions have error bars. The loss is then read as the negative log
    density of y under noise of variance sigma_o^2, in units of it, and the regulariser as a prior,
    which ``prior_correction`` counts once. The posterior of the block and of the outputs at x,

        N(theta', sigma_o^2 c (sum_i H_i + eps I)^-1),
        epistemic_o(x) = sigma_o^2 c J_o (sum_i H_i + eps I)^-1 J_o^T,   J_o = df_o(x)/dtheta',

    is exact for a head whose steps are ``"map"``: Bayesian linear regression with a prior of
    variance sigma_o^2 c / eps around theta_0. For a context and for all weights it is the Laplace
    approximation of the linearised network.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what adapts: ``Head()``, ``Context(size)`` or ``Full()``, all weights.
        inner_steps: how far each point descends. A number S >= 1 of gradient steps;
            ``"converged"``, to where its linearised loss is least (for a head, the limit of
            S -> infinity); ``"map"``, to its own maximum a posteriori, the least of
            l_i + eps/2 ||d||^2 (for a head, LAVA then **is** ridge regression around theta_0).
            The last two are closed form, need no rate, and a loss of constant curvature. In a
            context, where they may be ill-posed, they are damped by 1e-4 of the point's own scale.
        inner_rate: alpha, or where it starts; unused where steps are not counted.
        learn_inner_rate: learn alpha, as a scalar, in the outer loop; likewise.
        epsilon: eps, the regulariser of each curvature, or where it starts.
        learn_epsilon: learn log eps in the outer loop.
        epsilon_floor: f; a learned eps is replaced by eps + f mean_i tr(H_i)/k (with
            ``prior_correction``, f times the sum), without which it
            shrinks until float32 cannot solve the system and training is unstable. More helps many
            points, less helps few: of 1e-5 to 1e-3, 2e-4 served 2, 10 and 20 points of a sine.
            Unused for a fixed eps.
        prior_correction: count the prior once. As the paper writes it every point brings its own,
            N eps in all, which the more points there are holds the estimate the more; with the
            correction a point has the N-th part of eps.
        curvature: ``"ggn"``; ``"hessian"``, exact. Where those of a task add up to a precision
            that is not positive definite there is no estimate: it is NaN, and ``lavajax.adapt``
            refuses (see ``diagnose``). Or ``"flat"``, the plain average of the steps.
        curvature_at: where H_i is taken: ``"adapted"``, theta_i, as in the paper, or ``"prior"``,
            theta_0, where one gradient step and the curvature share their passes.
            ``"auto"`` is ``"prior"`` for all weights and ``"adapted"`` otherwise.
        solver: ``"primal"`` or ``"dual"`` form of the linear system, ``"auto"`` the smaller by
            shape, or ``"naive"``, the paper's steps taken literally with N matrices of n x n.
        noise: sigma, the standard deviation of the noise, in units of the targets that the source
            samples (standardised ones, of a table), or where it
            starts; None for a prediction without error bars. The precision of a
            context or of all weights, which the outputs share, is not weighted by their noise; each
            output's variance is scaled by its own sigma^2.
        learn_noise: learn log sigma ``[k]`` in the outer loop.
        outer: what the outer loop minimises: ``"mse"``, the loss of the query's mean, whatever
            ``point_loss`` is; or ``"nll"``, the negative log density of the query's targets, the
            mean over points and outputs, in nats.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Head()
    inner_steps: int | Literal["converged", "map"] = 1
    inner_rate: float = 0.1
    learn_inner_rate: bool = True
    epsilon: float = 0.1
    learn_epsilon: bool = False
    epsilon_floor: float = 2e-4
    prior_correction: bool = False
    curvature: Literal["ggn", "hessian", "flat"] = "ggn"
    curvature_at: Literal["auto", "adapted", "prior"] = "auto"
    solver: Literal["auto", "primal", "dual", "naive"] = "auto"
    noise: float | None = None
    learn_noise: bool = False
    outer: Literal["mse", "nll"] = "mse"

    def __post_init__(self) -> None:
        if isinstance(self.inner_steps, str):
            validate.choice(self, "inner_steps", ("converged", "map"))
        else:
            validate.integer(self, "inner_steps", minimum=1)
        validate.number(self, "inner_rate", minimum=0.0)
        validate.flag(self, "learn_inner_rate")
        validate.number(self, "epsilon", minimum=0.0, strict=True)
        validate.flag(self, "learn_epsilon")
        validate.number(self, "epsilon_floor", minimum=0.0, strict=True)
        validate.flag(self, "prior_correction")
        validate.choice(self, "curvature", ("ggn", "hessian", "flat"))
        validate.choice(self, "curvature_at", ("auto", "adapted", "prior"))
        validate.choice(self, "solver", ("auto", "primal", "dual", "naive"))
        validate.flag(self, "learn_noise")
        validate.choice(self, "outer", ("mse", "nll"))
        check_parts(self)
        self._check_error_bars()
        if self.linear_steps and self.point_loss.constant_curvature(1) is None:
            raise ValueError(
                f"Lava.inner_steps={self.inner_steps!r} needs a loss of constant curvature, such "
                f"as SquaredError(); got {self.point_loss!r}, which has no such minimum: give a "
                "number of steps"
            )
        if self.curvature == "flat" and self.learn_epsilon and self.inner_steps != "map":
            raise ValueError(
                "Lava.learn_epsilon=True needs curvature='ggn' or 'hessian', or inner_steps='map': "
                "else epsilon has no effect with curvature='flat', and there is nothing to learn"
            )
        if self.solver in ("primal", "dual") and self.curvature != "ggn":
            raise ValueError(
                f"Lava.solver={self.solver!r} is a form of the system for curvature='ggn'; with "
                f"curvature={self.curvature!r} give solver='auto' or 'naive'"
            )

    def _check_error_bars(self) -> None:
        if self.noise is None:
            for name, given in (("learn_noise", self.learn_noise), ("outer", self.outer == "nll")):
                if given:
                    raise ValueError(
                        f"Lava.{name}={getattr(self, name)!r} needs a noise: give noise=0.1, say, "
                        "the standard deviation of the targets around the truth"
                    )
            return
        validate.number(self, "noise", minimum=0.0, strict=True)
        check_gaussian(self)
        if not self.prior_correction:
            raise ValueError(
                "Lava.noise needs prior_correction=True: without it every point brings the prior "
                "again, and the result is no posterior"
            )
        if self.curvature != "ggn":
            raise ValueError(
                f"Lava.noise needs curvature='ggn', which is never negative; got "
                f"curvature={self.curvature!r}"
            )
        if self.learn_noise and self.outer == "mse":
            raise ValueError(
                "Lava.learn_noise=True needs outer='nll': the mean does not depend on the noise, "
                "and with outer='mse' there is nothing to learn"
            )

    @property
    def linear_steps(self) -> bool:
        """Whether each point goes to the least of its linearised loss."""
        return isinstance(self.inner_steps, str)

    @property
    def closed_form(self) -> bool:
        """Whether the block is a head under a loss of constant curvature."""
        return (
            isinstance(self.subspace, Head)
            and self.point_loss.constant_curvature(1) is not None
            and self.curvature == "ggn"
            and self.solver != "naive"
        )

    @property
    def at_prior(self) -> bool:
        """Whether curvatures are taken at theta_0."""
        if self.curvature_at == "auto":
            return isinstance(self.subspace, Full)
        return self.curvature_at == "prior"

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, and rate and log eps where they are learned.

        Raises:
            ValueError: the points do not fit the model or the loss, or the backbone couples points
                that this setting must take apart.
        """
        learned = {} if self.linear_steps else learned_rate(self)
        if self.learn_epsilon:
            learned["log_epsilon"] = jnp.log(scalar(self.epsilon))
        params = init_network(self, key, x, y, learned)
        params.learned.update(learned_noise(self, params["head"].shape[1]))
        check_apart(self, params)
        return params

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """One LAVA step from the prior block, on the support of one task.

        Returns:
            ``block``; with ``noise``, ``posterior``: a ``Posterior`` of the block, or, in
            closed form, of the weights ``[P]`` of any one output of the head.
        """
        del key  # deterministic
        if support.x.shape[0] == 0:
            prior = prior_of(self, params)
            dtype = jax.tree.leaves(prior.block)[0].dtype
            rows = jnp.zeros((0, self._posterior_size(prior.block)), dtype)
            return self.outcome(params, prior.block, rows, self.epsilon_share(params, 0.0, 1.0))
        support, bound = bind_support(self, params, support)
        if self.closed_form:
            return adapt_head(self, params, support, bound)
        return adapt_general(self, params, support, bound)

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """See ``Method``; with ``noise``, with error bars."""
        if self.noise is None:
            return predict_mean(self, params, adapted, x, mask=mask)
        if self.closed_form:
            z = head_features(self, params, x, mask)
            return predict_head(self, params, adapted, z, at=z, route=self.route)
        noise = noise_variance(self, params)
        mean, rows = self._linearised(params, adapted, x, mask)
        variance = adapted.posterior.variance(rows, self.route)
        return Prediction(mean, variance * noise, jnp.broadcast_to(noise, mean.shape))

    def sample(
        self, params: MetaParams, adapted: Adapted, x: Array, key: Array, number: int
    ) -> Array:
        """Functions drawn from the posterior, at x ``[M, ...]``: ``[number, M, k]``."""
        if self.closed_form:
            z = head_features(self, params, x)
            route = self.route
            return sample_head(self, params, adapted, z, at=z, route=route, key=key, number=number)
        sigma = jnp.sqrt(noise_variance(self, params))
        mean, rows = self._linearised(params, adapted, x, None)
        moves = adapted.posterior.draw(key, (number,), self.route)
        return mean + sigma * jnp.einsum("sn,mkn->smk", moves, rows)

    def _linearised(
        self, params: MetaParams, adapted: Adapted, x: Array, mask: Array | None
    ) -> tuple[Array, Array]:
        """The outputs at x ``[M, ...]``, ``[M, k]``, and their Jacobian, ``[M, k, n]``."""
        ones = jnp.ones(x.shape[0]) + points.varying_zero(x, *jax.tree.leaves(adapted.block))
        if isinstance(self.subspace, Full) and tangent.is_tapped(self.model):
            fixed = params.fixed["backbone"]
            mean, layers = tangent.layer_rows(self.model, adapted.block, fixed, x, ones)
            k = mean.shape[1]
            unit = jnp.broadcast_to(jnp.eye(k, dtype=mean.dtype), (*mean.shape, k))
            return mean, layers.written_out(unit).matrix()
        bound = bind(self.subspace, self.model, params, x, mask)
        mean, rows = jacobian(point_outputs(bound), adapted.block, bound.inputs, ones, fan=False)
        return mean, rows.matrix()

    absorb = absorb
    conclude = conclude
    recall = recall
    diagnose = diagnose
    loss = loss
    memory = no_memory
    step = gradient_step

    @property
    def route(self) -> linalg.Route:
        """The form of the linear system."""
        return "auto" if self.solver == "naive" else self.solver

    @property
    def why_no_estimate(self) -> str | None:
        """Why the estimate from finite points may be NaN; None where it is not."""
        if self.curvature != "hessian":
            return None
        return (
            "the exact Hessians of its points and epsilon add up to a precision that is not "
            "positive definite (the eigenvalues of lavajax.diagnose(params, support)); "
            "curvature='ggn' always is, or a larger epsilon may do"
        )

    @property
    def counted_steps(self) -> int:
        """S, where steps are counted."""
        assert isinstance(self.inner_steps, int)
        return self.inner_steps

    def epsilon_share(
        self, params: MetaParams, scale: Array | float, count: Array | float
    ) -> Array | float:
        """The share of one of ``count`` points in the regulariser of their precision.

        A learned eps is held above a floor relative to ``scale``, the mean curvature per output.
        """
        share = count if self.prior_correction else 1.0
        total = regulariser(params, "log_epsilon", self.epsilon, self.epsilon_floor, scale * share)
        return total / share

    def outcome(
        self, params: MetaParams, block: PyTree, rows: Array, ridge: Array | float
    ) -> Adapted:
        """The outcome, with the posterior of precision ridge (R^T R + I) for rows R."""
        if self.noise is None:
            return Adapted(block)
        c = constant_curvature(self.point_loss, params["head"].shape[1])
        return Adapted(block, Posterior(rows, c / jnp.asarray(ridge, rows.dtype)))

    def _posterior_size(self, block: PyTree) -> int:
        """n: of one output of a head, or of the whole block."""
        if self.closed_form:
            return block.shape[0]
        return sum(leaf.size for leaf in jax.tree.leaves(block))


def lava_converged(**settings: Any) -> Lava:
    """The setting of ``Lava`` that we recommend: converged per-point steps and a learned eps.

    A single rate alpha cannot make alpha c s_i = 1 for every point; this can, at the same cost.

    Args:
        **settings: any other field of ``Lava``.
    """
    return Lava(**{"inner_steps": "converged", "learn_epsilon": True, **settings})


def lava_bayesian(**settings: Any) -> Lava:
    """The setting of ``Lava`` that we recommend for error bars: the posterior, by its likelihood.

    Bayesian linear regression in a head, with learned noise and a learned prior variance; training
    by the density of the query often lowers the error of the mean too.

    It is worth trying ``epsilon=10.0``, a prior that is firm at first, so that what a task needs
    has to grow in the features. Long training on sine waves then ends at a lower error, but on air
    quality at a higher one.

    Args:
        **settings: any other field of ``Lava``.
    """
    bayesian = {"inner_steps": "map", "prior_correction": True, "noise": 0.1, "outer": "nll"}
    learned = {"learn_epsilon": True, "learn_noise": True, "epsilon_floor": 1e-6}
    return Lava(**{**bayesian, **learned, **settings})
