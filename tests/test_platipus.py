"""PLATIPUS: its limits, its KL, and the distribution of its starts."""

import dataclasses

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
    prior_block,
    with_method,
)
from lavajax.gaussian import kl_divergence, negative_log_density

CONTEXT = lj.Context(2)
# For each subspace, the method that PLATIPUS is without its noise.
PLAIN = {
    "full": (lj.Full(), lj.Maml(TANH, inner_steps=2)),
    "head": (lj.Head(), lj.Anil(TANH, inner_steps=2)),
    "context": (CONTEXT, lj.Cavia(TANH, subspace=CONTEXT, inner_steps=2)),
}
EVERY = pytest.mark.parametrize("name", PLAIN)
KEY = jax.random.key(5)


def make_task(k=2):
    return lj.Task(make_points(4, k), make_points(5, k, seed=7))


@EVERY
def test_without_noise_and_kl_it_is_the_plain_method(x64, name):
    """Standard deviations near 0, and no step of the means: with a key and without."""
    subspace, plain = PLAIN[name]
    still = lj.Platipus(
        TANH,
        subspace=subspace,
        inner_steps=2,
        kl_weight=0.0,
        gamma_p=0.0,
        gamma_q=0.0,
        log_std=-40.0,
        samples=3,
    )
    task = make_task()
    params = make_params(still, task.support)
    reference = with_method(params, plain)
    block = adapt(reference, task.support)
    assert_different(block, prior_block(params), by=1e-6)
    assert_close(adapt(params, task.support), block, 1e-12)
    drawn = lj.adapt(params, task.support, key=KEY).block
    for sample in range(3):
        assert_close(jax.tree.map(lambda leaf, i=sample: leaf[i], drawn), block, 1e-12)

    def loss(params):
        return jax.jit(jax.value_and_grad(lambda p: p.method.loss(p, task, KEY)))(params)

    value, gradient = loss(params)
    expected, reference_gradient = loss(reference)
    assert_close(value, expected, 1e-12)
    for leaf in ("weights", "head", "inner_rate"):
        assert_close(gradient.learned[leaf], reference_gradient.learned[leaf], 1e-10)


def test_kl_of_normal_densities_is_the_integral(x64):
    """Against quadrature of q (log q - log p), and 0 where they are equal."""
    mean_q, log_std_q, mean_p, log_std_p = 0.3, -0.5, -0.4, 0.2
    y = jnp.linspace(-12, 12, 20_001)
    log_q = -negative_log_density(mean_q, jnp.exp(2 * log_std_q), y)
    log_p = -negative_log_density(mean_p, jnp.exp(2 * log_std_p), y)
    integral = jnp.sum(jnp.exp(log_q) * (log_q - log_p)) * (y[1] - y[0])
    actual = kl_divergence(mean_q, jnp.asarray(log_std_q), mean_p, jnp.asarray(log_std_p))
    assert_close(actual, integral, 1e-9)
    reverse = kl_divergence(mean_p, jnp.asarray(log_std_p), mean_q, jnp.asarray(log_std_q))
    assert_different(reverse, actual, by=1e-2)
    assert kl_divergence(mean_q, jnp.asarray(log_std_q), mean_q, jnp.asarray(log_std_q)) == 0


def parts(params, task):
    """Loss at two weights of the KL: the KL, and the rest."""
    method = params.method
    losses = [
        method_loss(with_method(params, dataclasses.replace(method, kl_weight=w)), task)
        for w in (0.0, 1.0)
    ]
    return losses[1] - losses[0], losses[0]


@jax.jit
def method_loss(params, task):
    return params.method.loss(params, task, KEY)


def gradient_of_mean(params, points):
    """grad L(mu) in the head, by the prediction at the block as it stands."""

    def loss(head):
        mean = params.method.predict(params, lj.Adapted(head), points.x).mean
        return jnp.mean((mean - points.y) ** 2)

    return jax.jit(jax.grad(loss))(params["head"])


def test_kl_is_the_sum_over_parameters_from_the_querys_q_to_the_supports_p(x64):
    """The mean of q has seen the query, that of p the support, and the KL is a sum."""
    method = lj.Platipus(TANH, subspace=lj.Head(), gamma_p=0.3, gamma_q=0.7, log_std=-1.0)
    task = make_task()
    params = make_params(method, task.support)
    params = params.replace_learned(
        {**params.learned, "log_v": params["log_v"] - 0.5 + 0.1 * params["head"]}
    )
    mu = params["head"]
    mean_q = mu - 0.7 * gradient_of_mean(params, task.query)
    mean_p = mu - 0.3 * gradient_of_mean(params, task.support)
    sigma, v = np.exp(params["log_sigma"]), np.exp(params["log_v"])
    expected = 0.5 * np.sum(
        ((mean_q - mean_p) ** 2 + v**2) / sigma**2 - 1 + 2 * np.log(sigma) - 2 * np.log(v)
    )
    kl, rest = parts(params, task)
    assert_close(kl, expected, 1e-9)
    whole = method_loss(params, task)
    assert_close(whole, rest + 0.1 * kl, 1e-12)


def test_kl_vanishes_where_q_is_p(x64):
    method = lj.Platipus(TANH)
    support = make_points(4, 2)
    task = lj.Task(support, support)
    kl, _ = parts(make_params(method, support), task)
    assert abs(kl) < 1e-9
    other = dataclasses.replace(method, gamma_q=0.05)
    kl, _ = parts(make_params(other, support), task)
    assert kl > 1e-3


def test_samples_follow_the_distribution_of_the_start(x64):
    """Without inner steps the samples are draws of N(mu_p, sigma^2)."""
    method = lj.Platipus(RELU, subspace=lj.Head(), inner_steps=0, samples=4000, log_std=-1.0)
    support = make_points(4, 1)
    params = make_params(method, support)
    log_sigma = params["log_sigma"] + jnp.linspace(-0.5, 0.5, params["head"].size)[:, None]
    params = params.replace_learned({**params.learned, "log_sigma": log_sigma})
    drawn = lj.adapt(params, support, key=KEY).block
    assert drawn.shape == (4000, *params["head"].shape)
    center = adapt(params, support)
    assert_different(center, params["head"], by=1e-4)
    standard = (drawn - center) / jnp.exp(log_sigma)
    np.testing.assert_allclose(jnp.mean(standard, axis=0), 0, atol=0.08)
    np.testing.assert_allclose(jnp.std(standard, axis=0), 1, atol=0.06)
    assert abs(np.corrcoef(standard[:, 0, 0], standard[:, 1, 0])[0, 1]) < 0.08
    assert_close(lj.adapt(params, support, key=KEY).block, drawn, 0)
    assert_different(lj.adapt(params, support, key=jax.random.key(6)).block, drawn)


@EVERY
def test_prediction_is_the_mean_over_samples_with_their_variance(x64, name):
    method = lj.Platipus(RELU, subspace=PLAIN[name][0], samples=3, log_std=-1.0)
    task = make_task()
    params = make_params(method, task.support)
    drawn = lj.adapt(params, task.support, key=KEY)
    prediction = lj.predict(params, drawn, task.query.x)
    alone = [
        lj.predict(params, lj.Adapted(jax.tree.map(lambda a, i=i: a[i], drawn.block)), task.query.x)
        for i in range(3)
    ]
    assert all(p.epistemic is None for p in alone)
    means = np.stack([p.mean for p in alone])
    assert_close(prediction.mean, means.mean(0), 1e-12)
    assert_close(prediction.epistemic, means.var(0), 1e-10)
    assert np.all(prediction.epistemic > 0)
    assert prediction.noise is None


def test_classes_are_averaged_as_probabilities():
    labels = make_labels(4)
    params = make_params(lj.Platipus(RELU, lj.CrossEntropy(3), log_std=-1.0), labels)
    drawn = lj.adapt(params, labels, key=KEY)
    prediction = lj.predict(params, drawn, labels.x)
    np.testing.assert_allclose(jnp.sum(prediction.mean, axis=1), 1, rtol=1e-5)
    assert prediction.epistemic.shape == (4, 3)


@pytest.mark.parametrize("key", [None, KEY], ids=["mean", "samples"])
def test_without_support_the_answer_is_the_prior_with_or_without_padding(x64, key):
    params = make_params(lj.Platipus(TANH, subspace=CONTEXT, samples=3), make_points(4, 2))
    empty = lj.Points(jnp.zeros((0, 1)), jnp.zeros((0, 2)))
    padded = make_points(4, 2, mask=[0, 0, 0, 0])
    padded = dataclasses.replace(padded, x=padded.x * jnp.nan)
    prior = lj.adapt(params, empty, key=key).block
    assert_close(lj.adapt(params, padded, key=key).block, prior, 1e-12)
    assert_different(lj.adapt(params, make_points(4, 2), key=key).block, prior)
    if key is None:
        assert_close(prior, prior_block(params), 0)


def test_query_labels_do_not_reach_a_prediction(x64):
    """They enter the loss alone: q is not used at test."""
    method = lj.Platipus(TANH, subspace=lj.Head(), gamma_q=0.5, samples=2)
    task = make_task()
    params = make_params(method, task.support)

    def predicted(y):
        whole = lj.Task(task.support, lj.Points(task.query.x, y))
        drawn = method.adapt(params, whole.support, key=KEY)
        return jnp.sum(method.predict(params, drawn, whole.query.x).mean ** 2)

    def loss(y):
        return method.loss(params, lj.Task(task.support, lj.Points(task.query.x, y)), KEY)

    assert not np.any(jax.jit(jax.grad(predicted))(task.query.y))
    assert np.all(jax.jit(jax.grad(loss))(task.query.y) != 0)


def test_gradients_in_the_standard_deviations_and_rates_are_finite_differences(x64):
    """Each entry of log_v and log_sigma on a head, at fixed noise."""
    method = lj.Platipus(
        lj.MLP(hidden=(3,), activation="tanh"), subspace=lj.Head(), log_std=-1.0, gamma_q=0.2
    )
    task = make_task()
    params = make_params(method, task.support)
    names = ("log_v", "log_sigma", "gamma_p", "gamma_q", "inner_rate")
    start, unravel = ravel_pytree({n: params[n] for n in names})

    def loss(vector):
        at = params.replace_learned({**params.learned, **unravel(vector)})
        return method.loss(at, task, KEY)

    h = 1e-5 * jnp.eye(start.size)
    values, gradient = jax.jit(lambda v, s: (jax.vmap(loss)(s), jax.grad(loss)(v)))(
        start, jnp.concatenate([start + h, start - h])
    )
    up, down = jnp.split(values, 2)
    assert np.all(gradient != 0)
    assert_close((up - down) / 2e-5, gradient, 1e-7)


def test_first_order_changes_gradients_and_nothing_else(x64):
    method = lj.Platipus(TANH, subspace=CONTEXT, inner_rate=0.5, log_std=-2.0)
    task = make_task()
    params = make_params(method, task.support)
    first = with_method(params, dataclasses.replace(method, first_order=True))
    assert_close(method_loss(first, task), method_loss(params, task), 1e-14)
    slopes = [jax.jit(jax.grad(lambda p: method_loss(p, task)))(p) for p in (first, params)]
    assert_different(slopes[0].learned, slopes[1].learned, by=1e-6)


def test_training_lowers_the_loss_and_evaluation_draws_samples():
    tasks = lj.Sine(shots=5, queries=5)
    method = lj.Platipus(lj.MLP(hidden=(32, 32)), subspace=lj.Head(), samples=3)
    trained = lj.train(method, tasks, steps=1000, chunk=100, meta_batch=4)
    assert np.all(np.isfinite(trained.history["loss"]))
    assert trained.history["loss"][-1] < 0.8 * trained.history["loss"][0]
    scores = [lj.evaluate(trained.params, tasks, num_tasks=20, seed=s).values for s in (0, 0, 1)]
    np.testing.assert_array_equal(scores[0], scores[1])
    assert np.all(scores[0] != scores[2])


def test_training_without_a_key_is_refused():
    task = make_task()
    params = make_params(lj.Platipus(RELU), task.support)
    with pytest.raises(ValueError, match="key must be given: Platipus is stochastic"):
        params.method.loss(params, task, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [("samples", 0), ("kl_weight", -1.0), ("gamma_p", -0.1), ("gamma_q", "1"), ("log_std", np.inf)],
)
def test_impossible_settings_name_the_field(field, value):
    with pytest.raises(ValueError, match=rf"Platipus\.{field} must be"):
        lj.Platipus(**{field: value})
