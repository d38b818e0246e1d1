"""Exact curvature: losses with derivatives of their own, and Hessians that are not positive."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lavajax as lj
from helpers import (
    Circle,
    adapt,
    assert_close,
    assert_different,
    assert_finite,
    make_labels,
    make_params,
    make_points,
    prior_block,
    stack,
)
from lavajax import precision, rescue
from lavajax.outer import BatchExpectation
from lavajax.types import TrainState

HEAD, CONTEXT, FULL = lj.Head(), lj.Context(2), lj.Full()
SMALL = lj.MLP(hidden=(3,), activation="tanh")


# Losses with a rule of their own, which have no forward mode


@jax.custom_vjp
def log_cosh(r):
    """Summed over outputs."""
    return jnp.sum(jnp.logaddexp(r, -r) - jnp.log(2.0))


log_cosh.defvjp(lambda r: (log_cosh(r), r), lambda r, g: (g * jnp.tanh(r),))


@dataclasses.dataclass(frozen=True)
class LogCosh(lj.Huber):
    """As a user may write it, its gradient by hand."""

    def value(self, outputs, y):
        return log_cosh(outputs - y)

    def factor(self, outputs, y):
        return jnp.diag(1 / jnp.cosh(outputs - y))


@dataclasses.dataclass(frozen=True)
class PlainLogCosh(LogCosh):
    """The same, left to JAX."""

    def value(self, outputs, y):
        r = outputs - y
        return jnp.sum(jnp.logaddexp(r, -r) - jnp.log(2.0))


def estimate_and_gradient(method, task):
    """The adapted block, and the outer gradient, from the same parameters for every loss."""
    params = make_params(method, task.support)
    gradient = jax.jit(jax.grad(lambda p: method.loss(params.replace_learned(p), task, None)))
    return adapt(params, task.support), gradient(params.learned)


def test_a_loss_with_a_rule_of_its_own_has_no_forward_mode():
    """So that the tests below test something."""
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.hessian(LogCosh().value)(jnp.zeros(2), jnp.ones(2))


LAVA = lj.Lava(SMALL, learn_epsilon=True)
OWN_RULE = {
    "head": LAVA,
    "head, exact and naive": dataclasses.replace(LAVA, solver="naive", curvature="hessian"),
    "context, exact": dataclasses.replace(LAVA, subspace=CONTEXT, curvature="hessian"),
    "imaml": lj.IMaml(SMALL, proximal=2.0, inner_steps=3),
    "imaml, exact": lj.IMaml(SMALL, proximal=2.0, inner_steps=3, curvature="hessian"),
}


@pytest.mark.parametrize("name", OWN_RULE)
def test_a_loss_with_a_rule_of_its_own_adapts_and_trains(name, x64):
    """By reverse mode alone: to rounding what the same loss without the rule gives."""
    task = lj.Task(make_points(3, 2), make_points(4, 2, seed=1))
    own, plain = (
        estimate_and_gradient(dataclasses.replace(OWN_RULE[name], point_loss=loss), task)
        for loss in (LogCosh(), PlainLogCosh())
    )
    assert_close(own, plain, 1e-10)
    params = make_params(OWN_RULE[name], task.support)
    assert_different(own[0], prior_block(params))
    assert_different(own[1], jax.tree.map(jnp.zeros_like, own[1]))


@jax.custom_vjp
def half_square(r):
    """(1/2) ||r||^2."""
    return 0.5 * jnp.sum(r**2)


half_square.defvjp(lambda r: (half_square(r), r), lambda r, g: (g * r,))


@dataclasses.dataclass(frozen=True)
class OwnSquaredError(lj.SquaredError):
    """Squared error by hand."""

    def value(self, outputs, y):
        return self.constant_curvature(outputs.shape[-1]) * half_square(outputs - y)


@pytest.mark.parametrize(("subspace", "steps"), [(HEAD, "converged"), (CONTEXT, 1), (FULL, 1)])
def test_closed_forms_take_a_rule_of_its_own(subspace, steps, x64):
    task = lj.Task(make_points(3, 2), make_points(4, 2, seed=1))
    method = lj.Lava(SMALL, OwnSquaredError(), subspace, inner_steps=steps)
    plain = dataclasses.replace(method, point_loss=lj.SquaredError())
    own, expected = (estimate_and_gradient(m, task) for m in (method, plain))
    assert_close(own, expected, 1e-10)


# Hessians that are not positive


@dataclasses.dataclass(frozen=True)
class Welsch(lj.Huber):
    """1 - exp(-r^2 / 2): far from the target its curvature is negative, in a head too."""

    def value(self, outputs, y):
        return jnp.sum(1 - jnp.exp(-((outputs - y) ** 2) / 2))


def indefinite(subspace, solver="auto"):
    """A setting, and points that make its precision indefinite."""
    model, loss = (Circle(), Welsch()) if subspace == HEAD else (SMALL, lj.SquaredError())
    settings = {"curvature": "hessian", "curvature_at": "prior", "epsilon": 1e-3}
    method = lj.Lava(model, loss, subspace, solver=solver, **settings)
    points = make_points(3, mask=[1, 1, 1])
    y = jnp.full_like(points.y, 2.0) if subspace == HEAD else 100 * points.y
    return method, dataclasses.replace(points, y=y)


@pytest.mark.parametrize(
    ("subspace", "solver"), [(HEAD, "auto"), (HEAD, "naive"), (CONTEXT, "auto"), (FULL, "auto")]
)
def test_an_indefinite_precision_is_reported_and_never_solved_in_silence(subspace, solver):
    """NaN where nothing can be raised, with its gradient; an error that says what to do else."""
    method, support = indefinite(subspace, solver)
    params = make_params(method, support)
    with pytest.raises(
        ValueError, match=r"support must have a finite estimate.*curvature='ggn'.*eps"
    ):
        lj.adapt(params, support)
    nothing = dataclasses.replace(support, mask=jnp.zeros(3, bool))
    assert_close(adapt(params, nothing), prior_block(params), 1e-6)

    @jax.jit
    def unseen(learned):
        def loss(learned):
            return method.loss(params.replace_learned(learned), lj.Task(support, support), None)

        return method.diagnose(params, support).eigenvalues[0], jax.value_and_grad(loss)(learned)

    least, (value, gradient) = unseen(params.learned)
    assert least < 0
    assert np.isnan(value)
    assert np.isnan(gradient["head"]).any()


@pytest.mark.parametrize("solver", ["auto", "naive"])
def test_enough_epsilon_makes_an_indefinite_precision_definite(solver):
    method, support = indefinite(HEAD, solver)
    strong = dataclasses.replace(method, epsilon=10.0)
    params = make_params(strong, support)
    block = adapt(params, support)
    assert_finite(block)
    assert_different(block, prior_block(params))


def test_training_leaves_a_task_of_indefinite_precision_out():
    """It is counted with those whose loss is not finite."""
    method, bad = indefinite(HEAD)
    params = make_params(method, bad)
    at_target = lj.predict(params, lj.Adapted(params["head"]), bad.x).mean + 0.1
    good = dataclasses.replace(bad, y=at_target)
    tx = optax.sgd(0.1)
    state = TrainState(params, tx.init(params.learned), (), jax.random.key(0), jnp.int32(0))
    tasks = stack([lj.Task(points, points) for points in (good, bad)])
    expect = BatchExpectation(tasks, jax.random.split(jax.random.key(1), 2))
    state, metrics, left_out = jax.jit(lambda s: rescue.careful_step(s, expect, tx))(state)
    assert left_out.tolist() == [False, True]
    assert_finite((state.params.learned, metrics))


@pytest.mark.parametrize("points", ["repeated", "constant"])
def test_rounding_does_not_count_as_indefinite(points):
    """Singular sums of positive curvatures, as far above epsilon as float32 can tell."""
    support = make_labels(6, 3)
    x = (
        jnp.ones_like(support.x)
        if points == "constant"
        else support.x[jnp.array([0, 0, 0, 1, 1, 1])]
    )
    support = dataclasses.replace(support, x=1e2 * x)
    method = lj.Lava(lj.MLP(hidden=(8,)), lj.CrossEntropy(3), curvature="hessian", epsilon=1e-6)
    assert_finite(adapt(make_params(method, support), support))


def test_definite_looks_at_the_sum_and_the_ridge():
    dense = precision.Dense(jnp.stack([jnp.diag(jnp.array([3.0, -1.0])), jnp.eye(2) * 0.5]))
    assert float(dense.definite(0.6)) == 1
    assert np.isnan(dense.definite(0.4))
