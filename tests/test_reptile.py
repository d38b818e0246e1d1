"""Reptile: its limits in joint training and in plain training on one task."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lavajax as lj
from helpers import (
    TANH,
    adapt,
    assert_close,
    assert_different,
    make_params,
    make_points,
    stack,
    with_method,
)
from lavajax import points
from lavajax.methods.task_loss import loss_at
from lavajax.outer import BatchExpectation

TASKS = 3


def make_tasks(count=TASKS, split=4):
    """Tasks of 9 points each, the first ``split`` of them support."""
    whole = [make_points(9, 2, seed=s) for s in range(count)]
    return stack(
        [
            lj.Task(lj.Points(p.x[:split], p.y[:split]), lj.Points(p.x[split:], p.y[split:]))
            for p in whole
        ]
    )


def step(method, tasks, tx, seed=0):
    """Parameters before and after one outer step, and its metrics."""
    params = make_params(method, make_points(4, 2), seed)
    count = len(jax.tree.leaves(tasks)[0])
    keys = jax.random.split(jax.random.key(0), count)
    state = lj.TrainState(
        params, tx.init(params.learned), method.memory(params), jax.random.key(1), jnp.int32(0)
    )
    new, metrics = jax.jit(lambda s, t: method.step(s, BatchExpectation(t, keys), tx))(state, tasks)
    return params, new.params, metrics


def joint_loss(params, tasks):
    """The mean over tasks of the loss of all of a task's points, without adaptation."""

    def one(task):
        return loss_at(
            params.method,
            params,
            lj.Adapted(params.learned),
            points.concatenate(task.support, task.query),
        )

    return jnp.mean(jax.vmap(one)(tasks))


@pytest.mark.parametrize("form", ["scaled", "difference"])
def test_one_inner_step_is_joint_training(x64, form):
    """theta + e (theta_1 - theta) is SGD at rate e alpha on the mean loss of all points."""
    method = lj.Reptile(TANH, inner_steps=1, inner_rate=0.05, pseudo_gradient=form)
    tasks, rate = make_tasks(), 0.3
    before, after, metrics = step(method, tasks, optax.sgd(rate))
    gradient = jax.jit(jax.grad(lambda v: joint_loss(before.replace_learned(v), tasks)))(
        before.learned
    )
    size = rate * (0.05 if form == "difference" else 1.0)
    expected = jax.tree.map(lambda t, g: t - size * g, before.learned, gradient)
    assert_close(after.learned, expected, 1e-12)
    assert_different(after.learned, before.learned)
    np.testing.assert_allclose(metrics["grad_norm"] * rate, size * optax.tree.norm(gradient))


def test_one_task_and_a_full_step_end_where_training_on_the_task_ends(x64):
    method = lj.Reptile(TANH, inner_steps=4, inner_rate=0.1, pseudo_gradient="difference")
    tasks = make_tasks(1)
    before, after, _ = step(method, tasks, optax.sgd(1.0))
    union = points.concatenate(
        *(jax.tree.map(lambda leaf: leaf[0], p) for p in (tasks.support, tasks.query))
    )
    assert_close(after.learned, adapt(before, union), 1e-12)


def test_the_scaled_form_is_the_difference_per_unit_of_inner_rate_and_step(x64):
    tasks = make_tasks()
    moves = []
    for form, rate in (("scaled", 0.7), ("difference", 0.7 / (0.05 * 4))):
        method = lj.Reptile(TANH, inner_steps=4, inner_rate=0.05, pseudo_gradient=form)
        before, after, _ = step(method, tasks, optax.sgd(rate))
        moves.append(jax.tree.map(jnp.subtract, after.learned, before.learned))
    assert_close(moves[0], moves[1], 1e-10)


def test_support_and_query_are_one_set_in_training(x64):
    """The split does not matter, nor padding in either part."""
    method = lj.Reptile(TANH, inner_steps=3)
    _, expected, metrics = step(method, make_tasks(split=4), optax.sgd(0.1))
    for split in (0, 7, 9):
        _, actual, other = step(method, make_tasks(split=split), optax.sgd(0.1))
        assert_close(actual.learned, expected.learned, 1e-12)
        assert_close(other, metrics, 1e-12)

    def pad(part):
        x, y = (
            jnp.concatenate([a, jnp.full((TASKS, 2, *a.shape[2:]), jnp.nan)], axis=1)
            for a in (part.x, part.y)
        )
        return lj.Points(x, y, jnp.tile(jnp.arange(x.shape[1]) < part.x.shape[1], (TASKS, 1)))

    tasks = make_tasks()
    for padded in (
        lj.Task(pad(tasks.support), tasks.query),
        lj.Task(tasks.support, pad(tasks.query)),
        lj.Task(pad(tasks.support), pad(tasks.query)),
    ):
        _, actual, _ = step(method, padded, optax.sgd(0.1))
        assert_close(actual.learned, expected.learned, 1e-12)


def test_new_tasks_adapt_as_in_maml(x64):
    """S steps on the support alone."""
    support = make_points(4, 2)
    method = lj.Reptile(TANH, inner_steps=5, inner_rate=0.1)
    params = make_params(method, support)
    maml = lj.Maml(TANH, inner_steps=5, inner_rate=0.1, learn_inner_rate=False)
    assert_close(adapt(params, support), adapt(with_method(params, maml), support), 1e-12)


def test_the_update_differs_from_first_order_maml(x64):
    """It is not the gradient at the end of the inner loop, but a sum over all steps."""
    tasks = make_tasks()
    before, after, _ = step(lj.Reptile(TANH, inner_steps=4, inner_rate=0.1), tasks, optax.sgd(0.1))
    maml = lj.Maml(TANH, inner_steps=4, inner_rate=0.1, learn_inner_rate=False, first_order=True)
    _, other, _ = step(maml, tasks, optax.sgd(0.1))
    assert_different(after.learned, other.learned)
    assert_different(after.learned, before.learned)


def test_only_all_weights_can_adapt():
    """No gradient reaches shared weights, so there is no subspace to choose."""
    assert isinstance(lj.Reptile().subspace, lj.Full)
    with pytest.raises(TypeError, match="subspace"):
        lj.Reptile(subspace=lj.Head())


def test_training_learns_to_adapt():
    """Adaptation to unseen tasks gets better, which joint training alone would not do."""
    tasks = lj.Sine(shots=10, queries=10)
    method = lj.Reptile(lj.MLP(hidden=(32, 32), activation="tanh"))
    start = lj.train(method, tasks, steps=1)
    trained = lj.train(method, tasks, steps=600, meta_batch=5, chunk=100)
    assert trained.history["loss"][-1] < 0.5 * trained.history["loss"][0]
    before, after = (lj.evaluate(t.params, tasks, num_tasks=200).mean for t in (start, trained))
    assert after < 0.8 * before
