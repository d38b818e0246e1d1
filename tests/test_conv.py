"""Conv4: its layers against the library's own, what couples points, and what tasks share."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lavajax
from helpers import assert_close, assert_different, equations, make_params, stack
from lavajax import Conv4, CrossEntropy
from lavajax.models import conv
from lavajax.outer import BatchExpectation
from lavajax.subspace import net_of

LOSS = CrossEntropy(3)


def pictures(n: int = 6, side: int = 16, channels: int = 1, seed: int = 0) -> lavajax.Points:
    x = jax.random.uniform(jax.random.key(seed), (n, side, side, channels))
    return lavajax.Points(x, jnp.arange(n) % 3)


def features(model: Conv4, x, context=None, mask=None):
    weights, fixed = model.init(jax.random.key(0), x, context)
    return model.features(weights, fixed, x, context=context, mask=mask)


def test_convolution_is_that_of_jax_in_values_and_gradients():
    x, kernel = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(2, 5, 4, 3)] * 2))
    kernel = jax.random.normal(jax.random.key(1), (3, 3, 3, 4))

    def directly(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def both(fn):
        return jax.jit(jax.value_and_grad(lambda x, k: jnp.sum(jnp.sin(fn(x, k))), (0, 1)))

    assert_close(both(conv.as_product)(x, kernel), both(directly)(x, kernel), 1e-5)
    assert_close(conv.convolve(x, kernel), directly(x, kernel), 1e-5)


def test_pooling_is_that_of_flax_and_leaves_out_an_odd_row():
    h = jax.random.normal(jax.random.key(0), (2, 5, 6, 3))
    np.testing.assert_array_equal(conv._pool(h), nn.max_pool(h, (2, 2), (2, 2)))
    for at in ((0, 0), (0, 1), (1, 0), (1, 1)):
        pooled = conv._pool(h.at[(0, *at, 0)].set(jnp.nan))
        assert np.flatnonzero(np.isnan(pooled)).tolist() == [0]


@pytest.mark.parametrize(
    ("model", "side", "dim"),
    [
        (Conv4(3), 28, 3),
        (Conv4(2, "layer"), 35, 8),  # 35, 17, 8, 4, 2
        (Conv4(3, "none", linear_features=True), 16, 3),
        (Conv4(3, linear_features=True, feature_dim=5), 16, 5),
    ],
)
def test_widths_of_the_features(model, side, dim):
    x = pictures(4, side, 2).x
    assert jax.eval_shape(lambda x: features(model, x), x).shape == (4, dim)


def test_blocks_are_the_ones_written_out():
    x = pictures(5).x
    model = Conv4(2, linear_features=True, feature_dim=3)
    weights, fixed = model.init(jax.random.key(0), x)
    h = np.asarray(x, np.float64)
    for block in range(1, 5):
        padded = np.pad(h, ((0, 0), (1, 1), (1, 1), (0, 0)))
        n, side = h.shape[:2]
        kernel, h = np.asarray(weights[f"kernel_{block}"]), 0
        for i in range(3):
            for j in range(3):
                h = h + padded[:, i : i + side, j : j + side] @ kernel[i, j]
        h = (h - h.mean((0, 1, 2))) / np.sqrt(h.var((0, 1, 2)) + 1e-5)
        h = np.maximum(h.reshape(n, side // 2, 2, side // 2, 2, 2).max((2, 4)), 0)
    dense = weights["Dense_0"]
    expected = h.reshape(5, 2) @ np.asarray(dense["kernel"]) + np.asarray(dense["bias"])
    found = model.features(weights, fixed, x)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.min(found) < 0  # the last layer has no activation


def test_bytes_and_numbers_are_one_input():
    x = jnp.round(255 * pictures().x)
    assert_close(features(Conv4(2), x.astype(jnp.uint8)), features(Conv4(2), x), 0)


@pytest.mark.parametrize(("norm", "coupled"), [("batch", True), ("layer", False), ("none", False)])
def test_batch_normalisation_alone_couples_points_and_says_so(norm, coupled):
    x, model = pictures().x, Conv4(2, norm)
    weights, fixed = model.init(jax.random.key(0), x)
    assert ("batch_stats" in fixed) == coupled
    together, alone = model.features(weights, fixed, x), model.features(weights, fixed, x[:2])
    (assert_different if coupled else assert_close)(together[:2], alone, 1e-4)


def test_padding_stays_out_of_the_statistics():
    x, mask = pictures().x, jnp.arange(6) < 4
    model = Conv4(2)
    padded = x.at[4:].set(1e3)
    weights, fixed = model.init(jax.random.key(0), x)
    found = model.features(weights, fixed, padded, mask=mask)[:4]
    assert_close(found, model.features(weights, fixed, x[:4]), 1e-5)
    assert_different(found, model.features(weights, fixed, padded)[:4])


def test_a_context_of_zero_changes_nothing_and_another_scales_and_shifts():
    x, model = pictures().x, Conv4(2, "layer")
    weights, fixed = model.init(jax.random.key(0), x, jnp.zeros(3))
    plain = {name: w for name, w in weights.items() if not name.startswith("Dense")}
    assert len(plain) == len(weights) - 1
    found = model.features(weights, fixed, x, context=jnp.zeros(3))
    assert_close(found, model.features(plain, fixed, x), 0)
    moved = model.features(weights, fixed, x, context=jnp.ones(3))
    assert_different(moved, found)
    # As if the third normalisation had this scale and shift itself.
    scale, shift = jnp.split(jnp.ones(3) @ weights["Dense_0"]["kernel"], 2)
    norm = plain["GroupNorm_2"]
    own = {"scale": (1 + scale) * norm["scale"], "bias": (1 + scale) * norm["bias"] + shift}
    assert_close(moved, model.features({**plain, "GroupNorm_2": own}, fixed, x), 1e-5)


@pytest.mark.parametrize("subspace", [lavajax.Context(2), lavajax.Full()], ids=["context", "full"])
def test_batch_normalisation_is_refused_where_points_are_taken_apart(subspace):
    with pytest.raises(ValueError, match=r"couples the points of a batch.*Head\(\)"):
        make_params(lavajax.Lava(Conv4(2), LOSS, subspace), pictures())
    make_params(lavajax.Lava(Conv4(2, "layer"), LOSS, subspace), pictures())


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_a_support_of_padding_alone_and_no_image_leave_the_prior(norm):
    support = pictures()
    params = make_params(lavajax.Lava(Conv4(2, norm), LOSS), support)
    nothing = lavajax.Points(support.x, support.y, jnp.zeros(len(support.y), bool))
    assert_close(lavajax.adapt(params, nothing).block, params["head"], 0)
    adapted = lavajax.adapt(params, (support.x[:0], support.y[:0]))
    assert_close(adapted.block, params["head"], 0)
    assert lavajax.predict(params, adapted, support.x[:0]).mean.shape[0] == 0

    def loss(learned):
        other = params.replace_learned(learned)
        return params.method.loss(other, lavajax.Task(nothing, support), None)

    for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(params.learned)):
        assert np.isfinite(leaf).all()


@pytest.mark.parametrize(
    ("method", "shared"),
    [
        (lavajax.Lava(Conv4(2), LOSS), True),
        (lavajax.Anil(Conv4(2), LOSS, inner_steps=2), True),
        (lavajax.Ridge(Conv4(2), LOSS), True),
        (lavajax.Cavia(Conv4(2), LOSS, lavajax.Context(3), inner_steps=2), True),
        (lavajax.Maml(Conv4(2), LOSS), False),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "adapt") else "",
)
def test_tasks_share_their_kernels_unless_all_weights_adapt(method, shared, monkeypatch):
    """A kernel for each task is a convolution in groups; looked for in the training step's own."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # XLA's convolution; only traced
    task = lavajax.Task(pictures(), pictures(seed=1))
    params, tasks = make_params(method, task.support), stack([task, task])
    expect = BatchExpectation(tasks, jax.random.split(jax.random.key(0), 2))

    def gradient(learned):
        loss = lambda p, task, key: method.loss(params.replace_learned(p), task, key)  # noqa: E731
        return expect.value_and_grad(loss, learned)

    traced = jax.make_jaxpr(gradient)(params.learned).jaxpr
    found = [e.params for e in equations(traced) if e.primitive.name == "conv_general_dilated"]
    assert len(found) >= 4 * 2 * 2  # every block, for support and query, forwards and backwards
    groups = {max(p["feature_group_count"], p["batch_group_count"]) for p in found}
    assert (groups == {1}) == shared


def test_what_are_no_images_and_settings_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"\[N, H, W, C\] for Conv4.* at least 16.*got \(6, 15"):
        Conv4().init(jax.random.key(0), pictures(side=15).x)
    with pytest.raises(ValueError, match=r"for Conv4.*got \(3, 2\)"):
        Conv4().init(jax.random.key(0), jnp.zeros((3, 2)))
    with pytest.raises(ValueError, match=r"Conv4\.norm must be one of 'batch', 'layer', 'none'"):
        Conv4(norm="instance")
    with pytest.raises(ValueError, match=r"Conv4\.feature_dim is the width"):
        Conv4(feature_dim=3)


def test_training_on_two_shapes_reaches_what_chance_does_not():
    """Bars that lie or stand, at random places: support, query, labels and rates all take part."""

    @jax.tree_util.register_static
    class Bars:
        def sample(self, key, split="train"):
            keys = jax.random.split(key, 3)
            y = jnp.tile(jnp.array([0, 1]), 4)
            first = jax.random.bernoulli(keys[0])  # which of the two is called 0
            at = jax.random.randint(keys[1], (8,), 0, 16)
            lying = jnp.broadcast_to(jnp.arange(16)[:, None] == at[:, None, None], (8, 16, 16))
            stands = (y == 0) == first
            x = jnp.where(stands[:, None, None], lying.swapaxes(1, 2), lying)[..., None] * 1.0
            return lavajax.Task(lavajax.Points(x[:2], y[:2]), lavajax.Points(x[2:], y[2:]))

    method = lavajax.Lava(Conv4(4), CrossEntropy(2))
    optimizer = lavajax.outer_optimizer(60, rate=1e-2)
    trained = lavajax.train(method, Bars(), steps=60, meta_batch=4, optimizer=optimizer)
    assert lavajax.evaluate(trained.params, Bars(), num_tasks=100).mean > 0.9
    assert net_of(trained.params)["head"].shape == (5, 2)
