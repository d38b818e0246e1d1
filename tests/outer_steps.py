"""What the tests of methods with an outer step of their own share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import make_params, make_points, stack
from lavajax.outer import BatchExpectation

SUBSPACES = {"head": lj.Head(), "context": lj.Context(2), "full": lj.Full()}
EVERY_SUBSPACE = pytest.mark.parametrize("subspace", SUBSPACES.values(), ids=SUBSPACES)


def plain(method):
    """MAML, ANIL or CAVIA with the same inner loop."""
    base = {"Head": lj.Anil(), "Context": lj.Cavia(subspace=lj.Context(2)), "Full": lj.Maml()}
    names = ("model", "inner_steps", "inner_rate", "learn_inner_rate", "first_order")
    fields = {name: getattr(method, name) for name in names}
    fields["first_order"] = fields["first_order"] or getattr(method, "variant", "") == "storm"
    return dataclasses.replace(base[type(method.subspace).__name__], **fields)


def make_task(seed=0):
    return lj.Task(make_points(4, 2, seed=seed), make_points(5, 2, seed=seed + 50))


def make_batch(seed=0):
    """Two tasks and their keys."""
    tasks = stack([make_task(seed), make_task(seed + 1)])
    return BatchExpectation(tasks, jax.random.split(jax.random.key(seed), 2))


def make_state(method, tx, seed=0):
    params = make_params(method, make_points(4, 2), seed)
    return lj.TrainState(
        params, tx.init(params.learned), method.memory(params), jax.random.key(1), jnp.int32(0)
    )


def stepper(method, tx):
    """One compiled outer step on the batch of a seed."""
    run = jax.jit(lambda s, tasks, keys: method.step(s, BatchExpectation(tasks, keys), tx))

    def step(state, seed=0):
        batch = make_batch(seed)
        return run(state, batch.tasks, batch.keys)

    return step


@jax.jit
def meta_gradient(params, tasks):
    def mean(learned):
        at = params.replace_learned(learned)
        return jnp.mean(jax.vmap(lambda t: params.method.loss(at, t, None))(tasks))

    return jax.grad(mean)(params.learned)


def assert_trains(method, steps=300):
    """Training lowers the loss, and any split into chunks gives the same bits.

    What is carried between steps crosses the boundaries of the compiled chunks.
    """
    tasks = lj.Sine(shots=5, queries=10)
    runs = [lj.train(method, tasks, steps=steps, meta_batch=5, chunk=c) for c in (100, 150)]
    loss = runs[0].history["loss"]
    assert loss[-1] < 0.9 * loss[0]
    for a, b in zip(*(jax.tree.leaves((r.params, r.state.memory)) for r in runs), strict=True):
        np.testing.assert_array_equal(a, b)
    return runs[0].params
