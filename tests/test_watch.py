"""Explosions and dead runs are named; normal runs, and single bad chunks, are not."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lavajax
from helpers import RELU
from lavajax.start import start_state
from lavajax.watch import Watch

TASKS = lavajax.Sine(shots=3, queries=4)
METHOD = lavajax.Anil(RELU)


def chunk(loss, grad_norm=1.0):
    return {"loss": np.array(loss), "grad_norm": np.array(grad_norm)}


def look(watch, *args):
    """What the watch says."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        watch.look(*args)
    return [str(each.message) for each in told]


def test_an_explosion_is_told_once_and_a_single_bad_chunk_is_none():
    watch = Watch(np.array(4.0))
    for step, loss in enumerate((4900.0, 1e9, 3.0, 1e9)):
        assert look(watch, step, step + 1, chunk(loss)) == []
    (text,) = look(watch, 4, 5, chunk(2e9))
    assert text.startswith(
        "training explodes: the loss is 2e+09 up to step 5, and was 4 in the first; a lower outer"
    )
    assert look(watch, 5, 6, chunk(3e9)) == []
    assert not watch.in_doubt


def test_small_negative_and_infinite_losses_are_no_explosion():
    watch = Watch(np.array(1e-9))
    assert not any(look(watch, i, i + 1, chunk(900.0)) for i in range(3))
    watch = Watch(np.array(-3.0))
    assert not any(look(watch, i, i + 1, chunk(-3e9)) for i in range(3))
    for value in (np.nan, np.inf):
        assert not any(look(watch, i, i + 1, chunk(value, value)) for i in range(3))
        assert not any(look(Watch(np.array(value)), 0, 1, chunk(5.0)) for _ in range(3))


def test_the_first_loss_is_the_first_that_is_finite():
    watch = Watch(np.array([np.nan, 4.0]))
    assert look(watch, 0, 1, chunk([2.0, 2.0], [1.0, 1.0])) == []
    assert look(watch, 1, 2, chunk([1e9, 2.0], [1.0, 1.0])) == []
    (text,) = look(watch, 2, 3, chunk([1e9, 2.0], [1.0, 1.0]))
    assert "of seed 0 of 2 explodes" in text
    assert "and was 2 in the first" in text


def test_no_gradient_is_dead_unless_there_is_nothing_to_learn():
    watch = Watch(np.array(4.0))
    assert look(watch, 0, 10, chunk(4.0, 1e-30)) == []
    (text,) = look(watch, 10, 20, chunk(4.0, 0.0))
    assert text.startswith("training is dead: the gradient is exactly 0 in all steps from 10 to 20")
    assert look(Watch(np.array(4.0)), 0, 10, chunk(0.0, 0.0)) == []
    (text,) = look(Watch(np.array(0.0)), 0, 10, chunk(0.0, 0.0))
    assert "the tasks have a query" in text
    assert look(Watch(np.array(4.0)), 0, 10, {"loss": np.array(4.0)}) == []  # a user's own method


def test_a_layer_without_gradient_is_dead():
    watch = Watch(np.array(4.0))
    norms = {"layer_grad_norm": np.array(1e-30)}
    assert look(watch, 0, 10, chunk(4.0) | norms) == []
    (text,) = look(watch, 10, 20, chunk(4.0) | {"layer_grad_norm": np.array(0.0)})
    assert "leaves a layer of the backbone as it is: its gradient is exactly 0 in all" in text
    (text,) = look(watch, 20, 30, chunk(4.0, 0.0) | {"layer_grad_norm": np.array(0.0)})
    assert "is dead: the gradient is exactly 0" in text  # not both


def test_of_several_seeds_those_are_named():
    watch = Watch(np.array([1.0, 1.0, 1.0]))
    look(watch, 0, 1, chunk([1.0, 1e9, 1e9], [1.0, 1.0, 1.0]))
    first, second = look(watch, 1, 2, chunk([1.0, 2e9, 1.0], [0.0, 1.0, 1.0]))
    assert first.startswith("training of seed 1 of 3 explodes: the loss is 2e+09")
    assert second.startswith("training of seed 0 of 3 is dead")


def test_training_that_explodes_says_so_and_goes_on():
    """Up the gradient, by steps that the clip bounds."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(-0.3))
    with pytest.warns(UserWarning, match=r"training explodes: the loss is \S+ up to step") as told:
        trained = lavajax.train(METHOD, TASKS, steps=60, chunk=10, meta_batch=2, optimizer=tx)
    assert len(told) == 1
    assert np.isfinite(trained.history["loss"]).all()
    assert told[0].filename == __file__


def test_an_explosion_in_the_only_chunk_is_told():
    """By the steps that would follow; a bad task in the last chunk is none."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(-0.3))
    run = {"steps": 60, "meta_batch": 2, "optimizer": tx}
    with pytest.warns(UserWarning, match=r"training explodes: .* up to step 63") as told:
        lavajax.train(METHOD, TASKS, **run)
    assert len(told) == 1
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lavajax.train(METHOD, Outlier(TASKS), steps=60, meta_batch=2)


def test_training_without_an_active_unit_says_so():
    """Weights of 0, and tasks for whose mean of 0 the bias of the head is right already."""
    tx = optax.sgd(0.01)
    state = start_state(METHOD, TASKS, tx)
    dead = jax.tree.map(jnp.zeros_like, state.params.learned)
    state = dataclasses.replace(state, params=state.params.replace_learned(dead))
    source = Silent(TASKS)
    with pytest.warns(UserWarning, match=r"training is dead: .* from 0 to 5") as told:
        lavajax.train(METHOD, source, steps=10, chunk=5, meta_batch=2, optimizer=tx, state=state)
    assert len(told) == 1


def test_training_whose_first_layer_is_asleep_says_so():
    """The later layers go on learning a constant, with a gradient that is not 0."""
    tx = optax.sgd(0.01)
    state = start_state(METHOD, TASKS, tx)
    learned = state.params.learned
    first = {**learned["weights"][0], "bias": jnp.full_like(learned["weights"][0]["bias"], -1e3)}
    learned = {**learned, "weights": [first, *learned["weights"][1:]]}
    state = dataclasses.replace(state, params=state.params.replace_learned(learned))
    with pytest.warns(UserWarning, match="leaves a layer of the backbone as it is") as told:
        trained = lavajax.train(
            METHOD, TASKS, steps=10, chunk=5, meta_batch=2, optimizer=tx, state=state
        )
    assert len(told) == 1
    assert (trained.history["grad_norm"] > 0).all()


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Silent:
    """Support and query targets whose mean is 0: a head of zeros is a stationary point."""

    sine: lavajax.Sine

    def sample(self, key, split="train"):
        task = self.sine.sample(key, split)
        y = jnp.array([[1.0], [-1.0], [0.0]])
        queries = jnp.array([[1.0], [-1.0], [1.0], [-1.0]])
        return lavajax.Task(
            dataclasses.replace(task.support, y=y), dataclasses.replace(task.query, y=queries)
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Outlier:
    """A task in about 40 has query targets of 1e4."""

    sine: lavajax.Sine

    def sample(self, key, split="train"):
        task = self.sine.sample(key, split)
        far = jax.random.uniform(jax.random.fold_in(key, 7)) < 1 / 40
        y = jnp.where(far, 1e4, task.query.y)
        return lavajax.Task(task.support, dataclasses.replace(task.query, y=y))


@pytest.mark.parametrize("method", [METHOD, lavajax.lava_converged(model=RELU)])
def test_a_normal_run_says_nothing(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lavajax.train(method, TASKS, steps=40, chunk=4, meta_batch=2, seeds=2)
