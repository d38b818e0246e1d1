"""Meta-SGD: its limit in MAML, its gradient in the rates, and how rates start."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import (
    RELU,
    TANH,
    adapt,
    assert_close,
    assert_different,
    make_params,
    make_points,
    prior_block,
    with_method,
)
from lavajax.methods.task_loss import loss_at

SUBSPACES = {"head": lj.Head(), "context": lj.Context(2), "full": lj.Full()}
EVERY = pytest.mark.parametrize("subspace", SUBSPACES.values(), ids=SUBSPACES)


def make_task():
    return lj.Task(make_points(4, 2), make_points(5, 2, seed=7))


def params_at(method, rate):
    """Meta-parameters with all rates equal, and the same under one shared rate."""
    method = dataclasses.replace(method, rate_init="constant", inner_rate=rate)
    params = make_params(method, make_points(4, 2))
    plain = {
        "Head": lj.Anil(TANH),
        "Context": lj.Cavia(TANH, subspace=lj.Context(2)),
        "Full": lj.Maml(TANH),
    }[type(method.subspace).__name__]
    plain = dataclasses.replace(
        plain, inner_steps=method.inner_steps, first_order=method.first_order
    )
    leaves = {n: v for n, v in params.learned.items() if n != "rates"}
    shared = params.replace_learned({**leaves, "inner_rate": jnp.asarray(rate)})
    return params, with_method(shared, plain)


@jax.jit
def outer_gradient(params, task):
    return jax.grad(lambda v: params.method.loss(params.replace_learned(v), task, None))(
        params.learned
    )


@EVERY
@pytest.mark.parametrize("first_order", [False, True])
def test_equal_rates_are_one_shared_rate(x64, subspace, first_order):
    """MAML, ANIL or CAVIA: the block, the gradient, and the sum of the gradient in the rates."""
    task = make_task()
    method = lj.MetaSgd(TANH, subspace=subspace, inner_steps=2, first_order=first_order)
    params, plain = params_at(method, 0.3)
    assert_close(adapt(params, task.support), adapt(plain, task.support), 1e-12)
    actual, expected = outer_gradient(params, task), outer_gradient(plain, task)
    rates, rate = actual.pop("rates"), expected.pop("inner_rate")
    assert_close(actual, expected, 1e-10)
    assert_close(sum(jnp.sum(leaf) for leaf in jax.tree.leaves(rates)), rate, 1e-10)


@EVERY
def test_first_order_adapts_alike_and_learns_differently(x64, subspace):
    task = make_task()
    method = lj.MetaSgd(TANH, subspace=subspace, inner_steps=2, rate_init="constant")
    second = make_params(method, task.support)
    first = with_method(second, dataclasses.replace(method, first_order=True))
    assert_close(adapt(first, task.support), adapt(second, task.support), 1e-14)
    assert_different(outer_gradient(first, task), outer_gradient(second, task), by=1e-7)


@EVERY
def test_gradient_in_the_rates_is_the_product_of_two_gradients(x64, subspace):
    """One step: -grad L_S(theta) * grad L_Q(theta_1), elementwise, whatever the order."""
    task = make_task()
    for first_order in (False, True):
        method = lj.MetaSgd(TANH, subspace=subspace, first_order=first_order)
        params = make_params(method, task.support)

        @jax.jit
        def slope(params, block, points):
            return jax.grad(lambda b: loss_at(params.method, params, lj.Adapted(b), points))(block)

        before = slope(params, prior_block(params), task.support)
        after = slope(params, adapt(params, task.support), task.query)
        expected = jax.tree.map(lambda a, b: -a * b, before, after)
        assert_close(outer_gradient(params, task)["rates"], expected, 1e-10)


@EVERY
def test_rates_of_zero_do_not_adapt_and_negative_ones_ascend(x64, subspace):
    support = make_points(4, 2)
    still, _ = params_at(lj.MetaSgd(TANH, subspace=subspace), 0.0)
    assert_close(adapt(still, support), prior_block(still), 0)
    down, up = (
        loss_at(p.method, p, lj.adapt(p, support), support)
        for p, _ in (params_at(lj.MetaSgd(TANH, subspace=subspace), r) for r in (0.01, -0.01))
    )
    assert down < loss_at(still.method, still, lj.Adapted(prior_block(still)), support) < up


def test_every_parameter_moves_by_its_own_rate(x64):
    support = make_points(4, 2)
    params = make_params(lj.MetaSgd(TANH, subspace=lj.Head(), rate_init="constant"), support)
    step = adapt(params, support) - params["head"]
    factors = jnp.arange(step.size, dtype=step.dtype).reshape(step.shape)
    scaled = params.replace_learned({**params.learned, "rates": 0.1 * factors})
    assert_close(adapt(scaled, support) - params["head"], factors * step, 1e-12)


def test_how_rates_start():
    """Uniform on [0.005, 0.1], each its own, with the structure of the block; or one constant."""
    points = make_points(3)
    params = make_params(lj.MetaSgd(lj.MLP(hidden=(40, 40))), points)
    rates = params.learned["rates"]
    assert jax.tree.structure(rates) == jax.tree.structure(prior_block(params))
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(rates)])
    assert 0.005 <= values.min() < 0.0055
    assert 0.0995 < values.max() <= 0.1
    np.testing.assert_allclose(values.mean(), 0.0525, atol=0.002)
    assert len(np.unique(values)) > 0.99 * values.size
    constant = make_params(lj.MetaSgd(RELU, rate_init="constant", inner_rate=0.3), points)
    for leaf in jax.tree.leaves(constant.learned["rates"]):
        np.testing.assert_array_equal(leaf, np.float32(0.3))


def test_training_learns_the_rates_and_lowers_the_loss():
    tasks = lj.Sine(shots=5, queries=10)
    method = lj.MetaSgd(RELU)
    trained = lj.train(method, tasks, steps=300, chunk=100, meta_batch=5)
    loss = trained.history["loss"]
    assert loss[-1] < 0.9 * loss[0]
    moved = [np.ptp(leaf) for leaf in jax.tree.leaves(trained.params.learned["rates"])]
    assert max(moved) > 0.1  # out of the range in which they started
