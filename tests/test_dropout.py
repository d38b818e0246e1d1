"""Dropout: one thinned network for each task and outer step, and none outside training."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lavajax as lj
from helpers import assert_close, assert_different, make_params, make_points, stack
from lavajax.outer import BatchExpectation, in_training, meta_gradient
from lavajax.steps import draw


class LinenNet(nn.Module):
    """Two layers of dropout."""

    @nn.compact
    def __call__(self, x, context=None, deterministic=True):
        if context is not None:
            x = jnp.concatenate([x, jnp.broadcast_to(context, (len(x), len(context)))], axis=1)
        h = nn.Dropout(0.5)(nn.tanh(nn.Dense(16)(x)), deterministic=deterministic)
        return nn.Dropout(0.5)(nn.Dense(16)(h), deterministic=deterministic)


class NnxNet(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(1, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.drop, self.drop_last = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop_last(self.last(self.drop(nnx.tanh(self.first(x)))))


MODELS = {"linen": lj.Linen(LinenNet()), "nnx": lj.NNX(NnxNet)}
EVERY_MODEL = pytest.mark.parametrize("kind", MODELS)
KEYS = jax.random.split(jax.random.key(0), 2)


def dropped(model, weights, fixed, x):
    """Which of the last features are 0, ``[N, 16]``."""
    return np.asarray(model.features(weights, fixed, x)) == 0


@EVERY_MODEL
def test_a_task_has_one_mask_for_support_and_query_and_no_other_task_has_it(kind):
    model = MODELS[kind]
    support, query = make_points(3).x, make_points(5, seed=1).x
    weights, fixed = model.init(jax.random.key(1), support)
    masks = []
    for key in KEYS:
        drawn = model.drawn(fixed, key)
        whole = np.concatenate([dropped(model, weights, drawn, x) for x in (support, query)])
        assert np.all(whole == whole[0])
        assert 1 <= np.sum(whole[0]) <= 15
        np.testing.assert_array_equal(dropped(model, weights, drawn, support), whole[:3])
        masks.append(whole[0])
    assert np.any(masks[0] != masks[1])
    assert not dropped(model, weights, fixed, support).any()


@EVERY_MODEL
def test_training_draws_from_the_key_of_the_task_and_nothing_else_does(kind):
    """The same key gives the same loss; order and padding of the points change nothing."""
    method = lj.Anil(MODELS[kind])
    support, query = make_points(4), make_points(3, seed=1)
    params = make_params(method, support)

    @jax.jit
    def loss(params, support, key):
        return meta_gradient(
            method, params, BatchExpectation(stack([lj.Task(support, query)]), key[None])
        )

    losses = [loss(params, support, key)[0] for key in (*KEYS, KEYS[0])]
    assert losses[2] == losses[0]
    assert_different(losses[1], losses[0])
    plain = method.loss(params, lj.Task(support, query), KEYS[0])
    assert_different(plain, losses[0])
    assert_close(method.loss(params, lj.Task(support, query), KEYS[1]), plain, 0)

    order = jnp.array([3, 1, 0, 2])
    shuffled = lj.Points(support.x[order], support.y[order])
    assert_close(loss(params, shuffled, KEYS[0]), loss(params, support, KEYS[0]), 1e-5)
    padded = lj.Points(
        jnp.concatenate([jnp.full((2, 1), jnp.nan), support.x]),
        jnp.concatenate([jnp.full((2, 1), jnp.nan), support.y]),
        jnp.arange(6) >= 2,
    )
    assert_close(loss(params, padded, KEYS[0]), loss(params, support, KEYS[0]), 1e-5)


def test_every_task_of_every_step_has_a_key_of_its_own():
    keys = [draw(lj.Sine(), jax.random.key(0), jnp.int32(step), 3)[1] for step in range(2)]
    again = draw(lj.Sine(), jax.random.key(0), jnp.int32(1), 3)[1]
    np.testing.assert_array_equal(jax.random.key_data(again), jax.random.key_data(keys[1]))
    data = np.concatenate([jax.random.key_data(k) for k in keys])
    assert len(np.unique(data, axis=0)) == 6


@pytest.mark.parametrize("solver", ["auto", "naive"])
def test_points_apart_are_those_of_one_thinned_network(solver):
    """A context, whose points are taken one by one, gives what all of them together do."""
    method = lj.Lava(MODELS["linen"], subspace=lj.Context(2), solver=solver)
    points = make_points(3)
    drawn = in_training(make_params(method, points), KEYS[0])
    adapted = jax.jit(method.adapt)(drawn, points)
    together = method.predict(drawn, adapted, points.x).mean
    alone = [method.predict(drawn, adapted, points.x[i : i + 1]).mean for i in range(3)]
    assert_close(jnp.concatenate(alone), together, 1e-5)


@pytest.mark.parametrize(
    "method", [lj.Anil(MODELS["linen"]), lj.Reptile(MODELS["nnx"], inner_rate=0.01)]
)
def test_a_trained_model_keeps_no_key_and_does_not_draw(method):
    trained = lj.train(method, lj.Sine(shots=3), steps=2, meta_batch=2)
    params = trained.params
    assert not params.fixed["backbone"]
    support = make_points(3)
    for x in (support.x, support.x[:1]):
        prediction = lj.predict(params, lj.adapt(params, support), x).mean
        expected = method.predict(params, method.adapt(params, support), x).mean
        assert_close(prediction, expected, 1e-5)
