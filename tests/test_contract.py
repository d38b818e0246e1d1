"""What must hold for every method, whatever it does inside. New methods join the list."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lavajax
from helpers import (
    RELU,
    assert_close,
    assert_different,
    assert_finite,
    make_labels,
    make_params,
    make_points,
    stack,
)
from lavajax.evaluate import task_scores
from lavajax.outer import BatchExpectation
from lavajax.points import mean_metric
from lavajax.types import TrainState

# A stationary kernel does not see the bias of a last linear layer.
CURVED = lavajax.MLP(hidden=(8, 8), linear_features=False)
CONTEXT, FULL = lavajax.Context(3), lavajax.Full()
REGRESSION = {
    "lava head": lavajax.Lava(model=RELU),
    "lava head, converged": lavajax.lava_converged(model=RELU),
    "lava context": lavajax.Lava(model=RELU, subspace=CONTEXT),
    "lava full": lavajax.Lava(model=RELU, subspace=FULL),
    "lava full, adapted": lavajax.Lava(model=RELU, subspace=FULL, curvature_at="adapted"),
    "maml": lavajax.Maml(model=RELU, inner_steps=2),
    "anil": lavajax.Anil(model=RELU, inner_steps=3),
    "cavia": lavajax.Cavia(model=RELU, subspace=CONTEXT),
    "meta-sgd": lavajax.MetaSgd(model=RELU, inner_steps=2),
    "reptile": lavajax.Reptile(model=RELU),
    "llama": lavajax.Llama(model=RELU, eta=0.1),
    "vfml": lavajax.Vfml(model=RELU),
    "vfml storm": lavajax.Vfml(model=RELU, subspace=CONTEXT, variant="storm"),
    "meta-mix": lavajax.MetaMix(model=RELU),
    "meta-mix, pairs": lavajax.MetaMix(model=RELU, variant="query_pairs", mix_inner=True),
    "vr-maml": lavajax.vr_maml_tuned(model=RELU),
    "bmaml": lavajax.Bmaml(model=RELU, particles=3),
    "bmaml full": lavajax.Bmaml(model=RELU, subspace=FULL, particles=3, inner_steps=2),
    "hyper network": lavajax.HyperNetwork(model=RELU, encoder=(8,), encoding=4, decoder=(8,)),
    "cnp": lavajax.Cnp(encoder=(8,), encoding=4, decoder=(8,)),
    "attentive cnp": lavajax.AttentiveCnp(
        width=8, heads=2, key_encoder=(8,), encoder=(8,), decoder=(8,)
    ),
    "tnp": lavajax.Tnp(width=8, heads=2, layers=2, feedforward=8, decoder=(8,)),
    "platipus": lavajax.Platipus(model=RELU),
    "ridge": lavajax.Ridge(model=RELU),
    "imaml head": lavajax.IMaml(model=RELU, subspace=lavajax.Head(), learn_proximal=True),
    "imaml full": lavajax.IMaml(model=RELU, inner_steps=3, learn_proximal=True),
    "dkt": lavajax.Dkt(model=CURVED),
    "alpaca": lavajax.Alpaca(model=RELU),
    "conditioned": lavajax.Conditioned(
        lavajax.lava_converged(model=RELU), encoder=(8,), encoding=4
    ),
    "lava, error bars": lavajax.Lava(
        model=RELU, inner_steps="map", prior_correction=True, noise=0.5, outer="nll"
    ),
    "lava context, error bars": lavajax.Lava(
        model=RELU, subspace=CONTEXT, prior_correction=True, noise=0.5
    ),
}
CLASSIFICATION = {
    "lava head, labels": lavajax.Lava(model=RELU, point_loss=lavajax.CrossEntropy(3)),
    "meta-mix, labels": lavajax.MetaMix(model=RELU, point_loss=lavajax.CrossEntropy(3)),
    "hyper network, labels": lavajax.HyperNetwork(model=RELU, point_loss=lavajax.CrossEntropy(3)),
    "ridge, labels": lavajax.Ridge(model=RELU, point_loss=lavajax.CrossEntropy(3)),
}
METHODS = REGRESSION | CLASSIFICATION
# Those whose predictions have error bars, and those that carry what they do not differentiate.
PROBABILISTIC: set[str] = {
    *("bmaml", "bmaml full"),
    *("cnp", "attentive cnp", "tnp"),
    "alpaca",
    *("lava, error bars", "lava context, error bars"),
    "dkt",
}
CHANGES_FIXED: set[str] = {"vfml", "vfml storm"}
# Those whose block holds the points themselves, in their number and order: of these it is the
# prediction that must not depend on either.
KEEPS_POINTS = {"attentive cnp", "tnp", "dkt", "conditioned"}
every_method = pytest.mark.parametrize("name", METHODS)


def points_for(name: str, n: int, seed: int = 0, mask=None) -> lavajax.Points:
    if name in CLASSIFICATION:
        return make_labels(n, 3, d=2, seed=seed, mask=mask)
    return make_points(n, 2, d=2, seed=seed, mask=mask)


def outcome(name: str, params: lavajax.MetaParams, adapted: lavajax.Adapted):
    """The block, or what it predicts at a few inputs."""
    if name not in KEEPS_POINTS:
        return adapted.block
    return params.method.predict(params, adapted, points_for(name, 3, seed=4).x)


def adapt(name: str, params: lavajax.MetaParams, support: lavajax.Points):
    return outcome(name, params, lavajax.adapt(params, support))


def prior(name: str, params: lavajax.MetaParams):
    """What adapting to no point at all gives."""
    spec = params.spec
    x, y = jnp.zeros((0, *spec.x_shape)), jnp.zeros((0, *spec.y_shape), spec.y_dtype)
    return outcome(name, params, params.method.adapt(params, lavajax.Points(x, y)))


def setting(name: str, n: int = 5) -> tuple[lavajax.MetaParams, lavajax.Points]:
    support = points_for(name, n)
    return make_params(METHODS[name], support), support


@jax.jit
def judged(params: lavajax.MetaParams, task: lavajax.Task, key: jax.Array):
    """The outer loss of a task, and its scores; compiled, which is one program and not hundreds."""
    return params.method.loss(params, task, key), task_scores(params, task, key)


@every_method
def test_method_is_a_value(name):
    """It rides in pytrees as static metadata: equal and hashed by value, never changed."""
    method = METHODS[name]
    assert method == dataclasses.replace(method)
    assert hash(method) == hash(dataclasses.replace(method))
    other = lavajax.SquaredError("sum") if name in REGRESSION else lavajax.CrossEntropy(4)
    if isinstance(method, lavajax.Conditioned):  # whose loss is that of its own method
        changed = dataclasses.replace(method, method=lavajax.Anil(point_loss=other))
    else:
        changed = dataclasses.replace(method, point_loss=other)
    assert method != changed
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.point_loss = other


@every_method
def test_shapes_and_finite_values(name):
    params, support = setting(name)
    query = points_for(name, 7, seed=1)
    adapted = lavajax.adapt(params, support)
    assert_different(outcome(name, params, adapted), prior(name, params), by=1e-6)
    prediction = lavajax.predict(params, adapted, query.x)
    assert prediction.mean.shape == (7, 3 if name in CLASSIFICATION else 2)
    for variance in (prediction.epistemic, prediction.noise):
        if name not in PROBABILISTIC:
            assert variance is None
        elif variance is not None:
            assert variance.shape == prediction.mean.shape
            assert jnp.all(variance > 0)
    loss, scores = judged(params, lavajax.Task(support, query), jax.random.key(0))
    assert loss.shape == ()
    if name in PROBABILISTIC and name in REGRESSION:
        assert 0 <= scores["coverage"] <= 1
    assert ("nll" in scores) == (prediction.noise is not None)
    assert all(score.shape == () for score in scores.values())
    assert_finite([adapted.block, prediction.mean, loss, scores])


@pytest.mark.parametrize("name", ["lava full, adapted", "lava, error bars", "anil"])
def test_loss_and_scores_are_the_same_without_jit(name):
    params, support = setting(name)
    task, key = lavajax.Task(support, points_for(name, 7, seed=1)), jax.random.key(0)
    eager = params.method.loss(params, task, key), task_scores(params, task, key)
    assert_close(eager, judged(params, task, key), 1e-4)


@every_method
def test_saved_model_comes_back_to_the_bit_and_stacked_seeds_are_refused(name, tmp_path):
    params, support = setting(name)
    lavajax.save(params, tmp_path / "m")
    loaded = lavajax.load(tmp_path / "m")
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    with pytest.raises(ValueError, match="params must be those of one seed, got 2 seeds"):
        lavajax.adapt(stack([params, params]), support)


@every_method
def test_vmap_over_tasks_is_a_loop_and_jit_is_eager(name, x64):
    params, _ = setting(name)
    supports = [points_for(name, 5, seed=seed) for seed in range(3)]
    together = jax.jit(jax.vmap(lambda s: params.method.adapt(params, s).block))(stack(supports))
    for index, support in enumerate(supports):
        eager = params.method.adapt(params, support).block
        assert_close(jax.tree.map(lambda leaf, i=index: leaf[i], together), eager, 1e-9)


@every_method
def test_order_and_padding_of_the_support_change_nothing(name, x64):
    params, support = setting(name, n=5)
    expected = adapt(name, params, support)
    order = jnp.array([3, 0, 4, 2, 1])
    shuffled = lavajax.Points(support.x[order], support.y[order])
    assert_close(adapt(name, params, shuffled), expected, 1e-9)

    junk = points_for(name, 8, seed=9)
    slots = jnp.array([0, 2, 3, 5, 7])
    x = (junk.x * jnp.nan).at[slots].set(support.x)
    y = junk.y.at[slots].set(support.y)
    mask = jnp.zeros(8, bool).at[slots].set(True)
    assert_close(adapt(name, params, lavajax.Points(x, y, mask)), expected, 1e-9)


@pytest.mark.parametrize(
    "name",
    [
        *("lava head", "lava head, converged", "anil", "llama"),
        *("ridge", "imaml head"),
    ],
)
def test_outputs_of_a_head_may_be_permuted(name, x64):
    params, support = setting(name)
    flipped = params.replace_learned({**params.learned, "head": params["head"][:, ::-1]})
    assert_close(
        adapt(name, flipped, lavajax.Points(support.x, support.y[:, ::-1])),
        adapt(name, params, support)[:, ::-1],
        1e-9,
    )


@every_method
def test_query_labels_do_not_leak_into_adaptation(name):
    """Tasks that differ in them alone are scored by the same predictions."""
    params, support = setting(name)
    query, other = points_for(name, 6, seed=1), points_for(name, 6, seed=2)
    predicted = lavajax.predict(params, lavajax.adapt(params, support), query.x).mean
    score = jax.jit(task_scores)
    for y in (query.y, other.y):
        asked = lavajax.Points(query.x, y)
        expected = mean_metric(params.method.point_loss, predicted, asked)
        found = score(params, lavajax.Task(support, asked))["values"]
        assert_close(found, expected, 1e-4)
    # and the loss, of course, does read them
    loss = jax.make_jaxpr(
        lambda y: params.method.loss(
            params, lavajax.Task(support, lavajax.Points(query.x, y)), jax.random.key(0)
        )
    )(query.y)
    assert any(v is loss.jaxpr.invars[0] for eqn in loss.jaxpr.eqns for v in eqn.invars)


@pytest.mark.parametrize(
    "name",
    [
        *("lava head", "lava head, converged", "lava context", "lava full", "anil", "ridge"),
        *("alpaca", "dkt", "imaml head", "bmaml", "hyper network", "tnp"),
    ],
)
def test_float32_predicts_what_float64_does_from_twenty_points(name):
    with jax.enable_x64(True):
        support, x = points_for(name, 20), points_for(name, 7, seed=1).x
        params = make_params(METHODS[name], support)
        expected = lavajax.predict(params, lavajax.adapt(params, support), x).mean
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (params, support, x))
    found = lavajax.predict(low[0], lavajax.adapt(low[0], low[1]), low[2]).mean
    assert found.dtype == jnp.float32
    assert_close(found, expected, 1e-3)


@every_method
def test_masks_of_one_shape_are_one_compilation(name):
    params, _ = setting(name)
    traces = []

    @jax.jit
    def compiled(params, support):
        traces.append(None)
        return adapt(name, params, support)

    blocks = []
    for count in (6, 3, 1, 0):
        support = points_for(name, 6, mask=jnp.arange(6) < count)
        blocks.append(compiled(params, support))
    # Duplicates, and inputs, hence features, that are the same at different targets.
    same = dataclasses.replace(support, x=jnp.ones_like(support.x), mask=jnp.arange(6) < 5)
    blocks.append(compiled(params, same))
    twice = jax.tree.map(lambda leaf: leaf[jnp.array([0, 0, 0, 0, 1, 1])], same)
    blocks.append(compiled(params, twice))
    assert_finite(blocks)
    assert len(traces) == 1
    assert_different(blocks[0], blocks[1], by=1e-6)
    # a compiled prediction is that to rounding
    assert_close(blocks[3], prior(name, params), 1e-6 if name in KEEPS_POINTS else 0.0)


@every_method
def test_outer_step_counts_moves_every_learned_leaf_and_reports_the_loss(name):
    params, _ = setting(name)
    method, tx = params.method, optax.adam(1e-2)
    tasks = stack(
        [lavajax.Task(points_for(name, 5, s), points_for(name, 6, s + 9)) for s in range(3)]
    )
    keys = jax.random.split(jax.random.key(0), 3)
    state = TrainState(
        params, tx.init(params.learned), method.memory(params), jax.random.key(1), jnp.int32(4)
    )
    new, metrics = jax.jit(lambda s: method.step(s, BatchExpectation(tasks, keys), tx))(state)
    losses = jax.jit(jax.vmap(lambda t, k: method.loss(params, t, k)))(tasks, keys)
    np.testing.assert_allclose(metrics["loss"], jnp.mean(losses), rtol=1e-5)
    assert metrics["grad_norm"] > 0
    assert new.step == 5
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for before, after in zip(
        jax.tree.leaves(params.learned), jax.tree.leaves(new.params.learned), strict=True
    ):
        assert before.dtype == after.dtype
        assert not jnp.array_equal(before, after)
    if name not in CHANGES_FIXED:
        jax.tree.map(np.testing.assert_array_equal, params.fixed, new.params.fixed)


def test_learned_leaves_depend_on_what_is_learned_not_on_values():
    """An optimiser's state survives a change of hyperparameter."""
    support = make_points(4, 1)

    def learned(**settings):
        return make_params(lavajax.Lava(model=RELU, **settings), support).learned

    base = jax.tree.structure(learned())
    assert jax.tree.structure(learned(epsilon=1.0, inner_rate=0.01, curvature="flat")) == base
    assert "inner_rate" in learned()
    assert "inner_rate" not in learned(learn_inner_rate=False)
    assert "inner_rate" not in learned(inner_steps="converged")
    assert learned(learn_epsilon=True, epsilon=0.5)["log_epsilon"] == pytest.approx(np.log(0.5))


def test_a_fixed_rate_is_the_methods_number_and_may_be_changed_after_training():
    support = make_points(4, 1)
    params = make_params(lavajax.Anil(model=RELU, learn_inner_rate=False), support)
    faster = dataclasses.replace(params, method=dataclasses.replace(params.method, inner_rate=0.2))
    slow, fast = (lavajax.adapt(p, support).block - params["head"] for p in (params, faster))
    assert_close(fast, 2 * slow, 1e-4)
