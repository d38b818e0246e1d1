"""MAML, ANIL and CAVIA: closed forms, limits, first and second order."""

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
    Circle,
    adapt,
    assert_affine_in_labels,
    assert_close,
    assert_different,
    make_params,
    make_points,
    numpy_features,
    prior_block,
    with_method,
)
from lavajax.inner import descend

TINY = lj.MLP(hidden=(3,), activation="tanh")
METHODS = {
    "maml": lj.Maml(RELU),
    "anil": lj.Anil(RELU),
    "cavia": lj.Cavia(RELU, subspace=lj.Context(2, "normal_learned")),
}
EVERY = pytest.mark.parametrize("name", METHODS)


def make_task():
    return lj.Task(make_points(4, 2), make_points(5, 2, seed=7))


@jax.jit
def outer_gradient(params, task):
    """Gradient of the outer loss in every learned leaf."""
    return jax.grad(lambda v: params.method.loss(params.replace_learned(v), task, None))(
        params.learned
    )


def mean_loss(params, points):
    """The mean loss of the whole net, by the prediction at the block as it stands."""

    def loss(net):
        here = params.replace_learned({**params.learned, **net})
        mean = here.method.predict(here, lj.Adapted(prior_block(here)), points.x).mean
        return jnp.mean((mean - points.y) ** 2)

    return loss


@EVERY
def test_no_steps_leave_the_prior_and_the_plain_gradient(x64, name):
    """MAML-1, and MAML-2 for S = 0: first and second order agree."""
    method = dataclasses.replace(METHODS[name], inner_steps=0)
    task = make_task()
    params = make_params(method, task.support)
    assert_close(adapt(params, task.support), prior_block(params), 0)
    net = {n: v for n, v in params.learned.items() if n != "inner_rate"}
    plain = jax.jit(jax.grad(mean_loss(params, task.query)))(net)
    plain = {**plain, "inner_rate": jnp.zeros(())}
    first_order = with_method(params, dataclasses.replace(method, first_order=True))
    for at in (params, first_order):
        assert_close(outer_gradient(at, task), plain, 1e-12)


def test_second_order_is_the_hessian_product_and_first_order_drops_it(x64):
    """MAML-2, S = 1: (I - alpha H_S) grad L_Q against grad L_Q, both at theta_1."""
    task, rate = make_task(), 0.3
    method = lj.Maml(TINY, inner_rate=rate)
    params = make_params(method, task.support)
    net = {n: v for n, v in params.learned.items() if n != "inner_rate"}
    theta, unravel = ravel_pytree(net)

    def support(v):
        return mean_loss(params, task.support)(unravel(v))

    def query(v):
        return mean_loss(params, task.query)(unravel(v))

    step = jax.jit(jax.grad(support))(theta)
    at_query = jax.jit(jax.grad(query))(theta - rate * step)
    hessian = jax.jit(jax.hessian(support))(theta)
    expected = {
        False: at_query - rate * hessian @ at_query,
        True: at_query,
    }
    assert_different(expected[True], expected[False], by=1e-2)
    for first_order, gradient in expected.items():
        m = dataclasses.replace(method, first_order=first_order)
        actual = outer_gradient(with_method(params, m), task)
        # The rate acts through theta - rate * g whatever the order, and must not be dropped.
        assert_close(actual.pop("inner_rate"), -step @ at_query, 1e-10)
        assert_close(ravel_pytree(actual)[0], gradient, 1e-10)


@EVERY
def test_first_order_adapts_alike_and_learns_differently(x64, name):
    """The same block; another outer gradient, for S >= 1 on a curved network."""
    task = make_task()
    method = dataclasses.replace(METHODS[name], model=TANH, inner_steps=2, inner_rate=0.5)
    params = make_params(method, task.support)
    first_order = with_method(params, dataclasses.replace(method, first_order=True))
    assert_close(adapt(first_order, task.support), adapt(params, task.support), 1e-14)
    first, second = (outer_gradient(p, task) for p in (first_order, params))
    assert_different(first, second, by=1e-7)


def test_a_quadratic_has_its_closed_form(x64):
    """MAML-3: theta* + (I - alpha A)^S (theta_0 - theta*)."""
    root = jax.random.normal(jax.random.key(0), (4, 4))
    matrix, start, best = root @ root.T, jnp.ones(4), jnp.arange(4.0)

    def objective(theta):
        return 0.5 * (theta - best) @ matrix @ (theta - best)

    contraction = np.linalg.matrix_power(np.eye(4) - 0.05 * np.asarray(matrix), 5)
    expected = np.asarray(best) + contraction @ np.asarray(start - best)
    for first_order in (False, True):
        actual = descend(objective, start, 0.05, 5, first_order=first_order)
        assert_close(actual, expected, 1e-12)


@EVERY
def test_one_step_is_the_mean_of_the_points_own_steps(x64, name):
    """MAML-4: gradient-based meta-learning averages."""
    support = make_points(4, 2)
    params = make_params(METHODS[name], support)
    alone = [adapt(params, lj.Points(support.x[i : i + 1], support.y[i : i + 1])) for i in range(4)]
    mean = jax.tree.map(lambda *leaves: sum(leaves) / 4, *alone)
    assert_close(adapt(params, support), mean, 1e-12)


@EVERY
def test_order_and_padding_have_no_effect(x64, name):
    """MAML-5."""
    support = make_points(4, 2)
    params = make_params(dataclasses.replace(METHODS[name], inner_steps=3), support)
    expected = adapt(params, support)
    assert_different(expected, prior_block(params), by=1e-6)
    order = np.array([2, 0, 3, 1])
    assert_close(adapt(params, lj.Points(support.x[order], support.y[order])), expected, 1e-12)
    padded = lj.Points(
        jnp.concatenate([support.x, jnp.full((2, 1), jnp.inf)]),
        jnp.concatenate([support.y, jnp.full((2, 2), jnp.nan)]),
        jnp.arange(6) < 4,
    )
    assert_close(adapt(params, padded), expected, 1e-12)


@EVERY
def test_a_rate_of_zero_does_not_adapt(x64, name):
    """And a rate that is not learned is the hyperparameter itself, without a leaf."""
    support = make_points(4, 2)
    still = dataclasses.replace(METHODS[name], inner_rate=0.0, learn_inner_rate=False)
    params = make_params(still, support)
    assert "inner_rate" not in params.learned
    assert_close(adapt(params, support), prior_block(params), 0)
    moving = dataclasses.replace(still, inner_rate=0.2)
    leaf = params.replace_learned({**params.learned, "inner_rate": jnp.asarray(0.2)})
    expected = adapt(with_method(leaf, METHODS[name]), support)
    assert_close(adapt(with_method(params, moving), support), expected, 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("steps", [1, 4])
def test_anil_is_the_closed_gradient(x64, reduction, steps):
    """ANIL-1: W <- W - alpha (c/N) Z^T (Z W - Y)."""
    method = lj.Anil(RELU, lj.SquaredError(reduction), inner_steps=steps, inner_rate=0.2)
    support = make_points(4, 3)
    params = make_params(method, support)
    z, y, w = numpy_features(params, support.x), np.asarray(support.y), np.asarray(params["head"])
    c = {"mean": 2 / 3, "sum": 2.0}[reduction]
    for _ in range(steps):
        w = w - 0.2 * c / 4 * z.T @ (z @ w - y)
    assert_close(adapt(params, support), w, 1e-12)


def test_anil_converges_to_the_nearest_interpolating_head(x64):
    """ANIL-2: W_0 + pinv(Z)(Y - Z W_0)."""
    method = lj.Anil(Circle(), inner_steps=2000)
    support = lj.Points(jnp.array([[0.1], [2.0]]), jnp.array([[1.0], [-2.0]]))
    params = make_params(method, support)
    x, w = np.asarray(support.x), np.asarray(params["head"])
    z = np.concatenate([np.cos(x), np.sin(x), np.ones_like(x)], axis=1)
    expected = w + np.linalg.pinv(z) @ (np.asarray(support.y) - z @ w)
    assert_close(adapt(params, support), expected, 1e-9)


def test_anil_predictions_are_affine_in_the_labels(x64):
    """ANIL-3: label noise of zero mean leaves the expected prediction unchanged."""
    assert_affine_in_labels(lj.Anil(RELU, inner_steps=3), 1e-12)


def test_anil_is_maml_with_the_backbone_held(x64):
    """ANIL-4."""
    support = make_points(4, 2)
    params = make_params(lj.Anil(RELU, inner_steps=3), support)
    net = {"weights": params["weights"], "head": params["head"]}
    for _ in range(3):
        gradient = jax.jit(jax.grad(mean_loss(with_method(params, lj.Maml(RELU)), support)))(net)
        net = {**net, "head": net["head"] - params["inner_rate"] * gradient["head"]}
    assert_close(adapt(params, support), net["head"], 1e-12)


def scale_context(params, factor):
    """Multiplies the weights that read the context, the last rows of the first layer."""
    first, *rest = params["weights"]
    columns = jnp.arange(first["weight"].shape[1]) >= 1
    first = {**first, "weight": jnp.where(columns, factor * first["weight"], first["weight"])}
    return params.replace_learned({**params.learned, "weights": [first, *rest]})


def test_cavia_without_context_weights_does_not_adapt():
    """CAVIA-1."""
    support = make_points(4)
    params = scale_context(make_params(METHODS["cavia"], support), 0.0)
    assert_close(adapt(params, support), params["context"], 0)


def test_cavia_depends_on_rate_and_context_weights_by_one_product(x64):
    """CAVIA-2: weights times r and rate over r^2 leave predictions as they are."""
    support, query = make_points(4, 2), make_points(5, 2, seed=3)
    params = make_params(lj.Cavia(RELU, inner_steps=3, inner_rate=3.0), support)
    scaled = scale_context(params, 10.0)
    scaled = scaled.replace_learned({**scaled.learned, "inner_rate": jnp.asarray(0.03)})
    first, second = (lj.predict(p, lj.adapt(p, support), query.x).mean for p in (params, scaled))
    assert_close(second, first, 1e-12)
    assert_different(first, lj.predict(params, lj.Adapted(params["context"]), query.x).mean)


def test_cavia_curvature_of_a_relu_network_is_gauss_newton(x64):
    """CAVIA-3: the Hessian of a point's loss in c is (2/k) J^T J."""
    point = make_points(1, 3)
    params = make_params(lj.Cavia(RELU, subspace=lj.Context(4, "normal_learned")), point)

    def outputs(context):
        return params.method.predict(params, lj.Adapted(context), point.x).mean[0]

    def loss(context):
        return jnp.mean((outputs(context) - point.y[0]) ** 2)

    jacobian = jax.jit(jax.jacobian(outputs))(params["context"])
    hessian = jax.jit(jax.hessian(loss))(params["context"])
    assert_close(hessian, 2 / 3 * jacobian.T @ jacobian, 1e-10)


def test_where_a_context_starts_and_whether_it_is_learned():
    """Learned contexts meet the optimiser; a fixed start of zero never does."""
    support = make_points(3)
    starts = {
        start: make_params(lj.Cavia(RELU, subspace=lj.Context(4, start)), support)
        for start in ("zeros", "zeros_learned", "normal_learned")
    }
    assert "context" not in starts["zeros"].learned
    np.testing.assert_array_equal(starts["zeros"].fixed["context"], np.zeros(4))
    np.testing.assert_array_equal(starts["zeros_learned"].learned["context"], np.zeros(4))
    keys = jax.random.split(jax.random.key(0), 500)
    drawn = jax.vmap(lj.Context(4).init_context)(keys)
    np.testing.assert_allclose(np.mean(drawn), 0, atol=0.1)  # 2,000 draws of N(0, 1)
    np.testing.assert_allclose(np.std(drawn), 1, atol=0.1)
    assert np.all(np.asarray(starts["normal_learned"].learned["context"]) != 0)
