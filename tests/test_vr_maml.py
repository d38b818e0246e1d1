"""VR-MAML: its limit in MAML, and the recursion of its direction."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lavajax as lj
from helpers import RELU, TANH, assert_close, assert_different
from outer_steps import (
    EVERY_SUBSPACE,
    assert_trains,
    make_batch,
    make_state,
    meta_gradient,
    plain,
    stepper,
)


@EVERY_SUBSPACE
@pytest.mark.parametrize("first_order", [False, True])
def test_without_memory_is_plain(x64, subspace, first_order):
    """gamma = 1, over several steps of the same optimiser."""
    method = lj.VrMaml(TANH, subspace=subspace, gamma=1.0, first_order=first_order, inner_steps=2)
    tx = optax.adam(0.01)
    step, state = stepper(method, tx), make_state(method, tx)
    base = plain(method)
    base_step, expected = stepper(base, tx), make_state(base, tx)
    start = state.params.learned
    for seed in (0, 5, 9):
        state, metrics = step(state, seed)
        expected, other = base_step(expected, seed)
        assert_close(state.params.learned, expected.params.learned, 1e-9)
        assert_close(metrics, other, 1e-9)
    assert_different(state.params.learned, start)


@EVERY_SUBSPACE
def test_follows_its_recursion_in_every_learned_leaf(x64, subspace):
    """With both gradients of a step on the same tasks; the first direction is the gradient."""
    method = lj.VrMaml(TANH, subspace=subspace, gamma=0.3)
    tx = optax.sgd(0.1)
    step, state = stepper(method, tx), make_state(method, tx)
    assert not state.memory["started"]
    before, direction = None, None
    for seed in (0, 5, 9):
        tasks = make_batch(seed).tasks
        now = meta_gradient(state.params, tasks)
        if before is not None:
            old = meta_gradient(before, tasks)
            now = jax.tree.map(lambda g, c, d: g + 0.7 * (c - d), now, direction, old)
        before, direction = state.params, now
        state, metrics = step(state, seed)
        assert_close(state.memory["direction"], direction, 1e-10)
        assert_close(state.memory["previous"], before.learned, 0)
        expected = jax.tree.map(lambda t, c: t - 0.1 * c, before.learned, direction)
        assert_close(state.params.learned, expected, 1e-10)
        np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(direction), rtol=1e-10)
    assert "inner_rate" in direction


def test_first_direction_is_the_gradient_wherever_a_run_starts(x64):
    """Exactly, also where parameters are trained on from a new state at a later step."""
    method = lj.VrMaml(TANH, gamma=0.1)
    tx = optax.sgd(0.0)
    state = dataclasses.replace(make_state(method, tx), step=jnp.int32(100))
    new, _ = stepper(method, tx)(state)
    base = plain(method)
    reference, _ = stepper(base, optax.sgd(1.0))(make_state(base, optax.sgd(1.0)))
    gradient = jax.tree.map(jnp.subtract, state.params.learned, reference.params.learned)
    assert_close(new.memory["direction"], gradient, 1e-12)


def test_begins_anew_where_the_previous_parameters_have_no_gradient(x64):
    method, tx = lj.VrMaml(TANH, gamma=0.1), optax.sgd(0.1)
    step = stepper(method, tx)
    state, _ = step(make_state(method, tx))
    turned = jax.tree.map(lambda leaf: -leaf, state.memory["direction"])
    state = dataclasses.replace(state, memory={**state.memory, "direction": turned})
    lost = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), state.memory["previous"])
    spoilt = dataclasses.replace(state, memory={**state.memory, "previous": lost})
    fresh = dataclasses.replace(state, memory={**state.memory, "started": jnp.zeros((), bool)})
    (found, _), (expected, _) = step(spoilt), step(fresh)
    assert_close(found.params.learned, expected.params.learned, 1e-12)
    assert_different(found.params.learned, step(state)[0].params.learned)


def test_at_rest_on_one_batch_is_the_gradient(x64):
    """Parameters and batch constant: c_t = g."""
    method = lj.VrMaml(TANH, gamma=0.3)
    tx = optax.sgd(0.0)
    step, state = stepper(method, tx), make_state(method, tx)
    gradient = meta_gradient(state.params, make_batch().tasks)
    for _ in range(3):
        state, _ = step(state)
        assert_close(state.memory["direction"], gradient, 1e-10)


@pytest.mark.parametrize("gamma", [0.05, 0.5, 0.99])
def test_telescopes_on_a_fixed_batch(x64, gamma):
    """A deterministic objective: c_t = g_t for every gamma, while the parameters move."""
    method = lj.VrMaml(TANH, gamma=gamma)
    tx = optax.sgd(0.3)
    step, state = stepper(method, tx), make_state(method, tx)
    tasks = make_batch().tasks
    for _ in range(4):
        gradient = meta_gradient(state.params, tasks)
        state, _ = step(state)
        assert_close(state.memory["direction"], gradient, 1e-9)
    assert_different(meta_gradient(state.params, tasks), gradient)


def test_settings():
    released, tuned = lj.vr_maml_released(), lj.vr_maml_tuned(gamma=0.5, subspace=lj.Head())
    assert (released.gamma, released.inner_rate) == (0.99, 0.001)
    assert not released.first_order
    assert not released.learn_inner_rate
    assert isinstance(released.subspace, lj.Full)
    assert (tuned.gamma, tuned.inner_rate, tuned.first_order) == (0.5, 0.1, True)
    assert isinstance(tuned.subspace, lj.Head)


def test_training_lowers_the_loss():
    assert_trains(lj.vr_maml_tuned(model=RELU))
