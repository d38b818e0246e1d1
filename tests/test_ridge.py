"""Ridge regression of the head: both forms, limits, classes, and the floor of its strength."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import (
    RELU,
    Circle,
    adapt,
    assert_affine_in_labels,
    assert_close,
    assert_different,
    assert_finite,
    make_labels,
    make_params,
    make_points,
    numpy_features,
    with_method,
)

FIXED = lj.Ridge(RELU, ridge=0.3, learn_ridge=False)


@pytest.mark.parametrize("solver", ["auto", "primal", "dual"])
@pytest.mark.parametrize("n", [4, 12])
def test_both_forms_are_the_regression_in_numpy(x64, solver, n):
    """For fewer points than features and for more; N counts real points alone."""
    support = make_points(n, 3, mask=np.arange(n) != 1)
    params = make_params(dataclasses.replace(FIXED, solver=solver), support)
    z, y = numpy_features(params, support.x), np.asarray(support.y)
    z, y = np.delete(z, 1, axis=0), np.delete(y, 1, axis=0)
    prior = np.asarray(params["head"])
    gram = z.T @ z + (n - 1) * 0.3 * np.eye(z.shape[1])
    expected = np.linalg.solve(gram, z.T @ y + (n - 1) * 0.3 * prior)
    assert_close(adapt(params, support), expected, 1e-9)


def test_features_and_targets_over_the_root_of_their_number_are_the_same(x64):
    """The original divides both by sqrt(N) and adds lambda; here N multiplies lambda."""
    support = make_points(5, 2)
    params = make_params(dataclasses.replace(FIXED, centre=False), support)
    z = numpy_features(params, support.x) / np.sqrt(5)
    y = np.asarray(support.y) / np.sqrt(5)
    expected = z.T @ np.linalg.solve(z @ z.T + 0.3 * np.eye(5), y)
    assert_close(adapt(params, support), expected, 1e-9)


def test_limits_of_the_strength(x64):
    """None interpolates fewer points than features; all of it leaves the prior."""
    support = make_points(2, 2)
    params = make_params(dataclasses.replace(FIXED, model=Circle()), support)
    weak = with_method(params, dataclasses.replace(params.method, ridge=1e-12))
    fitted = lj.predict(weak, lj.adapt(weak, support), support.x).mean
    assert_close(fitted, support.y, 1e-7)
    assert_different(lj.predict(params, lj.adapt(params, support), support.x).mean, support.y)
    strong = with_method(params, dataclasses.replace(params.method, ridge=1e12))
    assert_close(adapt(strong, support), params["head"], 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("learn", [False, True])
def test_it_is_lava_with_each_points_own_maximum_a_posteriori(x64, reduction, learn):
    """At eps = c lambda; for learned strengths, floors included."""
    loss = lj.SquaredError(reduction)
    c = {"mean": 2 / 3, "sum": 2.0}[reduction]
    support = make_points(4, 3)
    ridge = make_params(
        lj.Ridge(RELU, loss, ridge=0.1, learn_ridge=learn, ridge_floor=0.5), support
    )
    method = lj.Lava(
        RELU,
        loss,
        inner_steps="map",
        epsilon=c * 0.1,
        learn_epsilon=learn,
        epsilon_floor=0.5,
    )
    lava = make_params(method, support)
    assert_close(adapt(ridge, support), adapt(lava, support), 1e-10)
    unfloored = with_method(ridge, dataclasses.replace(ridge.method, ridge_floor=1e-9))
    (assert_different if learn else assert_close)(
        adapt(unfloored, support), adapt(lava, support), 1e-4
    )


def test_predictions_are_affine_in_the_labels(x64):
    assert_affine_in_labels(FIXED, 1e-9)


def test_without_a_centre_there_is_no_head_to_learn(x64):
    support = make_points(4, 2)
    params = make_params(dataclasses.replace(FIXED, centre=False), support)
    assert "head" not in params.learned
    nothing = lj.Points(support.x, support.y, jnp.zeros(4, bool))
    for empty in (nothing, lj.Points(support.x[:0], support.y[:0])):
        np.testing.assert_array_equal(adapt(params, empty), np.zeros((9, 2)))
    with pytest.raises(ValueError, match="params must be those of one seed, got 2 seeds"):
        lj.adapt(jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params), support)


def test_classes_are_regressed_onto_and_scaled(x64):
    support = make_labels(5, 3)
    params = make_params(lj.Ridge(RELU, lj.CrossEntropy(3), ridge=0.2, learn_ridge=False), support)
    offset = jnp.array([0.5, -1.0, 2.0])
    learned = {**params.learned, "logit_scale": jnp.asarray(7.0), "logit_offset": offset}
    params = params.replace_learned(learned)
    z, prior = numpy_features(params, support.x), np.asarray(params["head"])
    targets = np.eye(3)[np.asarray(support.y)]
    regressed = prior + z.T @ np.linalg.solve(z @ z.T + np.eye(5), targets - z @ prior)
    for points, head in ((support, regressed), (lj.Points(support.x[:0], support.y[:0]), prior)):
        logits = 7 * z @ head + np.asarray(offset)
        expected = np.exp(logits) / np.sum(np.exp(logits), axis=1, keepdims=True)
        actual = lj.predict(params, lj.adapt(params, points), support.x).mean
        assert_close(actual, expected, 1e-9)


def test_a_label_out_of_range_is_not_ignored():
    support = make_labels(4, 3)
    params = make_params(lj.Ridge(RELU, lj.CrossEntropy(3)), support)
    wrong = dataclasses.replace(support, y=support.y.at[1].set(3))
    assert np.all(np.isnan(jax.jit(lambda s: params.method.adapt(params, s).block)(wrong)))
    hidden = dataclasses.replace(wrong, mask=jnp.arange(4) != 1)
    assert_finite(adapt(params, hidden))


def test_a_vanishing_strength_leaves_float32_solvable():
    """Points that coincide make the system singular but for the floor, and what rounding adds."""
    support = make_points(6, 2)
    support = lj.Points(jnp.repeat(support.x[:1], 6, axis=0), support.y)
    params = make_params(lj.Ridge(RELU), support)
    params = params.replace_learned({**params.learned, "log_ridge": jnp.asarray(-60.0)})
    task = lj.Task(support, make_points(5, 2, seed=3))

    def gradient(params):
        loss = lambda v: params.method.loss(params.replace_learned(v), task, None)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params.learned)

    for floor in (params.method.ridge_floor, 1e-30):
        here = with_method(params, dataclasses.replace(params.method, ridge_floor=floor))
        assert_finite(gradient(here))


@pytest.mark.parametrize("settings", [{}, {"centre": False}])
def test_training_lowers_the_error(settings):
    tasks, method = lj.Sine(shots=10, queries=10), lj.Ridge(RELU, **settings)
    start = make_params(method, tasks.sample(jax.random.key(0)).support)
    trained = lj.train(method, tasks, steps=60, meta_batch=5)
    first, last = (lj.evaluate(p, tasks, num_tasks=200).mean for p in (start, trained.params))
    assert last < 0.7 * first
