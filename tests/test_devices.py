"""Inner loops and the outer step on several devices, which one process simulates."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, optax
from jax.sharding import AxisType, PartitionSpec as P
import lavajax
from lavajax.outer import BatchExpectation
from lavajax.start import init_state

jax.config.update("jax_enable_x64", True)
assert jax.device_count() == 4
mesh = jax.make_mesh((4,), ("tasks",), axis_types=(AxisType.Auto,))
source, model, tx = lavajax.Sine(shots=4, queries=5), lavajax.MLP(hidden=(8, 8)), optax.sgd(0.1)
keys = jax.random.split(jax.random.key(3), 8)
tasks = jax.vmap(source.sample)(keys)

def lava(**settings):
    return lavajax.Lava(model=model, **settings)

full, context = lavajax.Full(), lavajax.Context(2)
methods = [
    lava(subspace=full, inner_steps=2), lava(subspace=context), lavajax.Vfml(model=model),
]

def distance(a, b):
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(b))
    gaps = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)
    return max(jax.tree.leaves(gaps)) / scale

for method in methods:
    state = init_state(method, source, tx, jax.random.key(0))

    def adapt(params, tasks):
        return jax.vmap(lambda support: lavajax.adapt(params, support))(tasks.support)

    whole = jax.jit(adapt)(state.params, tasks)
    apart = jax.jit(jax.shard_map(
        adapt, mesh=mesh, in_specs=(P(), P("tasks")), out_specs=P("tasks")
    ))(state.params, tasks)
    print("adapt", distance(apart, whole))

    def step(state, tasks, keys):
        return method.step(state, BatchExpectation(tasks, keys, "tasks"), tx)[0]

    one = jax.jit(
        lambda state, tasks, keys: method.step(state, BatchExpectation(tasks, keys), tx)[0]
    )(state, tasks, keys).params
    sharded = jax.jit(jax.shard_map(
        step, mesh=mesh, in_specs=(P(), P("tasks"), P("tasks")), out_specs=P()
    ))(state, tasks, keys).params
    print("shard_map", distance(sharded, one))

    split = lambda tree: jax.tree.map(lambda leaf: leaf.reshape(4, 2, *leaf.shape[1:]), tree)
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), state)
    mapped = jax.pmap(step, axis_name="tasks")(copies, split(tasks), keys.reshape(4, 2))
    print("pmap", distance(jax.tree.map(lambda leaf: leaf[0], mapped.params), one))
    print("moved", distance(state.params, one))

at = jnp.linspace(-1.0, 1.0, 3)[:, None]
for method in (
    lavajax.IMaml(model=model, subspace=context, solver="gradient"),
    lavajax.lava_bayesian(model=model, subspace=context),
    lavajax.lava_bayesian(model=model, subspace=full),
):
    params = init_state(method, source, tx, jax.random.key(0)).params

    def predict(params, tasks):
        def one(support):
            return lavajax.predict(params, lavajax.adapt(params, support), at)
        return jax.vmap(one)(tasks.support)

    apart = jax.jit(jax.shard_map(
        predict, mesh=mesh, in_specs=(P(), P("tasks")), out_specs=P("tasks")
    ))(params, tasks)
    print("predict", distance(apart, jax.jit(predict)(params, tasks)))
"""


@pytest.mark.timeout(280)
def test_adaptation_and_outer_step_agree_with_one_device():
    """Inside a user's ``shard_map`` an inner gradient must not be summed over the devices.

    One step of SGD, in float64: Adam would hide a meta-gradient of the wrong scale. Then methods
    whose loops or linearisations begin at a constant. All of them are in
    ``slow/every_method_on_devices.py``.
    """
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=260,
        check=False,
        # Fewer threads than devices would let queued collectives wait for each other.
        env={**os.environ, "XLA_FLAGS": flags, "NPROC": "16", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 3 * 4 + 3
    for kind, value in lines:
        if kind == "moved":
            assert float(value) > 1e-3
        else:
            assert float(value) < 1e-10, done.stdout
