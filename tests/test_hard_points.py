"""Points and models that break what is written for ordinary ones."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lavajax
from helpers import (
    RELU,
    adapt,
    assert_close,
    assert_different,
    assert_finite,
    make_params,
    make_points,
    prior_block,
)
from lavajax import linalg


class Product(nn.Module):
    """Features that do not depend on the context where x is 0."""

    @nn.compact
    def __call__(self, x, context):
        h = nn.Dense(6, use_bias=False)(x) * nn.Dense(6)(context)
        return nn.tanh(h)


class Normalised(nn.Module):
    """Not defined at x = 0, which padding must therefore not be."""

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(6, use_bias=False)(x)
        return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


class BatchNormalised(nn.Module):
    """Couples the points of a batch, and takes a mask."""

    @nn.compact
    def __call__(self, x, mask=None):
        norm = nn.BatchNorm(use_running_average=False)
        return norm(nn.Dense(6)(x), mask=None if mask is None else mask[:, None])


@pytest.mark.parametrize("inner_steps", ["converged", "map", 1])
def test_a_point_that_does_not_depend_on_the_block_takes_no_step(inner_steps):
    """J_i = 0: the point's own system has no scale."""
    method = lavajax.Lava(
        model=lavajax.Linen(Product()),
        subspace=lavajax.Context(2),
        inner_steps=inner_steps,
        learn_epsilon=True,
    )
    points = make_points(4)
    points = dataclasses.replace(points, x=points.x.at[1].set(0.0))
    params = make_params(method, points)
    block = adapt(params, points)
    assert_finite(block)
    assert_different(block, prior_block(params))
    task = lavajax.Task(points, make_points(3, seed=1))
    grads = jax.jit(jax.grad(lambda p: method.loss(params.replace_learned(p), task, None)))(
        params.learned
    )
    assert_finite(grads)

    alone = jax.tree.map(lambda leaf: leaf[1:2], points)
    assert_close(adapt(params, alone), prior_block(params), 1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_context_near_or_below_the_number_of_outputs_converges_in_float32(size):
    """With C < k every J_i J_i^T is singular, with C >= k it may nearly be."""
    method = lavajax.lava_converged(model=RELU, subspace=lavajax.Context(size))
    with jax.enable_x64(True):
        points = make_points(6, k=3)
        params = make_params(method, points)
        expected = adapt(params, points)
        assert_different(expected, prior_block(params))
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, points))
    assert_close(adapt(*low), expected, 5e-3)


@dataclasses.dataclass(frozen=True)
class Scaled(lavajax.SquaredError):
    """A user's own quadratic loss, (1/k) ||f - 2 y||^2."""

    def value(self, outputs, y):
        return jnp.mean((outputs - 2 * y) ** 2)


@pytest.mark.parametrize("subspace", [lavajax.Head(), lavajax.Full()], ids=["head", "full"])
@pytest.mark.parametrize("inner_steps", [1, "converged"])
def test_any_quadratic_loss_has_the_closed_form(subspace, inner_steps, x64):
    """Closed forms read the slope of the loss, and do not assume that it is f - y."""
    fast = lavajax.Lava(model=RELU, subspace=subspace, inner_steps=inner_steps, point_loss=Scaled())
    naive = dataclasses.replace(fast, solver="naive")
    points = make_points(4, k=2)
    params = make_params(fast, points)
    block = adapt(params, points)
    assert_close(block, adapt(dataclasses.replace(params, method=naive), points), 1e-9)
    doubled = dataclasses.replace(
        params, method=dataclasses.replace(fast, point_loss=lavajax.SquaredError())
    )
    assert_close(block, adapt(doubled, lavajax.Points(points.x, 2 * points.y)), 1e-9)


def test_padding_is_an_input_that_the_model_can_take():
    method = lavajax.lava_converged(model=lavajax.Linen(Normalised()))
    points = make_points(3, d=2)
    params = make_params(method, points)
    padded = lavajax.Points(
        jnp.concatenate([jnp.full((2, 2), jnp.nan), points.x]),
        jnp.concatenate([jnp.full((2, 1), jnp.nan), points.y]),
        jnp.arange(5) >= 2,
    )
    assert_close(adapt(params, padded), adapt(params, points), 1e-5)
    task = lavajax.Task(padded, padded)
    grads = jax.jit(jax.grad(lambda p: method.loss(params.replace_learned(p), task, None)))(
        params.learned
    )
    assert_finite(grads)


def test_padded_queries_stay_out_of_batch_statistics_in_loss_and_score():
    from lavajax.evaluate import task_scores

    method = lavajax.Lava(model=lavajax.Linen(BatchNormalised()))
    support, query = make_points(4, d=2), make_points(3, d=2, seed=1)
    params = make_params(method, support)
    padded = lavajax.Points(
        jnp.concatenate([query.x, jnp.full((2, 2), 1e3)]),
        jnp.concatenate([query.y, jnp.zeros((2, 1))]),
        jnp.arange(5) < 3,
    )
    for score in (
        lambda q: method.loss(params, lavajax.Task(support, q), None),
        lambda q: task_scores(params, lavajax.Task(support, q))["values"],
    ):
        np.testing.assert_allclose(score(padded), score(query), rtol=1e-5)
        assert np.isnan(score(lavajax.Points(padded.x, padded.y, jnp.arange(5) < 1)))


def test_a_single_query_is_refused_of_a_model_that_normalises_over_the_batch():
    """All its features would be 0 whatever it is."""
    params = make_params(lavajax.Lava(model=lavajax.Linen(BatchNormalised())), make_points(4, d=2))
    adapted = lavajax.adapt(params, make_points(4, d=2))
    with pytest.raises(ValueError, match=r"x must have at least 2 points.*batch normalisation"):
        lavajax.predict(params, adapted, jnp.ones((1, 2)))
    assert lavajax.predict(params, adapted, jnp.ones((2, 2))).mean.shape == (2, 1)


def test_a_regulariser_that_float32_cannot_tell_from_none_leaves_an_estimate():
    """On the features of a network, which are nearly dependent, at once and one by one."""
    support = lavajax.Sine(shots=20).sample(jax.random.key(0), "test").support
    for method in (
        lavajax.Lava(epsilon=1e-9),
        lavajax.Ridge(learn_ridge=False, ridge=1e-9),
        lavajax.Alpaca(prior_precision=1e-6),
        lavajax.lava_bayesian(learn_epsilon=False, epsilon=1e-9),
    ):
        params = make_params(method, support)
        for n in (3, 20):
            some = jax.tree.map(lambda leaf, n=n: leaf[:n], support)
            at_once = lavajax.adapt(params, some)
            one_by_one = lavajax.estimate(params, lavajax.online(params, some))
            for adapted in (at_once, one_by_one):
                assert_finite(lavajax.predict(params, adapted, support.x).mean)


@pytest.mark.parametrize(
    ("subspace", "solver"),
    [(lavajax.Head(), "primal"), (lavajax.Head(), "dual"), (lavajax.Full(), "auto")],
)
def test_nor_does_it_under_the_curvature_of_a_softmax(subspace, solver):
    """Which is singular whatever the points: adding to all scores changes nothing."""
    support = make_points(20)
    support = lavajax.Points(support.x, jnp.arange(20) % 3)
    loss = lavajax.CrossEntropy(3)
    method = lavajax.Lava(RELU, loss, subspace=subspace, epsilon=1e-9, solver=solver)
    params = make_params(method, support)
    assert_finite(lavajax.predict(params, lavajax.adapt(params, support), support.x).mean)


@pytest.mark.parametrize("number", [2, 10, 20])
def test_rows_that_repeat_are_factored_however_small_the_regulariser(number):
    """Rounding takes more from their Gram matrix than from that of other rows."""

    def one(key):
        rows = jnp.outer(1 + 1e-3 * jax.random.normal(key, (number,)), jnp.ones(65))
        targets = linalg.matmul(rows, jnp.ones((65, 1)))

        def fit(rows):
            move = linalg.matmul(rows.T, linalg.solve_gram(rows, targets, 1e-9))
            return jnp.max(jnp.abs(linalg.matmul(rows, move) / targets - 1))

        # Where the points are 1e12 times as precise as the prior, whose variance there is 65.
        variance = linalg.posterior_variance(1e5 * rows, rows)
        return fit(rows), jax.jit(jax.grad(fit))(rows), jnp.max(variance), jnp.min(variance)

    misfit, gradient, largest, smallest = jax.vmap(one)(jax.random.split(jax.random.key(0), 500))
    assert_finite(gradient)
    # The ridge that was taken, at most 1e3 eps of the trace, is what keeps the fit from the points.
    assert np.max(misfit) < 1e-3
    assert np.max(largest) < 1e-3 * 65
    assert np.min(smallest) >= 0.0


def test_what_can_be_factored_is_so_in_every_solve():
    """Rounding leaves a system of three factors a little asymmetric, of rank 6 here."""

    def one(key):
        rows, weight = (jax.random.normal(k, (24, 6)) for k in jax.random.split(key))
        gram = jnp.einsum("ia,ija,ja->ij", weight, rows[:, None] * rows[None], weight)
        whole = linalg.add_diagonal(gram, linalg.above_rounding(1e-12, gram))
        solved = linalg.solve_positive(whole, gram[0])
        return solved, linalg.log_det_positive(whole), linalg.solve_regularised(gram, gram[0], 0.0)

    assert_finite(jax.vmap(one)(jax.random.split(jax.random.key(0), 2000)))


@pytest.mark.parametrize("ridge", [1e-3, 1.0])
def test_a_regulariser_above_rounding_is_left_as_it_is(ridge):
    gram = jnp.eye(3)
    assert linalg.above_rounding(ridge, gram) == ridge
    assert jax.jit(jax.grad(linalg.above_rounding))(ridge, gram) == 1.0
    assert jnp.isnan(linalg.solve_gram(gram.at[0, 0].set(jnp.nan), gram, ridge)).all()


def test_loss_of_a_bfloat16_network_is_computed_in_float32():
    """Labels keep their digits: bfloat16 could not tell these two apart."""
    method = lavajax.Cavia(model=RELU, subspace=lavajax.Context(3))
    points = make_points(4)
    params = make_params(method, points)
    rounded = params.replace_learned(
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params.learned)
    )
    losses = [
        method.loss(rounded, lavajax.Task(points, lavajax.Points(points.x, y)), None)
        for y in (jnp.full((4, 1), 100.0), jnp.full((4, 1), 100.1))
    ]
    assert losses[0].dtype == jnp.float32
    assert losses[1] - losses[0] == pytest.approx(20.0, rel=0.1)


def test_gradient_over_whole_parameters_meets_no_random_state():
    """Dropout's keys and counters stay out of the parameters, where ``jax.grad`` refuses them."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(1, 6, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.norm = nnx.BatchNorm(6, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.drop(self.layer(x)))

    method = lavajax.Anil(model=lavajax.NNX(Net))
    points = make_points(4)
    params = make_params(method, points)
    assert params.fixed["backbone"].keys() == {"batch_stats"}
    grads = jax.jit(jax.grad(lambda p: method.loss(p, lavajax.Task(points, points), None)))(params)
    assert_finite(grads)
    assert_different(grads.learned, jax.tree.map(jnp.zeros_like, params.learned))
