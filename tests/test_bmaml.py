"""BMAML: Stein steps of particles, their limits and symmetries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import lavajax as lj
from helpers import (
    RELU,
    TANH,
    adapt,
    assert_close,
    assert_different,
    assert_finite,
    assert_gradient_is_finite_difference,
    at,
    flat,
    make_labels,
    make_params,
    make_points,
    numpy_features,
    prior_block,
    with_method,
)
from lavajax import stein
from lavajax.stein import kernel, stein_descend

CONTEXT = lj.Context(2)
# For each subspace, the method that a single particle is.
SINGLE = {
    "full": (lj.Full(), lj.Maml(TANH, inner_steps=2)),
    "head": (lj.Head(), lj.Anil(TANH, inner_steps=2)),
    "context": (CONTEXT, lj.Cavia(TANH, subspace=CONTEXT, inner_steps=2)),
}
EVERY = pytest.mark.parametrize("name", SINGLE)


def make_task(k=2):
    return lj.Task(make_points(4, k), make_points(5, k, seed=7))


def with_particles(params, particles):
    return params.replace_learned({**params.learned, "particles": particles})


@jax.jit
def value_and_grad(params, task):
    return jax.value_and_grad(lambda v: params.method.loss(params.replace_learned(v), task, None))(
        params.learned
    )


def pairs(particles):
    """k and its gradients in the first argument, by autodiff of the definition at a given h."""
    particles = jnp.asarray(particles)
    squares = np.sum((particles[:, None] - particles[None]) ** 2, axis=-1)
    h = np.median(squares) / np.log(len(particles))

    def k(a, b):
        return jnp.exp(-jnp.sum((a - b) ** 2) / h)

    def over_pairs(fn):
        return jax.vmap(jax.vmap(fn, (None, 0)), (0, None))(particles, particles)

    return over_pairs(k), over_pairs(jax.grad(k))


@EVERY
def test_one_particle_is_the_plain_method(x64, name):
    """Block, loss and outer gradient."""
    subspace, plain = SINGLE[name]
    task = make_task()
    reference = make_params(plain, task.support)
    method = lj.Bmaml(TANH, subspace=subspace, particles=1, inner_steps=2)
    start = jax.tree.map(lambda leaf: leaf[None], prior_block(reference))
    params = with_particles(make_params(method, task.support), start)
    shared = {n: reference[n] for n in params.learned if n != "particles"}
    params = params.replace_learned({**shared, "particles": start})
    block = adapt(params, task.support)
    assert_close(at(block, 0), adapt(reference, task.support), 1e-12)
    assert_different(block, start, by=1e-6)
    value, gradient = value_and_grad(params, task)
    expected, reference_gradient = value_and_grad(reference, task)
    assert_close(value, expected, 1e-12)
    own = {"full": {"weights", "head"}, "head": {"head"}, "context": {"context"}}[name]
    moved = {n: g for n, g in reference_gradient.items() if n in own}
    got = at(gradient.pop("particles"), 0)
    assert_close(got if name == "full" else {next(iter(own)): got}, moved, 1e-10)
    assert_close(gradient, {n: reference_gradient[n] for n in gradient}, 1e-10)
    prediction = lj.predict(params, lj.adapt(params, task.support), task.query.x)
    assert prediction.epistemic is None  # one particle says nothing of it


def test_repulsion_is_the_derivative_of_the_kernel_and_sums_to_zero(x64):
    particles = jax.random.normal(jax.random.key(0), (5, 3)) + 100.0
    k, repulsion = kernel(particles)
    expected, gradients = pairs(particles)
    assert_close(k, expected, 1e-12)
    assert_close(repulsion, jnp.sum(gradients, axis=0), 1e-10)
    assert np.max(np.abs(repulsion)) > 0.1
    assert np.max(np.abs(jnp.sum(repulsion, axis=0))) < 1e-12


def test_kernel_of_one_and_of_equal_particles_is_finite():
    for particles in (jnp.ones((1, 3)), jnp.ones((4, 3))):
        k, repulsion = kernel(particles)
        np.testing.assert_array_equal(k, np.ones((len(particles),) * 2))
        np.testing.assert_array_equal(repulsion, np.zeros_like(particles))
        assert_finite(jax.jit(jax.grad(lambda p: sum(jnp.sum(v**2) for v in kernel(p))))(particles))


def test_bandwidth_is_a_constant_to_derivatives(x64):
    """All distances scaled together: k does not change, and its derivative says that it does."""
    particles = jax.random.normal(jax.random.key(0), (4, 3))

    def total(scale):
        return jnp.sum(kernel(scale * particles)[0])

    assert_close(total(2.0), total(1.0), 1e-12)
    k = kernel(particles)[0]
    assert_close(jax.jit(jax.grad(total))(1.0), 2 * jnp.sum(k * jnp.log(k)), 1e-10)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.3])
def test_head_particles_are_the_formula(x64, temperature, steps):
    """With the gradient of squared error on a head, (c/N) Z^T (Z W - Y), in NumPy."""
    method = lj.Bmaml(RELU, particles=3, inner_steps=steps, inner_rate=0.4, temperature=temperature)
    support = make_points(4, 2)
    params = make_params(method, support)
    z, y = numpy_features(params, support.x), np.asarray(support.y)
    w = np.asarray(params["particles"])
    for _ in range(steps):
        gradients = np.stack([1.0 / 4 * z.T @ (z @ head - y) for head in w])
        k, kernel_gradients = pairs(w.reshape(3, -1))
        for_each = np.einsum("jm,jpk->mpk", k, gradients)
        repulsion = np.sum(kernel_gradients, axis=0).reshape(w.shape)
        w = w - 0.4 / 3 * (for_each - temperature * repulsion)
    assert_close(adapt(params, support), w, 1e-9)


def test_particles_find_a_normal_density(x64):
    """Many steps on ||theta||^2 / 2, whose density has mean 0 and variance T."""
    start = 3 + 0.1 * jax.random.normal(jax.random.key(0), (40, 1))
    run = jax.jit(lambda p, t: stein_descend(lambda v: 0.5 * jnp.sum(v**2), p, 0.5, 1500, t))
    for temperature in (1.0, 0.25):
        end = run(start, temperature)
        np.testing.assert_allclose(np.mean(end), 0, atol=1e-3)
        np.testing.assert_allclose(np.var(end), temperature, rtol=0.15)


@EVERY
def test_permuted_particles_adapt_alike_and_predict_the_same(x64, name):
    task = make_task()
    method = lj.Bmaml(TANH, subspace=SINGLE[name][0], particles=3, inner_steps=2)
    params = make_params(method, task.support)
    order = np.array([2, 0, 1])
    permuted = with_particles(params, at(params["particles"], order))
    first, second = (lj.adapt(p, task.support) for p in (params, permuted))
    assert_close(second.block, at(first.block, order), 1e-12)
    assert_different(second.block, first.block, by=1e-3)
    expected = lj.predict(params, first, task.query.x)
    assert_close(lj.predict(permuted, second, task.query.x), expected, 1e-12)


@EVERY
def test_a_rate_of_zero_leaves_the_particles(name):
    support = make_points(4, 2)
    method = lj.Bmaml(RELU, subspace=SINGLE[name][0], particles=3, inner_rate=0.0)
    params = make_params(method, support)
    assert_close(adapt(params, support), params["particles"], 0)


def test_the_mean_errs_less_than_the_particles_by_their_variance(x64):
    """MSE of the mean = mean MSE - variance; training minimises the second of the three."""
    task = make_task()
    params = make_params(lj.Bmaml(TANH, particles=4), task.support)
    prediction = lj.predict(params, lj.adapt(params, task.support), task.query.x)
    of_mean = jnp.mean((prediction.mean - task.query.y) ** 2)
    of_each, _ = value_and_grad(params, task)
    assert of_mean < of_each
    assert_close(of_each - jnp.mean(prediction.epistemic), of_mean, 1e-12)


@pytest.mark.parametrize("mask", [None, [1, 0, 1, 1]])
def test_chaser_is_the_distance_to_a_leader_on_support_and_query(x64, mask):
    """The leader goes on from the follower; no gradient passes through it."""
    method = lj.Bmaml(TANH, particles=3, outer="chaser", leader_steps=2)
    support, query = make_points(4, 2, mask=mask), make_points(5, 2, seed=7)
    params = make_params(method, support)
    real = np.ones(4, bool) if mask is None else np.array(mask, bool)
    both = lj.Points(
        jnp.concatenate([support.x[real], query.x]), jnp.concatenate([support.y[real], query.y])
    )
    follower = adapt(params, support)
    further = with_method(params, dataclasses.replace(method, inner_steps=2))
    leader = adapt(with_particles(further, follower), both)
    value, gradient = value_and_grad(params, lj.Task(support, query))
    assert_close(value, jnp.sum((follower - leader) ** 2), 1e-10)

    def distance(learned):
        block = method.adapt(params.replace_learned(learned), support).block
        return jnp.sum((block - leader) ** 2)

    assert_close(gradient, jax.jit(jax.grad(distance))(params.learned), 1e-10)
    assert_different(gradient, jax.tree.map(jnp.zeros_like, gradient))


@EVERY
@pytest.mark.parametrize("outer", ["query", "chaser"])
def test_outer_gradient_is_the_finite_difference_at_a_given_bandwidth(
    x64, name, outer, monkeypatch
):
    """Which is a constant to derivatives and no constant to differences; so is the leader."""
    monkeypatch.setattr(stein, "bandwidth", lambda squares: 2.0)
    method = lj.Bmaml(
        lj.MLP(hidden=(4,), activation="tanh"),
        subspace=SINGLE[name][0],
        particles=3,
        inner_steps=2,
    )
    support = make_points(4, 2, mask=[1, 1, 0, 1])
    support = dataclasses.replace(support, x=support.x.at[2].set(jnp.nan))
    assert_gradient_is_finite_difference(method, lj.Task(support, make_points(5, 2, seed=7)))


def test_particles_start_apart_and_replace_the_nets_own_block():
    support = make_points(4, 2)
    names = {
        "head": {"weights", "particles", "inner_rate"},
        "context": {"weights", "head", "particles", "inner_rate"},
        "full": {"particles", "inner_rate"},
    }
    for name, expected in names.items():
        params = make_params(lj.Bmaml(RELU, subspace=SINGLE[name][0], particles=3), support)
        assert params.learned.keys() == expected
        assert not params.fixed["backbone"]
        flattened = np.stack([flat(at(params["particles"], i)) for i in range(3)])
        gaps = np.abs(flattened[:, None] - flattened[None]).min(axis=-1)
        assert np.all(gaps[~np.eye(3, dtype=bool)] > 0)


def test_a_flax_model_and_labels():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(1, 6, rngs=rngs)

        def __call__(self, x):
            return jnp.tanh(self.layer(x))

    method = lj.Bmaml(lj.NNX(Net), lj.CrossEntropy(3), lj.Full(), particles=2)
    support = make_labels(4)
    params = make_params(method, support)
    prediction = lj.predict(params, lj.adapt(params, support), support.x)
    np.testing.assert_allclose(jnp.sum(prediction.mean, axis=1), 1, rtol=1e-5)
    assert np.all(prediction.epistemic > 0)


@pytest.mark.parametrize("outer", ["query", "chaser"])
def test_training_lowers_the_error(outer):
    tasks = lj.Sine(shots=5, queries=5)
    method = lj.Bmaml(lj.MLP(hidden=(32, 32)), particles=4, outer=outer, temperature=0.1)
    start = lj.train(method, tasks, steps=1).params
    trained = lj.train(method, tasks, steps=400, meta_batch=4)
    assert np.all(np.isfinite(trained.history["loss"]))
    before, after = (lj.evaluate(p, tasks, num_tasks=200).mean for p in (start, trained.params))
    assert after < 0.8 * before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"particles": 0}, r"Bmaml\.particles must be an integer of at least 1"),
        ({"temperature": -1.0}, r"Bmaml\.temperature must be a finite number of at least 0"),
        ({"outer": "mse"}, r"Bmaml\.outer must be one of 'query', 'chaser'"),
        ({"leader_steps": 0}, r"Bmaml\.leader_steps must be an integer of at least 1"),
        ({"inner_steps": -1}, r"Bmaml\.inner_steps must be an integer of at least 0"),
        ({"subspace": lj.Context(2, "zeros")}, "equal ones never separate: use Context"),
        ({"subspace": lj.Context(2, "zeros_learned")}, "equal ones never separate"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        lj.Bmaml(**settings)
