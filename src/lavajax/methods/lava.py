"""LAVA: per-point steps, weighed by the curvature of each point's own loss."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from lavajax import precision, tangent, validate
from lavajax.curvature import PointLosses
from lavajax.losses import Loss, SquaredError, constant_curvature
from lavajax.methods.base import (
    bind_support,
    check_apart,
    check_parts,
    init_network,
    inner_rate,
    learned_rate,
    predict_mean,
    prior_of,
    query_loss,
    regulariser,
    scalar,
)
from lavajax.methods.head import at_head
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Bound, Context, Full, Head, Subspace
from lavajax.types import Adapted, Array, MetaParams, Points, PyTree


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
        curvature: ``"ggn"``; ``"hessian"``, exact by ``jax.hessian``, which may be indefinite
            (see ``diagnose``); or ``"flat"``, the plain average of the steps.
        curvature_at: where H_i is taken: ``"adapted"``, theta_i, as in the paper, or ``"prior"``,
            theta_0, where one gradient step and the curvature share their passes.
            ``"auto"`` is ``"prior"`` for all weights and ``"adapted"`` otherwise.
        solver: ``"primal"`` or ``"dual"`` form of the linear system, ``"auto"`` the smaller by
            shape, or ``"naive"``, the paper's steps taken literally with N matrices of n x n.
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
    curvature: Literal["ggn", "hessian", "flat"] = "ggn"
    curvature_at: Literal["auto", "adapted", "prior"] = "auto"
    solver: Literal["auto", "primal", "dual", "naive"] = "auto"

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
        validate.choice(self, "curvature", ("ggn", "hessian", "flat"))
        validate.choice(self, "curvature_at", ("auto", "adapted", "prior"))
        validate.choice(self, "solver", ("auto", "primal", "dual", "naive"))
        check_parts(self)
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
        check_apart(self, params)
        return params

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """One LAVA step from the prior block, on the support of one task."""
        del key  # deterministic
        if support.x.shape[0] == 0:
            return prior_of(self, params)
        support, bound = bind_support(self, params, support)
        if self._has_closed_form:
            return Adapted(self._adapt_closed_form(params, support, bound))
        return Adapted(self._adapt_general(params, support, bound))

    predict = predict_mean
    loss = query_loss
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

    def _epsilon(self, params: MetaParams, scale: Array) -> Array | float:
        """eps, above its floor relative to ``scale``, the mean curvature per output."""
        return regulariser(params, "log_epsilon", self.epsilon, self.epsilon_floor, scale)

    def _adapt_closed_form(self, params: MetaParams, support: Points, bound: Bound) -> Array:
        """The head under squared error.

        With z the features, R = Z W_0 - Y and s_i = ||z_i||^2, each point's S steps are
        d_i = -beta_i c z_i R_i, beta_i = alpha sum_{j<S} (1 - alpha c s_i)^j, and

            W' = W_0 - (Z^T Z + (N eps/c) I)^-1 Z^T diag(omega) R,   omega_i = beta_i (c s_i + eps);

        converged, beta_i = 1/(c s_i); at the point's own MAP, omega_i = 1.
        """
        head, (z, residual, weight, n) = bound.prior, at_head(self.point_loss, support, bound)
        c = constant_curvature(self.point_loss, head.shape[1])
        cs = c * jnp.sum(z**2, axis=-1)
        epsilon = self._epsilon(params, jnp.sum(cs) / n)
        if self.inner_steps == "map":
            omega = jnp.ones_like(cs)
        elif self.inner_steps == "converged":
            omega = 1 + epsilon / jnp.where(weight > 0, cs, 1.0)
        else:
            rate = inner_rate(self, params)
            omega = rate * _geometric(1 - rate * cs, self._count_steps) * (cs + epsilon)
        targets = omega[:, None] * residual
        return head - precision.solve_kronecker_head(z, targets, n * epsilon / c, self._route)

    def _adapt_general(self, params: MetaParams, support: Points, bound: Bound) -> PyTree:
        """Any block and any loss: steps and curvatures by differentiation, point by point."""
        prior = bound.prior
        apart = PointLosses.of(self.point_loss, support, bound)
        if self._in_span(apart, prior):
            return self._adapt_in_span(params, apart, prior)
        if self._head_in_span(apart, prior):
            return self._adapt_head_in_span(params, apart, prior)
        steps, curvature = self._fan(params, apart, prior)
        epsilon = self._epsilon(params, apart.mean_scale(curvature.traces()))
        if self.solver == "naive":
            fan = jax.tree.map(jnp.add, prior, steps)
            return precision.literal(fan, curvature, apart.weight, epsilon)
        return precision.aggregate(prior, steps, curvature, apart.weight, epsilon)

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
        return self._epsilon(params, apart.mean_scale(traces))

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
        epsilon = self._epsilon(params, apart.mean_scale(traces))
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
        epsilon = self._epsilon(params, apart.mean_scale(curvature.traces()))
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


def _geometric(ratio: Array, terms: int) -> Array:
    """sum_{j<terms} ratio^j by Horner's rule: the quotient form is 0/0 at ratio 1 and cancels."""
    total, _ = lax.scan(
        lambda total, _: (1 + ratio * total, None), jnp.ones_like(ratio), length=terms - 1
    )
    return total
