"""MetaMix: limits in MAML, mixtures by hand, and what is drawn."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import lavajax as lj
from helpers import (
    RELU,
    TANH,
    adapt,
    assert_close,
    assert_different,
    make_labels,
    make_params,
    make_points,
    with_method,
)
from lavajax import mixture, network
from lavajax.mixture import Mixture

MIX = lj.MetaMix(TANH)
PAIRS = lj.MetaMix(TANH, variant="query_pairs", mixed_weight=0.7)
MAML = lj.Maml(TANH)
LAYERS = 4  # two hidden layers, the linear features and the head


def make_task(k=2):
    return lj.Task(make_points(4, k), make_points(5, k, seed=7))


def mixture_of(layer, weight, partner=(3, 0, 1, 1, 2)):
    weight = jnp.broadcast_to(jnp.asarray(weight, float), (len(partner),))
    return Mixture(jnp.int32(layer), jnp.asarray(partner), weight)


@jax.jit
def outer(params, task, mix, inner=None):
    """The outer loss at given mixtures, and its gradient in every learned leaf."""

    def loss(learned):
        at = params.replace_learned(learned)
        if isinstance(at.method, lj.MetaMix):
            return at.method.loss_of(at, task, mix, inner)
        return at.method.loss(at, task, None)

    return jax.value_and_grad(loss)(params.learned)


def scaled(tree, factor):
    return jax.tree.map(lambda leaf: factor * leaf, tree)


def numpy_net(net, x, layer=None, other=None, weight=None):
    """A tanh net, by NumPy alone; at ``layer`` its input is mixed with ``other``'s."""
    layers = [*net["weights"], {"weight": net["head"][:-1].T, "bias": net["head"][-1]}]
    inputs, h = [], np.asarray(x)
    for index, part in enumerate(layers):
        if index == layer:
            h = weight[:, None] * other[index] + (1 - weight[:, None]) * h
        inputs.append(h)
        h = h @ np.asarray(part["weight"]).T + np.asarray(part["bias"])
        h = np.tanh(h) if index < 2 else h
    return h, inputs


@pytest.mark.parametrize("first_order", [False, True])
def test_partners_of_no_weight_leave_maml(x64, first_order):
    """lambda = 0, which multiplies the partner: values and meta-gradients, at every layer."""
    task = make_task()
    method = dataclasses.replace(MIX, inner_steps=2, first_order=first_order)
    params = make_params(method, task.support)
    maml = dataclasses.replace(MAML, inner_steps=2, first_order=first_order)
    expected = outer(with_method(params, maml), task, None)
    for layer in range(LAYERS):
        assert_close(outer(params, task, mixture_of(layer, 0.0)), expected, 1e-10)
        assert_different(outer(params, task, mixture_of(layer, 0.3)), expected)
    pairs = dataclasses.replace(method, variant="query_pairs", mixed_weight=0.7)
    actual = outer(with_method(params, pairs), task, mixture_of(1, 0.0))
    assert_close(actual, scaled(expected, 1.7), 1e-10)


def test_partners_of_all_the_weight_are_all_that_counts(x64):
    """lambda = 1: the loss of support points alone, whatever the query."""
    task = make_task()
    params = make_params(MIX, task.support)
    chosen = jnp.array([3, 0, 1, 1, 2])
    repeated = lj.Task(task.support, lj.Points(task.support.x[chosen], task.support.y[chosen]))
    expected = outer(with_method(params, MAML), repeated, None)
    other = lj.Task(task.support, make_points(5, 2, seed=20))
    for layer in range(LAYERS):
        for at in (task, other):
            assert_close(outer(params, at, mixture_of(layer, 1.0)), expected, 1e-10)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_mixture_is_the_one_written_out(x64, layer):
    """The inputs of one layer of the adapted net and the targets, by the same lambda."""
    task = make_task(k=3)
    params = make_params(dataclasses.replace(MIX, inner_rate=0.4), task.support)
    weight, partner = np.array([0.1, 0.9, 0.5, 0.3, 0.7]), np.array([3, 0, 1, 1, 2])
    mix = mixture_of(layer, weight, partner)
    net = adapt(params, task.support)
    _, inputs = numpy_net(net, np.asarray(task.support.x)[partner])
    f, _ = numpy_net(net, task.query.x, layer, inputs, weight)
    y_s, y_q = np.asarray(task.support.y)[partner], np.asarray(task.query.y)
    y = weight[:, None] * y_s + (1 - weight[:, None]) * y_q
    value, _ = outer(params, task, mix)
    assert_close(value, np.mean((f - y) ** 2), 1e-12)
    # the net before adaptation, or another layer, would be something else
    unadapted, _ = numpy_net(params.learned, task.query.x, layer, inputs, weight)
    assert abs(np.mean((unadapted - y) ** 2) - value) > 1e-4
    assert_different(outer(params, task, mixture_of((layer + 2) % LAYERS, weight))[0], value)


def test_pairs_of_query_points_are_added_to_the_query_loss(x64):
    task = make_task()
    params = make_params(PAIRS, task.support)
    weight, partner = np.array([0.1, 0.9, 0.5, 0.3, 0.7]), np.array([4, 0, 1, 1, 2])
    net = adapt(params, task.support)
    x, y = np.asarray(task.query.x), np.asarray(task.query.y)
    _, inputs = numpy_net(net, x[partner])
    f, _ = numpy_net(net, x, 2, inputs, weight)
    mixed = np.mean((f - weight[:, None] * y[partner] - (1 - weight[:, None]) * y) ** 2)
    plain = np.mean((numpy_net(net, x)[0] - y) ** 2)
    value, _ = outer(params, task, mixture_of(2, weight, partner))
    assert_close(value, plain + 0.7 * mixed, 1e-12)


@pytest.mark.parametrize("first_order", [False, True])
def test_mixed_inner_loss_without_weight_is_a_larger_inner_rate(x64, first_order):
    """L + w L at lambda = 0; mixed for good, it adapts to something else."""
    task = make_task()
    method = dataclasses.replace(PAIRS, mix_inner=True, inner_steps=2, first_order=first_order)
    params = make_params(method, task.support)
    mix, inner = mixture_of(1, 0.4), mixture_of(1, 0.0, (3, 0, 1, 1))
    plain = dataclasses.replace(method, mix_inner=False)
    faster = with_method(params, plain)
    rate = 1.7 * params["inner_rate"]
    faster = faster.replace_learned({**params.learned, "inner_rate": rate})
    value, gradient = outer(params, task, mix, inner)
    expected, slope = outer(faster, task, mix)
    assert_close(value, expected, 1e-12)
    assert_close(gradient.pop("inner_rate"), 1.7 * slope.pop("inner_rate"), 1e-10)
    assert_close(gradient, slope, 1e-10)
    mixed = dataclasses.replace(inner, weight=jnp.full(4, 0.4))
    assert_different(outer(params, task, mix, mixed)[0], value)


def test_labels_are_mixed_by_their_losses(x64):
    """lambda CE(f, y_s) + (1 - lambda) CE(f, y_q)."""
    task = lj.Task(make_labels(4), make_labels(5, seed=7))
    params = make_params(lj.MetaMix(TANH, lj.CrossEntropy(3)), task.support)
    weight, partner = np.array([0.1, 0.9, 0.5, 0.3, 0.7]), np.array([3, 0, 1, 1, 2])
    net = adapt(params, task.support)
    _, inputs = numpy_net(net, np.asarray(task.support.x)[partner])
    f, _ = numpy_net(net, task.query.x, 1, inputs, weight)
    log_p = f - np.log(np.sum(np.exp(f), axis=1, keepdims=True))
    rows, y_s, y_q = np.arange(5), np.asarray(task.support.y)[partner], np.asarray(task.query.y)
    expected = -np.mean(weight * log_p[rows, y_s] + (1 - weight) * log_p[rows, y_q])
    assert_close(outer(params, task, mixture_of(1, weight))[0], expected, 1e-12)


def test_layer_of_a_linear_network_does_not_matter(x64):
    task = make_task()
    linear = lj.MLP(hidden=(), feature_dim=3)
    params = make_params(lj.MetaMix(linear), task.support)
    assert network.layers(linear, params.learned) == 2
    first, second = (outer(params, task, mixture_of(layer, 0.3)) for layer in (0, 1))
    assert_close(second, first, 1e-10)


def test_adaptation_does_not_see_the_key(x64):
    task = make_task()
    params = make_params(MIX, task.support)
    expected = adapt(with_method(params, MAML), task.support)
    for key in (None, jax.random.key(0), jax.random.key(1)):
        assert_close(lj.adapt(params, task.support, key=key).block, expected, 1e-12)
    losses = [MIX.loss(params, task, jax.random.key(seed)) for seed in range(2)]
    assert_different(*losses)
    with pytest.raises(ValueError, match="key must be given: MetaMix is stochastic"):
        MIX.loss(params, task, None)


def test_what_is_drawn():
    """Layers and real partners uniform, lambda from Beta(a, a), and each point its own."""
    own = make_points(200)
    partners = make_points(6, mask=[0, 1, 1, 0, 1, 0])

    @jax.jit
    def draws(keys):
        return jax.vmap(lambda key: mixture.draw(key, own, partners, layers=4, concentration=0.5))(
            keys
        )

    drawn = draws(jax.random.split(jax.random.key(0), 400))
    counts = np.bincount(np.asarray(drawn.layer), minlength=4)
    np.testing.assert_allclose(counts / 400, 0.25, atol=0.08)
    counts = np.bincount(np.ravel(drawn.partner), minlength=6) / 80_000
    np.testing.assert_allclose(counts, [0, 1 / 3, 1 / 3, 0, 1 / 3, 0], atol=0.01)
    assert not np.any(counts[[0, 3, 5]])
    np.testing.assert_allclose(np.mean(drawn.weight), 0.5, atol=0.01)
    np.testing.assert_allclose(np.var(drawn.weight), 1 / 8, atol=0.005)  # 1/(4 (2a + 1))
    nowhere = dataclasses.replace(partners, mask=jnp.zeros(6, bool))
    none = mixture.draw(jax.random.key(0), own, nowhere, layers=4, concentration=0.5)
    assert not np.any(none.weight)
    empty = lj.Points(partners.x[:0], partners.y[:0])
    assert mixture.draw(jax.random.key(0), own, empty, layers=4, concentration=0.5) is None
    params = make_params(MIX, own)
    assert_close(
        MIX.loss(params, lj.Task(empty, own), jax.random.key(0)),
        MAML.loss(with_method(params, MAML), lj.Task(empty, own), None),
        0,
    )


@pytest.mark.parametrize(("method", "concentration"), [(MIX, 0.5), (PAIRS, 1.0)])
def test_each_variant_has_its_own_beta(x64, method, concentration):
    task = make_task()
    params = make_params(method, task.support)
    given = with_method(params, dataclasses.replace(method, concentration=concentration))
    key = jax.random.key(0)
    expected = method.loss(params, task, key)
    assert_close(given.method.loss(given, task, key), expected, 1e-14)
    other = with_method(params, dataclasses.replace(method, concentration=3.0))
    assert_different(other.method.loss(other, task, key), expected)


@pytest.mark.parametrize("method", [MIX, dataclasses.replace(PAIRS, mix_inner=True)])
def test_padding_has_no_effect_on_loss_and_gradient(x64, method):
    """For one key: partners are drawn among real points, in whatever slots."""
    task = make_task()
    params = make_params(method, task.support)

    @jax.jit
    def loss(params, task):
        return jax.value_and_grad(
            lambda v: method.loss(params.replace_learned(v), task, jax.random.key(3))
        )(params.learned)

    def pad(p):
        """Padding after the real points: each keeps its own lambda."""
        n = len(p.x)
        return lj.Points(
            jnp.concatenate([p.x, jnp.full((2, 1), jnp.nan)]),
            jnp.concatenate([p.y, jnp.full((2, 2), jnp.inf)]),
            jnp.arange(n + 2) < n,
        )

    junk = pad(task.query)
    other = lj.Points(junk.x.at[5:].set(7.0), junk.y.at[5:].set(3.0), junk.mask)
    query, again = (loss(params, lj.Task(task.support, q)) for q in (junk, other))
    assert_close(again, query, 0)
    if not method.mix_inner:
        padded = lj.Task(pad(task.support), task.query)
        assert_close(loss(params, padded), loss(params, task), 1e-10)
    nowhere = lj.Points(junk.x, junk.y, jnp.zeros(7, bool))
    assert_close(loss(params, lj.Task(task.support, nowhere))[0], 0.0, 0)


@pytest.mark.parametrize("method", [MIX, dataclasses.replace(PAIRS, mix_inner=True)])
def test_outer_gradient_is_the_finite_difference(x64, method):
    support = make_points(4, 2, mask=[1, 1, 0, 1])
    support = dataclasses.replace(support, x=support.x.at[2].set(jnp.nan))
    task = lj.Task(support, make_points(5, 2, seed=7))
    params = make_params(method, task.support)
    start, unravel = ravel_pytree(params.learned)

    def loss(vector):
        return method.loss(params.replace_learned(unravel(vector)), task, jax.random.key(5))

    h, rng = 1e-5, np.random.default_rng(0)
    directions = jnp.asarray(rng.standard_normal((8, start.size)))
    shifted = jnp.concatenate([start + h * directions, start - h * directions])
    values, gradient = jax.jit(lambda v, many: (jax.vmap(loss)(many), jax.grad(loss)(v)))(
        start, shifted
    )
    up, down = np.split(np.asarray(values), 2)
    np.testing.assert_allclose(directions @ gradient, (up - down) / (2 * h), rtol=1e-5, atol=1e-8)


def test_first_order_learns_differently(x64):
    task = make_task()
    params = make_params(dataclasses.replace(MIX, inner_steps=2, inner_rate=0.5), task.support)
    first = with_method(params, dataclasses.replace(params.method, first_order=True))
    mix = mixture_of(1, 0.4)
    assert_close(outer(first, task, mix)[0], outer(params, task, mix)[0], 1e-12)
    assert_different(outer(first, task, mix)[1], outer(params, task, mix)[1], by=1e-6)


def test_layers_of_the_perceptron_are_visited_in_order(x64):
    points = make_points(3)
    params = make_params(MIX, points)
    seen = []

    def visit(index, h):
        seen.append((index, h.shape[1]))
        return h

    f = network.layered_outputs(TANH, params.learned, {}, points.x, visit)
    assert seen == [(0, 1), (1, 8), (2, 8), (3, 8)]
    assert network.layers(TANH, params.learned) == LAYERS
    assert_close(f, network.outputs(TANH, params.learned, {}, points.x), 0)


def test_a_model_that_hides_its_layers_is_mixed_at_inputs_and_features(x64):
    """The net of one linear Linen layer, against the perceptron that it equals."""
    task = make_task()
    linear = lj.MLP(hidden=(), feature_dim=3)
    expected = make_params(lj.MetaMix(linear), task.support)
    hidden = make_params(lj.MetaMix(lj.Linen(nn.Dense(3, param_dtype=float))), task.support)
    assert network.layers(hidden.method.model, hidden.learned) == 2
    (layer,) = expected["weights"]
    leaves = {**expected.learned, "weights": {"kernel": layer["weight"].T, "bias": layer["bias"]}}
    hidden = hidden.replace_learned(leaves)
    for layer in (0, 1):
        mix = mixture_of(layer, 0.3)
        assert_close(outer(hidden, task, mix)[0], outer(expected, task, mix)[0], 1e-10)


def test_training_lowers_the_loss():
    tasks = lj.Sine(shots=5, queries=10)
    for method in (lj.MetaMix(RELU), lj.MetaMix(RELU, variant="query_pairs")):
        loss = lj.train(method, tasks, steps=300, chunk=100, meta_batch=5).history["loss"]
        assert loss[-1] < loss[0]
