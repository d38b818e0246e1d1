"""LAVA: per-point steps, weighed by the curvature of each point's own loss."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from lavajax import network, precision, tangent, validate
from lavajax.curvature import PointLosses, jacobian, point_outputs
from lavajax.losses import Loss, SquaredError, constant_curvature
from lavajax.methods.base import (
    bind_support,
    check_apart,
    check_gaussian,
    check_parts,
    init_network,
    inner_rate,
    learned_rate,
    predict_mean,
    prior_of,
    regulariser,
    scalar,
)
from lavajax.methods.head import AtHead, at_head
from lavajax.methods.noise import learned_noise, noise_variance, outer_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.posterior import DensePosterior, Posterior
from lavajax.subspace import Bound, Context, Full, Head, Subspace, bind, net_of
from lavajax.sums import Sums, solve_head, sums_of
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
    generalised Gauss-Newton matrix, equal to the Hessian for a ReLU network, or the exact Hessian.

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
        epsilon_floor: f; a learned eps is replaced by eps + f mean_i tr(H_i)/k, without which it
            shrinks until float32 cannot solve the system and training is unstable. More helps many
            points, less helps few: of 1e-5 to 1e-3, 2e-4 served 2, 10 and 20 points of a sine.
            Unused for a fixed eps.
        prior_correction: count the prior once. As the paper writes it every point brings its own,
            N eps in all, which the more points there are holds the estimate the more; with the
            correction a point has the N-th part of eps.
        curvature: ``"ggn"``; ``"hessian"``, exact by ``jax.hessian``, which may be indefinite
            (see ``diagnose``); or ``"flat"``, the plain average of the steps.
        curvature_at: where H_i is taken: ``"adapted"``, theta_i, as in the paper, or ``"prior"``,
            theta_0, where one gradient step and the curvature share their passes.
            ``"auto"`` is ``"prior"`` for all weights and ``"adapted"`` otherwise.
        solver: ``"primal"`` or ``"dual"`` form of the linear system, ``"auto"`` the smaller by
            shape, or ``"naive"``, the paper's steps taken literally with N matrices of n x n.
        noise: sigma, the standard deviation of the noise in units of the targets, or where it
            starts; None for a prediction without error bars.
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
        if self._linear_steps and self.point_loss.constant_curvature(1) is None:
            raise ValueError(
                f"Lava.inner_steps={self.inner_steps!r} needs a loss of constant curvature, such "
                f"as SquaredError(); got {self.point_loss!r}, which has no such minimum: give a "
                "number of steps"
            )
        if self.curvature == "flat" and self.learn_epsilon:
            raise ValueError(
                "Lava.learn_epsilon=True needs curvature='ggn' or 'hessian': with curvature='flat' "
                "epsilon has no effect, and there is nothing to learn"
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
    def _linear_steps(self) -> bool:
        return isinstance(self.inner_steps, str)

    @property
    def _has_closed_form(self) -> bool:
        return (
            isinstance(self.subspace, Head)
            and self.point_loss.constant_curvature(1) is not None
            and self.curvature == "ggn"
            and self.solver != "naive"
        )

    @property
    def _at_prior(self) -> bool:
        if self.curvature_at == "auto":
            return isinstance(self.subspace, Full)
        return self.curvature_at == "prior"

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, and rate and log eps where they are learned.

        Raises:
            ValueError: the points do not fit the model or the loss, or the backbone couples points
                that this setting must take apart.
        """
        learned = {} if self._linear_steps else learned_rate(self)
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
            rows = jnp.zeros((0, self._posterior_size(prior.block)))
            return self._with_posterior(params, prior.block, rows, self._epsilon(params, 0.0, 1.0))
        support, bound = bind_support(self, params, support)
        if self._has_closed_form:
            return self._adapt_closed_form(params, support, bound)
        return self._adapt_general(params, support, bound)

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """See ``Method``; with ``noise``, with error bars."""
        if self.noise is None:
            return predict_mean(self, params, adapted, x, mask=mask)
        noise = noise_variance(self, params)
        if self._has_closed_form:
            fixed = params.fixed["backbone"]
            z = precision.lift(network.features(self.model, net_of(params), fixed, x, mask))
            mean = z @ adapted.block
            variance = adapted.posterior.variance(z, self._route)[:, None]
        else:
            bound = bind(self.subspace, self.model, params, x, mask)
            ones = jnp.ones(x.shape[0])
            mean, at = jacobian(point_outputs(bound), adapted.block, bound.inputs, ones, fan=False)
            variance = adapted.posterior.variance(at.matrix(), self._route)
        return Prediction(mean, variance * noise, jnp.broadcast_to(noise, mean.shape))

    def sample(
        self, params: MetaParams, adapted: Adapted, x: Array, key: Array, number: int
    ) -> Array:
        """Functions drawn from the posterior, at x ``[M, ...]``: ``[number, M, k]``."""
        posterior, sigma = adapted.posterior, jnp.sqrt(noise_variance(self, params))
        if self._has_closed_form:
            fixed = params.fixed["backbone"]
            z = precision.lift(network.features(self.model, net_of(params), fixed, x))
            moves = posterior.draw(key, (number, sigma.shape[0]), self._route)
            return z @ adapted.block + sigma * jnp.einsum("skp,mp->smk", moves, z)
        bound = bind(self.subspace, self.model, params, x, None)
        ones = jnp.ones(x.shape[0])
        mean, at = jacobian(point_outputs(bound), adapted.block, bound.inputs, ones, fan=False)
        moves = posterior.draw(key, (number,), self._route)
        return mean + sigma * jnp.einsum("sn,mkn->smk", moves, at.matrix())

    loss = outer_loss
    memory = no_memory
    step = gradient_step

    @property
    def _route(self) -> precision.Route:
        return "auto" if self.solver == "naive" else self.solver

    @property
    def _count_steps(self) -> int:
        """S, where steps are counted."""
        assert isinstance(self.inner_steps, int)
        return self.inner_steps

    def _epsilon(
        self, params: MetaParams, scale: Array | float, count: Array | float
    ) -> Array | float:
        """The share of one of ``count`` points in the regulariser of their precision.

        A learned eps is held above a floor relative to ``scale``, the mean curvature per output.
        """
        share = count if self.prior_correction else 1.0
        total = regulariser(params, "log_epsilon", self.epsilon, self.epsilon_floor, scale * share)
        return total / share

    def _with_posterior(
        self, params: MetaParams, block: PyTree, rows: Array, ridge: Array | float
    ) -> Adapted:
        """The outcome, with the posterior of precision A^T A + ridge I for rows A."""
        if self.noise is None:
            return Adapted(block)
        c = constant_curvature(self.point_loss, params["head"].shape[1])
        return Adapted(block, Posterior(rows / jnp.sqrt(ridge), c / jnp.asarray(ridge, rows.dtype)))

    def _posterior_size(self, block: PyTree) -> int:
        """n: of one output of a head, or of the whole block."""
        if self._has_closed_form:
            return block.shape[0]
        return sum(leaf.size for leaf in jax.tree.leaves(block))

    def _adapt_closed_form(self, params: MetaParams, support: Points, bound: Bound) -> Adapted:
        """The head under squared error.

        With z the features, R = Z W_0 - Y and s_i = ||z_i||^2, each point's S steps are
        d_i = -beta_i c z_i R_i, beta_i = alpha sum_{j<S} (1 - alpha c s_i)^j, and

            W' = W_0 - (Z^T Z + (N eps/c) I)^-1 Z^T diag(omega) R,   omega_i = beta_i (c s_i + eps);

        converged, beta_i = 1/(c s_i); at the point's own MAP, omega_i = 1.
        """
        at = at_head(self.point_loss, support, bound)
        c = constant_curvature(self.point_loss, bound.prior.shape[1])
        epsilon = self._epsilon(params, c * at.scale, at.n)
        curved, plain = self._head_steps(params, at)
        targets, ridge = curved + epsilon / c * plain, at.n * epsilon
        move = precision.solve_kronecker_head(at.z, targets, ridge / c, self._route)
        return self._with_posterior(params, bound.prior + move, math.sqrt(c) * at.z, ridge)

    def _head_steps(self, params: MetaParams, at: AtHead) -> tuple[Array, Array]:
        """(s_i, t_i), both ``[N, k]``, with d_i = z_i t_i and z_i z_i^T d_i = z_i s_i.

        At a point's own MAP, where H_i d_i + eps d_i = -c z_i R_i whatever eps, (-R_i, 0).
        """
        c = constant_curvature(self.point_loss, at.residual.shape[1])
        s = jnp.sum(at.z**2, axis=-1)
        if self.inner_steps == "map":
            return -at.residual, jnp.zeros_like(at.residual)
        if self.inner_steps == "converged":
            return -at.residual, -at.residual / jnp.where(at.weight > 0, s, 1.0)[:, None]
        rate = inner_rate(self, params)
        plain = -c * rate * _geometric(1 - rate * c * s, self._count_steps)[:, None] * at.residual
        return s[:, None] * plain, plain

    def absorb(self, params: MetaParams, points: Points) -> Sums:
        """The sums of some points ``[N]``, N >= 0, for adaptation as they arrive.

        Raises:
            ValueError: the setting has no closed form in a head.
        """
        if not self._has_closed_form:
            raise ValueError(
                "params must be of Lava with a head in closed form to adapt by sums over points, "
                f"got {self!r}"
            )
        points, bound = bind_support(self, params, points)
        at = at_head(self.point_loss, points, bound)
        return sums_of(at.z, *self._head_steps(params, at), at.weight)

    def conclude(self, params: MetaParams, sums: Sums) -> Adapted:
        """What ``adapt`` gives for all points of the sums."""
        prior = prior_of(self, params).block
        c, n = constant_curvature(self.point_loss, prior.shape[1]), sums.points
        epsilon = self._epsilon(params, c * jnp.trace(sums.features) / n, n)
        ridge = n * epsilon / c
        block = solve_head(prior, sums, ridge, epsilon / c)
        if self.noise is None:
            return Adapted(block)
        return Adapted(block, DensePosterior.of(sums.features / ridge, 1 / ridge))

    def _adapt_general(self, params: MetaParams, support: Points, bound: Bound) -> Adapted:
        """Any block and any loss: steps and curvatures by differentiation, point by point."""
        prior = bound.prior
        apart = PointLosses.of(self.point_loss, support, bound)
        if self._in_span(apart, prior):
            return Adapted(self._adapt_in_span(params, apart, prior))
        if self._head_in_span(apart, prior):
            return Adapted(self._adapt_head_in_span(params, apart, prior))
        steps, curvature = self._fan(params, apart, prior)
        epsilon = self._epsilon(params, apart.mean_scale(curvature.traces()), apart.count)
        if self.solver == "naive":
            fan = jax.tree.map(jnp.add, prior, steps)
            block = precision.literal(fan, curvature, apart.weight, epsilon)
        else:
            block = precision.aggregate(prior, steps, curvature, apart.weight, epsilon)
        if not isinstance(curvature, precision.LowRank):
            return Adapted(block)
        rows = curvature.rows()
        return self._with_posterior(params, block, rows, apart.count * epsilon)

    def _fan(
        self, params: MetaParams, apart: PointLosses, prior: PyTree
    ) -> tuple[PyTree, precision.Curvature]:
        """The steps d_i, with leaves ``[N, ...]``, and the curvatures H_i."""
        f, jacobian = apart.jacobian(prior, fan=False)  # compiled only where it is used
        if self._linear_steps:
            steps = jacobian.spread(self._newton(params, apart, f, jacobian.blocks()))
        elif self._at_prior and self.inner_steps == 1:
            steps = jacobian.spread(apart.gradient_coefficients(f, inner_rate(self, params)))
        else:
            steps = apart.descend(prior, inner_rate(self, params), self._count_steps)
        if self.curvature == "flat":
            size = sum(leaf.size for leaf in jax.tree.leaves(prior))
            return steps, precision.Flat(apart.weight.shape[0], size)
        fan = not self._at_prior
        theta = jax.tree.map(jnp.add, prior, steps) if fan else prior
        if self.curvature == "hessian":
            return steps, precision.Dense(apart.hessians(theta, fan=fan))
        if fan:
            f, jacobian = apart.jacobian(theta, fan=True)
        return steps, precision.LowRank(apart.factors(f, jacobian), self._route)

    def _epsilon_at_prior(
        self, params: MetaParams, apart: PointLosses, f: Array, blocks: Array
    ) -> Array | float:
        """eps, given outputs and J_i J_i^T ``[N, k, k]`` at the prior."""
        s = apart.loss_factors(f)
        traces = jnp.einsum("nkr,nkl,nlr->n", s, blocks, s, precision="highest")
        return self._epsilon(params, apart.mean_scale(traces), apart.count)

    def _newton(self, params: MetaParams, apart: PointLosses, f: Array, blocks: Array) -> Array:
        """a ``[N, k]``, d_i = J_i^T a_i, of steps to the least of each linearised point."""
        # A few context parameters may move some outputs hardly or not at all: without damping
        # they would move without bound. A head moves all alike, and is part of all weights.
        relative = 1e-4 if isinstance(self.subspace, Context) else 0.0
        if self.inner_steps == "converged":
            return apart.newton_coefficients(f, blocks, 0.0, relative)
        epsilon = self._epsilon_at_prior(params, apart, f, blocks)
        damping = epsilon / constant_curvature(self.point_loss, apart.out_dim)
        return apart.newton_coefficients(f, blocks, damping, relative)

    def _in_span(self, apart: PointLosses, prior: PyTree) -> bool:
        """Whether all of it can happen in the space of the N k outputs, which is the smaller.

        For all weights only: their J_i J_i^T contains ||z_i||^2 I, from the head, and is never
        near singular as that of a context can be, which would spoil the coefficients.
        """
        if not isinstance(self.subspace, Full) or self.curvature != "ggn":
            return False
        if self.noise is not None:  # the posterior needs the rows of the Jacobian
            return False
        if not self._at_prior or not (self._linear_steps or self.inner_steps == 1):
            return False
        size = sum(leaf.size for leaf in jax.tree.leaves(prior))
        small = apart.weight.shape[0] * apart.out_dim < size
        return self.solver == "dual" or (self.solver == "auto" and small)

    def _adapt_in_span(self, params: MetaParams, apart: PointLosses, prior: PyTree) -> PyTree:
        """theta_0 + J^T u, without a step or a curvature ever written out."""
        jacobian: tangent.Jacobian
        if tangent.is_tapped(self.model):
            backbone = params.fixed["backbone"]
            f, jacobian = tangent.layer_rows(
                self.model, prior, backbone, apart.inputs, apart.weight
            )
        else:
            f, jacobian = apart.jacobian(prior, fan=False)
        gram = jacobian.gram()
        blocks = jnp.einsum("nknl->nkl", gram)
        epsilon = self._epsilon_at_prior(params, apart, f, blocks)
        if self._linear_steps:
            steps = self._newton(params, apart, f, blocks)
        else:
            steps = apart.gradient_coefficients(f, inner_rate(self, params))
        u = precision.combine_in_span(gram, steps, apart.loss_factors(f), apart.count, epsilon)
        return jax.tree.map(jnp.add, prior, jacobian.combine(u))

    def _head_in_span(self, apart: PointLosses, prior: PyTree) -> bool:
        """Whether the head of a loss of any curvature, as of classes, is adapted by its features.

        Where points are fewer than features; then no Jacobian is written out, of N k rows of P k.
        """
        if not isinstance(self.subspace, Head) or self.curvature != "ggn" or self._linear_steps:
            return False
        small = apart.weight.shape[0] < prior.shape[0]
        return self.solver == "dual" or (self.solver == "auto" and small)

    def _adapt_head_in_span(self, params: MetaParams, apart: PointLosses, head: Array) -> Array:
        """W_0 + Z^T u: every step of a point is a multiple of its features, d_i = z_i a_i^T.

        With f_i = W_0^T z_i and s_i = ||z_i||^2, a gradient step is a_i <- a_i - alpha dl/df at
        f_i + s_i a_i, and the Jacobians' products are J_i J_j^T = (z_i z_j) I.
        """
        z = apart.inputs * apart.weight[:, None]
        f = jnp.matmul(z, head, precision=lax.Precision.HIGHEST)
        squares = jnp.sum(z**2, axis=-1)[:, None]
        rate = inner_rate(self, params)
        steps = jnp.zeros_like(f)
        if self._count_steps == 1:  # what the scan would compute, without its overhead
            steps = apart.gradient_coefficients(f, rate)
        else:
            steps, _ = lax.scan(
                lambda a, _: (a + apart.gradient_coefficients(f + squares * a, rate), None),
                steps,
                length=self._count_steps,
            )
        factors = apart.loss_factors(f if self._at_prior else f + squares * steps)
        traces = squares[:, 0] * jnp.sum(factors**2, axis=(1, 2))
        epsilon = self._epsilon(params, apart.mean_scale(traces), apart.count)
        kernel = jnp.matmul(z, z.T, precision=lax.Precision.HIGHEST)
        gram = kernel[:, None, :, None] * jnp.eye(apart.out_dim, dtype=z.dtype)[:, None, :]
        u = precision.combine_in_span(gram, steps, factors, apart.count, epsilon)
        return head + jnp.matmul(z.T, u, precision=lax.Precision.HIGHEST)

    def diagnose(self, params: MetaParams, support: Points) -> LavaDiagnostics:
        """What the estimate for one task is made of, by the literal route: for small blocks.

        Args:
            params: meta-parameters of this method.
            support: at least one point.
        """
        support, bound = bind_support(self, params, support)
        prior = bound.prior
        apart = PointLosses.of(self.point_loss, support, bound)
        steps, curvature = self._fan(params, apart, prior)
        epsilon = self._epsilon(params, apart.mean_scale(curvature.traces()), apart.count)
        hessians = curvature.matrices()
        total = precision.add_diagonal(jnp.sum(hessians, axis=0), apart.count * epsilon)
        return LavaDiagnostics(
            theta=jax.tree.map(jnp.add, prior, steps),
            hessians=hessians,
            epsilon=jnp.asarray(epsilon),
            eigenvalues=jnp.linalg.eigvalsh(total),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LavaDiagnostics:
    """The parts of one LAVA estimate, for N points and a block of n parameters.

    Attributes:
        theta: theta_i, the block's pytree with leaves ``[N, ...]``.
        hessians: H_i, ``[N, n, n]``; 0 for padding.
        epsilon: eps as used, a scalar.
        eigenvalues: of the precision sum_i H_i + N eps I, ``[n]``, ascending. One at or below 0
            says that exact Hessians made it indefinite: the estimate is then no minimum of
            anything. The condition number is the ratio of the last to the first.
    """

    theta: PyTree
    hessians: Array
    epsilon: Array
    eigenvalues: Array


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

    Args:
        **settings: any other field of ``Lava``.
    """
    bayesian = {"inner_steps": "map", "prior_correction": True, "noise": 0.1, "outer": "nll"}
    learned = {"learn_epsilon": True, "learn_noise": True, "epsilon_floor": 1e-6}
    return Lava(**{**bayesian, **learned, **settings})


def _geometric(ratio: Array, terms: int) -> Array:
    """sum_{j<terms} ratio^j by Horner's rule: the quotient form is 0/0 at ratio 1 and cancels."""
    total, _ = lax.scan(
        lambda total, _: (1 + ratio * total, None), jnp.ones_like(ratio), length=terms - 1
    )
    return total
