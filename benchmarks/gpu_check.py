"""Whether an accelerator computes what the CPU does, and how fast it trains: under 5 minutes.

    python benchmarks/gpu_check.py [--device N]

Every method adapts to the same tasks and takes two training steps there, at the highest precision
of matrix products and at the default one. Its predictions, with their variances, and what it gives
to the optimiser are compared, array by array, with the CPU's in float64, whose draws are those of
float32. At the highest a method may be ten times as far off as float32 on the CPU is; at the
default, which may round the factors of products, gradients that are off by a tenth are usual. Then
it trains on sine waves, and times steps of 16 to 65,536 tasks. Without an accelerator it says so,
and that is no failure.

Needs jax, flax, optax and chex; without an installed lavajax, PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax

import lavajax
from lavajax.methods.base import Method
from lavajax.outer import BatchExpectation
from lavajax.start import init_state
from lavajax.steps import MOST_DRAWN, run_steps

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
    "conditioned": lavajax.Conditioned(),
    "ridge": lavajax.Ridge(),
    "alpaca": lavajax.Alpaca(),
    "dkt": lavajax.Dkt(),
    "imaml": lavajax.IMaml(),
}
SIZES = tuple(4**power for power in range(2, 9))
SLACK, FLOOR = 10.0, 1e-5
COMPARING_SECONDS, SECONDS = 180.0, 270.0  # after so many, nothing more is begun
MOST_THREADS = 8  # of compilers: a container may count the cores of its host
HIGHEST = "highest"
NVIDIA = Path("/dev/nvidiactl")


def main() -> int:
    """Runs everything.

    Returns:
        1 where a method is further off than float32 explains, or does not run or train; 2 where
        there was no time for everything, or no accelerator of those that should be there.
    """
    begun = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", type=int, default=0, help="which accelerator")
    parser.add_argument("--quick", action="store_true", help="everything tiny: is it sound?")
    args = parser.parse_args()
    named = os.environ.get("JAX_PLATFORMS")
    if named and "cpu" not in named.split(","):
        parser.error(f"JAX_PLATFORMS={named} must name the CPU too, to compare with: {named},cpu")
    found = accelerators()
    if not found:
        if named and named != "cpu":
            parser.error(f"JAX finds the CPU alone of JAX_PLATFORMS={named}")
        if not named and NVIDIA.exists():
            parser.error(
                "there is an NVIDIA device, but JAX cannot use it: is jax[cuda] installed?"
            )
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
        failed, untimed = print_times(sizes, until=begun + SECONDS)
    wrong, missing = wrong + failed, missing + untimed
    print(f"{time.monotonic() - begun:.0f} s in all")
    if wrong:
        print(f"not as they should be: {', '.join(wrong)}")
    if missing:
        print(f"left out, for want of time or memory: {', '.join(missing)}")
    if not wrong and not missing:
        print("all of the first two is well" if args.quick else "all is well")
    return 1 if wrong else 2 if missing else 0


def accelerators() -> list[jax.Device]:
    """All that this process has: ``jax.devices()`` has those of the first backend alone."""
    backends = jax.extend.backend.backends().values()
    return [d for each in backends if each.platform != "cpu" for d in each.local_devices()]


def print_comparison(
    methods: dict[str, Method], device: jax.Device, seconds: float
) -> tuple[list[str], list[str]]:
    """Compares method by method until the time is up.

    Returns:
        The names of those that are off, and of those that there was no time for.
    """
    wrong, left = list[str](), list(methods)
    until = time.monotonic() + seconds
    print("distance from the CPU's values, relative to their norm: adapt, gradient")
    print(f"{'':16s}{'float32 on CPU':>20s}{'highest':>20s}{'default':>20s}")

    def fail(name: str, error: Exception) -> None:
        print(f"{name:16s}  FAILED: {first_line(error)}", flush=True)
        left.remove(name)
        wrong.append(name)

    def report(name: str, programs: dict[str, Program]) -> None:
        try:
            gaps = gaps_of(programs)
        except Exception as error:  # whatever it is: what the others do is still to be seen
            fail(name, error)
            return
        columns = "".join(f"{g['adapt']:10.0e}{g['gradient']:10.0e}" for g in gaps.values())
        off = is_off(gaps)
        print(f"{name:16s}{columns}{'  OFF' if off else ''}", flush=True)
        left.remove(name)
        wrong.extend([name] * off)

    ahead = collections.deque[tuple[str, dict[str, Program]]]()

    def report_compiled(until: float) -> None:
        while ahead and are_compiled(ahead[0][1], until):
            report(*ahead.popleft())

    pool = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1))
    for name, method in methods.items():  # traced one by one, compiled by all cores meanwhile
        if time.monotonic() > until:
            break
        try:
            ahead.append((name, begin(method, device, pool)))
        except Exception as error:
            fail(name, error)
        report_compiled(until=time.monotonic())
    report_compiled(until)
    pool.shutdown(cancel_futures=True)  # waits for what runs, which would disturb the times
    for name, programs in ahead:
        if not any(program.compiled.cancelled() for program in programs.values()):
            report(name, programs)
    return wrong, left


def are_compiled(programs: dict[str, Program], until: float) -> bool:
    """Waits for all of them, up to then."""
    futures = [program.compiled for program in programs.values()]
    return not wait(futures, max(0.0, until - time.monotonic())).not_done


def first_line(error: Exception) -> str:
    """Of its message, as much as a terminal's line has room for."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"


def is_off(gaps: dict[str, dict[str, float]]) -> bool:
    """Whether the highest precision is further off than float32 explains; NaN is."""
    return any(
        not found <= SLACK * max(gaps["cpu"][part], FLOOR) for part, found in gaps[HIGHEST].items()
    )


@dataclasses.dataclass(frozen=True)
class Program:
    """What is compiled, or about to be, and what it takes."""

    compiled: Future[Any]
    arguments: Any
    double: bool

    def run(self) -> Any:
        """Its results, as NumPy arrays."""
        with jax.enable_x64(self.double):
            return jax.device_get(self.compiled.result()(*self.arguments))


def begin(method: Method, device: jax.Device, pool: Executor) -> dict[str, Program]:
    """Has ``outcome`` compiled, for ``"exact"``, in float64, and for what ``gaps_of`` compares."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        example = jax.device_put(make_example(method), cpu)
    where = {
        "exact": (cpu, HIGHEST, True),
        "cpu": (cpu, HIGHEST, False),
        HIGHEST: (device, HIGHEST, False),
        "default": (device, "default", False),
    }
    programs = {}
    for name, (place, precision, double) in where.items():
        with jax.default_matmul_precision(precision), jax.enable_x64(double):
            arguments = jax.device_put(widen(example) if double else example, place)
            with float32_draws() if double else contextlib.nullcontext():
                lowered = jax.jit(outcome).lower(*arguments)
        # To choose the fastest product would take longer than all the rest, and be of no use here.
        options: dict[str, str | bool] | None = (
            {"xla_gpu_autotune_level": "0"} if place.platform == "gpu" else None
        )
        programs[name] = Program(pool.submit(lowered.compile, options), arguments, double)
    return programs


def gaps_of(programs: dict[str, Program]) -> dict[str, dict[str, float]]:
    """How far a device is from the CPU's float64, in adaptation and in training.

    Returns:
        For ``"cpu"``, float32 there, ``"highest"`` and ``"default"``: the distances of the
        predictions, ``"adapt"``, means or variances, and of the ``"gradient"`` of either step, as
        ``worst_leaf`` has it; NaN where one of them is.
    """
    found = {name: program.run() for name, program in programs.items()}
    exact = found.pop("exact")

    def gap(value: Any, part: str) -> float:
        pairs = zip(value[part], exact[part], strict=True)
        return float(np.max([worst_leaf(a, b) for a, b in pairs]))

    return {name: {part: gap(value, part) for part in exact} for name, value in found.items()}


def compare(method: Method, device: jax.Device) -> dict[str, dict[str, float]]:
    """The gaps of one method."""
    with ThreadPoolExecutor() as pool:
        return gaps_of(begin(method, device, pool))


# Keeps what it is given. A first gradient may be of any size, and the second is to be compared too.
_TX = optax.chain(optax.trace(0.0), optax.clip_by_global_norm(1.0), optax.scale(-1e-3))


def make_example(method: Method, number: int = 4) -> tuple[Any, Any, jax.Array]:
    """The state that training starts from, and tasks ``[number]`` with a key each."""
    source = lavajax.Sine(queries=20)
    tasks = jax.vmap(source.sample)(jax.random.split(jax.random.key(1), number))
    state = init_state(method, source, _TX, jax.random.key(0))
    return state, tasks, jax.random.split(jax.random.key(2), number)


def outcome(state: Any, tasks: Any, keys: jax.Array) -> dict[str, tuple[Any, ...]]:
    """Means and variances at the queries, and what two training steps give to the optimiser."""
    params = state.params
    method = params.method

    def predict(task: Any, key: jax.Array) -> tuple[Any, ...]:
        adapted = method.adapt(params, task.support, key=key)
        found = method.predict(params, adapted, task.query.x)
        return (found.mean,) if found.variance is None else (found.mean, found.variance)

    def step(state: Any, _: None) -> tuple[Any, Any]:
        state, _ = method.step(state, BatchExpectation(tasks, keys), _TX)
        return state, state.opt[0].trace

    _, given = jax.lax.scan(step, state, None, length=2)
    each = tuple(jax.tree.map(lambda leaf, i=i: leaf[i], given) for i in range(2))
    return {"adapt": jax.vmap(predict)(tasks, keys), "gradient": each}


@contextlib.contextmanager
def float32_draws() -> Iterator[None]:
    """Random numbers are those without float64, widened: with it a key gives others."""
    usual = {"beta": jnp.float32, "randint": jnp.int32}

    def narrow(value: Any) -> Any:
        if isinstance(value, (np.dtype, type)):
            return jnp.float32 if jnp.issubdtype(value, jnp.floating) else value
        floating = hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)
        return value.astype(jnp.float32) if floating else value

    def narrowed(name: str) -> Callable[..., Any]:
        draw = getattr(jax.random, name)

        def drawn(*args: Any, **options: Any) -> Any:
            args, options = jax.tree.map(narrow, (args, options))
            if name in usual:
                options.setdefault("dtype", usual[name])
            return widen(draw(*args, **options))

        return drawn

    with contextlib.ExitStack() as stack:
        for name in ("normal", "uniform", "choice", *usual):
            stack.enter_context(mock.patch.object(jax.random, name, narrowed(name)))
        yield


def widen(tree: Any) -> Any:
    """The same numbers in float64."""
    return jax.tree.map(
        lambda a: a.astype(jnp.float64) if jnp.issubdtype(a.dtype, jnp.floating) else a, tree
    )


def distance(found: Any, expected: Any) -> float:
    """The norm of the difference, relative to that of what is expected."""
    return norm(difference(found, expected)) / max(norm(expected), 1e-30)


def worst_leaf(found: Any, expected: Any) -> float:
    """The largest norm of the difference of one array, relative to that of what is expected.

    Relative to a thousandth of the norm of all arrays together at least: one may be zero.
    """
    least = max(1e-3 * norm(expected), 1e-30)
    apart = jax.tree.leaves(difference(found, expected))
    leaves = zip(apart, jax.tree.leaves(expected), strict=True)
    return float(np.max([norm(a) / max(norm(leaf), least) for a, leaf in leaves]))


def difference(found: Any, expected: Any) -> Any:
    """In float64, array by array."""
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b), found, expected)


def norm(tree: Any) -> float:
    """Of all arrays together, in float64."""
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in leaves)))


def print_training(device: jax.Device, steps: int, limit: float = 0.1) -> list[str]:
    """Trains LAVA on sine waves; the name of this where the error is above the limit."""
    tasks = lavajax.Sine()
    begun = time.monotonic()
    try:
        params = lavajax.train(lavajax.Lava(), tasks, steps=steps, devices=[device]).params
        error = lavajax.evaluate(params, tasks, num_tasks=1000).mean
    except Exception as failure:
        print(f"sine  FAILED: {first_line(failure)}", flush=True)
        return ["training"]
    spent = time.monotonic() - begun
    print(f"sine, {steps} steps in {spent:.0f} s: test error {error:.2g} (below {limit} is right)")
    return [] if error < limit else ["training"]


def print_times(
    sizes: tuple[int, ...], until: float, repeats: int = 5
) -> tuple[list[str], list[str]]:
    """The median time of a training step of LAVA at each size of the meta-batch.

    Returns:
        Those that failed; and those that were not begun by ``until``, of ``time.monotonic``, or
        did not fit the memory.
    """
    tasks, tx = lavajax.Sine(), lavajax.outer_optimizer(10_000)
    state = init_state(lavajax.Lava(), tasks, tx, jax.random.key(0))
    left = [f"steps of {size:,d} tasks" for size in sizes]
    print("tasks a step      ms a step   tasks a second")
    for number, size in enumerate(sizes):
        if time.monotonic() > until:
            return [], left[number:]
        # Whole blocks of those whose tasks are drawn at once: unused tasks would be timed too.
        steps = MOST_DRAWN if size <= 256 else MOST_DRAWN // 5
        chunk = jax.jit(
            lambda s, size=size, steps=steps: run_steps(s, tasks, tx, 0, steps, meta_batch=size)
        )
        try:
            jax.block_until_ready(chunk(state))
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                jax.block_until_ready(chunk(state))
                times.append((time.perf_counter() - begun) / steps)
        except jax.errors.JaxRuntimeError as error:
            print(f"{size:12,d}   {first_line(error)}")
            if "RESOURCE_EXHAUSTED" in str(error):
                return [], left[number:]
            return [left[number]], left[number + 1 :]
        median = statistics.median(times)
        print(f"{size:12,d} {1e3 * median:14.3f} {size / median:16,.0f}", flush=True)
    return [], []


if __name__ == "__main__":
    sys.exit(main())
