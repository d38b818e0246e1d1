"""VFML: limits in MAML, its inner steps, and the recursion of its term."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
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
    make_params,
    make_points,
    prior_block,
    with_method,
)
from lavajax.methods.task_loss import loss_at
from outer_steps import (
    EVERY_SUBSPACE,
    assert_trains,
    make_batch,
    make_state,
    make_task,
    meta_gradient,
    plain,
    stepper,
)

VARIANTS = pytest.mark.parametrize("variant", ["released", "storm"])


def with_term(params, term):
    return dataclasses.replace(params, fixed={**params.fixed, "variance_reduction": term})


def random_term(params, seed=3):
    leaves, treedef = jax.tree.flatten(params.fixed["variance_reduction"])
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, drawn)


@EVERY_SUBSPACE
@VARIANTS
def test_without_its_term_is_plain(x64, subspace, variant):
    """gamma = 1, whatever v: the same block, the same meta-gradient."""
    method = lj.Vfml(TANH, subspace=subspace, variant=variant, inner_steps=2, gamma=1.0)
    params = make_params(method, make_points(4, 2))
    params = with_term(params, random_term(params))
    tasks, base = make_batch().tasks, with_method(params, plain(method))
    support = make_points(4, 2)
    assert_close(adapt(params, support), adapt(base, support), 1e-12)
    assert_close(meta_gradient(params, tasks), meta_gradient(base, tasks), 1e-10)
    differing = with_method(params, dataclasses.replace(method, gamma=0.5))
    assert_different(adapt(differing, support), adapt(base, support))


@EVERY_SUBSPACE
def test_first_update_is_plain(x64, subspace):
    """v starts at 0: the first outer step of the released form is that of MAML."""
    method, tx = lj.Vfml(TANH, subspace=subspace, gamma=0.3), optax.sgd(0.1)
    first, _ = stepper(method, tx)(make_state(method, tx))
    base = plain(method)
    state = make_state(base, tx)
    expected, _ = stepper(base, tx)(state)
    assert_close(first.params.learned, expected.params.learned, 1e-10)
    assert_different(first.params.learned, state.params.learned)


def gradient_at(params, block, points):
    return jax.jit(jax.grad(lambda b: loss_at(params.method, params, lj.Adapted(b), points)))(block)


@EVERY_SUBSPACE
@VARIANTS
def test_inner_steps_are_the_written_ones(x64, subspace, variant):
    gamma, rate, support = 0.4, 0.2, make_points(4, 2)
    method = lj.Vfml(
        TANH, subspace=subspace, variant=variant, inner_steps=3, inner_rate=rate, gamma=gamma
    )
    params = make_params(method, support)
    term = random_term(params)
    params = with_term(params, term)
    gradient = jax.jit(gradient_at)
    block = prior_block(params)
    start = gradient(params, block, support)
    for _ in range(3):
        step = jax.tree.map(
            lambda g, v, g0: g + (1 - gamma) * (v - (g0 if variant == "storm" else 0)),
            gradient(params, block, support),
            term,
            start,
        )
        block = jax.tree.map(lambda t, s: t - rate * s, block, step)
    assert_close(adapt(params, support), block, 1e-12)


def test_storm_mixes_gradient_and_estimate_at_the_first_step(x64):
    """A control variate: gamma grad L + (1 - gamma) v."""
    support = make_points(4, 2)
    method = lj.Vfml(TANH, variant="storm", gamma=0.4, inner_rate=0.2)
    params = make_params(method, support)
    term = random_term(params)
    slope = gradient_at(params, prior_block(params), support)
    expected = jax.tree.map(
        lambda t, g, v: t - 0.2 * (0.4 * g + 0.6 * v), prior_block(params), slope, term
    )
    assert_close(adapt(with_term(params, term), support), expected, 1e-12)


@EVERY_SUBSPACE
@VARIANTS
def test_term_follows_its_recursion(x64, subspace, variant):
    """Both gradients on the batch of the step, unadapted, with shared weights already updated."""
    method = lj.Vfml(TANH, subspace=subspace, variant=variant, beta=0.3)
    tx = optax.sgd(0.1)
    step, state = stepper(method, tx), make_state(method, tx)
    state, _ = step(state, seed=0)
    new, _ = step(state, seed=5)
    tasks = make_batch(5).tasks
    points = tasks.query if variant == "released" else tasks.support

    @jax.jit
    def shared(params, block):
        each = jax.vmap(lambda p: gradient_at(params, block, p))(points)
        return jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), each)

    after = shared(new.params, prior_block(new.params))
    before = shared(new.params, prior_block(state.params))
    old = state.params.fixed["variance_reduction"]
    expected = jax.tree.map(lambda g, v, d: g + 0.7 * (v - d), after, old, before)
    assert_close(new.params.fixed["variance_reduction"], expected, 1e-10)
    assert_different(old, after)
    # beta = 1: the gradient of the last batch, and nothing of what was before
    last = dataclasses.replace(method, beta=1.0)
    state = dataclasses.replace(state, params=with_method(state.params, last))
    new, _ = stepper(last, tx)(state, seed=5)
    assert_close(new.params.fixed["variance_reduction"], after, 1e-10)


@dataclasses.dataclass(frozen=True)
class Slope:
    """A loss that is linear in the outputs: its gradient in a head is the same everywhere."""

    metric_name = "slope"

    def out_dim(self, y_shape):
        return y_shape[0]

    def cast(self, y, dtype):
        return y.astype(dtype)

    def check(self, y):
        pass

    def value(self, outputs, y):
        return jnp.sum(outputs * y)

    def mean(self, outputs):
        return outputs

    def metric(self, mean, y):
        return self.value(mean, y)

    def factor(self, outputs, y):
        return jnp.zeros((outputs.shape[-1], 1), outputs.dtype)

    def constant_curvature(self, k):
        return None


@VARIANTS
def test_term_converges_to_a_constant_gradient(x64, variant):
    method = lj.Vfml(Circle(), Slope(), subspace=lj.Head(), variant=variant, beta=0.5)
    tx = optax.sgd(0.1)
    step, state = stepper(method, tx), make_state(method, tx)
    tasks = make_batch().tasks
    points = tasks.query if variant == "released" else tasks.support
    z = np.concatenate([np.cos(points.x), np.sin(points.x), np.ones_like(points.x)], axis=-1)
    constant = np.einsum("bnp,bnk->pk", z, points.y) / (2 * points.x.shape[1])
    for count in range(1, 41):
        state, _ = step(state)
        gap = np.abs(state.params.fixed["variance_reduction"] - constant).max()
        np.testing.assert_allclose(gap, 0.5**count * np.abs(constant).max(), atol=1e-12)


@VARIANTS
def test_term_gets_no_gradient_and_is_moved_by_no_optimizer(x64, variant):
    params = make_params(lj.Vfml(TANH, variant=variant), make_points(4, 2))
    params = with_term(params, random_term(params))
    assert "variance_reduction" not in params.learned
    assert jax.tree.structure(params.fixed["variance_reduction"]) == jax.tree.structure(
        prior_block(params)
    )
    slope = jax.jit(
        jax.grad(lambda v: params.method.loss(with_term(params, v), make_task(), None))
    )(params.fixed["variance_reduction"])
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(slope))


def test_outer_gradient_is_the_finite_difference(x64):
    """Once v has grown, which the rate multiplies too."""
    task = make_task()
    params = make_params(lj.Vfml(TANH, inner_steps=2, gamma=0.5), task.support)
    params = with_term(params, random_term(params))
    start, unravel = ravel_pytree(params.learned)

    def loss(vector):
        return params.method.loss(params.replace_learned(unravel(vector)), task, None)

    # one direction for the rate alone, and some for everything
    rng, h = np.random.default_rng(0), 1e-5
    others = jax.tree.map(jnp.zeros_like, params.learned)
    rate, _ = ravel_pytree({**others, "inner_rate": jnp.ones(())})
    directions = jnp.stack([rate, *rng.standard_normal((4, start.size))])
    shifted = jnp.concatenate([start + h * directions, start - h * directions])
    values, gradient = jax.jit(lambda v, many: (jax.vmap(loss)(many), jax.grad(loss)(v)))(
        start, shifted
    )
    up, down = np.split(np.asarray(values), 2)
    np.testing.assert_allclose(directions @ gradient, (up - down) / (2 * h), rtol=1e-5)


def test_orders(x64):
    """Each variant has its own default; both orders adapt alike and learn differently."""
    tasks, support = make_batch().tasks, make_points(4, 2)
    for variant, default in (("released", False), ("storm", True)):
        own = lj.Vfml(TANH, variant=variant, inner_steps=2)
        params = make_params(own, support)
        params = with_term(params, random_term(params))
        same, other = (
            with_method(params, dataclasses.replace(own, first_order=order))
            for order in (default, not default)
        )
        assert_close(adapt(other, support), adapt(params, support), 1e-14)
        expected = meta_gradient(params, tasks)
        assert_close(meta_gradient(same, tasks), expected, 1e-14)
        assert_different(meta_gradient(other, tasks), expected, by=1e-6)


@VARIANTS
def test_without_points_stays_at_the_prior(x64, variant):
    """Also once v has grown; and padding in the support has no effect."""
    support = make_points(4, 2)
    params = make_params(lj.Vfml(TANH, variant=variant), support)
    params = with_term(params, random_term(params))
    nowhere = lj.Points(support.x * jnp.nan, support.y, jnp.zeros(4, bool))
    assert_close(params.method.adapt(params, nowhere).block, prior_block(params), 0)
    padded = lj.Points(
        jnp.concatenate([support.x, jnp.full((2, 1), jnp.nan)]),
        jnp.concatenate([support.y, jnp.full((2, 2), jnp.inf)]),
        jnp.arange(6) < 4,
    )
    assert_close(adapt(params, padded), adapt(params, support), 1e-12)


@VARIANTS
def test_training_grows_the_term_and_lowers_the_loss(variant):
    params = assert_trains(lj.Vfml(RELU, variant=variant))
    term = jax.tree.leaves(params.fixed["variance_reduction"])
    assert any(np.any(leaf != 0) for leaf in term)
