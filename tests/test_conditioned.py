"""Methods on inputs that know the other points of the support."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import RELU, TANH, assert_close, assert_finite, make_params, make_points

SMALL = {"encoder": (5,), "encoding": 3, "activation": "tanh", "lengthscale": 0.5, "min_scale": 0.1}


def literal(params, support, x, seen):
    """[x, r(x), m, log s] point by point; ``seen(j)`` lists the support that input j sees."""
    xs, ys = (np.asarray(v, float) for v in (support.x, support.y))
    rows = []
    for j, at in enumerate(np.asarray(x, float)):
        own = list(seen(j))
        mean = ys[own].mean(0) if own else np.zeros(ys.shape[1])
        scale = np.sqrt((((ys[own] - mean) ** 2).mean(0) if own else 0 * mean) + 0.1**2)
        relations = []
        for i in own:
            h = np.concatenate(
                [
                    (xs[i] - at) / 0.5,
                    abs(xs[i] - at) / 0.5,
                    (ys[i] - mean) / scale,
                    mean,
                    np.log(scale),
                ]
            )
            for layer in params["relations"]:
                h = np.tanh(h @ np.asarray(layer["weight"]).T + np.asarray(layer["bias"]))
            relations.append(h)
        r = np.mean(relations, 0) if relations else np.zeros(3)
        rows.append(np.concatenate([at, r, mean, np.log(scale)]))
    return np.array(rows)


@pytest.mark.parametrize("n", [1, 5])
def test_the_method_sees_what_the_equation_says(x64, n):
    """Of its own loss, adaptation and prediction: the literal inputs, given to it directly."""
    base = lj.Ridge(TANH)
    method = lj.Conditioned(base, **SMALL)
    support, query = make_points(n, 2, d=2), make_points(4, 2, d=2, seed=5)
    params = make_params(method, support)
    others = literal(params, support, support.x, lambda j: [i for i in range(n) if i != j])
    everyone = literal(params, support, query.x, lambda j: range(n))
    wide = dataclasses.replace(support, x=jnp.asarray(others))
    learned = {k: v for k, v in params.learned.items() if k != "relations"}
    own = dataclasses.replace(make_params(base, wide), learned=learned)

    found = lj.predict(params, lj.adapt(params, support), query.x)
    expected = lj.predict(own, lj.adapt(own, wide), everyone)
    assert_close(found.mean, expected.mean, 1e-9)

    task = lj.Task(wide, dataclasses.replace(query, x=jnp.asarray(everyone)))
    key = jax.random.key(0)
    found, expected = method.loss(params, lj.Task(support, query), key), base.loss(own, task, key)
    assert_close(found, expected, 1e-9)


@pytest.mark.parametrize("mask", [None, [1, 0, 1, 1]])
def test_nothing_at_a_point_depends_on_its_own_target(x64, mask):
    method = lj.Conditioned(lj.Ridge(TANH), **SMALL)
    support = make_points(4, mask=mask)
    params = make_params(method, support)
    known, wide = method._known(params, support)
    _, moved = method._known(params, dataclasses.replace(support, y=support.y.at[0].add(1)))
    np.testing.assert_array_equal(wide.x[0], moved.x[0])
    assert np.min(np.max(np.abs(wide.x - moved.x), axis=1)[2:]) > 1e-3
    # What a query at its place would see, were the point not in the support.
    rest = {name: leaf[1:] for name, leaf in known.items()}
    assert_close(method._widen(params, rest, support.x[:1])[0], wide.x[0], 1e-12)


@pytest.mark.parametrize(
    "base",
    [
        lj.Anil(RELU),
        lj.Lava(RELU, subspace=lj.Full()),
        lj.Cavia(RELU, subspace=lj.Context(3)),
        lj.Dkt(RELU, objective="predictive"),
        lj.Cnp(encoder=(4,), encoding=3, decoder=(4,)),
        lj.Lava(RELU, point_loss=lj.Huber()),
    ],
    ids=lambda base: type(base).__name__ + type(getattr(base, "subspace", None)).__name__,
)
def test_any_method_along_its_gradient_can_be_conditioned(base):
    """It adapts, predicts and trains; also to nothing at all."""
    method = lj.Conditioned(base, encoder=(4,), encoding=2)
    trained = lj.train(method, lj.Sine(shots=3, queries=3), steps=3, meta_batch=2)
    support = make_points(3)
    for points in (support, jax.tree.map(lambda leaf: leaf[:0], support)):
        prediction = lj.predict(trained.params, lj.adapt(trained.params, points), support.x)
        assert prediction.mean.shape == (3, 1)
        assert_finite(prediction.mean)


def test_error_bars_are_those_of_the_method():
    method = lj.Conditioned(lj.lava_bayesian(model=RELU), encoder=(4,), encoding=2)
    support = make_points(5, 2)
    params = make_params(method, support)
    adapted = lj.adapt(params, support)
    x = make_points(3, seed=3).x
    prediction = lj.predict(params, adapted, x)
    assert prediction.epistemic.shape == prediction.noise.shape == (3, 2)
    drawn = lj.sample(params, adapted, x, jax.random.key(0), number=4000)
    assert_close(drawn.mean(0), prediction.mean, 0.05)
    assert_close(drawn.var(0), prediction.epistemic, 0.1)


def test_it_is_saved_and_read_back(tmp_path):
    method = lj.Conditioned(lj.Anil(RELU), encoder=(4,), encoding=2)
    support = make_points(4)
    params = make_params(method, support)
    lj.save(params, tmp_path / "model")
    back = lj.load(tmp_path / "model")
    assert back.method == method
    for found, expected in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_what_cannot_be_conditioned_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Conditioned\.method must take outer steps along"):
        lj.Conditioned(lj.vr_maml_tuned())
    with pytest.raises(ValueError, match=r"give Dkt objective='predictive', got 'mll'"):
        lj.Conditioned(lj.Dkt())
    with pytest.raises(ValueError, match=r"Conditioned\.method is conditioned already"):
        lj.Conditioned(lj.Conditioned())
    with pytest.raises(ValueError, match=r"must have a loss of real targets, .* got CrossEntropy"):
        lj.Conditioned(lj.Anil(point_loss=lj.CrossEntropy(3)))
    with pytest.raises(ValueError, match=r"Conditioned\.method must be .*Lava\(\)"):
        lj.Conditioned(RELU)
    with pytest.raises(ValueError, match=r"Conditioned\.encoding must be"):
        lj.Conditioned(encoding=0)
    with pytest.raises(ValueError, match=r"Conditioned\.min_scale must be"):
        lj.Conditioned(min_scale=0)
    with pytest.raises(ValueError, match=r"Conditioned\.lengthscale must be"):
        lj.Conditioned(lengthscale=0)
    images = lj.Points(jnp.zeros((3, 4, 4)), jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"x must have shape \[N, d\]"):
        make_params(lj.Conditioned(), images)
    with pytest.raises(ValueError, match=r"y must have shape \[N, k\]"):
        make_params(lj.Conditioned(), lj.Points(jnp.zeros((3, 1)), jnp.zeros(3)))
    process = make_params(lj.Conditioned(lj.Dkt(RELU, objective="predictive")), make_points(3))
    adapted = lj.adapt(process, make_points(3))
    with pytest.raises(ValueError, match="a posterior of functions"):
        lj.sample(process, adapted, jnp.zeros((1, 1)), jax.random.key(0))
    params = make_params(lj.Conditioned(), make_points(3))
    with pytest.raises(ValueError, match="adapts by sums over points"):
        lj.online(params)
    with pytest.raises(ValueError, match="a posterior of functions"):
        lj.sample(params, lj.adapt(params, make_points(3)), jnp.zeros((1, 1)), jax.random.key(0))
    with pytest.raises(ValueError, match="Lava or IMaml, which have a diagnosis"):
        lj.diagnose(params, make_points(3))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Bent:
    """f(x) = a for x < 0 and |a| beyond, with the support on the left and the query on the right.

    |a| and a are not correlated: no predictor that is linear in targets is better than E|a|, whose
    error is Var |a| = 1/12.
    """

    def sample(self, key, split="train"):
        a_key, x_key = jax.random.split(key)
        a = jax.random.uniform(a_key, (), minval=-1.0, maxval=1.0)
        x = jax.random.uniform(x_key, (8, 1))
        return lj.Task(
            lj.Points(-x[:4], jnp.full((4, 1), a)), lj.Points(x[4:], jnp.full((4, 1), jnp.abs(a)))
        )


def test_it_learns_what_no_head_can():
    head = lj.lava_converged(model=lj.MLP((16, 16), activation="silu", initializer="lecun"))
    errors = []
    for method in (head, lj.Conditioned(head, encoder=(8,), encoding=4)):
        trained = lj.train(
            *(method, Bent()),
            steps=600,
            meta_batch=16,
            optimizer=lj.outer_optimizer(600, rate=1e-2),
        )
        errors.append(float(lj.evaluate(trained.params, Bent(), num_tasks=500).mean))
    assert errors[0] > 0.9 / 12
    assert errors[1] < 0.1 / 12
