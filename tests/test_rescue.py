"""Tasks that are not finite are left out of a step, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lavajax
from helpers import RELU, assert_close, at, make_params, make_points, stack
from lavajax.outer import BatchExpectation, meta_gradient
from lavajax.rescue import careful_step, not_finite
from lavajax.start import init_state, start_state
from lavajax.steps import draw

pytestmark = pytest.mark.filterwarnings("ignore:training left out")

METHOD = lavajax.Lava(RELU)
KEYS = jax.random.split(jax.random.key(3), 4)


def make_batch(spoil):
    tasks = [lavajax.Task(make_points(3, seed=s), make_points(4, seed=s + 9)) for s in range(4)]
    for index, value in spoil.items():
        y = tasks[index].support.y.at[1].set(value)
        tasks[index] = dataclasses.replace(
            tasks[index], support=dataclasses.replace(tasks[index].support, y=y)
        )
    return stack(tasks)


@pytest.mark.parametrize("method", [METHOD, lavajax.Maml(RELU)], ids=["lava", "maml"])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf])
def test_the_gradient_is_that_of_the_other_tasks(x64, method, value):
    params = make_params(method, make_points(3))
    spoilt, others = make_batch({0: value, 2: value}), jnp.array([1, 3])

    @jax.jit
    def of_the_good(params, tasks, keys):
        expect = BatchExpectation(tasks, keys)
        bad = not_finite(method, params, expect)
        return bad, meta_gradient(method, params, expect.without(bad))

    bad, (loss, gradient) = of_the_good(params, spoilt, KEYS)
    np.testing.assert_array_equal(bad, [True, False, True, False])
    alone = at(make_batch({}), others), KEYS[others]
    expected_loss, expected = jax.jit(
        lambda params, *alone: meta_gradient(method, params, BatchExpectation(*alone))
    )(params, *alone)
    assert_close(loss, expected_loss, 1e-12)
    assert_close(gradient, expected, 1e-12)


@pytest.mark.parametrize(
    "method",
    [METHOD, lavajax.Reptile(RELU, inner_steps=2), lavajax.vr_maml_tuned(model=RELU)],
    ids=["lava", "reptile", "vr-maml"],
)
def test_a_careful_step_is_the_step_unless_a_task_is_bad(x64, method):
    tx = optax.sgd(0.1)
    state = init_state(method, lavajax.Sine(shots=3, queries=4), tx, jax.random.key(0))
    step = jax.jit(lambda s, e_tasks: careful_step(s, BatchExpectation(e_tasks, KEYS), tx))
    new, metrics, bad = step(state, make_batch({}))
    of = jax.jit(lambda state, tasks, keys: method.step(state, BatchExpectation(tasks, keys), tx))
    plain, plain_metrics = of(state, make_batch({}), KEYS)
    assert not bad.any()
    assert_close(new.params.learned, plain.params.learned, 1e-12)
    assert_close(metrics, plain_metrics, 1e-10)
    new, metrics, bad = step(state, make_batch({1: jnp.nan}))
    np.testing.assert_array_equal(bad, [False, True, False, False])
    good = jnp.array([0, 2, 3])
    plain, _ = of(state, at(make_batch({}), good), KEYS[good])
    assert_close(new.params.learned, plain.params.learned, 1e-12)
    assert np.isfinite(metrics["loss"])
    assert new.step == state.step + 1


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Faulty:
    """Sine waves of which some have a label that is not a number."""

    share: float
    sine: lavajax.Sine = lavajax.Sine(shots=3, queries=4)

    def sample(self, key, split="train"):
        task = self.sine.sample(key, split)
        bad = (jax.random.uniform(jax.random.fold_in(key, 7)) < self.share) & (split == "train")
        y = task.support.y.at[0].set(jnp.where(bad, jnp.nan, task.support.y[0]))
        return lavajax.Task(dataclasses.replace(task.support, y=y), task.query)


@dataclasses.dataclass(frozen=True)
class Cusp(lavajax.SquaredError):
    """Its value is finite everywhere, its gradient is not where the target is 7."""

    def value(self, outputs, y):
        root = jnp.sqrt(jnp.where(y == 7, 0.0 * outputs, 1.0 + 0.0 * outputs))
        return super().value(outputs, y) + jnp.sum(0.0 * root)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class LastIsBad:
    """Sine waves; one query target of some is 7."""

    share: float

    def sample(self, key, split="train"):
        task = lavajax.Sine(shots=3, queries=4).sample(key, split)
        bad = jax.random.uniform(jax.random.fold_in(key, 7)) < self.share
        y = task.query.y.at[0].set(jnp.where(bad, 7.0, task.query.y[0]))
        return lavajax.Task(task.support, dataclasses.replace(task.query, y=y))


@pytest.mark.parametrize("chunk", [1, 6])
def test_a_gradient_that_is_not_finite_is_seen_where_the_loss_is(chunk):
    """Also in the last step of a chunk, after which no loss would show it."""
    method = lavajax.Anil(RELU, Cusp())
    run = {"steps": 6, "meta_batch": 4, "max_skipped": 0.9, "chunk": chunk}
    seen = []
    trained = lavajax.train(method, LastIsBad(0.3), callback=seen.append, **run)
    assert [each for progress in seen for each in progress.skipped]
    for leaf in jax.tree.leaves(trained.params.learned):
        assert np.isfinite(leaf).all()


def test_a_step_without_a_good_task_is_left_out_and_counted():
    """With a single task a step that is not divergence."""
    run = {"steps": 20, "meta_batch": 1, "max_skipped": 0.6}
    trained = lavajax.train(METHOD, Faulty(0.2), **run)
    assert trained.state.step == 20
    assert np.isfinite(trained.history["loss"]).all()
    seen = []
    run |= {"max_skipped": 1.0, "chunk": 1, "callback": seen.append}
    trained = lavajax.train(METHOD, Faulty(0.2), **run)
    skipped = tuple(each for progress in seen for each in progress.skipped)
    assert trained.skipped == skipped
    assert len(skipped) == np.isnan(trained.history["loss"]).sum() > 0
    for leaf in jax.tree.leaves(trained.params.learned):
        assert np.isfinite(leaf).all()


def test_training_goes_on_without_them_and_says_which_they_were():
    tasks, run = Faulty(0.02), {"steps": 40, "chunk": 10, "meta_batch": 4, "max_skipped": 0.2}
    with pytest.warns(UserWarning, match=r"left out \d+ tasks.* task \d of step \d+; Tr") as told:
        trained = lavajax.train(METHOD, tasks, **run)
    assert [each.filename for each in told] == [__file__]
    assert np.isfinite(trained.history["loss"]).all()
    skipped = list(trained.skipped)
    assert skipped
    expected = []
    for step in range(40):
        drawn, _ = draw(tasks, trained.state.key, jnp.int32(step), 4)
        bad = np.isnan(np.asarray(drawn.support.y)).any(axis=(1, 2))
        expected += [(step, int(index)) for index in np.flatnonzero(bad)]
    assert skipped == expected


def test_it_does_not_matter_how_the_run_is_split():
    run = {"steps": 20, "meta_batch": 4, "max_skipped": 1.0}
    one, two = (lavajax.train(METHOD, Faulty(0.1), chunk=c, **run) for c in (20, 5))
    assert_close(one.params.learned, two.params.learned, 1e-5)


def test_parameters_that_overflow_at_the_end_of_a_run_are_not_given_back():
    """Though the mean loss of the last chunk, over its steps before that, is finite."""
    tx = optax.sgd(lambda step: jnp.where(step < 8, 0.01, jnp.inf))
    with pytest.raises(FloatingPointError, match=r"diverged: what is learned, .* steps 0 and 10"):
        lavajax.train(METHOD, Faulty(0.0), steps=10, meta_batch=2, optimizer=tx, max_skipped=1.0)


def test_too_many_of_them_end_the_run():
    with pytest.raises(
        FloatingPointError, match=r"more than max_skipped allows; the first is task"
    ):
        lavajax.train(METHOD, Faulty(0.3), steps=20, meta_batch=4, max_skipped=0.05)
    tasks, seen = Faulty(0.1), []
    run = {"steps": 20, "meta_batch": 4, "chunk": 5}
    lavajax.train(METHOD, tasks, max_skipped=1.0, callback=seen.append, **run)
    skipped = [each for progress in seen for each in progress.skipped]
    assert seen[0].skipped
    assert skipped[-1] not in seen[0].skipped
    step, index = skipped[0]
    message = rf"^{len(skipped)} tasks up to .* the first is task {index} of step {step}\."
    with pytest.raises(FloatingPointError, match=message):
        lavajax.train(METHOD, tasks, max_skipped=(len(skipped) - 0.5) / 80, **run)
    lavajax.train(METHOD, tasks, max_skipped=(len(skipped) + 2) / 80, skipped=2, **run)
    with pytest.raises(FloatingPointError, match=message):  # with those before the run's state
        lavajax.train(METHOD, tasks, max_skipped=(len(skipped) + 1.5) / 80, skipped=2, **run)
    for wrong in (-1, 0.5, [1, 2]):
        with pytest.raises(ValueError, match="skipped must be an integer of at least 0, got"):
            lavajax.train(METHOD, tasks, skipped=wrong, **run)
    with pytest.raises(ValueError, match="max_skipped must be from 0 to 1"):
        lavajax.train(METHOD, Faulty(0.3), steps=20, max_skipped=1.5)


def test_a_seed_that_is_lost_does_not_hold_up_the_others():
    """A rate that some starts survive: here the second is made to fail from the beginning."""
    tasks = lavajax.Sine(shots=3, queries=4)
    tx = optax.sgd(0.01)
    state = start_state(METHOD, tasks, tx, seed=0, seeds=2)
    head = state.params.learned["head"].at[1].set(1e30)
    params = state.params.replace_learned({**state.params.learned, "head": head})
    state = dataclasses.replace(state, params=params)
    run = {"steps": 6, "chunk": 3, "meta_batch": 2, "optimizer": tx}
    trained = lavajax.train(METHOD, tasks, seeds=2, state=state, **run)
    assert np.isfinite(trained.history["loss"][:, 0]).all()
    assert not np.isfinite(trained.history["loss"][:, 1]).any()
    alone = lavajax.train(METHOD, tasks, seed=0, **run)
    assert_close(trained.seed(0).learned, alone.params.learned, 1e-4)
