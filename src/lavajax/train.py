"""The outer loop."""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lavajax import leaves
from lavajax.methods.base import Method
from lavajax.methods.batch_norm import check_batch
from lavajax.rescue import is_sound, left_out, run_carefully, spoiled
from lavajax.sharding import give, local, replicate, task_mesh
from lavajax.steps import run_chunk, step_with_care
from lavajax.tasks.base import TaskSource, check_source, check_task
from lavajax.types import Array, MetaParams, PyTree, TrainState
from lavajax.units import Units
from lavajax.validate import check_seed, whole
from lavajax.watch import Watch


@functools.lru_cache(maxsize=128)  # the same object again, so that a second run compiles nothing
def outer_optimizer(
    steps: int, *, rate: float = 5e-3, warmup: int | None = None, clip: float = 10.0
) -> optax.GradientTransformation:
    """Adam with a linear warm-up to ``rate``, then a cosine to 0, after clipping.

    Args:
        steps: length of the run, which the cosine spans.
        rate: peak learning rate.
        warmup: steps of the warm-up; None: 1,000, or a tenth of a shorter run.
        clip: bound on the global norm of the meta-gradient.

    Raises:
        ValueError: an argument is not positive, or the warm-up is not shorter than the run.
    """
    steps = whole("steps", steps, 1)
    if not isinstance(rate, numbers.Real) or not 0 < rate < math.inf:
        raise ValueError(f"rate must be a finite number above 0, got {rate!r}")
    if not isinstance(clip, numbers.Real) or not clip > 0:
        raise ValueError(f"clip must be a number above 0, got {clip!r}")
    if warmup is None:
        warmup = min(1000, steps // 10)
    if not 0 <= whole("warmup", warmup, 0) < steps:
        raise ValueError(f"warmup must be at least 0 and below steps = {steps}, got {warmup}")
    schedule = optax.warmup_cosine_decay_schedule(0.0 if warmup else rate, rate, warmup, steps)
    return optax.chain(optax.clip_by_global_norm(clip), optax.adam(schedule))


@dataclasses.dataclass(frozen=True)
class Progress:
    """How a run stands after a chunk of outer steps.

    Attributes:
        step: outer steps taken.
        steps: outer steps in all.
        metrics: the method's metrics, each averaged over the steps of the chunk; scalars, or
            ``[seeds]`` where several seeds train together.
        seconds: of this chunk, without compilation.
        compile_seconds: what compiling took, once before the first chunk; that of a single step
            where the same was compiled before.
        state: the state after the chunk. Its arrays are given up to the next chunk: a callback
            that keeps it, or its params, must copy them (``jax.tree.map(jnp.copy, ...)``).
        skipped: the tasks of the chunk that were left out, since their loss or its gradient was
            not finite: (outer step, index in the meta-batch), or (step, seed, index).
    """

    step: int
    steps: int
    metrics: dict[str, np.ndarray]
    seconds: float
    compile_seconds: float
    state: TrainState
    skipped: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Trained:
    """The outcome of a run.

    Attributes:
        params: final meta-parameters, with a leading axis ``[seeds]`` on every leaf where several
            seeds were trained together; see ``seed``.
        state: the whole final state.
        history: metrics over the run, each ``[chunks]`` or ``[chunks, seeds]``, and ``step``; NaN
            for a chunk in which no step had a task to learn from.
    """

    params: MetaParams
    state: TrainState
    history: dict[str, np.ndarray]

    def seed(self, index: int) -> MetaParams:
        """The meta-parameters of one of several seeds.

        Raises:
            ValueError: there is one alone, or ``index`` is not of one of them.
        """
        if np.ndim(self.state.step) == 0:
            raise ValueError("seed() is for runs of several seeds: this one was trained alone")
        if not 0 <= index < len(self.state.step):
            raise ValueError(
                f"index must be from 0 to {len(self.state.step) - 1}, one for each seed, "
                f"got {index}"
            )
        return jax.tree.map(lambda leaf: leaf[index], self.params)


def init_state(
    method: Method,
    tasks: TaskSource,
    tx: optax.GradientTransformation,
    key: Array,
) -> TrainState:
    """The state at step 0 of a single run, for points like those of ``tasks``, in its units.

    Raises:
        ValueError: what ``tasks`` samples is no task of points alike, or the method cannot take it.
    """
    example_key, init_key, run_key = jax.random.split(key, 3)
    task = check_task(tasks.sample(example_key, "train"))
    params = method.init(init_key, task.support.x, task.support.y)
    check_batch(params, task.query.x, task.query.x.shape[0], "the query of tasks")
    params = dataclasses.replace(params, units=_units_of(tasks, params))
    return TrainState(
        params, tx.init(params.learned), method.memory(params), run_key, jnp.zeros((), jnp.int32)
    )


def _units_of(tasks: TaskSource, params: MetaParams) -> Units | None:
    """The units of a source that has any, which must be as many as its inputs and targets."""
    units = getattr(tasks, "units", None)
    if units is None:
        return None
    sizes = params.spec.x_shape, params.spec.y_shape
    if not isinstance(units, Units) or sizes != ((len(units.x.mean),), (len(units.y.mean),)):
        raise ValueError(
            f"tasks.units must be Units of inputs {sizes[0]} and targets {sizes[1]}, got {units!r}"
        )
    return units


def start_state(
    method: Method,
    tasks: TaskSource,
    tx: optax.GradientTransformation,
    *,
    seed: int = 0,
    seeds: int | None = None,
) -> TrainState:
    """The state that ``train`` starts from; with ``seeds``, a leading axis on every leaf.

    Raises:
        ValueError: a seed is no integer from 0 to 2^32 - 1: larger ones would repeat the others.
    """
    seed = check_seed(seed, seeds or 1)
    if seeds is None:
        return _start(tasks, jax.random.key(seed), method=method, tx=tx)
    keys = jnp.stack([jax.random.key(seed + i) for i in range(seeds)])
    start = partial(_start, method=method, tx=tx)
    return jax.vmap(start, in_axes=(None, 0))(tasks, keys)


# Compiled, so that no two leaves of the state share a buffer: all are given up to each chunk.
@partial(jax.jit, static_argnames=("method", "tx"))
def _start(
    tasks: TaskSource, key: Array, *, method: Method, tx: optax.GradientTransformation
) -> TrainState:
    return init_state(method, tasks, tx, key)


def train(
    method: Method,
    tasks: TaskSource,
    *,
    steps: int = 15_000,
    seed: int = 0,
    seeds: int | None = None,
    meta_batch: int = 10,
    microbatch: int | None = None,
    optimizer: optax.GradientTransformation | None = None,
    chunk: int = 500,
    callback: Callable[[Progress], Any] | None = None,
    state: TrainState | None = None,
    max_skipped: float = 0.01,
    skipped: int | Sequence[int] = 0,
    devices: Sequence[jax.Device] | None = None,
) -> Trained:
    """Meta-trains a method on a source of tasks.

    The tasks of every outer step are shared out over the devices, and the meta-gradient is the
    mean over all of them: that of one device, but for rounding. Parameters and data are on every
    device. Results, and the state that a callback sees, are on the first device of the process.
    Several processes may each have a part of the data: a device draws from that of its process.

    Args:
        method: any method, such as ``Lava()``.
        tasks: source of tasks, such as ``Sine()``.
        steps: outer steps.
        seed: seeds everything: initialisation and tasks.
        seeds: train the runs of ``seed``, ``seed + 1``, ... together, under one vmap. Each is the
            run of that seed alone, but for rounding. None: one run, without a leading axis.
        meta_batch: tasks per outer step, B.
        microbatch: tasks that a device computes at once, a divisor of its share of B; the gradient
            is summed over them, in less memory. The result is the same but for rounding. None: all,
            and on a CPU the largest divisor from 16 to 64, which its caches hold, if there is one.
        optimizer: any optax optimiser over ``params.learned``; None: ``outer_optimizer(steps)``.
        chunk: outer steps in one compiled call. Does not change the result: not a bit of it where
            no task is left out, and else but for rounding.
        callback: called with a ``Progress`` after every chunk; must copy what it keeps of its
            ``state``.
        state: a state of the same run to go on from, such as a checkpoint's; None starts anew.
            With the same arguments otherwise, the outcome is that of a run without a pause, to the
            same bits on the same machine. Where it has taken all steps, it is returned, and the
            history is empty.
        max_skipped: the largest share of the tasks of the run (of all ``steps``) that may be left
            out. A chunk that ends in NaN or infinity is taken again step by step, without the tasks
            whose loss or gradient is not finite; the meta-gradient is that of the others. A seed
            among several that would need more is given up, and ends as NaN.
        skipped: how many tasks of the run have been left out before ``state``, or a number for each
            seed: they count too.
        devices: those to train on; None: all of ``jax.devices()``. Where ``jax.distributed`` joins
            several processes, all of them make the same call, with the same arguments, but that the
            arrays of ``tasks``, of equal shapes, may hold other numbers in each.

    Returns:
        Final parameters, state and history, the latter from ``state`` on.

    Warns:
        UserWarning: training is finite and yet none, and goes on: its loss explodes, or its
            gradient, or that of a layer of the backbone, is exactly 0 (``lavajax.watch``). Said
            once.

    Raises:
        ValueError: an argument is out of range, or the method cannot take such tasks.
        FloatingPointError: the loss of every seed has become NaN or infinite, or more tasks than
            ``max_skipped`` would have to be left out; the message has the first of them.
    """
    if isinstance(method, type) or not callable(getattr(method, "step", None)):
        raise ValueError(f"method must be an instance such as Lava(), got {method!r}")
    check_source(tasks)
    steps, meta_batch = whole("steps", steps, 1), whole("meta_batch", meta_batch, 1)
    chunk = whole("chunk", chunk, 1)
    microbatch = _optional("microbatch", microbatch, "all that fit")
    seeds = _optional("seeds", seeds, "a single run")
    if not 0 <= max_skipped <= 1:
        raise ValueError(f"max_skipped must be from 0 to 1, a share, got {max_skipped}")
    mesh = task_mesh(devices)
    tx = outer_optimizer(steps) if optimizer is None else _check_optimizer(optimizer)
    if state is None:
        state = start_state(method, tasks, tx, seed=seed, seeds=seeds)
    else:
        _check_state(state, method, tasks, tx, seeds)
        state = jax.tree.map(jnp.copy, state)  # the caller's own is not given up to the chunks
    done = int(np.max(state.step))
    if done > steps:
        raise ValueError(f"state must not be beyond steps = {steps}, got one of step {done}")

    state, tasks = replicate(state, mesh), give(tasks, mesh)
    settings: dict[str, Any] = {
        "tx": tx,
        "meta_batch": meta_batch,
        "microbatch": microbatch,
        "mesh": mesh,
    }

    if done == steps:
        return _at_end(state, tasks, done, **settings)
    first_loss, compile_seconds = _try_step(state, tasks, done, **settings)
    watch = Watch(first_loss)

    every: tuple[tuple[int, ...], ...] = ()
    room = max_skipped * steps * meta_batch - _counts(skipped, state.step.shape)
    history: list[dict[str, np.ndarray]] = []
    while done < steps:
        length = min(chunk, steps - done)
        begun = time.perf_counter()
        before = jax.tree.map(jnp.copy, state)  # a chunk that goes wrong starts from it again
        state, metrics = run_chunk(state, tasks, done, done + length, **settings)
        host = {name: np.asarray(value) for name, value in metrics.items()}
        omitted: tuple[tuple[int, ...], ...] = ()
        if spoiled(*(local(each, mesh) for each in (before, state, metrics))):
            step = partial(step_with_care, tasks=tasks, **settings)
            state, host, omitted = run_carefully(before, step, length, room, every)
            room, every = room - left_out(omitted, room), every + omitted
        done += length
        history.append({"step": np.asarray(done), **host})
        # Without a loss a run may yet be sound: no step of the chunk had a good task.
        here = local(state, mesh)
        if not (np.isfinite(host["loss"]).any() or is_sound(here.params, here.step).any()):
            raise FloatingPointError(
                f"training diverged: the loss is not finite between steps {done - length} and "
                f"{done}; a lower outer rate, or a larger epsilon or epsilon_floor, may help"
            )
        watch.look(done - length, done, host)
        if callback is not None:
            seconds = time.perf_counter() - begun
            callback(Progress(done, steps, host, seconds, compile_seconds, here, omitted))
    stacked = {name: np.stack([h[name] for h in history]) for name in history[0]}
    return Trained(here.params, here, stacked)


def _check_optimizer(given: Any) -> optax.GradientTransformation:
    if isinstance(given, type) or not all(hasattr(given, name) for name in ("init", "update")):
        raise ValueError(
            "optimizer must be an optax.GradientTransformation, such as optax.adam(1e-3), got "
            f"{given!r}"
        )
    return given


def _counts(skipped: int | Sequence[int], shape: tuple[int, ...]) -> np.ndarray:
    """Numbers of tasks of the shape of the seeds.

    Raises:
        ValueError: they are something else.
    """
    counts = np.asarray(skipped)
    if counts.dtype.kind not in "iu" or counts.shape not in ((), shape) or np.any(counts < 0):
        seeds = f", or {shape[0]} of them, one for each seed" if shape else ""
        raise ValueError(f"skipped must be an integer of at least 0{seeds}, got {skipped!r}")
    return np.broadcast_to(counts, shape)


def _at_end(state: TrainState, tasks: TaskSource, done: int, **settings: Any) -> Trained:
    """The outcome of a run that has no step left to take."""
    _, like = jax.eval_shape(partial(run_chunk, **settings), state, tasks, done, done + 1)
    history = {name: np.zeros((0, *each.shape), each.dtype) for name, each in like.items()}
    state = local(state, settings["mesh"])
    return Trained(state.params, state, {"step": np.zeros(0, int), **history})


def _optional(name: str, value: int | None, none: str) -> int | None:
    """An integer of at least 1, or None, which stands for ``none``."""
    return None if value is None else whole(name, value, 1, f", or None for {none}")


def _try_step(
    state: TrainState, tasks: TaskSource, done: int, **settings: Any
) -> tuple[np.ndarray, float]:
    """The loss of the next step, taken by a copy, and the seconds: those of compiling."""
    begun = time.perf_counter()
    copy = jax.tree.map(jnp.copy, state)
    _, metrics = run_chunk(copy, tasks, done, done + 1, **settings)
    return np.asarray(metrics["loss"]), time.perf_counter() - begun


def _check_state(
    state: TrainState,
    method: Method,
    tasks: TaskSource,
    tx: optax.GradientTransformation,
    seeds: int | None,
) -> None:
    """Requires a state to be one that these arguments lead to."""
    if not isinstance(state, TrainState):
        raise ValueError(f"state must be a TrainState, got {type(state).__name__}")
    if state.params.method != method:
        raise ValueError(f"state must be of the method {method!r}, got {state.params.method!r}")
    found = None if state.step.ndim == 0 else state.step.shape[0]
    if found != seeds:
        raise ValueError(f"state must be of seeds={seeds}, got one of seeds={found}")
    like = jax.eval_shape(partial(start_state, method, tasks, tx, seeds=seeds))
    if state.params.spec != like.params.spec:
        raise ValueError(
            f"state must be of points like those of tasks, {like.params.spec}, got one of "
            f"{state.params.spec}"
        )
    units = like.params.units
    if state.params.units != units:
        raise ValueError(
            f"state must be of tasks in the same units, got {state.params.units!r}, and the tasks "
            f"have {units!r}"
        )
    for field, argument in (("params", "method"), ("opt", "optimizer"), ("memory", "method")):
        if different := _difference(getattr(state, field), getattr(like, field)):
            raise ValueError(
                f"state.{field} must be such as {argument} makes it, {different}: give the "
                f"{argument} that the state is of"
            )


def _difference(given: PyTree, made: PyTree) -> str:
    """The first difference in structure, shapes or dtypes; empty where there is none."""
    one, other = (
        {name: f"{leaf.shape} {leaf.dtype}" for name, leaf in leaves.named(tree).items()}
        for tree in (given, made)
    )
    for name in {**other, **one}:
        if one.get(name) != other.get(name):
            return f"{other.get(name, 'nothing')} at {name!r}, got {one.get(name, 'nothing')}"
    trees: list[Any] = [jax.tree.structure(tree) for tree in (given, made)]
    return "" if trees[0] == trees[1] else f"{trees[1]}, got {trees[0]}"
