"""Meta-gradients of every method on several devices against one, which one process simulates.

    python tests/slow/every_method_on_devices.py [--devices 8] [--meta-batch 10] [--only lava maml]

One step of SGD, in float64: Adam would hide a gradient of the wrong scale. With 10 tasks on 8
devices, two to each, three devices have nothing that counts. Through ``lavajax.train``, which uses
``shard_map``; with the same steps under ``pmap``; and in a user's own ``shard_map``, which looks at
what varies over devices, a task to each: the gradient in parameters of the device's own, and
predictions by parameters that all devices share.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--devices", type=int, default=8)
parser.add_argument("--meta-batch", type=int, default=10)
parser.add_argument("--only", nargs="*")
parser.add_argument("--train", action="store_true", help="also train, with bad tasks and seeds")
parser.add_argument("--quick", action="store_true", help="less of --train")
args = parser.parse_args()

# Both are read when the backend starts. Fewer threads than devices would let queued collectives
# wait for each other.
flag = f"--xla_force_host_platform_device_count={args.devices}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, PartitionSpec  # noqa: E402

import lavajax  # noqa: E402
from gpu_check import METHODS, distance  # noqa: E402
from lavajax.sharding import AXIS, Share  # noqa: E402
from lavajax.start import start_state  # noqa: E402
from lavajax.steps import run_steps  # noqa: E402

RATE, LIMIT = 1e-3, 1e-6
SINE = lavajax.Sine(shots=4, queries=5)
ONE = jax.devices()[:1]


def small(method: Any) -> Any:
    """The method on a network that compiles fast."""
    if isinstance(method, lavajax.Conditioned):
        return dataclasses.replace(method, method=small(method.method))
    if not hasattr(method, "model"):
        return method
    return dataclasses.replace(method, model=dataclasses.replace(method.model, hidden=(8,)))


def gradient(start: Any, end: Any) -> Any:
    """What a step of SGD went along."""
    return jax.tree.map(
        lambda a, b: (np.asarray(a) - np.asarray(b)) / RATE,
        start.params.learned,
        end.params.learned,
    )


def compare(method: Any) -> dict[str, float]:
    """How far the meta-gradients are from that of one device, relative to its norm."""
    tx = optax.sgd(RATE)
    run: dict[str, Any] = {"steps": 1, "meta_batch": args.meta_batch, "optimizer": tx}
    start = start_state(method, SINE, tx)
    one = gradient(start, lavajax.train(method, SINE, devices=ONE, **run).state)
    sharded = gradient(start, lavajax.train(method, SINE, **run).state)
    assert distance(jax.tree.map(np.zeros_like, one), one) == 1.0, "the gradient is 0"
    share = Share(args.devices, AXIS)
    steps = partial(run_steps, meta_batch=args.meta_batch, share=share)
    mapped = jax.pmap(
        lambda _, state: steps(state, SINE, tx, 0, 1)[0], axis_name=AXIS, in_axes=(0, None)
    )(jnp.arange(args.devices), start)
    each = [jax.tree.map(lambda leaf, i=i: leaf[i], mapped) for i in (0, -1)]
    return {
        "shard_map": distance(sharded, one),
        "pmap": max(distance(gradient(start, state), one) for state in each),
        **compare_own(method, start.params),
    }


def compare_own(method: Any, params: Any) -> dict[str, float]:
    """The same of a user's own ``shard_map``, against ``vmap``."""
    keys = jax.random.split(jax.random.key(4), args.devices)
    tasks = jax.vmap(SINE.sample)(keys)

    def slope(learned: Any, task: Any, key: Any) -> Any:
        return jax.grad(lambda own: method.loss(params.replace_learned(own), task, key))(learned)

    def predict(params: Any, task: Any, key: Any) -> Any:
        adapted = lavajax.adapt(params, task.support, key=key)
        return lavajax.predict(params, adapted, task.query.x)

    def apart(fn: Any, shared: Any, *, vary: bool) -> Any:
        def one(shared: Any, task: Any, key: Any) -> Any:
            if vary:
                shared = jax.tree.map(lambda v: jax.lax.pcast(v, AXIS, to="varying"), shared)
            task, key = jax.tree.map(lambda v: v[0], (task, key))
            return jax.tree.map(lambda v: v[None], fn(shared, task, key))

        mesh, of_each = Mesh(np.array(jax.devices()), (AXIS,)), PartitionSpec(AXIS)
        specs = (PartitionSpec(), of_each, of_each)
        sharded = jax.shard_map(one, mesh=mesh, in_specs=specs, out_specs=of_each)
        return jax.jit(sharded)(shared, tasks, keys)

    def whole(fn: Any, shared: Any) -> Any:
        return jax.vmap(fn, in_axes=(None, 0, 0))(shared, tasks, keys)

    learned = params.learned
    return {
        "own gradient": distance(apart(slope, learned, vary=True), whole(slope, learned)),
        "own prediction": distance(apart(predict, params, vary=False), whole(predict, params)),
    }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Faulty:
    """Sine waves of which some have a label that is not a number."""

    share: jax.Array

    def sample(self, key: Any, split: str = "train") -> Any:
        """Draws one task."""
        task = SINE.sample(key, split)
        bad = jax.random.uniform(jax.random.fold_in(key, 7)) < self.share
        y = task.support.y.at[0].set(jnp.where(bad, jnp.nan, task.support.y[0]))
        return lavajax.Task(dataclasses.replace(task.support, y=y), task.query)


def train(seeds: int | None, bad: float) -> dict[str, float]:
    """A run with Adam, bad tasks left out: its distance from that on one device."""
    method, tasks = small(lavajax.Lava()), Faulty(jnp.float32(bad))
    run: dict[str, Any] = {"steps": 6, "chunk": 3, "meta_batch": 10, "max_skipped": 1.0}
    found = []
    for devices in (ONE, None):
        skipped: list[Any] = []
        trained = lavajax.train(
            method,
            tasks,
            seeds=seeds,
            devices=devices,
            callback=lambda p, skipped=skipped: skipped.extend(p.skipped),
            **run,
        )
        found.append((trained.params.learned, trained.history["loss"], skipped))
    (one, loss, left_out), (several, loss_several, left_out_several) = found
    assert bool(left_out) == (bad > 0)
    assert left_out == left_out_several, (left_out, left_out_several)
    return {"parameters": distance(several, one), "loss": distance(loss_several, loss)}


def main() -> int:
    """Compares; 1 where anything differs."""
    jax.config.update("jax_enable_x64", True)
    assert jax.device_count() == args.devices
    ok = True

    def report(name: str, found: dict[str, float]) -> None:
        nonlocal ok
        good = all(value < LIMIT for value in found.values())
        ok = ok and good
        text = ", ".join(f"{part} {value:.1e}" for part, value in found.items())
        print(f"{name}: {text}{'' if good else '  DIFFERS'}", flush=True)

    for name in args.only or METHODS:
        report(name, compare(small(METHODS[name])))
    if args.train:
        report("train, bad tasks", train(None, 0.2))
        report("train, 2 seeds", train(2, 0.0))
        if not args.quick:
            report("train, bad tasks, 2 seeds", train(2, 0.2))
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
