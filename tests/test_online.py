"""Points that arrive one by one lead where all of them at once do."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import RELU, assert_close, make_labels, make_params, make_points, numpy_features
from lavajax.posterior import DensePosterior

BAYES = lj.Lava(
    RELU,
    inner_steps="converged",
    learn_epsilon=True,
    prior_correction=True,
    noise=0.4,
    learn_noise=True,
    outer="nll",
)
METHODS = {
    "lava": lj.Lava(RELU),
    "lava, bayesian": lj.lava_bayesian(model=RELU),
    "lava, three steps": lj.Lava(RELU, inner_steps=3, learn_epsilon=True),
    "lava, converged": dataclasses.replace(lj.lava_converged(), model=RELU),
    "lava, map": lj.Lava(RELU, inner_steps="map"),
    "lava, error bars": BAYES,
    "lava, error bars, map": dataclasses.replace(BAYES, inner_steps="map"),
    "ridge": lj.Ridge(RELU),
    "ridge, labels": lj.Ridge(RELU, lj.CrossEntropy(3)),
    "alpaca": lj.Alpaca(RELU, noise=0.4),
}


def points_for(method, n, seed=0, mask=None):
    if isinstance(method.point_loss, lj.CrossEntropy):
        return make_labels(n, seed=seed, mask=mask)
    return make_points(n, 2, seed=seed, mask=mask)


@pytest.mark.parametrize("name", METHODS)
def test_one_by_one_is_all_at_once(x64, name):
    """The first points together, then single ones, then a batch with padding of NaN."""
    method = METHODS[name]
    support, query = points_for(method, 14), points_for(method, 4, seed=4)
    params = make_params(method, support)

    def part(start, stop):
        return lj.Points(support.x[start:stop], support.y[start:stop])

    sums = lj.online(params, part(0, 3))
    for i in range(3, 10):
        sums = lj.update(params, sums, part(i, i + 1))
    mask = jnp.array([1, 1, 0, 1, 1, 0], bool)
    spread = jnp.array([10, 11, 11, 12, 13, 13])
    x = jnp.where(mask[:, None], support.x[spread], jnp.nan)
    sums = lj.update(params, sums, lj.Points(x, support.y[spread], mask))
    actual, expected = lj.estimate(params, sums), lj.adapt(params, support)
    assert_close(actual.block, expected.block, 1e-10)
    ours, theirs = (lj.predict(params, a, query.x) for a in (actual, expected))
    assert_close(ours.mean, theirs.mean, 1e-10)
    if theirs.epistemic is not None:
        assert_close(ours.epistemic, theirs.epistemic, 1e-8)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["lava, bayesian", "lava, error bars, map", "alpaca"])
def test_what_was_adapted_is_followed_without_its_points(x64, name, masked):
    """The posterior tells the sums, to which further points add, also after forgetting."""
    method = METHODS[name]
    mask = jnp.array([True, False] * 4) if masked else None
    first, more, query = make_points(8, 2, mask=mask), make_points(5, 2, seed=1), make_points(4, 2)
    params = make_params(method, first)
    recalled = lj.online(params, lj.adapt(params, first))
    absorbed = lj.online(params, first)
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-9), recalled, absorbed)
    for forget in (1.0, 0.8):
        one, other = (
            lj.predict(params, lj.estimate(params, sums), query.x)
            for sums in (
                lj.update(params, each, more, forget=forget) for each in (recalled, absorbed)
            )
        )
        assert_close(one.mean, other.mean, 1e-9)
        assert_close(one.epistemic, other.epistemic, 1e-9)


def test_no_support_is_recalled_as_none(x64):
    params = make_params(METHODS["lava, bayesian"], make_points(3, 2))
    nothing = lj.Points(jnp.zeros((0, 1)), jnp.zeros((0, 2)))
    recalled = lj.online(params, lj.adapt(params, nothing))
    jax.tree.map(lambda a, b: assert_close(a, b, 1e-12), recalled, lj.online(params))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lj.Lava(RELU), "tells them only for a head with inner_steps='map' and a noise"),
        (BAYES, "tells them only for a head with inner_steps='map' and a noise"),
        (lj.Ridge(RELU), "what Ridge adapted to does not tell them"),
    ],
)
def test_what_does_not_tell_its_points_is_refused(method, message):
    support = make_points(3, 2)
    params = make_params(method, support)
    with pytest.raises(ValueError, match=message):
        lj.online(params, lj.adapt(params, support))


def test_what_was_estimated_has_its_sums():
    params = make_params(METHODS["alpaca"], make_points(3, 2))
    with pytest.raises(ValueError, match="what estimate returned has its sums"):
        lj.online(params, lj.estimate(params, lj.online(params)))
    adapted = lj.adapt(params, make_points(3, 2))
    with pytest.raises(ValueError, match="adapted must be of one task of this model"):
        lj.online(params, dataclasses.replace(adapted, block=jnp.zeros(3)))


@pytest.mark.parametrize("name", ["lava", "lava, error bars", "ridge", "alpaca"])
def test_no_point_leaves_the_prior(x64, name):
    method = METHODS[name]
    example = points_for(method, 3)
    params = make_params(method, example)
    empty = lj.adapt(params, lj.Points(example.x[:0], example.y[:0]))
    mask = lj.Points(example.x, example.y, jnp.zeros(3, bool))
    for sums in (lj.online(params), lj.update(params, lj.online(params), mask)):
        actual = lj.estimate(params, sums)
        assert_close(actual.block, empty.block, 1e-12)
        if actual.posterior is not None:
            ours, theirs = (lj.predict(params, a, example.x) for a in (actual, empty))
            assert_close(ours.epistemic, theirs.epistemic, 1e-10)


def test_forgetting_weighs_points_by_their_age(x64):
    """Against weighted ridge regression in NumPy, the count weighed alike."""
    support = make_points(5, 2)
    params = make_params(lj.Ridge(RELU, learn_ridge=False, ridge=0.3), support)
    sums = lj.online(params)
    for i in range(5):
        new = lj.Points(support.x[i : i + 1], support.y[i : i + 1])
        sums = lj.update(params, sums, new, forget=0.7)
    z, y = numpy_features(params, support.x), np.asarray(support.y)
    head, weight = np.asarray(params["head"]), 0.7 ** np.arange(4, -1, -1)
    system = (z.T * weight) @ z + weight.sum() * 0.3 * np.eye(z.shape[1])
    expected = head + np.linalg.solve(system, (z.T * weight) @ (y - z @ head))
    assert_close(lj.estimate(params, sums).block, expected, 1e-10)


def test_a_changed_task_is_followed_by_forgetting_alone():
    before, after = make_points(200, 1), make_points(200, 1)
    truth = jnp.sin(before.x), -jnp.sin(after.x)
    params = make_params(METHODS["lava, error bars"], make_points(3, 1))

    def error(forget):
        sums = lj.online(params, lj.Points(before.x, truth[0]))
        for i in range(40):
            new = lj.Points(after.x[i : i + 1], truth[1][i : i + 1])
            sums = lj.update(params, sums, new, forget=forget)
        mean = lj.predict(params, lj.estimate(params, sums), after.x).mean
        return float(jnp.mean((mean - truth[1]) ** 2))

    assert error(0.9) < 0.3 * error(1.0)


def test_float32_drifts_little_over_ten_thousand_updates():
    """Against one solve in NumPy float64."""
    support, query = make_points(10_000, 1), make_points(50, 1, seed=4)
    truth = jnp.sin(2 * support.x) + 0.1 * support.y
    params = make_params(lj.Ridge(RELU, learn_ridge=False, ridge=0.01), support)

    @jax.jit
    def follow(x, y):
        def absorb(sums, point):
            return lj.update(params, sums, (point[0][None], point[1][None])), None

        return jax.lax.scan(absorb, lj.online(params), (x, y))[0]

    mean = lj.predict(params, lj.estimate(params, follow(support.x, truth)), query.x).mean
    z, at = (numpy_features(params, p.x).astype(np.float64) for p in (support, query))
    head, y = np.asarray(params["head"], np.float64), np.asarray(truth, np.float64)
    system = z.T @ z + 10_000 * 0.01 * np.eye(z.shape[1])
    expected = at @ (head + np.linalg.solve(system, z.T @ (y - z @ head)))
    error = np.abs(np.asarray(mean) - expected).max() / np.abs(expected).max()
    assert error < 1e-3


@pytest.mark.parametrize("name", ["lava", "lava, error bars", "lava, bayesian", "alpaca"])
def test_float32_drifts_little_over_ten_thousand_updates_of_other_methods(name):
    """Against all points at once in float64; the regulariser of ``lava_bayesian`` is the least."""
    support, query = make_points(10_000, 2), make_points(50, 2, seed=4)
    truth = jnp.stack([jnp.sin(2 * support.x[:, 0]), support.x[:, 0]], axis=1) + 0.1 * support.y
    params = make_params(METHODS[name], support)

    @jax.jit
    def follow(x, y):
        def absorb(sums, point):
            return lj.update(params, sums, (point[0][None], point[1][None])), None

        return jax.lax.scan(absorb, lj.online(params), (x, y))[0]

    found = lj.predict(params, lj.estimate(params, follow(support.x, truth)), query.x)
    x, y, at = (np.asarray(each, np.float64) for each in (support.x, truth, query.x))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
        adapted = wide.method.adapt(wide, lj.Points(jnp.asarray(x), jnp.asarray(y)))
        expected = wide.method.predict(wide, adapted, jnp.asarray(at))
    assert_close(found.mean, expected.mean, 1e-3)
    if expected.epistemic is not None:
        assert_close(found.epistemic, expected.epistemic, 1e-3)


def test_forgetting_keeps_what_rounding_loses():
    """Ten thousand updates at 0.9999 against NumPy float64."""
    x = np.random.default_rng(0).uniform(0.5, 1.5, (10_000, 4)).astype(np.float32)
    params = make_params(METHODS["lava"], make_points(3, 2, 4))
    forget = np.float32(0.9999)

    @jax.jit
    def follow(x):
        def absorb(sums, x):
            return lj.update(params, sums, (x[None], jnp.ones((1, 2))), forget=forget), None

        return jax.lax.scan(absorb, lj.online(params), x)[0]

    z = numpy_features(params, x).astype(np.float64)
    weight = np.float64(forget) ** np.arange(len(x))[::-1]
    found = np.asarray(follow(x).features, np.float64)
    expected = (z * weight[:, None]).T @ z
    assert np.abs(found - expected).max() < 3e-7 * np.abs(expected).max()


def test_functions_are_drawn_from_what_the_sums_leave_open(x64):
    """Of mean and covariance as predicted, to the error of 20,000 draws."""
    support, at = make_points(6, 2), make_points(4, 2, seed=4).x
    params = make_params(METHODS["lava, error bars"], support)
    adapted = lj.estimate(params, lj.online(params, support))
    assert isinstance(adapted.posterior, DensePosterior)
    prediction = lj.predict(params, adapted, at)
    drawn = np.asarray(lj.sample(params, adapted, at, jax.random.key(0), number=20_000))
    std = np.sqrt(np.asarray(prediction.epistemic))
    assert np.all(np.abs(drawn.mean(axis=0) - prediction.mean) < 5 * std / np.sqrt(20_000))
    np.testing.assert_allclose(drawn.std(axis=0), std, rtol=0.03)
    whole = lj.sample(params, lj.adapt(params, support), at, jax.random.key(1), number=20_000)
    for output in range(2):  # points together, as those of the posterior of all points at once
        one, other = (np.cov(d[:, :, output].T) for d in (drawn, np.asarray(whole)))
        np.testing.assert_allclose(one, other, atol=0.05 * one.diagonal().max())


def test_nothing_is_compiled_again_as_points_arrive():
    """Whatever type the numbers have that say how much is forgotten."""
    module = sys.modules["lavajax.online"]  # the package's attribute is the function
    support = make_points(30, 1)
    params = make_params(lj.Lava(RELU), support)
    sums = lj.online(params)
    sizes = []
    for i in range(30):
        forget = (0.9, np.float32(0.8), jnp.float32(0.7), 1)[i % 4]
        point = (support.x[i : i + 1], support.y[i : i + 1])
        sums = lj.update(params, sums, point, forget=forget)
        lj.predict(params, lj.estimate(params, sums), support.x[:1])
        sizes.append((module._update._cache_size(), module._conclude._cache_size()))
    assert len(set(sizes)) == 1


def test_it_goes_through_jit_and_vmap():
    """Several tasks followed at once."""
    method = METHODS["lava, error bars"]
    tasks = [make_points(4, 2, seed=s) for s in range(3)]
    params = make_params(method, tasks[0])
    x, y = (jnp.stack([getattr(t, name) for t in tasks]) for name in "xy")

    def follow(x, y):
        return lj.estimate(
            params, lj.update(params, lj.online(params, (x[:2], y[:2])), (x[2:], y[2:]))
        )

    together = jax.jit(jax.vmap(follow))(x, y)
    for i, task in enumerate(tasks):
        assert_close(together.block[i], lj.adapt(params, task).block, 2e-4)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lj.Anil(RELU), "a method that adapts by sums"),
        (lj.Lava(RELU, subspace=lj.Context(3)), "a head in closed form"),
        (lj.Lava(RELU, curvature="hessian"), "a head in closed form"),
    ],
)
def test_what_needs_the_points_is_refused(method, message):
    support = make_points(3)
    params = make_params(method, support)
    with pytest.raises(ValueError, match=message):
        lj.online(params)


def test_points_that_see_each_other_are_refused():
    images = jnp.zeros((3, 16, 16, 1))
    method = lj.Ridge(lj.Conv4(width=2), lj.CrossEntropy(3))
    params = method.init(jax.random.key(0), images, jnp.arange(3))
    with pytest.raises(ValueError, match="a model that takes points apart"):
        lj.online(params)


def test_sums_of_another_model_are_refused():
    one, two = (make_params(lj.Ridge(RELU), make_points(3, k)) for k in (1, 2))
    with pytest.raises(ValueError, match="with curved of shape"):
        lj.estimate(two, lj.online(one))


def test_bad_input_is_refused():
    support = make_points(3)
    params = make_params(lj.Lava(RELU), support)
    sums = lj.online(params, support)
    for forget in (0.0, 1.1, -1.0, float("nan"), jnp.ones(2), jnp.ones(1), "0.9", None):
        with pytest.raises(ValueError, match="forget must be a number above 0 and at most 1"):
            lj.update(params, sums, support, forget=forget)
    with pytest.raises(ValueError, match=r"support\.x must be finite"):
        lj.update(params, sums, (jnp.full((1, 1), jnp.nan), support.y[:1]))
    with pytest.raises(ValueError, match="sums must be what online or update returned"):
        lj.estimate(params, lj.adapt(params, support))
    with pytest.raises(ValueError, match="sums must be what online or update returned"):
        lj.update(params, None, support)


def test_what_follows_a_task_traces_nothing_again(monkeypatch):
    """Neither the steps nor the check of the sums, which took ten times as long as they."""
    traces, absorb = [], lj.Lava.absorb
    monkeypatch.setattr(lj.Lava, "absorb", lambda *args: (traces.append(0), absorb(*args))[1])
    params = make_params(lj.Lava(RELU, epsilon=0.123), make_points(3, 2))
    sums, x, y = lj.online(params), jnp.ones((1, 1)), jnp.ones((1, 2))
    for index in range(4):
        sums = lj.update(params, sums, (x, y))
        lj.estimate(params, sums)
        if index == 0:
            first = len(traces)
    assert 0 < first == len(traces)
