"""Deep kernel transfer: densities, conditioning and kernels against NumPy and SciPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

import lavajax as lj
from helpers import RELU, assert_close, assert_different, assert_finite, make_params, make_points
from lavajax.linalg import log_det_positive

KERNELS = pytest.mark.parametrize("kernel", ["linear", "rbf", "spectral_mixture"])


def perturbed(kernel, points, **settings):
    """Parameters in which no hyperparameter has its starting value."""
    method = lj.Dkt(RELU, kernel=kernel, noise=0.3, mixtures=2, **settings)
    params = make_params(method, points)
    keys = iter(jax.random.split(jax.random.key(3), 50))
    moved = {
        name: leaf
        if name == "weights"
        else jax.tree.map(lambda v: v + 0.3 * jax.random.normal(next(keys), v.shape, v.dtype), leaf)
        for name, leaf in params.learned.items()
    }
    return params.replace_learned(moved)


def softplus(raw, floor=1e-4):
    return floor + np.log1p(np.exp(np.asarray(raw)))


def numpy_kernel(params, a, b):
    """k(a_n, b_m) one pair at a time."""
    hyper = params["kernel"]

    def one(p, q):
        tau = p - q
        if params.method.kernel == "linear":
            return softplus(hyper["raw_scale"]) * (p @ q + 1)
        if params.method.kernel == "rbf":
            length = softplus(hyper["raw_length"])
            return softplus(hyper["raw_scale"]) * np.exp(-tau @ tau / (2 * length**2))
        total = 0.0
        parts = zip(
            softplus(hyper["raw_weights"]),
            np.asarray(hyper["frequencies"]),
            softplus(hyper["raw_widths"]),
            strict=True,
        )
        for weight, mean, width in parts:
            decay = np.exp(-2 * np.pi**2 * np.sum((tau * width) ** 2))
            total += weight * decay * np.cos(2 * np.pi * mean @ tau)
        return total

    return np.array([[one(p, q) for q in b] for p in a]).reshape(len(a), len(b))


def numpy_features(params, x):
    h, layers = np.asarray(x), params["weights"]
    for index, layer in enumerate(layers):
        h = h @ np.asarray(layer["weight"]).T + np.asarray(layer["bias"])
        h = np.maximum(h, 0) if index < len(layers) - 1 else h
    return h


def process(params, points):
    """Real features, centred targets, and covariance of real points."""
    real = np.ones(len(points.x), bool) if points.mask is None else np.asarray(points.mask)
    phi = numpy_features(params, points.x)[real]
    residual = np.asarray(points.y)[real] - np.asarray(params["mean"])
    noise = softplus(params["raw_noise"])
    return phi, residual, numpy_kernel(params, phi, phi) + noise * np.eye(len(phi)), noise


def join(first, second):
    return lj.Points(*(jnp.concatenate([getattr(p, n) for p in (first, second)]) for n in "xy"))


@KERNELS
def test_conditioning_is_that_of_a_gaussian_process(x64, kernel):
    support, query = make_points(5, 2, mask=[1, 1, 0, 1, 1]), make_points(4, 2, seed=5)
    params = perturbed(kernel, support)
    phi, residual, gram, noise = process(params, support)
    at = numpy_features(params, query.x)
    cross = numpy_kernel(params, at, phi)
    mean = np.asarray(params["mean"]) + cross @ np.linalg.solve(gram, residual)
    covariance = numpy_kernel(params, at, at) - cross @ np.linalg.solve(gram, cross.T)
    actual = lj.predict(params, lj.adapt(params, support), query.x)
    assert_close(actual.mean, mean, 1e-9)
    assert_close(actual.epistemic, np.tile(np.diagonal(covariance)[:, None], 2), 1e-9)
    assert_close(actual.noise, np.full((4, 2), noise), 1e-12)


@KERNELS
def test_training_maximises_the_density_in_scipy(x64, kernel):
    """Of support and query together, or of the query given the support; in nats per number."""
    support, query = make_points(4, 2), make_points(3, 2, seed=5, mask=[1, 0, 1])
    params = perturbed(kernel, support)
    real = lj.Points(query.x[::2], query.y[::2])
    _, residual, gram, _ = process(params, join(support, real))
    joint = sum(multivariate_normal.logpdf(r, cov=gram) for r in residual.T)
    task = lj.Task(support, query)
    np.testing.assert_allclose(params.method.loss(params, task, None), -joint / 12, rtol=1e-9)

    known, new = gram[:4, :4], gram[4:, :4]
    shift = new @ np.linalg.solve(known, residual[:4])
    left = gram[4:, 4:] - new @ np.linalg.solve(known, new.T)
    given = sum(multivariate_normal.logpdf(r, cov=left) for r in (residual[4:] - shift).T)
    method = dataclasses.replace(params.method, objective="predictive")
    np.testing.assert_allclose(method.loss(params, task, None), -given / 4, rtol=1e-9)

    # and the chain rule: log p(S) + log p(Q | S) = log p(S, Q)
    nothing = lj.Points(support.x[:0], support.y[:0])
    alone = method.loss(params, lj.Task(nothing, support), None)
    np.testing.assert_allclose(-8 * alone + given, joint, rtol=1e-9)


def test_without_noise_it_interpolates(x64):
    support = make_points(4, 2)
    params = make_params(lj.Dkt(RELU, noise=1e-6, noise_floor=1e-13), support)
    at_support = lj.predict(params, lj.adapt(params, support), support.x)
    assert_close(at_support.mean, support.y, 1e-5)
    assert np.all(np.asarray(at_support.epistemic) < 1e-9)
    noisy = make_params(lj.Dkt(RELU), support)
    assert_different(lj.predict(noisy, lj.adapt(noisy, support), support.x).mean, support.y)


@KERNELS
def test_no_points_are_the_prior(x64, kernel):
    query = make_points(4, 2)
    params = perturbed(kernel, query)
    phi = numpy_features(params, query.x)
    variance = np.diagonal(numpy_kernel(params, phi, phi))
    nothing = lj.Points(query.x, query.y, jnp.zeros(4, bool))
    for support in (nothing, lj.Points(query.x[:0], query.y[:0])):
        actual = lj.predict(params, lj.adapt(params, support), query.x)
        assert_close(actual.mean, np.tile(np.asarray(params["mean"]), (4, 1)), 1e-12)
        assert_close(actual.epistemic, np.tile(variance[:, None], 2), 1e-12)


def test_log_determinant_and_its_gradient(x64):
    root = jax.random.normal(jax.random.key(0), (5, 5))
    matrix = root @ root.T + 0.1 * jnp.eye(5)
    value, gradient = jax.jit(jax.value_and_grad(log_det_positive))(matrix)
    np.testing.assert_allclose(value, np.linalg.slogdet(np.asarray(matrix))[1], rtol=1e-12)
    assert_close(gradient, np.linalg.inv(np.asarray(matrix)), 1e-10)


def test_hyperparameters_start_where_the_settings_say(x64):
    support = make_points(4, 3)
    params = make_params(lj.Dkt(RELU, noise=0.5, kernel="spectral_mixture", mixtures=3), support)
    assert "head" not in params.learned
    assert_close(softplus(params["raw_noise"]), np.array(0.25), 1e-12)
    assert_close(np.sum(softplus(params["kernel"]["raw_weights"])), np.array(1.0), 1e-12)
    assert params["kernel"]["frequencies"].shape == (3, 8)
    assert params["mean"].shape == (3,)
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    with pytest.raises(ValueError, match="params must be those of one seed, got 2 seeds"):
        lj.adapt(stacked, support)


def test_noise_never_falls_below_its_floor():
    params = make_params(lj.Dkt(RELU), make_points(4))
    params = params.replace_learned({**params.learned, "raw_noise": jnp.float32(-100.0)})
    x = make_points(3).x
    noise = lj.predict(params, lj.adapt(params, make_points(4)), x).noise
    np.testing.assert_allclose(noise, 1e-4)


@pytest.mark.parametrize("kernel", ["linear", "rbf"])
def test_points_that_coincide_are_solvable_in_float32(kernel):
    """At the least noise and a wide prior, where differences of variances cancel."""
    support = make_points(20, 2)
    support = lj.Points(jnp.repeat(support.x[:1], 20, axis=0), support.y)
    params = make_params(lj.Dkt(RELU, kernel=kernel), support)
    hyper = {**params["kernel"], "raw_scale": jnp.float32(1e5)}
    params = params.replace_learned(
        {**params.learned, "raw_noise": jnp.float32(-100.0), "kernel": hyper}
    )
    task = lj.Task(support, support)
    loss = jax.jit(
        jax.value_and_grad(lambda v: params.method.loss(params.replace_learned(v), task, None))
    )
    assert_finite(loss(params.learned))
    prediction = lj.predict(params, lj.adapt(params, support), support.x)
    assert_finite(prediction)
    assert np.all(np.asarray(prediction.epistemic) > 0)


@KERNELS
def test_training_lowers_the_error(kernel):
    tasks, method = lj.Sine(shots=10, queries=10), lj.Dkt(RELU, kernel=kernel)
    start = make_params(method, tasks.sample(jax.random.key(0)).support)
    trained = lj.train(method, tasks, steps=60, meta_batch=5)
    first, last = (lj.evaluate(p, tasks, num_tasks=200).mean for p in (start, trained.params))
    assert last < 0.7 * first
