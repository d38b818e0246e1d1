"""The outer loop and evaluation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

import lavajax
from lavajax.evaluate import _batch_size, _example, task_keys
from lavajax.outer import BatchExpectation
from lavajax.start import init_state, start_state
from lavajax.steps import run_steps
from lavajax.tasks.dynamics import Pendulum
from lavajax.types import Points, Task

MODEL = lavajax.MLP(hidden=(8, 8))
TASKS = lavajax.Sine(shots=4, queries=6)
METHOD = lavajax.Lava(model=MODEL)


def assert_equal_trees(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("seeds", [None, 2])
def test_any_split_into_chunks_gives_the_same_bits(seeds):
    """Keys are folded from the absolute step, not carried from chunk to chunk."""
    runs = [
        lavajax.train(METHOD, TASKS, steps=21, seeds=seeds, meta_batch=3, chunk=chunk)
        for chunk in (21, 7, 4)
    ]
    assert_equal_trees(runs[0].params, runs[1].params)
    assert_equal_trees(runs[0].params, runs[2].params)
    assert int(jnp.min(runs[0].state.step)) == 21


@pytest.mark.parametrize("seeds", [None, 2])
def test_run_that_goes_on_from_a_state_ends_at_the_same_bits(seeds):
    tx = lavajax.outer_optimizer(21)
    options = {"steps": 21, "seeds": seeds, "meta_batch": 3, "optimizer": tx, "chunk": 7}
    states = []
    whole = lavajax.train(
        METHOD, TASKS, **options, callback=lambda p: states.append(jax.tree.map(jnp.copy, p.state))
    )
    for state in states:  # the last is that of the end: nothing is left to do
        rest = lavajax.train(METHOD, TASKS, **options, state=state)
        assert_equal_trees(rest.params, whole.params)
        jax.block_until_ready(state)  # the caller's state is still the caller's
    assert {name: len(each) for name, each in rest.history.items()} == dict.fromkeys(
        whole.history, 0
    )
    with pytest.raises(ValueError, match="state must be of the method"):
        lavajax.train(lavajax.Anil(model=MODEL), TASKS, state=states[0])
    with pytest.raises(ValueError, match="state must be of seeds=3, got one of seeds="):
        lavajax.train(METHOD, TASKS, seeds=3, state=states[0])
    with pytest.raises(ValueError, match="state must not be beyond steps = 5, got one of step 7"):
        lavajax.train(METHOD, TASKS, steps=5, seeds=seeds, state=states[0])
    with pytest.raises(ValueError, match="state must be a TrainState, got MetaParams"):
        lavajax.train(METHOD, TASKS, state=whole.params)


def test_a_state_of_another_optimizer_or_of_other_tasks_is_refused():
    state = start_state(METHOD, TASKS, lavajax.outer_optimizer(20))
    with pytest.raises(ValueError, match=r"state\.opt must be such as optimizer makes it"):
        lavajax.train(METHOD, TASKS, state=state, optimizer=optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"state must be of points like those of tasks, PointSpec"):
        lavajax.train(METHOD, Pendulum(shots=3, queries=4), state=state)
    learned = {**state.params.learned, "head": jnp.zeros((2, 1))}
    other = dataclasses.replace(state, params=state.params.replace_learned(learned))
    with pytest.raises(
        ValueError, match=r"method makes it, \(9, 1\) float32 at 'learned/head', got"
    ):
        lavajax.train(METHOD, TASKS, state=other)


def test_tasks_drawn_ahead_are_those_drawn_step_by_step():
    """What a user's own loop over single steps would see."""
    tx = optax.sgd(0.01)
    state = init_state(METHOD, TASKS, tx, jax.random.key(0))
    run = jax.jit(lambda s, start, stop: run_steps(s, TASKS, tx, start, stop, meta_batch=3))
    ahead, metrics = run(state, 0, 6)
    losses = []
    for index in range(6):
        keys = jax.random.split(jax.random.fold_in(state.key, index))
        tasks = jax.vmap(TASKS.sample)(jax.random.split(keys[0], 3))
        expect = BatchExpectation(tasks, jax.random.split(keys[1], 3))
        state, step_metrics = METHOD.step(state, expect, tx)
        losses.append(step_metrics["loss"])
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-5)
    for a, b in zip(
        jax.tree.leaves(ahead.params.learned), jax.tree.leaves(state.params.learned), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_seeds_trained_together_are_the_seeds_trained_alone():
    """After few steps: rounding differs under vmap, and training amplifies it."""
    together = lavajax.train(METHOD, TASKS, steps=3, seed=5, seeds=2, meta_batch=3)
    for index in range(2):
        alone = lavajax.train(METHOD, TASKS, steps=3, seed=5 + index, meta_batch=3)
        for a, b in zip(
            jax.tree.leaves(together.seed(index)), jax.tree.leaves(alone.params), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    first, second = together.seed(0).learned["head"], together.seed(1).learned["head"]
    assert not jnp.allclose(first, second)


def test_history_and_progress_report_every_chunk():
    seen: list[lavajax.Progress] = []
    trained = lavajax.train(
        METHOD, TASKS, steps=10, seeds=2, meta_batch=2, chunk=4, callback=seen.append
    )
    assert trained.history["step"].tolist() == [4, 8, 10]
    assert trained.history["loss"].shape == (3, 2)
    assert [p.step for p in seen] == [4, 8, 10]
    assert len({p.compile_seconds for p in seen}) == 1
    np.testing.assert_array_equal(seen[1].metrics["loss"], trained.history["loss"][1])
    assert all(p.seconds > 0 for p in seen)
    assert trained.params["head"].shape == (2, 9, 1)


def test_a_run_alone_has_no_axis_of_seeds_and_no_seed_to_pick():
    trained = lavajax.train(METHOD, TASKS, steps=np.int64(2), seed=np.uint32(0), meta_batch=2)
    assert trained.params["head"].shape == (9, 1)
    with pytest.raises(ValueError, match="trained alone"):
        trained.seed(0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"meta_batch": 2.5}, "meta_batch must be an integer of at least 1, got 2.5"),
        ({"chunk": 0}, "chunk must be an integer of at least 1, got 0"),
        ({"seeds": 0}, "seeds must be an integer of at least 1, or None for a single run, got 0"),
        ({"steps": True}, "steps must be an integer of at least 1, got True"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295, got 4294967296"),
        ({"seed": 2**32 - 1, "seeds": 2}, "from 0 to 4294967294 for the 2 seeds from it on"),
        ({"seed": -1}, "seed must be an integer from 0 to"),
        ({"seed": 1.5}, r"seed must be an integer from 0 to 4294967295, got 1\.5"),
        ({"max_skipped": "all"}, "max_skipped must be from 0 to 1, a share, got 'all'"),
        ({"optimizer": optax.adam}, r"optimizer must be an optax\.GradientTransformation"),
    ],
)
def test_bad_arguments_of_train_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        lavajax.train(METHOD, TASKS, **{"steps": 2, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.0}, "rate must be a finite number above 0, got 0"),
        ({"clip": -1.0}, "clip must be a number above 0, got -1"),
        ({"rate": "fast"}, "rate must be a finite number above 0, got 'fast'"),
        ({"warmup": 1.5}, "warmup must be an integer of at least 0, got 1.5"),
        ({"warmup": 10}, "warmup must be at least 0 and below steps = 10, got 10"),
    ],
)
def test_bad_arguments_of_the_optimizer_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        lavajax.outer_optimizer(10, **change)


def test_the_same_optimizer_is_the_same_object_whatever_the_kind_of_its_numbers():
    """So that a second run compiles nothing."""
    one = lavajax.outer_optimizer(100, rate=0.5)
    assert one is lavajax.outer_optimizer(np.int64(100), rate=jnp.float32(0.5), warmup=10, clip=10)
    assert one is not lavajax.outer_optimizer(100, rate=0.25)


def test_optimizer_warms_up_peaks_and_decays_to_zero():
    """Adam's first updates have the size of the learning rate."""
    tx = lavajax.outer_optimizer(100, rate=0.01, warmup=10)
    params = {"w": jnp.zeros(())}
    state = tx.init(params)
    sizes = []
    for _ in range(100):
        updates, state = tx.update({"w": jnp.ones(())}, state, params)
        sizes.append(-float(updates["w"]))
    assert sizes[0] == 0.0
    assert np.argmax(sizes) == 10
    assert sizes[10] == pytest.approx(0.01, rel=1e-3)
    assert sizes[55] == pytest.approx(0.005, rel=0.05)
    assert sizes[99] < 1e-4


def test_a_users_own_optimizer_takes_the_meta_gradient():
    """One step of SGD moves every learned leaf by -rate times the gradient of the mean loss."""
    rate = 0.1
    tx = optax.sgd(rate)
    start = init_state(METHOD, TASKS, tx, jax.random.key(0))
    end = lavajax.train(METHOD, TASKS, steps=1, seed=0, meta_batch=3, optimizer=tx)

    sample_key, method_key = jax.random.split(jax.random.fold_in(start.key, 0))
    tasks = jax.vmap(TASKS.sample)(jax.random.split(sample_key, 3))
    keys = jax.random.split(method_key, 3)

    def mean_loss(learned):
        params = start.params.replace_learned(learned)
        return jnp.mean(jax.vmap(lambda t, k: METHOD.loss(params, t, k))(tasks, keys))

    loss, grads = jax.jit(jax.value_and_grad(mean_loss))(start.params.learned)
    assert float(end.history["loss"][0]) == pytest.approx(float(loss), rel=1e-5)
    expected = jax.tree.map(lambda p, g: p - rate * g, start.params.learned, grads)
    for a, b in zip(jax.tree.leaves(end.params.learned), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_things_that_are_not_a_method_or_a_source_are_refused():
    with pytest.raises(ValueError, match=r"method must be an instance such as Lava\(\)"):
        lavajax.train(lavajax.Lava, TASKS)
    with pytest.raises(ValueError, match=r"got AirQuality; give what its load\(\) returns"):
        lavajax.train(METHOD, lavajax.AirQuality("x.zip"))

    class Unknown:
        sample = TASKS.sample

    with pytest.raises(ValueError, match=r"JAX does not know Unknown.*register_dataclass"):
        lavajax.train(METHOD, Unknown())


def test_one_seed_of_several_must_be_picked():
    trained = lavajax.train(METHOD, TASKS, steps=1, seeds=3, meta_batch=2)
    with pytest.raises(ValueError, match=r"params must be those of one seed, got 3 seeds"):
        lavajax.evaluate(trained.params, TASKS)
    with pytest.raises(ValueError, match=r"must be MetaParams, got Trained; give its \.params"):
        lavajax.adapt(trained, example())
    with pytest.raises(ValueError, match="index must be from 0 to 2, one for each seed, got 3"):
        trained.seed(3)


def test_memory_that_starts_as_the_parameters_trains():
    """Whatever a method keeps of its parameters: buffers given up to a chunk are no one else's."""

    @dataclasses.dataclass(frozen=True)
    class Remembering(lavajax.Anil):
        def memory(self, params):
            return params.learned

    trained = lavajax.train(Remembering(model=MODEL), TASKS, steps=4, chunk=2, meta_batch=2)
    start = init_state(
        Remembering(model=MODEL), TASKS, optax.sgd(0.1), jax.random.key(0)
    ).params.learned
    np.testing.assert_allclose(trained.state.memory["head"], start["head"], rtol=1e-6)


def test_divergence_is_an_error_that_says_where():
    method = lavajax.Maml(model=MODEL, inner_rate=1e6, inner_steps=3)
    with pytest.raises(FloatingPointError, match="not finite between steps 0 and 3"):
        lavajax.train(method, TASKS, steps=6, chunk=3, meta_batch=2, optimizer=optax.sgd(1e3))


def test_lava_learns_sine_waves_and_one_step_of_anil_does_not():
    """N = 10, 800 updates: below 0.05 against above 0.15."""
    tasks = lavajax.Sine(shots=10)
    lava = lavajax.train(lavajax.Lava(), tasks, steps=800)
    anil = lavajax.train(lavajax.Anil(), tasks, steps=800)
    assert lavajax.evaluate(lava.params, tasks, num_tasks=300).mean < 0.05
    assert lavajax.evaluate(anil.params, tasks, num_tasks=300).mean > 0.15


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """A user's source: rows of stored labels over one grid of inputs."""

    labels: jax.Array

    def sample(self, key, split="train"):
        row_key, order_key = jax.random.split(jax.random.fold_in(key, len(split)))
        y = self.labels[jax.random.randint(row_key, (), 0, self.labels.shape[0])][:, None]
        x = jnp.linspace(-1, 1, y.shape[0])[:, None]
        order = jax.random.permutation(order_key, y.shape[0])
        support, query = order[:3], order[3:]
        return Task(Points(x[support], y[support]), Points(x[query], y[query]))


def test_stored_data_is_an_argument_and_new_data_compiles_nothing(monkeypatch):
    traces = []
    sample = Stored.sample
    monkeypatch.setattr(
        Stored,
        "sample",
        lambda self, key, split="train": (traces.append(0), sample(self, key, split))[1],
    )
    rng = np.random.default_rng(0)
    first, second = (Stored(jnp.asarray(rng.normal(size=(5, 8)), jnp.float32)) for _ in range(2))
    optimizer = lavajax.outer_optimizer(6)
    one = lavajax.train(METHOD, first, steps=6, meta_batch=2, optimizer=optimizer)
    count = len(traces)
    assert count > 0
    two = lavajax.train(METHOD, second, steps=6, meta_batch=2, optimizer=optimizer)
    assert len(traces) == count
    assert not jnp.allclose(one.params["head"], two.params["head"])
    lavajax.evaluate(one.params, first, num_tasks=4)
    count = len(traces)
    lavajax.evaluate(two.params, second, num_tasks=4)
    assert len(traces) == count + 1  # the check of its shapes, likewise


def test_evaluation_is_the_mean_of_independent_tasks_whatever_the_batch():
    params = METHOD.init(jax.random.key(0), *example())
    wide = lavajax.evaluate(params, TASKS, num_tasks=30, batch=30)
    narrow = lavajax.evaluate(params, TASKS, num_tasks=30, batch=7)
    np.testing.assert_allclose(wide.values, narrow.values, rtol=1e-5)
    assert wide.metric == "mse"
    keys = task_keys(0, 30)
    for index in (0, 29):
        task = TASKS.sample(jax.random.split(keys[index])[0], "test")
        adapted = lavajax.adapt(params, task.support)
        error = jnp.mean((lavajax.predict(params, adapted, task.query.x).mean - task.query.y) ** 2)
        assert wide.values[index] == pytest.approx(float(error), rel=1e-4)


def test_tasks_that_are_large_are_scored_a_few_at_a_time():
    batches = {
        points: _batch_size(_example(lavajax.Sine(queries=points), "test"))
        for points in (
            50,
            10_000,
            10**6,
        )
    }
    assert batches == {50: 250, 10_000: 2**22 // (8 * 10_010), 10**6: 1}


def test_evaluation_statistics_against_numpy():
    values = np.array([1.0, 2.0, 3.0, 10.0])
    found = lavajax.Evaluation("mse", values)
    half = 1.96 * values.std(ddof=1) / 2
    assert found.mean == 4.0
    assert found.median == 2.5
    assert found.interval == pytest.approx((4 - half, 4 + half))


def test_tasks_without_a_finite_estimate_are_counted():
    found = lavajax.Evaluation("mse", np.array([1.0, np.nan, 3.0, np.inf]))
    assert found.not_finite == 2
    assert np.isnan(found.mean)
    assert lavajax.Evaluation("mse", np.ones(3)).not_finite == 0


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Unscored:
    """Tasks of which every other one has no real query point, or all have none."""

    queries: int

    def sample(self, key, split="train"):
        task = lavajax.Sine(shots=3, queries=2).sample(key, split)
        real = jnp.broadcast_to(jax.random.bernoulli(key), (2,))
        query = dataclasses.replace(task.query, mask=real)
        return Task(task.support, jax.tree.map(lambda leaf: leaf[: self.queries], query))


def test_a_task_without_a_query_is_no_perfect_score():
    params = METHOD.init(jax.random.key(0), *example())
    found = lavajax.evaluate(params, Unscored(2), num_tasks=20)
    queries = [
        Unscored(2).sample(jax.random.split(key)[0], "test").query.mask.any()
        for key in task_keys(0, 20)
    ]
    np.testing.assert_array_equal(np.isfinite(found.values), queries)
    assert 0 < found.not_finite < 20
    with pytest.raises(ValueError, match="a query of at least one point to be scored"):
        lavajax.evaluate(params, Unscored(0), num_tasks=2)
    with pytest.warns(UserWarning, match=r"training is dead.*and the tasks have a query"):
        lavajax.train(METHOD, Unscored(0), steps=2, meta_batch=2)


@dataclasses.dataclass(frozen=True)
class Unlike:
    """Tasks whose query, or a mask, does not go with the support."""

    query: tuple[int, ...] = (10, 2)
    mask: tuple[float, ...] | None = None

    def sample(self, key, split="train"):
        del split
        x, y = jnp.ones((5, 1)), jax.random.normal(key, (5, 2))
        mask = None if self.mask is None else jnp.asarray(self.mask)
        return lavajax.Task(lavajax.Points(x, y, mask), lavajax.Points(*self._query()))

    def _query(self):
        return jnp.ones((10, 1)), jnp.ones(self.query)


jax.tree_util.register_static(Unlike)


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (Unlike((10, 1)), r"a query of points like those .* y of shape \(5, 2\) .* \(10, 1\)"),
        (Unlike((9, 2)), r"as many targets as inputs, got a query with x .* and y of \(9, 2\)"),
        (Unlike(mask=(1.0,) * 5), r"masks of booleans, .* a support .* dtype float32"),
    ],
)
def test_tasks_whose_parts_are_not_alike_are_refused_before_they_are_broadcast(tasks, message):
    method = lavajax.Anil(MODEL)
    with pytest.raises(ValueError, match=message):
        lavajax.train(method, tasks, steps=1)
    params = method.init(jax.random.key(0), jnp.ones((5, 1)), jnp.ones((5, 2)))
    with pytest.raises(ValueError, match=message):
        lavajax.evaluate(params, tasks, num_tasks=2)


def test_score_sees_the_tasks_that_evaluate_sees():
    params = METHOD.init(jax.random.key(0), *example())

    def error(task, key):
        adapted = METHOD.adapt(params, task.support, key=key)
        return jnp.mean((METHOD.predict(params, adapted, task.query.x).mean - task.query.y) ** 2)

    found = lavajax.score(error, TASKS, num_tasks=20, seed=3)
    expected = lavajax.evaluate(params, TASKS, num_tasks=20, seed=3).values
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class OfSplit:
    """Sine waves whose targets are those of the split: 1, 2 or 3."""

    def sample(self, key, split="train"):
        task = TASKS.sample(key, split)
        value = float(1 + ("train", "validation", "test").index(split))
        return jax.tree.map(
            lambda points: dataclasses.replace(points, y=jnp.full_like(points.y, value)),
            task,
            is_leaf=lambda node: isinstance(node, lavajax.Points),
        )


@pytest.mark.parametrize(
    ("options", "value"), [({}, 3), ({"split": "validation"}, 2), ({"split": "train"}, 1)]
)
def test_tasks_are_those_of_the_split_that_is_asked_for(options, value):
    found = lavajax.score(lambda task, key: task.query.y[0, 0], OfSplit(), num_tasks=4, **options)
    np.testing.assert_array_equal(found, value)
    params = lavajax.Lava(model=MODEL, inner_rate=0.0).init(jax.random.key(0), *example())
    zero = params.replace_learned(jax.tree.map(jnp.zeros_like, params.learned))  # and so it stays
    scores = lavajax.evaluate(zero, OfSplit(), num_tasks=4, **options)
    np.testing.assert_array_equal(scores.values, value**2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tasks": 1}, "num_tasks must be an integer of at least 2, for an interval"),
        ({"num_tasks": 2.5}, "num_tasks must be an integer of at least 2, .* got 2.5"),
        ({"seed": 2**32}, "seed must be an integer from 0 to 4294967295"),
        ({"split": "valid"}, "split must be one of 'train', 'validation', 'test', got 'valid'"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
    ],
)
def test_bad_arguments_of_evaluate_are_refused(change, message):
    params = METHOD.init(jax.random.key(0), *example())
    with pytest.raises(ValueError, match=message):
        lavajax.evaluate(params, TASKS, **change)


def example():
    support = TASKS.sample(jax.random.key(0)).support
    return support.x, support.y


def test_evaluation_gives_likelihood_and_coverage_of_predicted_variances():
    params = lavajax.train(lavajax.Alpaca(MODEL), TASKS, steps=3, meta_batch=2).params
    found = lavajax.evaluate(params, TASKS, num_tasks=4)
    for index, key in enumerate(task_keys(0, 4)):
        task = TASKS.sample(jax.random.split(key)[0], "test")
        p = lavajax.predict(params, lavajax.adapt(params, task.support), task.query.x)
        mean, variance = np.float64(p.mean), np.float64(p.epistemic + p.noise)
        squares = (np.float64(task.query.y) - mean) ** 2 / variance
        nll = 0.5 * (squares + np.log(2 * np.pi * variance))
        np.testing.assert_allclose(found.nll[index], np.mean(nll), rtol=1e-3)
        widths = {"coverage": 1.959964, "coverage_90": 1.644854, "coverage_50": 0.674490}
        for name, width in widths.items():
            inside = np.mean(squares <= width**2)
            np.testing.assert_allclose(getattr(found, name)[index], inside, rtol=1e-6)
        np.testing.assert_allclose(found.sharpness[index], np.sqrt(variance).mean(), rtol=1e-5)
        y, std = np.float64(task.query.y)[:, 0], np.sqrt(variance)[:, 0]
        t = np.linspace(-30, 30, 40_001)[:, None]
        steps = (norm.cdf(t, mean[:, 0], std) - (t >= y)) ** 2
        integral = np.trapezoid(steps, t, axis=0).mean()
        np.testing.assert_allclose(found.crps[index], integral, rtol=5e-3)
    plain = lavajax.train(METHOD, TASKS, steps=1, meta_batch=2).params
    assert lavajax.evaluate(plain, TASKS, num_tasks=4).nll is None
    with pytest.raises(ValueError, match=r"targets \(1,\), got \(2,\) and \(1,\)"):
        lavajax.evaluate(plain, Wide(), num_tasks=4)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wide:
    """Tasks of two inputs."""

    def sample(self, key, split="train"):
        points = Points(jnp.zeros((3, 2)), jnp.zeros((3, 1)))
        return Task(points, points)
