"""Adaptation computes in float32 or better, and follows the user's switch to float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax

MODEL = lavajax.MLP(hidden=(8, 8))
METHODS = [
    lavajax.Lava(model=MODEL),
    lavajax.lava_converged(model=MODEL, subspace=lavajax.Full()),
    lavajax.Lava(model=MODEL, subspace=lavajax.Context(2)),
    lavajax.Maml(model=MODEL),
    lavajax.Anil(model=MODEL),
    lavajax.Cavia(model=MODEL),
    lavajax.MetaSgd(model=MODEL),
    lavajax.Reptile(model=MODEL),
    lavajax.Llama(model=MODEL),
    lavajax.Vfml(model=MODEL, variant="storm"),
    lavajax.VrMaml(model=MODEL),
    lavajax.MetaMix(model=MODEL),
    lavajax.Ridge(model=MODEL),
    lavajax.Alpaca(model=MODEL),
    lavajax.Dkt(model=MODEL),
    lavajax.IMaml(model=MODEL),
    lavajax.Bmaml(model=MODEL, particles=2),
    lavajax.Platipus(model=MODEL),
    lavajax.HyperNetwork(model=MODEL),
]
# Their block is what a network has made of the points: as precise as the network.
PROCESSES = [
    lavajax.Cnp(encoder=(8,), encoding=4, decoder=(8,)),
    lavajax.AttentiveCnp(width=8, heads=2, key_encoder=(8,), encoder=(8,), decoder=(8,)),
    lavajax.Tnp(width=8, heads=2, layers=2, feedforward=8, decoder=(8,)),
    lavajax.Conditioned(lavajax.lava_converged(model=MODEL), encoder=(8,), encoding=4),
]


def name(method):
    return f"{type(method).__name__}-{getattr(method, 'subspace', '')}"


@pytest.mark.parametrize("method", METHODS, ids=name)
def test_bfloat16_parameters_adapt_in_float32_and_near_the_float32_answer(method):
    task = lavajax.Sine(shots=6).sample(jax.random.key(0))
    params = method.init(jax.random.key(1), task.support.x, task.support.y)
    rounded = params.replace_learned(
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params.learned)
    )
    support = (task.support.x, task.support.y)
    low, high = lavajax.adapt(rounded, support), lavajax.adapt(params, support)
    for a, b in zip(jax.tree.leaves(low.block), jax.tree.leaves(high.block), strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=0.05 * float(jnp.abs(b).max()) + 0.01)


@pytest.mark.parametrize("method", [*METHODS, *PROCESSES], ids=name)
def test_float32_training_state_stays_float32_when_float64_is_on(method):
    """No constant of ours may promote: a scan over steps would refuse the changed state."""
    tasks = lavajax.Sine(shots=3, queries=4)
    task = tasks.sample(jax.random.key(0))
    params = method.init(jax.random.key(1), task.support.x, task.support.y)
    with jax.enable_x64(True):
        adapted = method.adapt(params, task.support)
        prediction = method.predict(params, adapted, task.query.x)
        loss = method.loss(params, task, jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(adapted.block)} == {jnp.dtype("float32")}
    assert prediction.mean.dtype == jnp.float32
    assert loss.dtype == jnp.float32
