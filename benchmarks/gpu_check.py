"""Whether an accelerator computes what the CPU does, and how fast it trains: under 5 minutes.

    python benchmarks/gpu_check.py [--device N]

Every method adapts to the same tasks and takes its meta-gradient there, at the highest precision of
matrix products and at the default one, and is compared with the CPU in float64; methods that draw
from their keys with the CPU in float32, since their draws have other bits in float64. At the
highest a method may be ten times as far off as float32 on the CPU is. Then it trains on sine waves,
and times steps of 16 to 65,536 tasks. Without an accelerator it says so, and that is no failure.

Needs jax, flax, optax and chex; without an installed lavajax, PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from lavajax.methods.base import Method
from lavajax.start import init_state
from lavajax.steps import run_steps

METHODS: dict[str, Method] = {
    "lava": lavajax.Lava(),
    "lava-converged": lavajax.lava_converged(),
    "lava-bayesian": lavajax.lava_bayesian(),
    "lava context": lavajax.Lava(subspace=lavajax.Context(4)),
    "lava full": lavajax.Lava(subspace=lavajax.Full()),
    "anil": lavajax.Anil(),
    "maml": lavajax.Maml(),
    "cavia": lavajax.Cavia(),
    "meta-sgd": lavajax.MetaSgd(),
    "reptile": lavajax.Reptile(),
    "llama": lavajax.Llama(),
    "vfml": lavajax.Vfml(),
    "vr-maml": lavajax.vr_maml_tuned(),
    "meta-mix": lavajax.MetaMix(),
    "platipus": lavajax.Platipus(),
    "bmaml": lavajax.Bmaml(),
    "hyper-network": lavajax.HyperNetwork(),
    "cnp": lavajax.Cnp(),
    "attentive-cnp": lavajax.AttentiveCnp(),
    "tnp": lavajax.Tnp(),
    "ridge": lavajax.Ridge(),
    "alpaca": lavajax.Alpaca(),
    "dkt": lavajax.Dkt(),
    "imaml": lavajax.IMaml(),
}
DRAWS = {"meta-mix", "platipus", "bmaml"}
SIZES = tuple(4**power for power in range(2, 9))
SLACK, FLOOR = 10.0, 1e-5
COMPARING_SECONDS, SECONDS = 180.0, 285.0  # after so many, nothing more is begun
HIGHEST = "highest"


def main() -> int:
    """Runs everything.

    Returns:
        1 where a method is further off than float32 explains, or does not train; 2 where there was
        no time for everything, or no such accelerator.
    """
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=int, default=0, help="which accelerator")
    parser.add_argument("--quick", action="store_true", help="everything tiny: is it sound?")
    args = parser.parse_args()
    found = [d for d in jax.devices() if d.platform != "cpu"]
    if not found:
        print("no accelerator: JAX finds the CPU alone, and there is nothing to compare")
        return 0
    if not 0 <= args.device < len(found):
        parser.error(f"--device must be from 0 to {len(found) - 1}, got {args.device}")
    device = found[args.device]
    print(f"{device.device_kind}, JAX {jax.__version__}")
    with jax.default_device(device):
        methods = dict(list(METHODS.items())[:2]) if args.quick else METHODS
        wrong, missing = print_comparison(methods, device, COMPARING_SECONDS)
        if not args.quick:
            wrong += print_training(device, steps=2000)
        sizes = SIZES[:1] if args.quick else SIZES
        missing += print_times(sizes, until=begun + SECONDS)
    if wrong:
        print(f"not as they should be: {', '.join(wrong)}")
    if missing:
        print(f"left out, for want of time: {', '.join(missing)}")
    if not wrong and not missing:
        print("all of the first two is well" if args.quick else "all is well")
    return 1 if wrong else 2 if missing else 0


def print_comparison(
    methods: dict[str, Method], device: jax.Device, seconds: float
) -> tuple[list[str], list[str]]:
    """Compares method by method until the time is up.

    Returns:
        The names of those that are off, and of those that there was no time for.
    """
    wrong = list[str]()
    begun = time.monotonic()
    print("distance from the CPU's values, relative to their norm: adapt, gradient")
    print(f"{'':16s}{'float32 on CPU':>20s}{'highest':>20s}{'default':>20s}")
    for number, (name, method) in enumerate(methods.items()):
        if time.monotonic() - begun > seconds:
            return wrong, list(methods)[number:]
        gaps = compare(method, device, double=name not in DRAWS)
        columns = "".join(f"{g['adapt']:10.0e}{g['gradient']:10.0e}" for g in gaps.values())
        off = is_off(gaps)
        print(f"{name:16s}{columns}{'  OFF' if off else ''}", flush=True)
        wrong += [name] * off
    return wrong, []


def is_off(gaps: dict[str, dict[str, float]]) -> bool:
    """Whether the highest precision is further off than float32 explains; NaN is."""
    return any(
        not found <= SLACK * max(gaps["cpu"][part], FLOOR) for part, found in gaps[HIGHEST].items()
    )


def compare(
    method: Method, device: jax.Device, *, double: bool = True
) -> dict[str, dict[str, float]]:
    """How far a device is from the CPU's float64, or float32, in adaptation and meta-gradient.

    Returns:
        For ``"cpu"``, float32 there, ``"highest"`` and ``"default"``: the distances of the
        predictions, ``"adapt"``, and of the ``"gradient"``, relative to the norm of the CPU's.
    """
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        params, tasks, keys = example(method)
    single = outcome(params, tasks, keys, cpu, HIGHEST)
    exact = single
    if double:
        with jax.enable_x64(True):
            exact = outcome(widen(params), widen(tasks), keys, cpu, HIGHEST)
    found = {
        "cpu": single,
        HIGHEST: outcome(params, tasks, keys, device, HIGHEST),
        "default": outcome(params, tasks, keys, device, "default"),
    }
    return {
        name: {part: distance(value[part], exact[part]) for part in exact}
        for name, value in found.items()
    }


def example(method: Method, number: int = 4) -> tuple[Any, Any, jax.Array]:
    """Parameters at their start, and tasks ``[number]`` with a key each."""
    source = lavajax.Sine(queries=20)
    tasks = jax.vmap(source.sample)(jax.random.split(jax.random.key(1), number))
    params = method.init(jax.random.key(0), tasks.support.x[0], tasks.support.y[0])
    return params, tasks, jax.random.split(jax.random.key(2), number)


def outcome(
    params: Any, tasks: Any, keys: jax.Array, device: jax.Device, precision: str
) -> dict[str, Any]:
    """Predictions at the queries, and the gradient of the mean loss, computed on a device."""

    @jax.jit
    def both(params: Any, tasks: Any, keys: jax.Array) -> dict[str, Any]:
        method = params.method

        def predict(task: Any, key: jax.Array) -> jax.Array:
            adapted = method.adapt(params, task.support, key=key)
            return method.predict(params, adapted, task.query.x).mean

        def loss(learned: Any) -> jax.Array:
            at = params.replace_learned(learned)
            return jnp.mean(jax.vmap(lambda t, k: method.loss(at, t, k))(tasks, keys))

        gradient = jax.grad(loss)(params.learned)
        return {"adapt": jax.vmap(predict)(tasks, keys), "gradient": gradient}

    with jax.default_matmul_precision(precision):
        return jax.device_get(both(*jax.device_put((params, tasks, keys), device)))


def widen(tree: Any) -> Any:
    """The same numbers in float64."""
    return jax.tree.map(
        lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def distance(found: Any, expected: Any) -> float:
    """The norm of the difference, relative to that of what is expected."""

    def norm(leaves: list[np.ndarray]) -> float:
        return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves)))

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    wide = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return norm([a - b for a, b in wide]) / max(norm([b for _, b in wide]), 1e-30)


def print_training(device: jax.Device, steps: int, limit: float = 0.1) -> list[str]:
    """Trains LAVA on sine waves; the name of this where the error is above the limit."""
    tasks = lavajax.Sine()
    begun = time.monotonic()
    params = lavajax.train(lavajax.Lava(), tasks, steps=steps, devices=[device]).params
    error = lavajax.evaluate(params, tasks, num_tasks=1000).mean
    spent = time.monotonic() - begun
    print(f"sine, {steps} steps in {spent:.0f} s: test error {error:.2g} (below {limit} is right)")
    return [] if error < limit else ["training"]


def print_times(
    sizes: tuple[int, ...], until: float, repeats: int = 5, steps: int = 10
) -> list[str]:
    """The median time of a training step of LAVA at each size of the meta-batch.

    Returns:
        Those that were not begun by ``until``, of ``time.monotonic``.
    """
    tasks, tx = lavajax.Sine(), lavajax.outer_optimizer(10_000)
    state = init_state(lavajax.Lava(), tasks, tx, jax.random.key(0))
    print("tasks a step      ms a step   tasks a second")
    for number, size in enumerate(sizes):
        if time.monotonic() > until:
            return [f"steps of {each:,d} tasks" for each in sizes[number:]]
        chunk = jax.jit(lambda s, size=size: run_steps(s, tasks, tx, 0, steps, meta_batch=size))
        try:
            jax.block_until_ready(chunk(state))
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                jax.block_until_ready(chunk(state))
                times.append((time.perf_counter() - begun) / steps)
        except jax.errors.JaxRuntimeError as error:
            print(f"{size:12,d}   {str(error).splitlines()[0][:80]}")
            break
        median = statistics.median(times)
        print(f"{size:12,d} {1e3 * median:14.3f} {size / median:16,.0f}", flush=True)
    return []


if __name__ == "__main__":
    sys.exit(main())
