"""ALPaCA: the posterior of a Bayesian last layer, its density, and its digits in float32."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import multivariate_normal

import lavajax as lj
from helpers import (
    RELU,
    adapt,
    assert_close,
    assert_different,
    assert_finite,
    make_params,
    make_points,
    numpy_features,
    with_method,
)
from lavajax.linalg import posterior_variance

METHOD = lj.Alpaca(RELU, noise=0.3, learn_noise=True)
SOLVERS = pytest.mark.parametrize("solver", ["auto", "primal", "dual"])


def perturb(params, seed=0):
    """Other values of every leaf, so that no matrix is the identity."""
    leaves, treedef = jax.tree.flatten(params.learned)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    moved = [
        leaf + 0.4 * jax.random.normal(key, leaf.shape, leaf.dtype)
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return params.replace_learned(jax.tree.unflatten(treedef, moved))


def numpy_prior(params):
    """K0 ``[P, k]``, Lambda0 ``[P, P]`` and sigma^2 ``[k]``."""
    raw = np.asarray(params["prior_factor"])
    factor = np.tril(raw, -1) + np.diag(np.log1p(np.exp(np.diagonal(raw))))
    precision = np.linalg.inv(factor @ factor.T)
    return np.asarray(params["head"]), precision, np.exp(2 * np.asarray(params["log_noise"]))


def predicted(params, support, x):
    return lj.predict(params, lj.adapt(params, support), x)


@SOLVERS
@pytest.mark.parametrize("n", [4, 12])
def test_it_is_the_textbook_posterior_in_numpy(x64, solver, n):
    """Mean and variance by Lambda = Z^T Z + Lambda0, with a point of padding."""
    support, query = make_points(n, 3, mask=np.arange(n) != 1), make_points(5, 3, seed=4)
    params = perturb(make_params(dataclasses.replace(METHOD, solver=solver), support))
    z, y = numpy_features(params, support.x), np.asarray(support.y)
    z, y = np.delete(z, 1, axis=0), np.delete(y, 1, axis=0)
    head, precision, noise = numpy_prior(params)
    posterior = z.T @ z + precision
    block = np.linalg.solve(posterior, z.T @ y + precision @ head)
    assert_close(adapt(params, support), block, 1e-9)
    at = numpy_features(params, query.x)
    variance = np.sum(at.T * np.linalg.solve(posterior, at.T), axis=0)
    actual = predicted(params, support, query.x)
    assert_close(actual.mean, at @ block, 1e-9)
    assert_close(actual.epistemic, variance[:, None] * noise, 1e-9)
    assert_close(actual.noise, np.broadcast_to(noise, (5, 3)), 1e-12)


def test_it_is_a_gaussian_process(x64):
    """With mean K0^T z and kernel sigma^2 z^T Lambda0^-1 z'."""
    support, query = make_points(5, 2), make_points(4, 2, seed=4)
    params = perturb(make_params(METHOD, support))
    z, at = (numpy_features(params, p.x) for p in (support, query))
    head, precision, noise = numpy_prior(params)
    actual = predicted(params, support, query.x)
    for o in range(2):
        covariance = noise[o] * np.linalg.inv(precision)
        gram = z @ covariance @ z.T + noise[o] * np.eye(5)
        cross = at @ covariance @ z.T
        residual = np.asarray(support.y)[:, o] - z @ head[:, o]
        mean = at @ head[:, o] + cross @ np.linalg.solve(gram, residual)
        variance = np.diagonal(at @ covariance @ at.T - cross @ np.linalg.solve(gram, cross.T))
        assert_close(actual.mean[:, o], mean, 1e-9)
        assert_close(actual.epistemic[:, o], variance, 1e-9)


def test_point_by_point_is_all_at_once(x64):
    """The rank-one update of the covariance, from the prior."""
    support = make_points(6, 2)
    params = perturb(make_params(METHOD, support))
    head, precision, noise = numpy_prior(params)
    covariance, q = np.linalg.inv(precision), precision @ head
    for z, y in zip(numpy_features(params, support.x), np.asarray(support.y), strict=True):
        u = covariance @ z
        covariance = covariance - np.outer(u, u) / (1 + z @ u)
        q = q + np.outer(z, y)
    assert_close(adapt(params, support), covariance @ q, 1e-9)
    x = make_points(3, seed=8).x
    at = numpy_features(params, x)
    variance = np.einsum("mp,pq,mq->m", at, covariance, at)
    assert_close(predicted(params, support, x).epistemic, variance[:, None] * noise, 1e-9)


def test_no_points_are_the_prior(x64):
    query = make_points(4, 2)
    params = perturb(make_params(METHOD, query))
    head, precision, noise = numpy_prior(params)
    at = numpy_features(params, query.x)
    variance = np.sum(at.T * np.linalg.solve(precision, at.T), axis=0)
    nothing = lj.Points(query.x, query.y, jnp.zeros(4, bool))
    for support in (nothing, lj.Points(query.x[:0], query.y[:0])):
        actual = predicted(params, support, query.x)
        assert_close(actual.mean, at @ head, 1e-12)
        assert_close(actual.epistemic, variance[:, None] * noise, 1e-9)


def test_variance_ignores_the_labels_and_falls_with_every_point(x64):
    support, query = make_points(6, 2), make_points(5, 2, seed=4)
    params = perturb(make_params(METHOD, support))
    other = lj.Points(support.x, support.y + 3)
    whole, same = (predicted(params, s, query.x) for s in (support, other))
    assert_close(same.epistemic, whole.epistemic, 0)
    assert_different(same.mean, whole.mean)
    masks = jnp.arange(6) < jnp.arange(7)[:, None]
    falling = [
        predicted(params, dataclasses.replace(support, mask=mask), query.x).epistemic
        for mask in masks
    ]
    assert np.all(np.diff(np.stack(falling), axis=0) < 0)


def test_outer_loss_is_the_density_in_scipy(x64):
    """In nats per point and output, over real points of the query."""
    support, query = make_points(4, 3), make_points(5, 3, seed=4, mask=[1, 0, 1, 1, 1])
    params = perturb(make_params(METHOD, support))
    prediction = predicted(params, support, query.x)
    covariances = np.asarray(prediction.epistemic + prediction.noise)
    densities = [
        multivariate_normal.logpdf(y, m, np.diag(v))
        for y, m, v, real in zip(query.y, prediction.mean, covariances, query.mask, strict=True)
        if real
    ]
    actual = params.method.loss(params, lj.Task(support, query), None)
    np.testing.assert_allclose(actual, -np.mean(densities) / 3, rtol=1e-12)


def test_outer_loss_may_be_that_of_the_mean(x64):
    support, query = make_points(4, 3), make_points(5, 3, seed=4)
    params = make_params(lj.Alpaca(RELU, outer="mse"), support)
    expected = jnp.mean((predicted(params, support, query.x).mean - query.y) ** 2)
    actual = params.method.loss(params, lj.Task(support, query), None)
    np.testing.assert_allclose(actual, expected, rtol=1e-12)


def test_settings_are_where_the_leaves_start(x64):
    support = make_points(4, 2)
    params = make_params(lj.Alpaca(RELU, noise=0.7, learn_noise=True, prior_precision=5.0), support)
    _, precision, noise = numpy_prior(params)
    assert_close(precision, 5 * np.eye(9), 1e-9)
    assert_close(noise, np.full(2, 0.49), 1e-12)
    fixed = make_params(lj.Alpaca(RELU, noise=0.7, prior_precision=5.0), support)
    assert "log_noise" not in fixed.learned
    x = make_points(3).x
    first, second = (predicted(p, support, x) for p in (fixed, params))
    assert_close([first.epistemic, first.noise], [second.epistemic, second.noise], 1e-12)


@SOLVERS
@pytest.mark.parametrize("n", [6, 20])
def test_float32_keeps_the_digits_under_a_wide_prior(solver, n):
    """Noise 10,000 times narrower in variance than the prior, as for noise-free tasks."""
    rng = np.random.default_rng(0)
    z, at = (rng.standard_normal((m, 12)).astype(np.float32) for m in (n, 50))
    at[: n // 2] = z[: n // 2]  # the variance there is tiny beside that of the prior
    exact = [100 * a.astype(float) for a in (z, at)]
    expected = np.sum(
        exact[1].T * np.linalg.solve(np.eye(12) + exact[0].T @ exact[0], exact[1].T), axis=0
    )
    actual = posterior_variance(jnp.asarray(100 * z), jnp.asarray(100 * at), solver)
    if solver == "auto":
        np.testing.assert_allclose(actual, expected, rtol=2e-3)
    assert np.all(np.asarray(actual) > 0)


def test_points_that_coincide_are_solvable_under_any_prior():
    support = make_points(6, 2)
    support = lj.Points(jnp.repeat(support.x[:1], 6, axis=0), support.y)
    params = make_params(lj.Alpaca(RELU, prior_precision=1e-12), support)
    task = lj.Task(support, support)
    loss = jax.jit(
        jax.value_and_grad(lambda v: params.method.loss(params.replace_learned(v), task, None))
    )
    assert_finite(loss(params.learned))


@pytest.mark.parametrize("settings", [{"learn_noise": True}, {"outer": "mse"}])
def test_training_lowers_the_outer_loss(settings):
    tasks, method = lj.Sine(shots=10, queries=10), lj.Alpaca(RELU, **settings)

    def outer(params, task, key):
        return params.method.loss(params, task, key)

    def score(params):
        return np.mean(lj.score(jax.tree_util.Partial(outer, params), tasks, num_tasks=100))

    start = make_params(method, tasks.sample(jax.random.key(0)).support)
    trained = lj.train(method, tasks, steps=60, meta_batch=5)
    assert score(trained.params) < 0.7 * score(start)


def test_solver_and_noise_are_no_leaves(x64):
    """They may be changed after training."""
    support = make_points(4, 2)
    params = make_params(lj.Alpaca(RELU), support)
    noisier = with_method(params, lj.Alpaca(RELU, noise=0.04, solver="primal"))
    first, second = (predicted(p, support, support.x) for p in (params, noisier))
    assert_close(second.mean, first.mean, 1e-9)
    assert_close(second.epistemic, 4 * first.epistemic, 1e-9)
