"""Support and query pass a shared backbone together, and it changes nothing."""

from __future__ import annotations

import dataclasses

import jax
import pytest

import lavajax as lj
from helpers import (
    RELU,
    assert_close,
    assert_different,
    assert_finite,
    make_labels,
    make_params,
    make_points,
)
from lavajax.methods import noise, task_loss
from lavajax.methods.on_features import Given, on_features
from lavajax.outer import in_training

KEY = jax.random.key(3)
METHODS = {
    "lava": lj.Lava(RELU),
    "lava, error bars": lj.lava_bayesian(model=RELU),
    "anil": lj.Anil(RELU, inner_steps=2),
    "alpaca": lj.Alpaca(RELU),
    "ridge": lj.Ridge(RELU),
    "imaml": lj.IMaml(RELU, subspace=lj.Head(), solver="gradient", inner_steps=2),
    "lava, labels": lj.Lava(RELU, point_loss=lj.CrossEntropy(3)),
}


@dataclasses.dataclass(frozen=True)
class Counted:
    """A backbone that counts its passes."""

    inner: lj.MLP
    passes: list[int] = dataclasses.field(default_factory=list, compare=False)

    def init(self, key, x, context=None):
        """See ``Model``."""
        return self.inner.init(key, x, context)

    def features(self, weights, fixed, x, *, context=None, mask=None):
        """See ``Model``."""
        self.passes.append(x.shape[0])
        return self.inner.features(weights, fixed, x, context=context, mask=mask)


def task_for(name: str, mask=None) -> lj.Task:
    make = make_labels if "labels" in name else make_points
    query_mask = None if mask is None else [True, False, True]
    return lj.Task(make(5, 2, seed=1, mask=mask), make(3, 2, seed=2, mask=query_mask))


@pytest.mark.parametrize("name", METHODS)
def test_loss_and_gradient_are_those_of_two_passes(name, monkeypatch):
    mask = [True, True, False, True, False] if name in ("lava", "anil", "alpaca") else None
    method, task = METHODS[name], task_for(name, mask)
    params = make_params(method, task.support)

    def value_and_grad():
        return jax.jit(
            jax.value_and_grad(
                lambda learned: method.loss(params.replace_learned(learned), task, KEY)
            )
        )(params.learned)

    with jax.enable_x64(False):
        value, gradient = value_and_grad()
        for module in (task_loss, noise):
            monkeypatch.setattr(module, "on_features", lambda *given: given)
        expected, expected_gradient = value_and_grad()
    assert_finite(gradient)
    assert_close(value, expected, 1e-5)
    assert_close(gradient, expected_gradient, 1e-5)


@pytest.mark.parametrize(("shots", "queries"), [(5, 3), (0, 3), (5, 0)])
def test_second_derivatives_are_those_of_two_passes(shots, queries, monkeypatch, x64):
    """Forwards over backwards, as a Hessian times a vector is taken."""
    method = lj.Lava(lj.MLP((4,), activation="tanh"))
    task = lj.Task(make_points(shots, 2, seed=1), make_points(queries, 2, seed=2))
    params = make_params(method, make_points(5, 2, seed=1))

    def product():
        gradient = jax.grad(lambda s: method.loss(params.replace_learned(s), task, KEY))
        return jax.jvp(gradient, (params.learned,), (params.learned,))[1]

    actual = product()
    monkeypatch.setattr(task_loss, "on_features", lambda *given: given)
    assert_close(actual, product(), 1e-10)
    if queries:
        assert_different(actual, jax.tree.map(jax.numpy.zeros_like, actual))


def test_all_points_pass_the_backbone_once():
    backbone = Counted(RELU)
    method, task = lj.Lava(backbone), task_for("lava")
    params = make_params(method, task.support)
    backbone.passes.clear()
    method.loss(params, task, KEY)
    assert backbone.passes == [8]


def test_all_points_of_a_task_share_what_dropout_draws(monkeypatch):
    import flax.linen as nn

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, deterministic=True):
            x = nn.Dropout(0.5, deterministic=deterministic)(nn.tanh(nn.Dense(16)(x)))
            return nn.Dense(4)(x)

    method, task = lj.Anil(lj.Linen(Net())), task_for("anil")
    params = make_params(method, task.support)
    drawn = in_training(params, KEY)
    loss = method.loss(drawn, task, KEY)
    assert abs(loss - method.loss(params, task, KEY)) > 1e-3
    assert on_features(method, drawn, task)[0] != method
    monkeypatch.setattr(task_loss, "on_features", lambda *given: given)
    assert_close(loss, method.loss(drawn, task, KEY), 1e-5)


def test_padding_reaches_no_gradient():
    method, task = METHODS["lava"], task_for("lava", [True, True, False, True, False])
    spoilt = task.support.x.at[2].set(float("nan"))
    task = dataclasses.replace(task, support=dataclasses.replace(task.support, x=spoilt))
    params = make_params(method, make_points(5, 2))

    def loss(learned):
        return method.loss(params.replace_learned(learned), task, KEY)

    assert_finite(jax.jit(jax.value_and_grad(loss))(params.learned))


def test_what_is_not_a_shared_backbone_apart_is_left_as_it_is():
    import flax.linen as nn

    task = task_for("lava")
    coupled = lj.Linen(nn.Sequential([nn.Dense(4), nn.BatchNorm(use_running_average=False)]))
    for method in (lj.Cavia(RELU), lj.Maml(RELU), lj.Cnp(), lj.Lava(coupled)):
        params = make_params(method, task.support)
        found = on_features(method, params, task)
        assert all(one is other for one, other in zip(found, (method, params, task), strict=True))
    method = lj.Anil(RELU)
    found, _, featured = on_features(method, make_params(method, task.support), task)
    assert found == dataclasses.replace(method, model=Given())
    assert featured.support.x.shape == (5, 8)
    assert featured.query.x.shape == (3, 8)
