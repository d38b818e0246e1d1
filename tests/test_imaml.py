"""iMAML: the implicit gradient against closed forms, dense solves and other routes."""

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
    assert_finite,
    make_labels,
    make_params,
    make_points,
    prior_block,
    with_method,
)
from lavajax.inner import conjugate_gradients, descend_monotone, implicit
from lavajax.methods.base import outputs
from lavajax.methods.task_loss import loss_at

TINY = lj.MLP(hidden=(4,), activation="tanh")
FULL = lj.IMaml(
    TINY, proximal=2.0, inner_steps=400, inner_rate=0.2, cg_steps=60, curvature="hessian"
)
HEAD = lj.IMaml(TINY, subspace=lj.Head(), learn_proximal=True)


def make_task():
    return lj.Task(make_points(4, 2, mask=[1, 1, 0, 1]), make_points(5, 2, seed=7))


@jax.jit
def outer_gradient(params, task):
    """Gradient of the outer loss in every learned leaf."""
    return jax.grad(lambda v: params.method.loss(params.replace_learned(v), task, None))(
        params.learned
    )


def query_loss(params, task):
    """The loss of the query as a function of the whole net as it stands."""

    def loss(net):
        here = params.replace_learned({**params.learned, **net})
        mean = here.method.predict(here, lj.Adapted(prior_block(here)), task.query.x).mean
        return jnp.mean((mean - task.query.y) ** 2)

    return loss


def test_implicit_gradient_is_that_of_the_closed_form(x64):
    """In the prior head, the shared weights through the mixed derivative, and lambda."""
    task = make_task()
    params = make_params(HEAD, task.support)
    stepped = dataclasses.replace(
        HEAD, solver="gradient", inner_steps=1500, inner_rate=0.5, cg_steps=40
    )
    assert_close(
        adapt(with_method(params, stepped), task.support), adapt(params, task.support), 1e-9
    )
    expected = outer_gradient(params, task)
    assert all(np.any(np.abs(leaf) > 1e-6) for leaf in jax.tree.leaves(expected))
    assert_close(outer_gradient(with_method(params, stepped), task), expected, 1e-9)


def test_a_strong_pull_leaves_the_plain_gradient(x64):
    task = make_task()
    for method in (
        dataclasses.replace(HEAD, learn_proximal=False, proximal=1e8),
        dataclasses.replace(FULL, proximal=1e8),
    ):
        params = make_params(method, task.support)
        plain = jax.jit(jax.grad(query_loss(params, task)))(params.learned)
        assert_close(outer_gradient(params, task), plain, 1e-6)
        weak = with_method(params, dataclasses.replace(method, proximal=2.0))
        assert_different(outer_gradient(weak, task), plain, by=1e-2)


def test_gradient_does_not_depend_on_the_path(x64):
    task = make_task()
    params = make_params(FULL, task.support)
    other = dataclasses.replace(FULL, inner_steps=900, inner_rate=0.05)
    expected = outer_gradient(params, task)
    assert_close(outer_gradient(with_method(params, other), task), expected, 1e-9)
    few = dataclasses.replace(FULL, inner_steps=2)
    assert_different(outer_gradient(with_method(params, few), task), expected, by=1e-3)


def test_all_weights_have_the_gradient_of_the_dense_solve(x64):
    """(I + H/lambda)^-1 grad L_Q at phi*, with H of the mean loss of real points."""
    task = make_task()
    params = make_params(FULL, task.support)
    phi, unravel = ravel_pytree(adapt(params, task.support))
    real = np.asarray(task.support.mask)
    support = lj.Points(task.support.x[real], task.support.y[real])

    def loss(points):
        at = query_loss(params, lj.Task(support, points))
        return lambda v: at(unravel(v))

    hessian = jax.hessian(loss(support))(phi)
    gradient = jax.jit(jax.grad(loss(task.query)))(phi)
    expected = np.linalg.solve(np.eye(phi.size) + hessian / 2.0, gradient)
    assert_close(ravel_pytree(outer_gradient(params, task))[0], expected, 1e-9)
    assert_different(expected, gradient, by=1e-2)


def test_gauss_newton_gradient_is_that_of_the_dense_solve(x64):
    """(I + J^T L'' J/lambda)^-1 grad L_Q, for two outputs coupled by the loss; and it differs."""
    task = lj.Task(make_labels(4, 3, mask=[1, 1, 0, 1]), make_labels(5, 3, seed=7))
    method = dataclasses.replace(
        FULL, point_loss=lj.CrossEntropy(3), proximal=0.2, inner_steps=5, curvature="ggn"
    )
    params = make_params(method, task.support)
    phi, unravel = ravel_pytree(adapt(params, task.support))
    real = np.asarray(task.support.mask)

    def outputs(v, x):
        """Logits, up to a shift that the loss does not see."""
        here = params.replace_learned({**params.learned, **unravel(v)})
        return jnp.log(here.method.predict(here, lj.Adapted(prior_block(here)), x).mean)

    jacobian = jax.jit(jax.jacobian(outputs))(phi, task.support.x[real])
    p = jnp.exp(outputs(phi, task.support.x[real]))
    bend = np.stack([np.diag(row) - np.outer(row, row) for row in np.asarray(p)])
    ggn = np.einsum("nka,nkl,nlb->ab", jacobian, bend, jacobian) / real.sum()

    def query(v):
        return jnp.mean(jax.vmap(method.point_loss.value)(outputs(v, task.query.x), task.query.y))

    gradient = jax.jit(jax.grad(query))(phi)
    expected = np.linalg.solve(np.eye(phi.size) + ggn / 0.2, gradient)
    actual = ravel_pytree(outer_gradient(params, task))[0]
    assert_close(actual, expected, 1e-9)
    found = [
        outer_gradient(
            with_method(params, dataclasses.replace(method, proximal=2.0, curvature=c)), task
        )
        for c in ("ggn", "hessian")
    ]
    assert_different(*found, by=1e-3)
    assert_finite(found)


def test_gauss_newton_of_a_density_is_its_fisher_information(x64):
    """The Hessian of a heteroscedastic density is indefinite in its outputs."""
    method = dataclasses.replace(
        FULL, point_loss=lj.GaussianNll(), inner_steps=5, curvature="ggn", proximal=1.0
    )
    support, query = make_points(4), make_points(5, seed=7)
    params = make_params(method, support)
    phi, unravel = ravel_pytree(adapt(params, support))

    def f(v):
        return outputs(method, params, lj.Adapted(unravel(v)), support.x)

    factors = jax.vmap(method.point_loss.factor)(f(phi), support.y)
    rows = jnp.einsum("nka,nkr->nra", jax.jit(jax.jacobian(f))(phi), factors)
    ggn = jnp.einsum("nra,nrb->ab", rows, rows) / 4
    gradient = jax.jit(jax.grad(lambda v: loss_at(method, params, lj.Adapted(unravel(v)), query)))(
        phi
    )
    expected = jnp.linalg.solve(jnp.eye(phi.size) + ggn, gradient)
    actual = ravel_pytree(outer_gradient(params, lj.Task(support, query)))[0]
    assert_close(actual, expected, 1e-9)
    assert_different(expected, gradient, by=1e-2)


def test_root_of_an_equation_has_the_implicit_derivative(x64):
    """A phi = b: d phi = A^-1 (db - dA phi), by as many steps as there are unknowns."""
    root = jax.random.normal(jax.random.key(0), (5, 5))
    matrix, b = root @ root.T + jnp.eye(5), jnp.arange(5.0)
    weights = jnp.array([1.0, -2.0, 0.5, 3.0, 1.0])

    def by_steps(matrix, b, steps):
        held_matrix, held_b = jax.lax.stop_gradient((matrix, b))
        solution = jnp.linalg.solve(held_matrix, held_b)
        phi = implicit(lambda p: matrix @ p - b, lambda v: held_matrix @ v, solution, steps)
        return weights @ phi**2

    expected = jax.grad(lambda m, b: weights @ jnp.linalg.solve(m, b) ** 2, argnums=(0, 1))
    actual = jax.grad(by_steps, argnums=(0, 1))
    assert_close(actual(matrix, b, 8), expected(matrix, b), 1e-9)
    assert_different(actual(matrix, b, 1), expected(matrix, b), by=1e-2)


@pytest.mark.parametrize("steps", [2, 8])
def test_slope_that_is_not_positive_definite_gives_no_gradient(x64, steps):
    """The third search direction sees the negative eigenvalue, the first two do not."""
    diagonal, solution = jnp.array([1.0, 2.0, -0.5]), jnp.arange(3.0)

    def at(shift, diagonal):
        phi = implicit(lambda p: p - shift, lambda v: diagonal * v, solution, steps)
        return jnp.sum(phi * jnp.array([1.0, 1.0, 0.1]))

    gradient = jax.jit(jax.grad(at))(solution, diagonal)
    assert np.isnan(gradient).all() if steps > 2 else np.isfinite(gradient).all()
    assert np.isfinite(jax.jit(jax.grad(at))(solution, jnp.abs(diagonal))).all()


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_conjugate_gradients_whatever_the_size_of_the_right_hand_side(size):
    """In float32, where the square of so small or large a number is none."""
    diagonal, b = jnp.array([1.0, 2.0, 1e-3]), jnp.array([1.0, -1.0, 2e-3])
    found = conjugate_gradients(lambda v: diagonal * v, size * b, tolerance=1e-7, steps=20)
    np.testing.assert_allclose(found / size, b / diagonal, rtol=1e-4)
    zero = conjugate_gradients(lambda v: diagonal * v, 0 * b, tolerance=1e-7, steps=20)
    np.testing.assert_array_equal(zero, 0)
    lost = conjugate_gradients(lambda v: diagonal * v, jnp.nan * b, tolerance=1e-7, steps=20)
    assert np.isnan(lost).all()


def test_diagnose_shows_whether_the_problem_is_solved(x64):
    support = make_points(4, 2, mask=[1, 1, 0, 1])

    @jax.jit
    def diagnose(params):
        return params.method.diagnose(params, support)

    for method in (FULL, HEAD):
        solved = diagnose(make_params(method, support))
        assert solved.end < 1e-8 < solved.start
    few = diagnose(make_params(dataclasses.replace(FULL, inner_steps=2), support))
    assert 1e-3 < few.end < few.start


def test_descent_never_raises_the_objective():
    """Where plain steps of this size would diverge; and stays where no step helps."""

    def bowl(theta):
        return 50 * jnp.sum(theta**2)

    start = jnp.array([1.0, -2.0])
    values = [bowl(descend_monotone(bowl, start, 1.0, steps)) for steps in range(1, 30, 4)]
    assert np.all(np.diff(values) <= 0)
    assert values[-1] < 1e-3 * bowl(start)
    np.testing.assert_array_equal(
        descend_monotone(lambda t: jnp.sum(t) * jnp.nan, start, 1.0, 3), start
    )


def test_a_rate_that_is_too_large_is_survived():
    task = lj.Task(make_points(10), make_points(5, seed=7))
    for loss in (lj.SquaredError(), lj.CrossEntropy(3)):
        method = lj.IMaml(TANH, loss, inner_rate=100.0)
        if loss == lj.CrossEntropy(3):
            task = lj.Task(make_labels(10, 3), make_labels(5, 3, seed=7))
        params = make_params(method, task.support)
        assert_finite([adapt(params, task.support), outer_gradient(params, task)])


def test_training_lowers_the_error():
    tasks = lj.Sine(shots=10, queries=10)
    for settings, factor in (({}, 0.9), ({"solver": "gradient"}, 0.97)):
        method = lj.IMaml(RELU, subspace=lj.Head(), proximal=0.01, **settings)
        start = make_params(method, tasks.sample(jax.random.key(0)).support)
        trained = lj.train(method, tasks, steps=60, meta_batch=5)
        first, last = (lj.evaluate(p, tasks, num_tasks=100).mean for p in (start, trained.params))
        assert last < factor * first
