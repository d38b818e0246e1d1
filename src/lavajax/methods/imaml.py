"""iMAML: a regularised inner problem, differentiated at its solution."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lavajax import linalg, points, validate
from lavajax.inner import descend_monotone, implicit
from lavajax.losses import Loss, SquaredError, constant_curvature
from lavajax.methods.base import (
    bind_support,
    check_parts,
    init_network,
    predict_mean,
    prior_of,
    regulariser,
    scalar,
)
from lavajax.methods.gradient import support_loss
from lavajax.methods.head import at_head
from lavajax.methods.task_loss import one_pass_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Bound, Full, Head, Subspace
from lavajax.types import Adapted, Array, MetaParams, Points, PyTree

# A learned lambda of a head stands above this share of c mean_i ||z_i||^2, as Ridge's does.
_FLOOR = 2e-4


@dataclasses.dataclass(frozen=True)
class IMaml:
    r"""Meta-learning with implicit gradients (Rajeswaran, Finn, Kakade and Levine 2019).

    Adaptation solves a problem, by whatever route (equation 3), L the mean loss of the support,

        phi* = argmin_phi L(phi) + (lambda/2) ||phi - theta||^2,

    and the outer gradient is that of the solution, not of the route: with g the gradient of the
    query's loss at phi*, it is u = (I + H/lambda)^-1 g in theta, H the Hessian of L at phi*
    (equation 6) or, by default, its Gauss-Newton part, and -(1/lambda) u^T d(grad L) in whatever
    else L depends on: shared weights and lambda. Memory does not grow with the steps. u is found by
    conjugate gradients, which need H + lambda I to be positive definite. At a minimum it is, and of
    the Gauss-Newton part it always is; of the Hessian, where the steps have stopped short of a
    minimum, it may not be.

    The gradient is wrong where the problem has not been solved: see ``diagnose``. A head under
    squared error is solved in closed form, and is ``Ridge`` at c lambda_ridge = lambda.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what adapts: ``Head()``, ``Context(size)`` or ``Full()``, all weights.
        proximal: lambda, or where it starts.
        learn_proximal: learn log lambda in the outer loop; that of a head then stands above
            2e-4 c mean_i ||z_i||^2, for float32.
        solver: ``"closed"`` form, of a head under squared error; ``"gradient"`` descent; or
            ``"auto"``, the closed form where there is one.
        inner_steps: gradient steps towards phi*; unused by the closed form.
        inner_rate: size of the first one, halved by each that would raise the objective; likewise.
        cg_steps: most steps of conjugate gradients in the outer gradient; likewise.
        curvature: H of the outer gradient: ``"ggn"``, the generalised Gauss-Newton matrix, which
            is positive semi-definite, and exact where the outputs are linear in the block, for a
            loss whose ``factor`` is its Hessian; or ``"hessian"``, exact, of which H + lambda I may
            be indefinite: the outer gradient of such a task is NaN, and training leaves it out, or
            stops where these are more than ``max_skipped``. A larger lambda helps.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Subspace = Full()
    proximal: float = 0.5
    learn_proximal: bool = False
    solver: Literal["auto", "closed", "gradient"] = "auto"
    inner_steps: int = 16
    inner_rate: float = 0.1
    cg_steps: int = 10
    curvature: Literal["ggn", "hessian"] = "ggn"

    def __post_init__(self) -> None:
        validate.number(self, "proximal", minimum=0.0, strict=True)
        validate.flag(self, "learn_proximal")
        validate.choice(self, "solver", ("auto", "closed", "gradient"))
        validate.integer(self, "inner_steps", minimum=1)
        validate.number(self, "inner_rate", minimum=0.0, strict=True)
        validate.integer(self, "cg_steps", minimum=1)
        validate.choice(self, "curvature", ("ggn", "hessian"))
        check_parts(self)
        if self.solver == "closed" and not self._is_linear:
            raise ValueError(
                "IMaml.solver='closed' needs subspace=Head() and a loss of constant curvature, "
                f"such as SquaredError(); got {self.subspace!r} and {self.point_loss!r}: give "
                "solver='gradient'"
            )

    @property
    def _is_linear(self) -> bool:
        head = isinstance(self.subspace, Head)
        return head and self.point_loss.constant_curvature(1) is not None

    @property
    def _is_closed(self) -> bool:
        return self.solver == "closed" or (self.solver == "auto" and self._is_linear)

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The network, and log lambda where it is learned.

        Raises:
            ValueError: the points do not fit the model or the loss.
        """
        learned = {"log_proximal": jnp.log(scalar(self.proximal))} if self.learn_proximal else {}
        return init_network(self, key, x, y, learned)

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """phi*, on the support of one task."""
        del key  # deterministic
        if support.x.shape[0] == 0:
            return prior_of(self, params)
        support, bound = bind_support(self, params, support)
        strength = self._strength(params, support, bound)
        if self._is_closed:
            at = at_head(self.point_loss, support, bound)
            c = constant_curvature(self.point_loss, bound.prior.shape[1])
            move = linalg.solve_kronecker_head(at.z, at.residual, at.n * strength / c)
            return Adapted(bound.prior - move)
        objective = self._objective(support, bound, strength)
        # The same problem, held constant: the outer gradient does not see how it is solved.
        held_params = params.replace_learned(lax.stop_gradient(params.learned))
        held_support, held_bound = bind_support(self, held_params, lax.stop_gradient(support))
        held_strength = self._strength(held_params, held_support, held_bound)
        held = self._objective(held_support, held_bound, held_strength)
        solution = descend_monotone(held, held_bound.prior, self.inner_rate, self.inner_steps)
        if self.curvature == "ggn":
            slope = self._gauss_newton(held_support, held_bound, held_strength, solution)
        else:
            _, pull = jax.vjp(jax.grad(held), solution)
            slope = lambda move: pull(move)[0]  # noqa: E731  (H is symmetric)
        return Adapted(implicit(jax.grad(objective), slope, solution, self.cg_steps))

    predict = predict_mean
    loss = one_pass_loss
    memory = no_memory
    step = gradient_step

    def _strength(self, params: MetaParams, support: Points, bound: Bound) -> Array | float:
        """lambda."""
        scale = jnp.zeros(())
        if isinstance(self.subspace, Head):
            c = self.point_loss.constant_curvature(bound.prior.shape[1]) or 1.0
            scale = c * points.average(jnp.sum(bound.inputs**2, axis=-1), support)
        return regulariser(params, "log_proximal", self.proximal, _FLOOR, scale)

    def _objective(
        self, support: Points, bound: Bound, strength: Array | float
    ) -> Callable[[PyTree], Array]:
        """L(phi) + (lambda/2) ||phi - theta||^2 as a function of phi."""
        fit = support_loss(self, support, bound)

        def objective(block: PyTree) -> Array:
            moved = jax.tree.map(jnp.subtract, block, bound.prior)
            return fit(block) + 0.5 * strength * optax.tree.norm(moved, squared=True)

        return objective

    def _gauss_newton(
        self, support: Points, bound: Bound, strength: Array | float, block: PyTree
    ) -> Callable[[PyTree], PyTree]:
        """The product with J^T S S^T J / N + lambda I: J of the outputs, S the loss's factors."""
        # Reverse mode alone, which rules of a user's own (``jax.custom_vjp``) have: J is the
        # transpose of its transpose.
        f, pull = jax.vjp(lambda block: bound.apply(block, bound.inputs, support.mask), block)
        _, push = jax.vjp(lambda u: pull(u)[0], jnp.zeros_like(f))
        factors = jax.vmap(self.point_loss.factor)(f, self.point_loss.cast(support.y, f.dtype))
        share = points.weights(support, f.dtype) / points.count(support, f.dtype)

        def product(move: PyTree) -> PyTree:
            (outputs,) = push(move)
            bent = linalg.einsum("n,nkr,nlr,nl->nk", share, factors, factors, outputs)
            (curved,) = pull(bent)
            return jax.tree.map(lambda a, b: a + (strength * b).astype(a.dtype), curved, move)

        return product

    def diagnose(self, params: MetaParams, support: Points) -> IMamlDiagnostics:
        """How well the inner problem of one task is solved.

        Args:
            params: meta-parameters of this method.
            support: at least one point.
        """
        solution = self.adapt(params, support).block
        support, bound = bind_support(self, params, support)
        objective = self._objective(support, bound, self._strength(params, support, bound))
        gradient = jax.grad(objective)
        return IMamlDiagnostics(
            start=optax.tree.norm(gradient(bound.prior)),
            end=optax.tree.norm(gradient(solution)),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class IMamlDiagnostics:
    """The norm of the gradient of the inner objective, L(phi) + (lambda/2) ||phi - theta||^2.

    Attributes:
        start: at theta, a scalar.
        end: at the solution found, a scalar: 0 where the problem is solved. The outer gradient is
            that of phi* as far as this is small beside ``start``.
    """

    start: Array
    end: Array
