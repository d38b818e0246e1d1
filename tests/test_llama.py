"""LLAMA: the log determinant against the explicit Hessian, its gradient, its limits."""

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
    assert_close,
    assert_different,
    make_labels,
    make_params,
    make_points,
    with_method,
)
from lavajax import linalg, network
from lavajax.methods.task_loss import loss_at
from lavajax.subspace import net_of

CONTEXT = lj.Context(2)
PLAIN = {"head": lj.Anil(TANH, inner_steps=2), "context": lj.Cavia(TANH, subspace=CONTEXT)}
METHODS = {
    "head": lj.Llama(TANH, inner_steps=2, eta=0.3),
    "context": lj.Llama(TANH, subspace=CONTEXT, eta=0.3),
}
EVERY = pytest.mark.parametrize("name", METHODS)


def make_task(n=4, m=5, k=2):
    return lj.Task(make_points(n, k), make_points(m, k, seed=7))


def setting(method, task, seed=0):
    """Meta-parameters, and the adapted block."""
    params = make_params(method, task.support, seed)
    return params, lj.adapt(params, task.support)


@jax.jit
def outer(params, task):
    """The outer loss and its gradient in every learned leaf."""
    return jax.value_and_grad(lambda v: params.method.loss(params.replace_learned(v), task, None))(
        params.learned
    )


@EVERY
def test_without_weight_it_is_the_base_method_bit_for_bit(name):
    """In float32, values and meta-gradients; and adaptation never sees the determinant."""
    task = make_task()
    params = make_params(dataclasses.replace(METHODS[name], eta=0.0), task.support)
    base = with_method(params, PLAIN[name])
    for a, b in zip(
        jax.tree.leaves(outer(params, task)), jax.tree.leaves(outer(base, task)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    weighted = with_method(params, METHODS[name])
    np.testing.assert_array_equal(adapt(weighted, task.support), adapt(base, task.support))
    assert_different(outer(weighted, task)[0], outer(base, task)[0])


@EVERY
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("m", [2, 12], ids=["few", "many"])
def test_log_determinant_is_that_of_the_explicit_hessian(x64, name, reduction, m):
    """slogdet of the (k P) x (k P) Hessian of the mean query loss, with fewer points and more.

    For a context of a ReLU network: where its Hessian is Gauss-Newton.
    """
    task = make_task(m=m, k=3)
    loss = lj.SquaredError(reduction)
    method = dataclasses.replace(METHODS[name], model=RELU, point_loss=loss, tau=0.05)
    params, adapted = setting(method, task)

    def objective(flat):
        block = lj.Adapted(flat.reshape(adapted.block.shape))
        return loss_at(method, params, block, task.query)

    hessian = jax.jit(jax.hessian(objective))(adapted.block.ravel())
    damped = np.asarray(hessian) + 0.05 * np.eye(adapted.block.size)
    sign, expected = np.linalg.slogdet(damped)
    assert sign == 1
    actual = method.log_det(params, adapted, task.query)
    assert_close(actual, expected, 1e-9)
    total = method.loss(params, task, None)
    np.testing.assert_allclose(total, objective(adapted.block.ravel()) + 0.3 * actual, rtol=1e-9)


def test_log_determinant_of_a_head_under_cross_entropy_is_that_of_the_hessian(x64):
    """Softmax of a linear head: Gauss-Newton is exact, and no Kronecker product."""
    support, query = make_labels(5), make_labels(6, seed=7)
    method = lj.Llama(TANH, lj.CrossEntropy(3), eta=0.3, tau=0.05)
    params, adapted = setting(method, lj.Task(support, query))

    def objective(flat):
        return loss_at(method, params, lj.Adapted(flat.reshape(adapted.block.shape)), query)

    hessian = jax.jit(jax.hessian(objective))(adapted.block.ravel())
    damped = np.asarray(hessian) + 0.05 * np.eye(adapted.block.size)
    assert_close(method.log_det(params, adapted, query), np.linalg.slogdet(damped)[1], 1e-9)


@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (4, 4), (0, 3)])
def test_primal_and_dual_forms_agree_in_value_and_gradient(x64, shape):
    rows = jax.random.normal(jax.random.key(0), shape)
    expected = np.linalg.slogdet(np.asarray(rows.T @ rows) + 0.01 * np.eye(shape[1]))[1]
    gradient = (
        2 * np.asarray(rows) @ np.linalg.inv(np.asarray(rows.T @ rows) + 0.01 * np.eye(shape[1]))
    )
    for route in ("primal", "dual", "auto"):
        value, slope = jax.jit(
            jax.value_and_grad(lambda a, r=route: linalg.log_det_rows(a, 0.01, r))
        )(rows)
        assert_close(value, expected, 1e-10)
        assert_close(slope, gradient, 1e-9)


def test_log_determinant_of_matrices_has_first_and_second_derivatives(x64):
    """The rule by a solve, against finite differences, batched, in both modes."""
    root = jax.random.normal(jax.random.key(0), (3, 4, 4))
    move = jax.random.normal(jax.random.key(1), (3, 4, 4))
    matrix, move = root @ root.mT + jnp.eye(4), move + move.mT

    def along(t):
        return jnp.sum(jax.vmap(linalg.log_det_positive)(matrix + t * move))

    np.testing.assert_allclose(along(0.0), np.sum(np.linalg.slogdet(matrix)[1]), rtol=1e-12)
    h = 1e-4
    first = (along(h) - along(-h)) / (2 * h)
    second = (along(h) - 2 * along(0.0) + along(-h)) / h**2
    for derivative in (jax.grad, jax.jacfwd):
        np.testing.assert_allclose(derivative(along)(0.0), first, rtol=1e-5)
        np.testing.assert_allclose(derivative(derivative(along))(0.0), second, rtol=1e-4)


@EVERY
def test_gradient_of_the_determinant_reaches_the_backbone(x64, name):
    """It is not zero, with fewer query points than features, and is the finite difference."""
    task = make_task(m=3)
    method = METHODS[name]
    params = make_params(method, task.support)
    start, unravel = ravel_pytree(params.learned)

    def determinant(vector):
        at = params.replace_learned(unravel(vector))
        return method.log_det(at, method.adapt(at, task.support), task.query)

    rng, h = np.random.default_rng(0), 1e-5
    directions = jnp.asarray(rng.standard_normal((6, start.size)))
    shifted = jnp.concatenate([start + h * directions, start - h * directions])
    values, gradient = jax.jit(
        lambda v, many: (jax.vmap(determinant)(many), jax.grad(determinant)(v))
    )(start, shifted)
    up, down = np.split(np.asarray(values), 2)
    np.testing.assert_allclose(
        np.asarray(directions @ gradient), (up - down) / (2 * h), rtol=1e-5, atol=1e-7
    )
    for layer in unravel(gradient)["weights"]:
        assert np.linalg.norm(layer["weight"]) > 1e-4


def test_gradient_of_the_determinant_survives_float32():
    """Where an undamped determinant of few points would be 0, and its gradient lost."""
    task = make_task(m=3)
    params, _ = setting(METHODS["head"], task)
    plain = with_method(params, dataclasses.replace(METHODS["head"], eta=0.0))
    difference = jax.tree.map(jnp.subtract, outer(params, task)[1], outer(plain, task)[1])
    assert all(jnp.linalg.norm(layer["weight"]) > 1e-4 for layer in difference["weights"])
    with jax.enable_x64(True):
        precise = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), (params, task))
        exact = outer(*precise)[1]
    assert_close(outer(params, task)[1], exact, 1e-3)


def test_scaling_the_features_adds_its_logarithm(x64):
    """2 k P log r as tau -> 0, with at least as many points as features."""
    task = make_task(m=40, k=3)
    method = lj.Llama(Circle(), tau=1e-13)
    params, adapted = setting(method, task)
    z = network.features(method.model, net_of(params), {}, task.query.x)
    rows = np.sqrt(2 / 3 / 40) * z  # c/M of three outputs and 40 points
    base, scaled = (3 * linalg.log_det_rows(r * rows, 1e-13) for r in (1.0, 2.5))
    np.testing.assert_allclose(method.log_det(params, adapted, task.query), base, rtol=1e-9)
    np.testing.assert_allclose(scaled - base, 2 * 3 * 3 * np.log(2.5), rtol=1e-9)


@EVERY
def test_padding_of_the_query_has_no_effect(x64, name):
    """Nor on the gradient; a query without any point leaves the damping alone."""
    task = make_task()
    params, adapted = setting(METHODS[name], task)
    query = lj.Points(
        jnp.concatenate([jnp.full((3, 1), jnp.nan), task.query.x]),
        jnp.concatenate([jnp.full((3, 2), jnp.inf), task.query.y]),
        jnp.arange(8) >= 3,
    )
    assert_close(outer(params, lj.Task(task.support, query)), outer(params, task), 1e-10)
    expected = adapted.block.size * np.log(1e-3)
    nowhere = dataclasses.replace(query, mask=jnp.zeros(8, bool))
    for empty in (nowhere, lj.Points(query.x[:0], query.y[:0])):
        assert_close(params.method.log_det(params, adapted, empty), expected, 1e-10)


@EVERY
def test_first_order_adapts_alike_and_learns_differently(x64, name):
    task = make_task()
    method = dataclasses.replace(METHODS[name], inner_steps=2, inner_rate=0.5)
    params = make_params(method, task.support)
    first = with_method(params, dataclasses.replace(method, first_order=True))
    assert_close(adapt(first, task.support), adapt(params, task.support), 1e-14)
    assert_close(outer(first, task)[0], outer(params, task)[0], 1e-12)
    assert_different(outer(first, task)[1], outer(params, task)[1], by=1e-7)


def test_a_context_of_a_backbone_that_couples_points_is_refused():
    import flax.linen as nn

    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x, context=None, mask=None):
            h = nn.BatchNorm(use_running_average=False)(nn.Dense(4)(x), mask=mask)
            return h if context is None else h + jnp.sum(context)

    points = make_points(4)
    with pytest.raises(ValueError, match=r"Llama with subspace=Context.* use Head\(\)"):
        make_params(lj.Llama(lj.Linen(Normed()), subspace=CONTEXT), points)
    params = make_params(lj.Llama(lj.Linen(Normed())), points)
    assert np.isfinite(params.method.loss(params, lj.Task(points, points), None))


def test_training_lowers_the_loss():
    tasks = lj.Sine(shots=5, queries=10)
    for subspace in (lj.Head(), lj.Context(2)):
        method = lj.Llama(RELU, subspace=subspace, eta=1e-3)
        loss = lj.train(method, tasks, steps=200, chunk=50, meta_batch=5).history["loss"]
        assert loss[-1] < loss[0]
