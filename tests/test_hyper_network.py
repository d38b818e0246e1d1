"""The hypernetwork: its formula, its symmetries, and what it is not."""

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import (
    RELU,
    adapt,
    assert_close,
    assert_different,
    make_labels,
    make_params,
    make_points,
    prior_block,
)

CONTEXT = lj.Context(2)
SMALL = lj.HyperNetwork(RELU, encoder=(8, 6), encoding=5, decoder=(7,))
METHODS = {"head": SMALL, "context": dataclasses.replace(SMALL, subspace=CONTEXT)}
EVERY = pytest.mark.parametrize("name", METHODS)


def awake(params, scale=30.0):
    """The decoder's last layer enlarged, so that its output is not lost beside theta_0."""
    *rest, last = params["decoder"]
    decoder = [*rest, {"weight": scale * last["weight"], "bias": last["bias"] + 0.1}]
    return params.replace_learned({**params.learned, "decoder": decoder})


def perceptron(layers, h):
    """ReLU but for the last layer, in NumPy."""
    for layer in layers[:-1]:
        h = np.maximum(h @ np.asarray(layer["weight"]).T + np.asarray(layer["bias"]), 0)
    return h @ np.asarray(layers[-1]["weight"]).T + np.asarray(layers[-1]["bias"])


@EVERY
def test_block_is_the_decoded_mean_encoding(x64, name):
    support = make_points(5, 2)
    params = awake(make_params(METHODS[name], support))
    prior = prior_block(params)
    encodings = perceptron(params["encoder"], np.concatenate([support.x, support.y], axis=1))
    assert encodings.shape == (5, 5)
    delta = perceptron(params["decoder"], encodings.mean(axis=0)).reshape(prior.shape)
    block = adapt(params, support)
    assert_close(block, prior + delta, 1e-12)
    assert_different(block, prior, by=1e-2)


def test_labels_enter_one_hot(x64):
    method = dataclasses.replace(SMALL, point_loss=lj.CrossEntropy(3))
    support = make_labels(5)
    params = awake(make_params(method, support))
    pairs = np.concatenate([support.x, np.eye(3)[np.asarray(support.y)]], axis=1)
    delta = perceptron(params["decoder"], perceptron(params["encoder"], pairs).mean(axis=0))
    expected = params["head"] + delta.reshape(params["head"].shape)
    assert_close(adapt(params, support), expected, 1e-12)


@EVERY
def test_order_repetition_and_padding_have_no_effect(x64, name):
    """The encodings are averaged: a support given twice is the same support."""
    support = make_points(4, 2)
    params = awake(make_params(METHODS[name], support))
    block = adapt(params, support)
    order = np.array([2, 0, 3, 1])
    assert_close(adapt(params, lj.Points(support.x[order], support.y[order])), block, 1e-12)
    twice = lj.Points(jnp.tile(support.x, (2, 1)), jnp.tile(support.y, (2, 1)))
    assert_close(adapt(params, twice), block, 1e-12)
    padded = lj.Points(
        jnp.concatenate([support.x, jnp.full((2, 1), jnp.inf)]),
        jnp.concatenate([support.y, jnp.full((2, 2), jnp.nan)]),
        jnp.arange(6) < 4,
    )
    assert_close(adapt(params, padded), block, 1e-12)
    uneven = lj.Points(twice.x[:5], twice.y[:5])
    assert_different(adapt(params, uneven), block)


@EVERY
def test_a_decoder_of_zero_does_not_adapt_and_a_new_one_hardly(x64, name):
    support = make_points(4, 2)
    params = make_params(METHODS[name], support)
    assert_close(adapt(awake(params, 0.0), support) - 0.1, prior_block(params), 1e-12)
    move = adapt(params, support) - prior_block(params)
    assert 0 < np.max(np.abs(move)) < 0.05
    last = make_params(lj.HyperNetwork(), support)["decoder"][-1]
    assert np.std(last["weight"]) == pytest.approx(0.01, rel=0.05)
    assert not np.any(last["bias"])


def test_the_block_is_not_affine_in_the_labels(x64):
    """Unlike gradient steps on a head: noise of zero mean shifts the expected prediction."""
    support, other = make_points(4, 2), make_points(4, 2, seed=5)
    params = awake(make_params(SMALL, support))

    def at(y):
        return adapt(params, lj.Points(support.x, y))

    between = 0.5 * (at(support.y) + at(other.y))
    assert_different(at(0.5 * (support.y + other.y)), between, by=1e-3)


def test_training_learns_to_adapt():
    tasks = lj.Sine(shots=10, queries=10)
    method = lj.HyperNetwork(lj.MLP(hidden=(32, 32)), encoder=(32, 32), encoding=32, decoder=(32,))
    trained = lj.train(method, tasks, steps=1500, meta_batch=8)
    assert np.all(np.isfinite(trained.history["loss"]))
    unadapted = lj.score(
        lambda task, key: jnp.mean(
            (
                method.predict(
                    trained.params, lj.Adapted(trained.params["head"]), task.query.x
                ).mean
                - task.query.y
            )
            ** 2
        ),
        tasks,
        num_tasks=200,
    )
    score = lj.evaluate(trained.params, tasks, num_tasks=200).mean
    assert score < 0.5 * unadapted.mean()


class Flat(nn.Module):
    """Features of images."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x.reshape(len(x), -1))


def test_inputs_other_than_vectors_are_refused():
    images = lj.Points(jnp.zeros((3, 4, 4, 1)), jnp.zeros((3, 1)))
    method = lj.HyperNetwork(lj.Linen(Flat()))
    with pytest.raises(ValueError, match=r"x must have shape \[N, d\] .* got \(3, 4, 4, 1\)"):
        make_params(method, images)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"subspace": lj.Full()}, "too many for all weights; gradient steps on these are Maml"),
        ({"encoder": (0,)}, r"HyperNetwork\.encoder must be a sequence of integers"),
        ({"decoder": 64}, r"HyperNetwork\.decoder must be a sequence of integers"),
        ({"encoding": 0}, r"HyperNetwork\.encoding must be an integer of at least 1"),
        ({"activation": "rleu"}, r"activation must be one of 'relu'"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        lj.HyperNetwork(**settings)
