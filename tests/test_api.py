"""lavajax.adapt and lavajax.predict, as a user calls them."""

import dataclasses
import subprocess
import sys
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import (
    METHODS,
    RELU,
    TANH,
    Circle,
    adapt,
    assert_close,
    assert_different,
    assert_finite,
    at,
    make_labels,
    make_params,
    make_points,
    points_for,
    prior_block,
    stack,
    with_method,
)
from lavajax.methods.base import init_network, predict_mean, require_key
from lavajax.methods.task_loss import query_loss
from lavajax.outer import gradient_step, no_memory

N = 4
SUPPORT, QUERY = make_points(N), make_points(5, seed=3)
PARAMS = make_params(lj.Lava(RELU), SUPPORT)
EVERY = pytest.mark.parametrize("name", METHODS)


def predicted(params, support, x=QUERY.x):
    return lj.predict(params, lj.adapt(params, support), x).mean


# Input that is taken


def test_points_and_pairs_of_numpy_or_jax_arrays_are_one():
    expected = adapt(PARAMS, SUPPORT)
    x, y = np.asarray(SUPPORT.x), np.asarray(SUPPORT.y)
    for support in (
        (SUPPORT.x, SUPPORT.y),
        (x, y),
        (x.astype(np.float64), y.astype(np.float64)),
        lj.Points(x, y, np.ones(N, bool)),
        lj.Points(SUPPORT.x, y, np.ones(N, int)),
        (x.tolist(), y.tolist()),
    ):
        assert_close(adapt(PARAMS, support), expected, 1e-6)
    adapted = lj.adapt(PARAMS, SUPPORT)
    for inputs in (x, x.astype(np.float64), x.tolist()):
        actual = lj.predict(PARAMS, adapted, inputs).mean
        assert_close(actual, lj.predict(PARAMS, adapted, SUPPORT.x).mean, 1e-6)


@pytest.mark.parametrize("name", ["lava-head", "lava-full", "maml", "cavia", "anil-classes"])
def test_integer_inputs_are_cast(name):
    """And integer targets of a regression."""
    method = METHODS[name]
    params = make_params(method, points_for(method, N))
    x = jnp.array([[0], [2], [-1], [3]])
    y = points_for(method, N).y
    y = y if jnp.issubdtype(y.dtype, jnp.integer) else jnp.round(3 * y)
    expected = adapt(params, (x.astype(float), y))
    assert_finite(expected)
    assert_close(adapt(params, (x, y.astype(jnp.int32))), expected, 1e-6)
    prediction = lj.predict(params, lj.Adapted(expected), x)
    assert_close(prediction.mean, lj.predict(params, lj.Adapted(expected), 1.0 * x).mean, 1e-6)


# Under jit, vmap and grad


def test_works_under_vmap_and_jit():
    supports = [SUPPORT, make_points(N, seed=1)]
    batch = stack(supports)
    run = jax.vmap(lambda s: predicted(PARAMS, s))
    for compiled in (run, jax.jit(run)):
        for index, support in enumerate(supports):
            assert_close(at(compiled(batch), index), predicted(PARAMS, support), 1e-5)


@pytest.mark.parametrize("name", ["lava-head", "lava-context", "lava-full", "maml"])
def test_gradients_by_parameters_and_support_are_finite_differences(x64, name):
    """Through both calls, under ``jit(vmap(grad))``."""
    method = dataclasses.replace(METHODS[name], model=TANH)
    supports = [make_points(N, 2), make_points(N, 2, seed=1)]
    params = make_params(method, supports[0])

    def error(learned, x, y):
        mean = predicted(params.replace_learned(learned), (x, y), jnp.ones((2, 1)))
        return jnp.sum(mean**2)

    batch = stack(supports)
    axes = (None, 0, 0)
    gradient = jax.jit(jax.vmap(jax.grad(error, argnums=(0, 1, 2)), in_axes=axes))
    value = jax.jit(jax.vmap(error, in_axes=axes))
    start = (params.learned, batch.x, batch.y)
    found = gradient(*start)
    rng, h = np.random.default_rng(0), 1e-5
    for argument in range(3):
        direction = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), start[argument])

        def shifted(sign, argument=argument, direction=direction):
            moved = jax.tree.map(lambda a, d: a + sign * h * d, start[argument], direction)
            return value(*start[:argument], moved, *start[argument + 1 :])

        expected = (shifted(1) - shifted(-1)) / (2 * h)
        for task in range(2):
            moved = direction if argument == 0 else direction[task]
            slopes = jax.tree.map(lambda g, d: jnp.sum(g * d), at(found[argument], task), moved)
            slope = sum(jax.tree.leaves(slopes))
            np.testing.assert_allclose(slope, expected[task], rtol=1e-5)


# Input that is refused


def refused(match, support, params=PARAMS):
    with pytest.raises(ValueError, match=match):
        lj.adapt(params, support)


def test_targets_without_an_axis_of_outputs_are_told_what_to_do():
    refused(
        r"support\.y must have shape \(N, 1\), as in training, got \(4,\);.*y\[:, None\]",
        (SUPPORT.x, SUPPORT.y[:, 0]),
    )


def test_inputs_of_another_width_are_refused():
    refused(r"support\.x must have shape \(N, 1\).*got \(4, 3\)", (jnp.ones((4, 3)), SUPPORT.y))
    with pytest.raises(ValueError, match=r"^x must have shape \(N, 1\).*got \(4, 3\)"):
        lj.predict(PARAMS, lj.adapt(PARAMS, SUPPORT), jnp.ones((4, 3)))


def test_inputs_without_an_axis_of_features_are_told_what_to_do():
    refused(r"support\.x.*got \(4,\); a single input is x\[:, None\]", (jnp.ones(4), SUPPORT.y))
    with pytest.raises(ValueError, match=r"^x must.*got \(4,\); a single input is x\[:, None\]"):
        lj.predict(PARAMS, lj.adapt(PARAMS, SUPPORT), jnp.ones(4))


def test_a_scalar_input_is_refused():
    refused(r"support\.x must have shape \(N, 1\).*got \(\)", (1.0, SUPPORT.y))
    refused(r"support\.y must have shape \(N, 1\).*got \(\)", (SUPPORT.x, 1.0))


def test_targets_of_another_width_are_refused():
    refused(r"support\.y must have shape \(N, 1\).*got \(4, 2\)", (SUPPORT.x, jnp.ones((4, 2))))


def test_different_numbers_of_inputs_and_targets_are_refused():
    refused(r"support\.x and support\.y.*as many points, got 4 and 3", (SUPPORT.x, SUPPORT.y[:3]))


def test_a_mask_of_the_wrong_shape_is_refused():
    for shape in ((3,), (4, 1), ()):
        mask = jnp.ones(shape, bool)
        refused(
            rf"support\.mask must have shape \(4,\).*got \({', '.join(map(str, shape))}",
            dataclasses.replace(SUPPORT, mask=mask),
        )


def test_a_mask_that_is_no_choice_of_points_is_refused():
    """Weights and lists of indices are not what a mask is."""
    for mask in ([0.2, 1.0, 1.0, 0.0], [0, 2, 1, 3]):
        given = dataclasses.replace(SUPPORT, mask=np.array(mask))
        refused(r"support\.mask must be booleans, True where a point is real", given)


def test_integers_beyond_32_bits_keep_their_value():
    """Milliseconds since 1970, say; labels of that size are none."""
    large = 2**40
    as_integers, as_floats = (
        adapt(PARAMS, (np.asarray(SUPPORT.x) + np.array(large, dtype), SUPPORT.y))
        for dtype in (np.int64, np.float64)
    )
    x = np.full((N, 1), large)
    assert_close(adapt(PARAMS, (x, SUPPORT.y)), adapt(PARAMS, (x.astype(float), SUPPORT.y)), 0.0)
    assert_close(as_integers, as_floats, 0.0)
    assert_close(adapt(PARAMS, (x.tolist(), SUPPORT.y)), adapt(PARAMS, (x, SUPPORT.y)), 0.0)
    labels = make_labels(N)
    params = make_params(lj.Anil(RELU, lj.CrossEntropy(3)), labels)
    with pytest.raises(ValueError, match="labels"):
        lj.adapt(params, (labels.x, np.full(N, 2**32)))


@pytest.mark.parametrize("support", [None, np.ones((4, 2)), (1, 2, 3), {"x": 1, "y": 2}])
def test_what_is_not_points_is_refused(support):
    refused(rf"support must be Points.*\(x, y\), got {type(support).__name__}", support)


def test_memory_of_the_users_may_be_written_to_after_a_call():
    """JAX on a CPU takes memory aligned to 64 bytes as it is, and reads it later."""
    adapted = lj.adapt(PARAMS, SUPPORT)
    size = 100_000
    memory = np.ones(size + 16, np.float32)
    first = -memory.ctypes.data // memory.itemsize % 16
    x = memory[first : first + size, None]
    expected = np.asarray(lj.predict(PARAMS, adapted, x).mean)
    for _ in range(5):
        found = lj.predict(PARAMS, adapted, x)
        x[:] = np.nan
        assert np.array_equal(found.mean, expected)
        x[:] = 1.0


def test_masked_arrays_are_refused():
    """What is behind a mask would count."""
    x, y = (np.ma.array(a, mask=np.arange(N)[:, None] == 1) for a in (SUPPORT.x, SUPPORT.y))
    refused(r"support\.x must have no masked entries; leave such points out", (x, SUPPORT.y))
    refused(r"support\.y must have no masked entries", (SUPPORT.x, y))
    with pytest.raises(ValueError, match=r"^x must have no masked entries"):
        lj.predict(PARAMS, lj.adapt(PARAMS, SUPPORT), x)
    whole = np.ma.array(SUPPORT.x, mask=False)
    assert_close(adapt(PARAMS, (whole, SUPPORT.y)), adapt(PARAMS, SUPPORT), 0)


def test_text_is_refused():
    refused(r"support\.x must be an array of numbers", (["one"], SUPPORT.y))
    refused(r"support\.y must be an array of numbers", (SUPPORT.x, [["one"]] * 4))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["x", "y"])
def test_a_real_point_that_is_not_finite_is_refused_and_propagates_under_jit(field, bad):
    values = getattr(SUPPORT, field).at[2].set(bad)
    support = dataclasses.replace(SUPPORT, **{field: values})
    refused(rf"support\.{field} must be finite.*at point 2", support)
    masked = dataclasses.replace(support, mask=jnp.array([False, True, True, True]))
    refused(rf"support\.{field} must be finite.*at point 2", masked)
    low = dataclasses.replace(support, **{field: values.astype(jnp.bfloat16)})
    refused(rf"support\.{field} must be finite in bfloat16.*at point 2", low)
    block = jax.jit(lambda s: lj.adapt(PARAMS, s).block)(support)
    assert not np.all(np.isfinite(block))


@pytest.mark.parametrize("name", ["imaml", "maml", "ridge"])
def test_what_is_not_finite_reaches_the_loss_and_the_gradient(name):
    """No route to the estimate, such as conjugate gradients, may swallow it."""
    method = METHODS[name]
    support = points_for(method, N)
    params = make_params(method, support)

    @jax.jit
    def loss_and_gradient(y):
        task = lj.Task(dataclasses.replace(support, y=y), support)
        loss = lambda v: method.loss(params.replace_learned(v), task, None)  # noqa: E731
        return jax.value_and_grad(loss)(params.learned)

    assert_finite(loss_and_gradient(support.y))
    value, gradient = loss_and_gradient(support.y.at[1, 0].set(jnp.nan))
    assert np.isnan(value)
    assert not np.isfinite(jax.flatten_util.ravel_pytree(gradient)[0]).all()


def test_an_estimate_that_is_not_finite_is_refused_and_propagates_under_jit():
    params = make_params(lj.Anil(RELU, inner_rate=1e3, inner_steps=20), SUPPORT)
    refused(r"support must have a finite estimate.*smaller inner rate", SUPPORT, params)
    assert not np.isfinite(jax.jit(lambda s: lj.adapt(params, s).block)(SUPPORT)).all()


def test_an_outcome_of_several_tasks_or_of_another_model_is_refused():
    """Unseen, its tasks would be taken for outputs or for samples."""
    two = stack([SUPPORT, make_points(N, seed=8)])
    for method in (lj.Lava(RELU), lj.Platipus(RELU, samples=3), lj.Cnp(encoder=(8,), encoding=4)):
        params = make_params(method, SUPPORT)
        one = lj.adapt(params, SUPPORT)
        lj.predict(params, one, QUERY.x)
        lj.predict(params, lj.adapt(params, SUPPORT, key=jax.random.key(0)), QUERY.x)
        batch = jax.vmap(lambda s, p=params: lj.adapt(p, s))(two)
        with pytest.raises(ValueError, match="adapted must be of one task of this model"):
            lj.predict(params, batch, QUERY.x)
        found = jax.vmap(lambda a, p=params: lj.predict(p, a, QUERY.x).mean)(batch)
        assert_close(found[0], lj.predict(params, one, QUERY.x).mean, 1e-5)
    with pytest.raises(ValueError, match="adapted must be of one task of this model"):
        lj.predict(PARAMS, one, QUERY.x)


def test_a_diagnosis_takes_what_adapt_takes():
    found = lj.diagnose(PARAMS, (np.asarray(SUPPORT.x), np.asarray(SUPPORT.y)))
    assert found.hessians.shape[0] == N
    with pytest.raises(ValueError, match="support must have a point to diagnose"):
        lj.diagnose(PARAMS, (SUPPORT.x[:0], SUPPORT.y[:0]))
    with pytest.raises(ValueError, match="support must have a point to diagnose"):
        lj.diagnose(PARAMS, dataclasses.replace(SUPPORT, mask=np.zeros(N, bool)))
    wide = lj.Lava(lj.MLP(hidden=(64,)), subspace=lj.Full())
    with pytest.raises(ValueError, match="support must have few enough points for their Hessians"):
        lj.diagnose(make_params(wide, SUPPORT), make_points(20))
    with pytest.raises(ValueError, match=r"params must be of Lava or IMaml.*Ridge"):
        lj.diagnose(make_params(lj.Ridge(RELU), SUPPORT), SUPPORT)


def test_complex_targets_are_refused():
    refused(r"y must be real, got dtype complex64", (SUPPORT.x, SUPPORT.y + 1j))


def test_labels_out_of_range_or_not_integers_are_refused():
    labels = make_labels(N)
    params = make_params(METHODS["lava-head-classes"], labels)
    for bad in (-1, 3):
        y = labels.y.at[1].set(bad)
        refused(f"y must hold labels from 0 to 2, got {bad}", (labels.x, y), params)
        masked = lj.Points(labels.x, y, jnp.array([True, False, True, True]))
        assert_finite(adapt(params, masked))
        block = jax.jit(lambda s: lj.adapt(params, s).block)((labels.x, y))
        assert not np.all(np.isfinite(block))
    refused("integer labels.*float32", (labels.x, labels.y.astype(float)), params)
    refused(
        r"support\.y must have shape \(N,\).*got \(4, 1\)", (labels.x, labels.y[:, None]), params
    )


# Degenerate supports and queries


@EVERY
def test_no_points_give_exactly_the_prior(name):
    """By a support of size 0, or by a mask that is all False."""
    method = METHODS[name]
    some = points_for(method, N)
    params = make_params(method, some)
    prior = prior_block(params)
    assert_close(adapt(params, (some.x[:0], some.y[:0])), prior, 0)
    assert_close(adapt(params, (np.zeros((0, 1)), np.asarray(some.y[:0]))), prior, 0)
    unseen = dataclasses.replace(some, x=some.x.at[:].set(jnp.nan), mask=jnp.zeros(N, bool))
    assert_close(adapt(params, unseen), prior, 0)


@EVERY
def test_degenerate_tasks_have_finite_values_and_gradients(name):
    """N = 1, duplicated points, no support, no query; all in one shape."""
    method = METHODS[name]
    some, query = points_for(method, N), points_for(method, 5, seed=3)
    params = make_params(method, some)
    everything, nothing = jnp.ones(N, bool), jnp.zeros(N, bool)
    supports = {
        "one point": dataclasses.replace(some, mask=nothing.at[0].set(True)),
        "duplicates": lj.Points(
            jnp.repeat(some.x[:1], N, axis=0), jnp.repeat(some.y[:1], N, axis=0), everything
        ),
        "one input, many labels": lj.Points(jnp.repeat(some.x[:1], N, axis=0), some.y, everything),
        "none": dataclasses.replace(some, mask=nothing),
    }

    @jax.jit
    @jax.vmap
    def run(support):
        def loss(learned):
            task = lj.Task(support, query)
            return method.loss(params.replace_learned(learned), task, None)

        return jax.value_and_grad(loss)(params.learned)

    assert_finite(run(stack(list(supports.values()))))


@EVERY
def test_padding_has_no_effect_on_any_gradient(name):
    """Outer loss, by meta-parameters and by the real points themselves."""
    method = METHODS[name]
    support = points_for(method, N)
    params = make_params(method, support)
    query = points_for(method, 5, seed=3)
    mask = jnp.array([True, False, True, True])
    padded = dataclasses.replace(support, mask=mask)

    @jax.jit
    def gradients(learned, support_x, query_x, task):
        def loss(learned, support_x, query_x):
            task_here = lj.Task(
                dataclasses.replace(task.support, x=support_x),
                dataclasses.replace(task.query, x=query_x),
            )
            return method.loss(params.replace_learned(learned), task_here, None)

        return jax.grad(loss, argnums=(0, 1, 2))(learned, support_x, query_x)

    def run(support, query):
        return gradients(params.learned, support.x, query.x, lj.Task(support, query))

    query = dataclasses.replace(query, mask=jnp.array([True, True, False, True, False]))
    expected = run(padded, query)
    spoilt = dataclasses.replace(padded, x=support.x.at[1].set(jnp.nan))
    query_spoilt = dataclasses.replace(query, x=query.x.at[2].set(jnp.inf).at[4].set(jnp.nan))
    if jnp.issubdtype(support.y.dtype, jnp.inexact):
        spoilt = dataclasses.replace(spoilt, y=support.y.at[1].set(jnp.nan))
        query_spoilt = dataclasses.replace(query_spoilt, y=query.y.at[4].set(jnp.nan))
    actual = run(spoilt, query_spoilt)
    assert_finite(actual)
    assert_close(actual, expected, 1e-5)
    np.testing.assert_array_equal(actual[1][1], 0)
    np.testing.assert_array_equal(actual[2][np.array([2, 4])], 0)


@EVERY
def test_an_empty_query_has_no_loss_and_no_gradient(name):
    """By size and by mask."""
    method = METHODS[name]
    support = points_for(method, N)
    params = make_params(method, support)
    query = points_for(method, 3)
    empties = [
        lj.Points(query.x[:0], query.y[:0]),
        dataclasses.replace(query, mask=jnp.zeros(3, bool)),
    ]

    @jax.jit
    def run(learned):
        def loss(learned, empty):
            return method.loss(params.replace_learned(learned), lj.Task(support, empty), None)

        return [jax.value_and_grad(loss)(learned, empty) for empty in empties]

    for loss, gradient in run(params.learned):
        assert float(loss) == 0
        assert_close(gradient, jax.tree.map(jnp.zeros_like, gradient), 0)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Features that say nothing: 0 everywhere."""

    def init(self, key, x, context=None):
        return {}, {}

    def features(self, weights, fixed, x, *, context=None, mask=None):
        return jnp.zeros((len(x), 3))


@pytest.mark.parametrize("steps", [1, 3, "converged", "map"])
@pytest.mark.parametrize("subspace", [lj.Head(), lj.Full()], ids=["head", "full"])
def test_constant_features_move_the_bias_alone(subspace, steps):
    """Every point then has the same curvature: the estimate is the average of the steps."""
    method = lj.Lava(Constant(), subspace=subspace, inner_steps=steps, learn_epsilon=True)
    params = make_params(method, SUPPORT)

    def loss(learned):
        return method.loss(params.replace_learned(learned), lj.Task(SUPPORT, QUERY), None)

    assert_finite(jax.jit(jax.value_and_grad(loss))(params.learned))
    block = adapt(params, SUPPORT)
    head = block if isinstance(subspace, lj.Head) else block["head"]
    assert_close(head[:-1], params["head"][:-1], 1e-6)
    residual = float(jnp.mean(SUPPORT.y) - params["head"][-1, 0])
    share = {1: 0.2, 3: 1 - 0.8**3, "converged": 1.0, "map": 2 / 2.1}
    if steps == "map":  # eps, which is learned, stands above its floor
        share["map"] = 2 / (2.1 + 2 * method.epsilon_floor)
    moved = float(head[-1, 0] - params["head"][-1, 0])
    np.testing.assert_allclose(moved, share[steps] * residual, rtol=1e-4)


# Stochastic methods


@dataclasses.dataclass(frozen=True)
class Jittered:
    """A user's stochastic method: it adds noise to the head, and has no deterministic answer."""

    subspace: ClassVar[lj.Head] = lj.Head()

    model: lj.Model = RELU
    point_loss: lj.Loss = lj.SquaredError()

    def init(self, key, x, y):
        return init_network(self, key, x, y, {})

    def adapt(self, params, support, *, key=None):
        key = require_key(self, key)
        return lj.Adapted(params["head"] + jax.random.normal(key, params["head"].shape))

    predict = predict_mean
    loss = query_loss
    memory = no_memory
    step = gradient_step


def test_a_stochastic_method_wants_a_key_and_answers_alike_for_the_same():
    params = make_params(Jittered(), SUPPORT)
    with pytest.raises(ValueError, match=r"key must be given: Jittered.*jax\.random\.key\(0\)"):
        lj.adapt(params, SUPPORT)
    first, again, other = (
        lj.adapt(params, SUPPORT, key=jax.random.key(seed)).block for seed in (0, 0, 1)
    )
    assert_close(again, first, 0)
    assert_different(other, first)


def test_a_stochastic_method_trains_and_evaluates():
    """A user's method of a dozen lines goes through the whole library."""
    tasks = lj.Sine(shots=3, queries=4)
    trained = lj.train(Jittered(), tasks, steps=3, meta_batch=2)
    one, two = (lj.evaluate(trained.params, tasks, num_tasks=6, batch=b) for b in (6, 4))
    np.testing.assert_allclose(one.values, two.values, rtol=1e-5)


def test_what_is_no_key_is_refused():
    for key in (0, jnp.zeros(2), jax.random.split(jax.random.key(0))):
        with pytest.raises(ValueError, match=r"key must be one PRNG key, such as jax\.random\.key"):
            lj.adapt(PARAMS, SUPPORT, key=key)
    assert_close(
        lj.adapt(PARAMS, SUPPORT, key=jax.random.PRNGKey(0)).block, adapt(PARAMS, SUPPORT), 0
    )


@EVERY
def test_deterministic_methods_ignore_a_key(name):
    method = METHODS[name]
    support = points_for(method, N)
    params = make_params(method, support)
    with_key = lj.adapt(params, support, key=jax.random.key(0)).block
    assert_close(with_key, adapt(params, support), 0)


# Compilation


@dataclasses.dataclass(frozen=True)
class Counting(Circle):
    """Notes every trace of its features; equal to its like."""

    traces: tuple[list[int]] = dataclasses.field(default=([],), compare=False)

    def features(self, weights, fixed, x, *, context=None, mask=None):
        self.traces[0].append(len(x))
        return super().features(weights, fixed, x, context=context, mask=mask)


@pytest.mark.parametrize("method", [lj.Lava, lj.Anil, lj.Maml], ids=lambda m: m.__name__)
def test_one_shape_compiles_once(method):
    """Other tasks, other masks and other meta-parameters of the same shape are new arguments."""
    model = Counting(([],))
    traces = model.traces[0]
    support = make_points(N, 2, mask=[1] * N)
    params = make_params(method(model), support)
    adapt(params, support)
    first = len(traces)
    for seed, mask in enumerate(([1, 1, 0, 1], [0, 0, 0, 1], [1, 0, 0, 0])):
        adapt(params, make_points(N, 2, seed=seed, mask=mask))
    adapt(jax.tree.map(lambda leaf: 2 * leaf, params), support)
    assert len(traces) == first
    equal = dataclasses.replace(params, method=method(Counting(([],))))
    adapt(equal, support)  # an equal method is the same constant
    assert len(traces) == first
    adapt(params, make_points(N + 1, 2, mask=[1] * (N + 1)))
    assert len(traces) > first
    other = with_method(params, dataclasses.replace(params.method, inner_rate=0.3))
    second = len(traces)
    adapt(other, support)  # a hyperparameter is a constant
    assert len(traces) > second


# Initialisation


def test_init_refuses_points_that_do_not_fit():
    key = jax.random.key(0)
    for x, y, match in (
        (jnp.ones((4, 1)), jnp.ones((3, 1)), r"same number of points.*\(4, 1\) and \(3, 1\)"),
        (jnp.ones((4, 1)), jnp.ones(4), r"y must have shape \[N, k\]"),
        (jnp.ones(4), jnp.ones((4, 1)), r"x must have shape \[N, d\]"),
        (jnp.ones(()), jnp.ones((4, 1)), r"same number of points"),
    ):
        with pytest.raises(ValueError, match=match):
            lj.Lava(RELU).init(key, x, y)


# The package


def test_tasks_and_methods_are_imported_when_first_asked_for():
    code = """
import sys, lavajax
assert not {"lavajax.tasks.sine", "lavajax.methods.tnp", "flax.nnx"} & sys.modules.keys()
names = [name for name in dir(lavajax) if not name.startswith("_")]
assert len(names) == len(set(names)) and {"Sine", "cartpole_forces", "Tnp"} < set(names)
assert all(getattr(lavajax, name) for name in names)
from lavajax import Table, tasks
assert Table is tasks.table.Table
assert vars(lavajax)["Table"] is Table  # found at once from now on
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'lavajax' has no attribute 'Sin'"):
        _ = vars(lj)["__getattr__"]("Sin")
