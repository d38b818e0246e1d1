"""LAVA's posterior: against Bayesian regression in NumPy, and against dense matrices."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import (
    RELU,
    TANH,
    adapt,
    assert_close,
    flat,
    make_labels,
    make_params,
    make_points,
    numpy_features,
    prior_block,
    with_method,
)
from lavajax import gaussian
from lavajax.linalg import posterior_draw, posterior_variance

BAYES = lj.Lava(
    RELU,
    inner_steps="map",
    epsilon=0.3,
    learn_epsilon=True,
    epsilon_floor=1e-6,
    prior_correction=True,
    noise=0.4,
    learn_noise=True,
    outer="nll",
)
PLAIN = dataclasses.replace(BAYES, learn_epsilon=False, learn_noise=False, outer="mse")
SOLVERS = pytest.mark.parametrize("solver", ["primal", "dual", "naive"])
BLOCKS = pytest.mark.parametrize("subspace", [lj.Context(3), lj.Full()], ids=["context", "full"])


def predicted(params, support, x):
    return lj.predict(params, lj.adapt(params, support), x)


def with_noises(params, noises):
    """A different noise in every output."""
    return params.replace_learned({**params.learned, "log_noise": jnp.log(jnp.asarray(noises))})


@SOLVERS
@pytest.mark.parametrize("n", [3, 12])
def test_a_head_is_bayesian_linear_regression_in_numpy(x64, solver, n):
    """Prior N(W_0, sigma^2 c / eps), with a point of padding and three outputs."""
    support, query = make_points(n, 3, mask=np.arange(n) != 1), make_points(5, 3, seed=4)
    params = make_params(dataclasses.replace(BAYES, solver=solver), support)
    noises, c = np.array([0.2, 0.5, 1.5]), 2 / 3
    params = with_noises(params, noises)
    z, y = numpy_features(params, support.x), np.asarray(support.y)
    z, y = np.delete(z, 1, axis=0), np.delete(y, 1, axis=0)
    head = np.asarray(params["head"])
    ridge = (0.3 + 1e-6 * c * np.sum(z**2)) / c  # with the floor of a learned eps
    precision = z.T @ z + ridge * np.eye(z.shape[1])
    block = head + np.linalg.solve(precision, z.T @ (y - z @ head))
    at = numpy_features(params, query.x)
    variance = np.sum(at.T * np.linalg.solve(precision, at.T), axis=0)
    actual = predicted(params, support, query.x)
    assert_close(actual.mean, at @ block, 1e-9)
    assert_close(actual.epistemic, variance[:, None] * noises**2, 1e-9)
    assert_close(actual.noise, np.broadcast_to(noises**2, (5, 3)), 1e-12)


def test_it_is_alpaca_with_an_isotropic_prior(x64):
    support, query = make_points(4, 2), make_points(5, 2, seed=4)
    params = make_params(dataclasses.replace(PLAIN, model=TANH), support)
    other = lj.Alpaca(TANH, noise=0.4, prior_precision=0.3)  # c = 1
    learned = make_params(other, support).learned
    alpaca = dataclasses.replace(with_method(params, other), learned={**learned, **params.learned})
    mine, theirs = predicted(params, support, query.x), predicted(alpaca, support, query.x)
    assert_close(mine.mean, theirs.mean, 1e-9)
    assert_close(mine.epistemic, theirs.epistemic, 1e-9)


def test_a_learned_prior_covariance_is_that_of_bayesian_regression(x64):
    """Features [phi, 1] C: the prior of their head, written out over the weights of [phi, 1]."""
    support, query = make_points(4, 2), make_points(5, 2, seed=4)
    params = make_params(dataclasses.replace(PLAIN, model=lj.Correlated(TANH, speed=2.0)), support)
    net = params["weights"]
    size = net["factor"].shape[0]
    net["factor"] = 0.3 * jax.random.normal(jax.random.key(1), (size, size))
    z, at = (
        np.hstack([np.asarray(TANH.features(net["model"], {}, p.x)), np.ones((len(p.x), 1))])
        for p in (support, query)
    )
    c = np.eye(size) + 2.0 * np.tril(np.asarray(net["factor"]))
    one = np.eye(size)[:, -1:]  # the head has a bias of its own, beside that of [phi, 1]
    head = np.asarray(params["head"])
    start = c @ head[:-1] + one @ head[-1:]
    precision = 0.3 * np.linalg.inv(c @ c.T + one @ one.T)
    total = z.T @ z + precision
    block = np.linalg.solve(total, z.T @ np.asarray(support.y) + precision @ start)
    variance = 0.4**2 * np.sum(at.T * np.linalg.solve(total, at.T), axis=0)
    actual = predicted(params, support, query.x)
    assert_close(actual.mean, at @ block, 1e-9)
    assert_close(actual.epistemic, np.broadcast_to(variance[:, None], (5, 2)), 1e-9)


@BLOCKS
@pytest.mark.parametrize(("steps", "at"), [(2, "auto"), ("map", "prior"), ("map", "adapted")])
def test_other_blocks_have_the_posterior_of_the_linearised_network(x64, subspace, steps, at):
    """sigma^2 c J (sum H_i + eps I)^-1 J^T, with every matrix written out."""
    settings = {"subspace": subspace, "inner_steps": steps, "curvature_at": at}
    method = dataclasses.replace(PLAIN, model=TANH, **settings)
    support, query = make_points(3, 2, mask=[1, 0, 1]), make_points(4, 2, seed=4)
    params = make_params(method, support)
    diagnosed = method.diagnose(params, support)
    n = diagnosed.hessians.shape[-1]
    total = np.asarray(diagnosed.hessians).sum(axis=0) + 0.3 * np.eye(n)
    adapted = lj.adapt(params, support)
    vector, unravel = jax.flatten_util.ravel_pytree(adapted.block)

    def outputs(block):
        return lj.predict(params, dataclasses.replace(adapted, block=unravel(block)), query.x).mean

    rows = np.asarray(jax.jit(jax.jacobian(outputs))(vector))
    expected = 0.4**2 * np.einsum("mkn,mkn->mk", rows, rows @ np.linalg.inv(total))
    assert_close(lj.predict(params, adapted, query.x).epistemic, expected, 1e-8)


@pytest.mark.parametrize(
    "subspace", [lj.Head(), lj.Context(3), lj.Full()], ids=["head", "context", "full"]
)
def test_no_point_leaves_the_prior(x64, subspace):
    """An empty support, or one of padding alone, whatever it holds."""
    query = make_points(4, 2, seed=4)
    params = make_params(dataclasses.replace(PLAIN, subspace=subspace), query)
    empty = lj.Points(query.x[:0], query.y[:0])
    adapted = lj.adapt(params, empty)
    assert_close(adapted.block, prior_block(params), 0.0)
    assert_close(adapted.posterior.prior, 1 / 0.3, 1e-12)
    padding = lj.Points(jnp.full_like(query.x, jnp.nan), query.y, jnp.zeros(4, bool))
    actual, expected = predicted(params, padding, query.x), predicted(params, empty, query.x)
    assert_close(actual.mean, expected.mean, 1e-12)
    assert_close(actual.epistemic, expected.epistemic, 1e-12)
    if isinstance(subspace, lj.Head):
        z = numpy_features(params, query.x)
        variance = 0.4**2 / 0.3 * np.sum(z**2, axis=1)
        assert_close(expected.epistemic, np.stack([variance] * 2, axis=1), 1e-9)


def test_more_points_leave_less_open(x64):
    support, query = make_points(6, 2), make_points(5, 2, seed=4)
    params = make_params(PLAIN, support)
    open_ = [
        flat(predicted(params, lj.Points(support.x[:n], support.y[:n]), query.x).epistemic)
        for n in range(7)
    ]
    assert all((after < before).all() for before, after in itertools.pairwise(open_))


@pytest.mark.parametrize(
    "subspace", [lj.Head(), lj.Context(3), lj.Full()], ids=["head", "context", "full"]
)
@pytest.mark.parametrize("solver", ["auto", "naive"])
def test_the_correction_gives_a_point_the_nth_part_of_epsilon(x64, subspace, solver):
    support = make_points(5, 2, mask=[1, 1, 0, 1, 1])
    method = lj.Lava(
        RELU, subspace=subspace, inner_steps=2, prior_correction=True, epsilon=0.8, solver=solver
    )
    params = make_params(method, support)
    other = dataclasses.replace(method, prior_correction=False, epsilon=0.2)
    assert_close(adapt(params, support), adapt(with_method(params, other), support), 1e-10)


@pytest.mark.parametrize("n", [0, 3, 9])
@pytest.mark.parametrize("route", ["primal", "dual"])
def test_draws_have_the_covariance_of_the_posterior(x64, n, route):
    z = np.asarray(jax.random.normal(jax.random.key(1), (n, 4)))
    draws = np.asarray(posterior_draw(jax.random.key(2), jnp.asarray(z), (200, 200), route))
    expected = np.linalg.inv(np.eye(4) + z.T @ z)
    np.testing.assert_allclose(np.cov(draws.reshape(-1, 4).T), expected, atol=0.02)


@pytest.mark.parametrize(
    "method",
    [
        BAYES,
        dataclasses.replace(PLAIN, subspace=lj.Context(3)),
        lj.Alpaca(RELU, noise=0.4),
    ],
    ids=["head", "context", "alpaca"],
)
def test_drawn_functions_have_the_predicted_mean_and_variance(method):
    support, query = make_points(4, 2), make_points(3, 2, seed=4)
    params = make_params(method, support)
    adapted = lj.adapt(params, support)
    expected = lj.predict(params, adapted, query.x)
    drawn = np.asarray(lj.sample(params, adapted, query.x, jax.random.key(0), number=4000))
    assert drawn.shape == (4000, 3, 2)
    std = np.sqrt(np.asarray(expected.epistemic))
    np.testing.assert_allclose(drawn.mean(axis=0), expected.mean, atol=5 * std.max() / 63)
    np.testing.assert_allclose(drawn.std(axis=0), std, rtol=0.07)


@pytest.mark.parametrize("subspace", [lj.Head(), lj.Context(2), lj.Full()], ids=str)
def test_no_input_has_no_prediction(subspace):
    support = make_points(3)
    params = make_params(lj.lava_bayesian(model=RELU, subspace=subspace), support)
    adapted = lj.adapt(params, support)
    assert lj.predict(params, adapted, support.x[:0]).epistemic.shape == (0, 1)
    drawn = lj.sample(params, adapted, support.x[:0], jax.random.key(0), number=np.int64(2))
    assert drawn.shape == (2, 0, 1)


def test_parameters_of_float32_keep_their_error_bars_under_float64():
    support = make_points(3)
    params = make_params(lj.lava_bayesian(model=RELU, subspace=lj.Context(2)), support)
    adapted = lj.adapt(params, support)
    expected = lj.predict(params, adapted, support.x).variance
    with jax.enable_x64(True):
        assert_close(lj.predict(params, adapted, support.x).variance, expected, 1e-5)


def test_a_draw_is_one_function_at_all_inputs():
    """Equal inputs, equal values; and what is known by many points does not vary."""
    support = make_points(4, 2)
    params = make_params(PLAIN, support)
    x = jnp.concatenate([support.x, support.x])
    drawn = lj.sample(params, lj.adapt(params, support), x, jax.random.key(0), number=3)
    assert_close(drawn[:, :4], drawn[:, 4:], 1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lj.Lava(noise=0.1), r"Lava\.noise needs prior_correction=True"),
        (lambda: lj.Lava(outer="nll"), r"Lava\.outer='nll' needs a noise"),
        (lambda: lj.Lava(learn_noise=True), r"Lava\.learn_noise=True needs a noise"),
        (
            lambda: dataclasses.replace(PLAIN, learn_noise=True),
            r"Lava\.learn_noise=True needs outer='nll'",
        ),
        (lambda: dataclasses.replace(PLAIN, noise=0.0), r"Lava\.noise must be"),
        (
            lambda: dataclasses.replace(PLAIN, inner_steps=1, curvature="hessian"),
            r"Lava\.noise needs curvature='ggn'",
        ),
        (
            lambda: dataclasses.replace(PLAIN, inner_steps=1, point_loss=lj.CrossEntropy(3)),
            r"Lava\.point_loss must be SquaredError",
        ),
    ],
)
def test_what_has_no_posterior_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_functions_are_drawn_from_a_posterior_alone():
    support = make_points(4)
    params = make_params(lj.Lava(RELU), support)
    with pytest.raises(ValueError, match="a method with a posterior of functions"):
        lj.sample(params, lj.adapt(params, support), support.x, jax.random.key(0))
    params = make_params(PLAIN, support)
    with pytest.raises(ValueError, match="number must be an integer of at least 1"):
        lj.sample(params, lj.adapt(params, support), support.x, jax.random.key(0), number=0)
    plain = lj.adapt(make_params(lj.Lava(RELU), support), support)
    with pytest.raises(
        ValueError, match="adapted must have the posterior that adapt of this model"
    ):
        lj.predict(params, plain, support.x)
    with pytest.raises(ValueError, match="adapted must be what adapt returned"):
        lj.sample(params, make_labels(2), support.x, jax.random.key(0))


@pytest.mark.parametrize("route", ["primal", "dual"])
@pytest.mark.parametrize("n", [0, 3, 7])
def test_variance_is_differentiated_as_the_quadratic_form_that_it_is(x64, route, n):
    """As through the solve, of first and second order, backwards and forwards."""
    rng = np.random.default_rng(0)
    z, at, dz, da = (jnp.asarray(rng.standard_normal((m, 5))) for m in (n, 4, n, 4))

    def plain(z, at):
        return jnp.einsum("mp,pm->m", at, jnp.linalg.solve(jnp.eye(5) + z.T @ z, at.T))

    def rule(z, at):
        return posterior_variance(z, at, route)

    def derivatives(fn):
        total = jax.value_and_grad(lambda z, at: jnp.sum(jnp.sin(fn(z, at))), (0, 1))
        second = jax.grad(lambda z, at: jnp.sum(jnp.cos(total(z, at)[1][1])), (0, 1))
        return fn(z, at), total(z, at), second(z, at), jax.jvp(fn, (z, at), (dz, da))

    assert_close(derivatives(rule), derivatives(plain), 1e-10)


def test_all_weights_are_trained_by_the_density_of_the_query():
    """Also where few points of a wide network move it without weights of their own."""
    model = lj.MLP(hidden=(16, 16), activation="tanh")
    method = dataclasses.replace(BAYES, model=model, subspace=lj.Full())
    support, query = make_points(3), make_points(4, seed=4)
    params = make_params(method, support)
    prediction = predicted(params, support, query.x)
    density = gaussian.negative_log_density(prediction.mean, prediction.variance, query.y)
    assert_close(method.loss(params, lj.Task(support, query), None), jnp.mean(density), 1e-5)
