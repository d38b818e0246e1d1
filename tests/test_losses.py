"""Losses of a point: value, curvature, metric, and what they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from scipy.stats import norm

import lavajax as lj
from helpers import RELU, assert_close, assert_finite, make_params, make_points

F = jnp.array([0.3, -1.2, 0.8])
Y = jnp.array([0.1, 0.4, -0.5])
LOSSES = {
    "mean": (lj.SquaredError(), Y),
    "sum": (lj.SquaredError("sum"), Y),
    "directions": (lj.DirectionError(), Y),
    "directions, sum": (lj.DirectionError("sum"), Y),
    "huber": (lj.Huber(1.4), Y),  # two outputs within delta of their target, one beyond
    "huber, sum": (lj.Huber(0.9, "sum"), Y),
    "classes": (lj.CrossEntropy(3), jnp.int32(2)),
}
EVERY = pytest.mark.parametrize("name", LOSSES)


@EVERY
def test_factor_is_a_root_of_the_hessian(x64, name):
    """S S^T = d2 value / d outputs2, and c I where the loss says that it is constant."""
    loss, y = LOSSES[name]
    f = F.astype(float)
    hessian = jax.hessian(loss.value)(f, y)
    s = loss.factor(f, y)
    assert_close(s @ s.T, hessian, 1e-12)
    c = loss.constant_curvature(3)
    if name in ("mean", "sum", "directions", "directions, sum"):
        assert_close(c * np.eye(3), hessian, 1e-12)
    else:
        assert c is None


def test_the_curvature_of_a_density_is_the_fisher_information(x64):
    """The Hessian's mean over targets that follow the prediction, of which it is quadratic."""
    loss = lj.GaussianNll(min_std=0.5)
    f = jnp.array([0.3, -1.2, 0.4, -2.0])
    mean, std = loss.mean(f), jnp.sqrt(loss.noise(f))
    signs = jnp.array([[1, 1], [1, -1], [-1, 1], [-1, -1]])
    hessians = jax.vmap(lambda sign: jax.hessian(loss.value)(f, mean + sign * std))(signs)
    s = loss.factor(f, mean)
    assert_close(s @ s.T, hessians.mean(axis=0), 1e-12)
    assert loss.constant_curvature(4) is None


def test_directions_have_length_1_whatever_the_outputs(x64):
    loss, f = lj.DirectionError(), F.astype(float)
    for scale in (1e-200, 1.0, 1e200):
        assert_close(loss.mean(scale * f), f / np.linalg.norm(f), 1e-12)
    np.testing.assert_array_equal(loss.mean(jnp.zeros(3)), 0.0)
    check_grads(loss.mean, (f,), order=2)
    check_grads(loss.mean, (jnp.array([0.0, -2.0]),), order=2)  # the largest entry is all of it
    assert_finite(jax.jit(jax.jacobian(loss.mean))(jnp.zeros(3)))
    assert_close(loss.metric(loss.mean(f), Y), np.mean((f / np.linalg.norm(f) - Y) ** 2), 1e-12)


def circle(angle):
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def test_directions_adapt_as_vectors_and_are_predicted_on_the_circle():
    """The closed form is that of the squared error; an angle may pass from pi to -pi."""
    x = jnp.linspace(-1, 1, 9)[:, None]
    support = lj.Points(x[::2], circle(3 + x[::2, 0]))
    flat = make_params(lj.lava_converged(model=RELU, epsilon=1e-3), support)
    method = lj.lava_converged(model=RELU, point_loss=lj.DirectionError(), epsilon=1e-3)
    params = make_params(method, support)
    adapted = lj.adapt(params, support)
    np.testing.assert_array_equal(adapted.block, lj.adapt(flat, support).block)
    straight = lj.predict(flat, adapted, x).mean
    predicted = lj.predict(params, adapted, x).mean
    assert_close(predicted, straight / jnp.linalg.norm(straight, axis=1, keepdims=True), 1e-6)
    query = circle(3 + x[:, 0])
    assert np.mean((predicted - query) ** 2) < 0.9 * np.mean((straight - query) ** 2)


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (jnp.ones((3, 1)), "its cos and its sin"),
        (jnp.full((3, 2), 10.0), "root mean square length of 14.1421: divide by it"),
        (jnp.full((20, 2), 2.0), "root mean square length of 2.82843"),
        (jnp.zeros((3, 2)), "length of 0"),
    ],
)
def test_targets_that_are_no_directions_are_refused(y, said):
    method = lj.Lava(RELU, lj.DirectionError())

    def use():
        support = lj.Points(jnp.ones((len(y), 1)), y)
        return lj.adapt(make_params(method, support), support)

    with pytest.raises(ValueError, match=said):
        use()


def test_a_noisy_direction_alone_is_taken():
    lj.DirectionError().check(np.array([[2.5, 0.5]]))


def test_training_looks_at_the_directions_of_its_tasks():
    method = lj.Anil(RELU, lj.DirectionError())
    with pytest.raises(ValueError, match="must hold vectors of length 1"):
        lj.train(method, lj.NoisyLabels(lj.SyntheticFm(), 3.0, "both"), steps=1)


def test_error_bars_of_directions_are_refused():
    with pytest.raises(ValueError, match="normal density of real targets"):
        lj.lava_bayesian(point_loss=lj.DirectionError())


def test_hubers_loss_is_quadratic_then_linear():
    loss = lj.Huber(delta=0.5)
    at = jnp.array([0.0, 0.3, 0.5, 0.500001, 2.0, -2.0])[:, None]
    values = jax.vmap(loss.value)(at, jnp.zeros_like(at))
    np.testing.assert_allclose(values, [0, 0.09, 0.25, 0.25, 1.75, 1.75], rtol=1e-5, atol=1e-6)
    slopes = jax.vmap(jax.grad(loss.value))(at, jnp.zeros_like(at))[:, 0]
    np.testing.assert_allclose(slopes, [0, 0.6, 1, 1, 1, -1], rtol=1e-5)
    assert_close(loss.metric(at[4], jnp.zeros(1)), 4.0, 1e-6)
    assert_close(lj.Huber(1e6).value(F, Y), lj.SquaredError().value(F, Y), 1e-6)


def test_a_predicted_density_against_scipy():
    loss = lj.GaussianNll(min_std=0.1)
    f, y = jnp.array([0.3, -1.2, 0.4, -2.0]), jnp.array([0.1, 0.4])
    variance = np.exp([0.4, -2.0]) + 0.01
    np.testing.assert_allclose(loss.noise(f), variance, rtol=1e-6)
    expected = -norm.logpdf(y, f[:2], np.sqrt(variance)).mean() - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(loss.value(f, y), expected, rtol=1e-5)
    np.testing.assert_array_equal(loss.mean(f), f[:2])


@pytest.mark.parametrize("subspace", [lj.Head(), lj.Context(3), lj.Full()])
def test_a_method_adapts_both_mean_and_noise(subspace):
    """Its predictions carry the noise; far targets leave every gradient finite."""
    support = make_points(5, 2)
    params = make_params(lj.Lava(RELU, lj.GaussianNll(), subspace), support)
    assert params["head"].shape[1] == 4
    prediction = lj.predict(params, lj.adapt(params, support), support.x)
    assert prediction.mean.shape == prediction.noise.shape == (5, 2)
    assert prediction.epistemic is None
    far = lj.Task(support, lj.Points(support.x, 1e3 * support.y))
    gradient = jax.jit(
        jax.grad(lambda learned: params.method.loss(params.replace_learned(learned), far, None))
    )(params.learned)
    assert_finite(gradient)


def test_an_outlier_moves_the_estimate_by_no_more_than_its_distance_to_delta():
    """Under squared error it moves it as far as it lies."""
    support = make_points(6, 1)
    far = lj.Points(support.x, support.y.at[2].add(1e4))

    def moved(loss):
        params = make_params(lj.Lava(RELU, loss), support)
        return np.abs(lj.adapt(params, far).block - lj.adapt(params, support).block).max()

    assert moved(lj.Huber(1.0)) < 2 < 100 < moved(lj.SquaredError())


def test_values_and_metrics_against_numpy():
    """Reductions over outputs, and what is reported."""
    f, y = np.asarray(F), np.asarray(Y)
    squares = (f - y) ** 2
    np.testing.assert_allclose(lj.SquaredError().value(F, Y), squares.mean(), rtol=1e-6)
    np.testing.assert_allclose(lj.SquaredError("sum").value(F, Y), squares.sum(), rtol=1e-6)
    for reduction in ("mean", "sum"):  # reported alike, so that runs compare
        loss = lj.SquaredError(reduction)
        assert loss.metric_name == "mse"
        np.testing.assert_allclose(loss.metric(F, Y), squares.mean(), rtol=1e-6)
        np.testing.assert_array_equal(loss.mean(F), F)
    p = np.exp(f) / np.exp(f).sum()
    loss = lj.CrossEntropy(3)
    assert loss.metric_name == "accuracy"
    np.testing.assert_allclose(loss.mean(F), p, rtol=1e-6)
    for label in range(3):
        np.testing.assert_allclose(loss.value(F, jnp.int32(label)), -np.log(p[label]), rtol=1e-6)
        assert loss.metric(loss.mean(F), label) == (label == 2)


def test_no_class_is_right_without_probabilities():
    metric = jax.vmap(lj.CrossEntropy(3).metric)
    found = metric(jnp.array([[jnp.nan] * 3, [0.2, 0.5, 0.3]]), jnp.array([0, 1]))
    np.testing.assert_array_equal(found, [np.nan, 1.0])


def test_cross_entropy_of_extreme_logits_is_finite_with_its_gradients():
    """Also of the factor, where a probability underflows to 0."""
    loss, f = lj.CrossEntropy(3), jnp.array([300.0, 0.0, -300.0])
    assert float(loss.value(f, jnp.int32(2))) == 600
    for tree in (
        loss.factor(f, 2),
        jax.jit(jax.jacobian(loss.factor))(f, 2),
        jax.jit(jax.grad(loss.value))(f, 2),
    ):
        assert np.all(np.isfinite(tree))


@pytest.mark.parametrize("label", [-1, 3, 100])
def test_label_out_of_range_is_refused_where_it_can_be_seen_and_nan_where_not(label):
    """A negative index must not count from the end."""
    loss = lj.CrossEntropy(3)
    with pytest.raises(ValueError, match=f"y must hold labels from 0 to 2, got {label}"):
        loss.check(np.array([0, label, 2]))
    assert np.isnan(loss.value(F, jnp.int32(label)))
    loss.check(np.array([0, 1, 2]))


def test_targets_are_cast_to_the_outputs_dtype():
    """Integer and half-precision targets of a regression; labels of any integer type."""
    squared, classes = lj.SquaredError(), lj.CrossEntropy(3)
    for dtype in (jnp.int32, jnp.float16, jnp.bfloat16, jnp.bool):
        cast = squared.cast(jnp.ones(2, dtype), jnp.dtype("float32"))
        assert cast.dtype == jnp.float32
        np.testing.assert_array_equal(cast, 1)
    for dtype in (jnp.uint8, jnp.int8, jnp.int32):
        cast = classes.cast(jnp.array([2, 0], dtype), jnp.dtype("float32"))
        assert cast.dtype == jnp.int32
        np.testing.assert_array_equal(cast, [2, 0])


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64"])
def test_labels_that_are_not_integers_are_refused(dtype):
    with pytest.raises(ValueError, match=f"y must hold integer labels.*got dtype {dtype}"):
        lj.CrossEntropy(3).cast(jnp.zeros(2, dtype), jnp.dtype("float32"))


def test_complex_targets_are_refused():
    with pytest.raises(ValueError, match="y must be real, got dtype complex64"):
        lj.SquaredError().cast(jnp.zeros((2, 1), jnp.complex64), jnp.dtype("float32"))


def test_outputs_that_targets_need():
    """k for vectors, C for labels; a bare column is told what to do."""
    assert lj.SquaredError().out_dim((4,)) == 4
    assert lj.CrossEntropy(7).out_dim(()) == 7
    with pytest.raises(ValueError, match=r"\[N, k\].*y\[:, None\]"):
        lj.SquaredError().out_dim(())
    with pytest.raises(ValueError, match=r"got one target of shape \(0,\)"):
        lj.SquaredError().out_dim((0,))
    with pytest.raises(ValueError, match=r"\[N\], integer labels.*shape \(1,\)"):
        lj.CrossEntropy(7).out_dim((1,))
