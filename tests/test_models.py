"""Backbones: the MLP, the Flax adapters, and a user's own class."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

import lavajax as lj
from helpers import (
    Circle,
    adapt,
    assert_close,
    assert_different,
    assert_finite,
    make_params,
    make_points,
    numpy_features,
    stack,
)
from lavajax.models.base import is_stochastic

X = make_points(5, d=2).x


def draw(model, x=X, context=None, seed=0):
    return model.init(jax.random.key(seed), x, context)


# The MLP


def test_features_are_those_of_numpy_and_the_last_layer_is_linear():
    """With the switch off they end in a ReLU, and are never negative."""
    points = make_points(20, d=2)
    params = make_params(lj.Anil(lj.MLP(hidden=(8, 6), feature_dim=5)), points)
    assert [layer["weight"].shape for layer in params["weights"]] == [(8, 2), (6, 8), (5, 6)]
    expected = numpy_features(params, points.x)
    actual = params.method.model.features(params["weights"], {}, points.x)
    assert_close(np.asarray(actual), expected[:, :-1].astype(np.float32), 1e-5)
    assert actual.min() < 0

    relu = lj.MLP(hidden=(8, 6), linear_features=False)
    weights, fixed = draw(relu, points.x)
    features = relu.features(weights, fixed, points.x)
    assert features.shape == (20, 6)
    assert features.min() == 0


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("d", [1, 3])
def test_layers_of_few_inputs_have_the_derivatives_of_a_product(x64, d, shared):
    """First and second, forward and backward, of weights that tasks share or that each has."""
    model = lj.MLP(hidden=(3,), activation="tanh", linear_features=False)
    x = jax.random.normal(jax.random.key(0), (2, 4, d))  # two tasks
    weights, _ = draw(model, x[0])
    if not shared:
        weights = stack([weights, jax.tree.map(jnp.negative, weights)])

    def features(weights, x):
        return model.features(weights, {}, x)

    def product(weights, x):
        return jnp.tanh(x @ weights[0]["weight"].T + weights[0]["bias"])

    def cubed(function, weights):
        return jax.vmap(function, in_axes=(None if shared else 0, 0))(weights, x) ** 3

    def gradient(function):
        return jax.jit(jax.grad(lambda w: jnp.sum(cubed(function, w))))(weights)

    assert_close(cubed(features, weights), cubed(product, weights), 1e-14)
    assert_close(gradient(features), gradient(product), 1e-14)
    check_grads(lambda w: cubed(features, w), (weights,), order=2)


@pytest.mark.parametrize("initializer", ["torch", "lecun", "he"])
def test_initial_weights_have_the_stated_distribution(initializer):
    """U(-1, 1)/sqrt(fan_in) for weights and biases, or normal weights and no biases."""
    fan_in = 400
    weights, fixed = draw(
        lj.MLP(hidden=(300,), linear_features=False, initializer=initializer),
        jnp.zeros((1, fan_in)),
    )
    assert fixed == {}
    w, b = np.asarray(weights[0]["weight"]), np.asarray(weights[0]["bias"])
    bound = 1 / np.sqrt(fan_in)
    std = {"torch": bound / np.sqrt(3), "lecun": bound, "he": np.sqrt(2) * bound}[initializer]
    np.testing.assert_allclose(w.std(), std, rtol=0.02)  # 120,000 draws
    assert abs(w.mean()) < 5 * std / np.sqrt(w.size)
    if initializer == "torch":
        assert 0.99 * bound < np.abs(w).max() <= bound
        assert 0.95 * bound < np.abs(b).max() <= bound
        np.testing.assert_allclose(b.std(), std, rtol=0.1)
    else:
        assert np.abs(w).max() > 3 * std
        np.testing.assert_array_equal(b, 0)


def test_head_starts_like_a_layer_of_its_own():
    """Weights over the bias row, U(-1, 1)/sqrt(D)."""
    points = make_points(3, k=50)
    head = np.asarray(make_params(lj.Anil(lj.MLP(hidden=(100,))), points)["head"])
    assert head.shape == (101, 50)
    assert 0.099 < np.abs(head[:-1]).max() <= 0.1
    assert 0.08 < np.abs(head[-1]).max() <= 0.1


def test_keys_draw_different_layers_and_the_same_key_the_same():
    weights, _ = draw(lj.MLP(hidden=(8, 8)))
    again, _ = draw(lj.MLP(hidden=(8, 8)))
    other, _ = draw(lj.MLP(hidden=(8, 8)), seed=1)
    assert_close(again, weights, 0)
    assert_different(other, weights)
    assert_different(weights[1]["weight"], weights[2]["weight"])


def test_a_context_is_concatenated_to_every_input():
    model, context = lj.MLP(hidden=(8,)), jnp.array([0.3, -0.7, 1.1])
    weights, fixed = draw(model, context=context)
    assert weights[0]["weight"].shape == (8, 5)
    wide = jnp.concatenate([X, jnp.broadcast_to(context, (5, 3))], axis=1)
    expected = model.features(weights, fixed, wide)
    assert_close(model.features(weights, fixed, X, context=context), expected, 0)


def test_points_of_an_mlp_do_not_see_each_other():
    model = lj.MLP(hidden=(8,))
    weights, fixed = draw(model)
    together = model.features(weights, fixed, X)
    apart = jnp.concatenate([model.features(weights, fixed, X[i : i + 1]) for i in range(5)])
    assert_close(together, apart, 1e-6)


def test_inputs_that_are_not_vectors_are_refused():
    with pytest.raises(ValueError, match=r"\[N, d\] for MLP, got \(5,\).*x\[:, None\]"):
        draw(lj.MLP(), jnp.zeros(5))


# Any class that follows the protocol


@dataclasses.dataclass(frozen=True)
class Flattening:
    """Takes images ``[N, 2, 3]`` to their pixels."""

    def init(self, key, x, context=None):
        return {}, {}

    def features(self, weights, fixed, x, *, context=None, mask=None):
        return x.reshape(len(x), 6)


@dataclasses.dataclass(frozen=True)
class Unbatched(Flattening):
    """Forgets the axis of points."""

    def features(self, weights, fixed, x, *, context=None, mask=None):
        return x.ravel()


def test_a_users_class_needs_the_two_methods_alone():
    """Without weights, on inputs of any rank."""
    x = jax.random.normal(jax.random.key(0), (4, 2, 3))
    y = jnp.sum(x, axis=(1, 2))[:, None]
    for method in (lj.Lava(Flattening()), lj.Maml(Flattening()), lj.Anil(Flattening())):
        params = method.init(jax.random.key(1), x, y)
        assert params["head"].shape == (7, 1)
        whole = lj.Points(x, y)
        loss = jax.jit(method.loss)
        before = loss(params, lj.Task(lj.Points(x[:0], y[:0]), whole), None)
        after = loss(params, lj.Task(whole, whole), None)
        assert after < before
    ridge = lj.Lava(Flattening(), inner_steps="map", epsilon=1e-6)
    params = ridge.init(jax.random.key(1), x, y)
    assert_close(lj.predict(params, lj.adapt(params, (x, y)), x).mean, y, 1e-3)


def test_features_that_are_not_one_vector_for_each_point_are_refused():
    with pytest.raises(ValueError, match=r"features \[N, D\] with N = 4, got \(24,\)"):
        lj.Anil(Unbatched()).init(jax.random.key(0), jnp.zeros((4, 2, 3)), jnp.zeros((4, 1)))


# Flax


class LinenNet(nn.Module):
    """Takes a context beside x where one is given."""

    @nn.compact
    def __call__(self, x, context=None):
        if context is not None:
            x = jnp.concatenate([x, jnp.broadcast_to(context, (len(x), len(context)))], axis=1)
        h = nn.tanh(nn.Dense(8)(x))
        return nn.Dense(4)(h)


class NnxNet(nnx.Module):
    """The same in NNX; ``inputs`` counts the context."""

    def __init__(self, inputs, rngs):
        self.first, self.last = nnx.Linear(inputs, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x, context=None):
        if context is not None:
            x = jnp.concatenate([x, jnp.broadcast_to(context, (len(x), len(context)))], axis=1)
        return self.last(nnx.tanh(self.first(x)))


def build_nnx(rngs):
    return NnxNet(1, rngs)


def build_nnx_context(rngs):
    return NnxNet(3, rngs)


def layers_of(kind, weights):
    """First and last layer ``(kernel, bias)`` of the two networks above."""
    names = ("Dense_0", "Dense_1") if kind == "linen" else ("first", "last")
    return [(np.asarray(weights[n]["kernel"]), np.asarray(weights[n]["bias"])) for n in names]


ADAPTERS = {"linen": lj.Linen(LinenNet()), "nnx": lj.NNX(build_nnx)}
EVERY_ADAPTER = pytest.mark.parametrize("kind", ADAPTERS)


@EVERY_ADAPTER
def test_adapters_compute_the_module(kind):
    model = ADAPTERS[kind]
    points = make_points(5)
    weights, fixed = draw(model, points.x)
    assert fixed == {}
    (w1, b1), (w2, b2) = layers_of(kind, weights)
    expected = np.tanh(np.asarray(points.x) @ w1 + b1) @ w2 + b2
    assert_close(model.features(weights, fixed, points.x), expected, 1e-5)


@pytest.mark.parametrize("method", [lj.Lava, lj.Maml, lj.Anil], ids=lambda m: m.__name__)
@EVERY_ADAPTER
def test_adapters_work_under_jit_vmap_and_grad(kind, method):
    """Head and all weights adapt; a batch of tasks is the tasks one by one."""
    method = method(ADAPTERS[kind])
    check_batch(method)
    if isinstance(method, lj.Lava):
        check_batch(dataclasses.replace(method, subspace=lj.Full()))


def check_batch(method):
    tasks = [lj.Task(make_points(3, seed=s), make_points(4, seed=s + 9)) for s in range(2)]
    params = make_params(method, tasks[0].support)

    @jax.jit
    @jax.value_and_grad
    def batched(learned, tasks):
        here = params.replace_learned(learned)
        return jnp.mean(jax.vmap(lambda task: method.loss(here, task, None))(tasks))

    loss, gradient = batched(params.learned, stack(tasks))
    errors = [
        jnp.mean((lj.predict(params, lj.adapt(params, t.support), t.query.x).mean - t.query.y) ** 2)
        for t in tasks
    ]
    assert_close(loss, np.float32(np.mean(errors)), 1e-5)
    assert_finite(gradient)
    for leaf in jax.tree.leaves(gradient):
        assert np.any(np.asarray(leaf) != 0)


@pytest.mark.parametrize(
    "model", [lj.Linen(LinenNet()), lj.NNX(build_nnx_context)], ids=["linen", "nnx"]
)
def test_adapters_take_a_context(model):
    """CAVIA and LAVA move it, and it moves the predictions."""
    support = make_points(3)
    for method in (lj.Cavia(model, inner_rate=1.0), lj.Lava(model)):
        params = make_params(dataclasses.replace(method, subspace=lj.Context(2)), support)
        assert_different(adapt(params, support), params["context"])
        before, after = (
            lj.predict(params, lj.Adapted(c), support.x).mean
            for c in (params["context"], adapt(params, support))
        )
        assert np.mean((after - support.y) ** 2) < np.mean((before - support.y) ** 2)


def test_a_sequential_given_a_list_is_hashable_and_equal_by_value():
    """``nn.Sequential`` keeps the list it is given, which jit could not compare safely."""
    model, twin = (lj.Linen(nn.Sequential([nn.Dense(8), nn.tanh, nn.Dense(4)])) for _ in "ab")
    assert model == twin
    assert hash(model) == hash(twin)
    support = make_points(3)
    params = make_params(lj.Lava(model), support)
    assert_different(adapt(params, support), params["head"])


class Mislabelled(nn.Module):
    """Holds an array."""

    table: jax.Array

    def __call__(self, x):
        return x


def test_modules_that_cannot_be_constants_are_refused():
    with pytest.raises(ValueError, match=r"Linen.module must be hashable.*tuples"):
        lj.Linen(Mislabelled(jnp.zeros(3)))
    with pytest.raises(ValueError, match=r"Linen.module must be an instance.*LinenNet"):
        lj.Linen(LinenNet)
    with pytest.raises(ValueError, match=r"NNX.constructor must be a function.*got NnxNet"):
        lj.NNX(NnxNet(1, nnx.Rngs(0)))


# Dropout


class LinenDropout(nn.Module):
    """Drops half of its inputs in training mode."""

    deterministic: bool

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=self.deterministic)(nn.Dense(8)(x))


class NnxDropout(nnx.Module):
    """As ``nnx.Dropout`` comes: in training mode."""

    def __init__(self, rngs):
        self.linear, self.dropout = nnx.Linear(1, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.linear(x))


def test_dropout_is_deterministic_or_refused():
    """See ``test_dropout.py`` for training."""
    points = make_points(5)
    with pytest.raises(ValueError, match="argument deterministic and pass it to its Dropout"):
        draw(lj.Linen(LinenDropout(deterministic=False)), points.x)
    model = lj.NNX(NnxDropout)
    weights, fixed = draw(model, points.x)
    kernel, bias = weights["linear"]["kernel"], weights["linear"]["bias"]
    assert_close(model.features(weights, fixed, points.x), points.x @ kernel + bias, 1e-6)
    method = lj.Lava(model)
    params = make_params(method, points)

    @jax.jit
    @jax.grad
    def gradient(learned):
        return method.loss(params.replace_learned(learned), lj.Task(points, points), None)

    assert_finite(gradient(params.learned))


class NnxStack(nnx.Module):
    """Two layers of one definition, each with random streams of its own."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def build(rngs):
            return nnx.Dropout(0.5, rngs=rngs)

        self.layers = build(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=-1)(self.layers, x)


def test_stacked_layers_drop_different_units():
    x = jnp.ones((1, 64))
    model = lj.NNX(NnxStack)
    _, fixed = draw(model, x)
    kept = model.features({}, model.drawn(fixed, jax.random.key(0)), x)[0] > 0
    assert 0.2 < jnp.mean(kept[:, 0] == kept[:, 1]) < 0.8


# A learned prior covariance: see test_error_bars.py for what it means


def test_a_correlated_backbone_starts_as_the_one_within_and_draws_where_it_does(tmp_path):
    points = make_points(5)
    model = lj.Correlated(lj.MLP(hidden=(8,)))
    weights, fixed = draw(model, points.x)
    phi = model.model.features(weights["model"], fixed, points.x)
    features = model.features(weights, fixed, points.x)
    assert_close(features, np.hstack([phi, np.ones((5, 1))]), 0)
    assert is_stochastic(lj.Correlated(lj.NNX(NnxDropout)))
    assert not is_stochastic(model)
    with pytest.raises(ValueError, match=r"Correlated\.speed must be a finite number above 0"):
        lj.Correlated(speed=0.0)
    method = lj.lava_bayesian(model=model)
    params = make_params(method, points)
    gradient = jax.jit(
        jax.grad(
            lambda learned: method.loss(
                params.replace_learned(learned), lj.Task(points, points), None
            )
        )
    )(params.learned)
    factor = np.asarray(gradient["weights"]["factor"])
    assert (factor[np.tril_indices(9)] != 0).all()
    assert (factor[np.triu_indices(9, 1)] == 0).all()
    lj.save(params, tmp_path / "model")
    assert lj.load(tmp_path / "model").method == method


# Batch normalisation


class LinenBatchNorm(nn.Module):
    """Honours a mask."""

    @nn.compact
    def __call__(self, x, context=None, mask=None):
        h = nn.Dense(8)(x)
        h = nn.BatchNorm(use_running_average=False)(h, mask=None if mask is None else mask[:, None])
        return nn.Dense(4)(h)


class LinenMaskless(nn.Module):
    """Has no mask argument."""

    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))


class NnxBatchNorm(nnx.Module):
    """Honours a mask."""

    def __init__(self, rngs):
        self.linear, self.norm = nnx.Linear(1, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

    def __call__(self, x, context=None, mask=None):
        return self.norm(self.linear(x), mask=None if mask is None else mask[:, None])


class NnxMaskless(NnxBatchNorm):
    """Has no mask argument."""

    def __call__(self, x):
        return self.norm(self.linear(x))


NORMALISED = pytest.mark.parametrize(
    "model", [lj.Linen(LinenBatchNorm()), lj.NNX(NnxBatchNorm)], ids=["linen", "nnx"]
)
MASKLESS = pytest.mark.parametrize(
    "model", [lj.Linen(LinenMaskless()), lj.NNX(NnxMaskless)], ids=["linen", "nnx"]
)


class LinenTrain(nn.Module):
    """As Flax's own examples are written."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        return nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))


class LinenAverage(nn.Module):
    """One layer of two forgets to take the batch."""

    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.BatchNorm(use_running_average=True)(h)


def test_a_module_that_would_keep_its_running_average_is_refused():
    x = make_points(4).x
    with pytest.raises(ValueError, match=r"LinenTrain.__call__ must not take 'train'.*use_running"):
        draw(lj.Linen(LinenTrain()), x)
    with pytest.raises(ValueError, match=r"Linen.module must normalise by the batch at hand"):
        draw(lj.Linen(LinenAverage()), x)
    with pytest.raises(ValueError, match=r"Linen.module must normalise by the batch at hand"):
        jax.eval_shape(lambda: draw(lj.Linen(LinenAverage()), x))


@NORMALISED
def test_batch_norm_uses_the_batch_at_hand_and_leaves_padding_out(model):
    """With a head; its statistics are fixed leaves, which no optimiser sees."""
    support = make_points(4)
    for method in (lj.Lava(model), lj.Anil(model)):
        params = make_params(method, support)
        assert "batch_stats" in params.fixed["backbone"]
        expected = adapt(params, support)
        assert_different(expected, params["head"])
        padded = lj.Points(
            jnp.concatenate([support.x, jnp.full((3, 1), jnp.nan)]),
            jnp.concatenate([support.y, jnp.full((3, 1), jnp.nan)]),
            jnp.arange(7) < 4,
        )
        assert_close(adapt(params, padded), expected, 1e-4)
        shifted = dataclasses.replace(support, x=5 * support.x + 3)  # normalised away
        assert_close(adapt(params, shifted), expected, 1e-2)


@NORMALISED
def test_batch_norm_is_refused_where_points_are_taken_apart(model):
    support = make_points(4)
    for subspace in (lj.Full(), lj.Context(2)):
        with pytest.raises(ValueError, match=r"couples the points.*Head\(\)"):
            make_params(lj.Lava(model, subspace=subspace), support)


@NORMALISED
def test_batch_norm_refuses_a_single_point(model):
    """Whatever it is, it would be normalised away; also where a mask leaves one."""
    support = make_points(4)
    params = make_params(lj.Anil(model), support)
    one = lj.Points(support.x[:1], support.y[:1])
    for points in (one, dataclasses.replace(support, mask=jnp.arange(4) == 2)):
        with pytest.raises(ValueError, match="at least 2 points for a model with batch norm"):
            lj.adapt(params, points)
    with pytest.raises(ValueError, match="at least 2 points"):
        jax.eval_shape(params.method.loss, params, lj.Task(one, support), None)


@NORMALISED
def test_batch_norm_refuses_tasks_with_a_single_query(model):
    params = make_params(lj.Anil(model), make_points(4))
    for call in (
        lambda tasks: lj.train(params.method, tasks, steps=1),
        lambda tasks: lj.evaluate(params, tasks, num_tasks=2),
    ):
        with pytest.raises(ValueError, match="the query of tasks must have at least 2 points"):
            call(lj.Sine(shots=4, queries=1))


@NORMALISED
def test_batch_norm_of_a_single_point_is_no_value_where_a_compiled_mask_leaves_one(model):
    """Training then leaves such tasks out, counts them, and stops where they are too many."""
    for method in (lj.Anil(model), lj.Lava(model), lj.Bmaml(model, particles=2)):
        params = make_params(method, make_points(4))
        loss = jax.jit(lambda task, m=method, p=params: m.loss(p, task, jax.random.key(0)))
        for real, sound in ((1, False), (2, True), (4, True)):
            support = dataclasses.replace(make_points(4), mask=jnp.arange(4) < real)
            assert jnp.isfinite(loss(lj.Task(support, make_points(4, seed=1)))) == sound


@NORMALISED
def test_batch_norm_works_in_the_gradient_methods(model):
    """They differentiate the mean loss of all points together."""
    support = make_points(4)
    params = make_params(lj.Maml(model), support)
    assert_finite(adapt(params, support))
    assert_different(adapt(params, support), {"weights": params["weights"], "head": params["head"]})


@MASKLESS
def test_a_module_without_a_context_is_told_to_take_one(model):
    with pytest.raises(ValueError, match=r"must take a context to adapt one: give \w+Maskless"):
        make_params(lj.Cavia(model), make_points(3))


@MASKLESS
def test_a_mask_is_refused_where_padding_would_enter_the_statistics(model):
    support = make_points(4, mask=[1, 1, 1, 0])
    params = make_params(lj.Lava(model), support)
    with pytest.raises(ValueError, match=r"support has a mask.*__call__ a mask argument"):
        adapt(params, support)
    whole = dataclasses.replace(support, mask=None)
    assert_finite(adapt(params, whole))


def test_equal_models_share_compiled_code_and_a_model_of_its_own_is_used():
    """Methods compare by value, down to the model."""
    assert lj.Lava(lj.MLP(hidden=[8, 8])) == lj.Lava(lj.MLP(hidden=(8, 8)))
    assert lj.Lava(Circle()) == lj.Lava(Circle()) != lj.Lava(Flattening())
    assert lj.NNX(build_nnx) == lj.NNX(build_nnx) != lj.NNX(build_nnx_context)
