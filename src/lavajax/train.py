"""The outer loop."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lavajax.methods.base import Method
from lavajax.rescue import DIVERGED, is_sound, left_out, run_carefully, spoiled
from lavajax.sharding import give, local, replicate, task_mesh
from lavajax.start import begin
from lavajax.steps import run_chunk, step_with_care
from lavajax.tasks.base import TaskSource, check_source
from lavajax.types import MetaParams, TrainState
from lavajax.validate import real, whole
from lavajax.watch import Watch


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
    rate = real("rate", rate, "a finite number above 0", lambda r: 0 < r < math.inf)
    clip = real("clip", clip, "a number above 0", lambda c: c > 0)
    if warmup is None:
        warmup = min(1000, steps // 10)
    if not 0 <= whole("warmup", warmup, 0) < steps:
        raise ValueError(f"warmup must be at least 0 and below steps = {steps}, got {warmup}")
    return _outer_optimizer(steps, rate, warmup, clip)


@functools.lru_cache(maxsize=128)  # the same object again, so that a second run compiles nothing
def _outer_optimizer(
    steps: int, rate: float, warmup: int, clip: float
) -> optax.GradientTransformation:
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
        skipped: the tasks of the run that were left out, as in ``Progress``, from ``state`` on.
    """

    params: MetaParams
    state: TrainState
    history: dict[str, np.ndarray]
    skipped: tuple[tuple[int, ...], ...] = ()

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
        seed: seeds everything: initialisation and tasks. A given ``state`` has its own.
        seeds: train the runs of ``seed``, ``seed + 1``, ... together, under one vmap. Each is the
            run of that seed alone, but for rounding. None: one run, without a leading axis.
        meta_batch: tasks per outer step, B.
        microbatch: tasks that a device computes at once: the gradient is summed over them, in less
            memory, and is the same but for rounding. A share of B that it does not divide is filled
            up with tasks that count nothing. None: all, and on a CPU the largest divisor of a share
            from 16 to 64, which its caches hold, if there is one.
        optimizer: any optax optimiser over ``params.learned``; None: ``outer_optimizer(steps)``.
        chunk: outer steps in one compiled call. Does not change the result: not a bit of it where
            no task is left out, and else but for rounding.
        callback: called with a ``Progress`` after every chunk; must copy what it keeps of its
            ``state``.
        state: a state of the same run to go on from, such as a checkpoint's; None starts anew.
            With the same arguments otherwise, the outcome is that of a run without a pause, on the
            same machine as closely as ``chunk`` says. Where it has taken all steps, it is returned,
            and the history is empty.
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
            once. Or tasks were left out, and no callback heard of it.

    Raises:
        ValueError: an argument is out of range, or the method cannot take such tasks.
        FloatingPointError: the parameters of every seed have become NaN or infinite, or more tasks
            than ``max_skipped`` would have to be left out; the message has the first of them.
    """
    if isinstance(method, type) or not callable(getattr(method, "step", None)):
        raise ValueError(f"method must be an instance such as Lava(), got {method!r}")
    check_source(tasks)
    steps, meta_batch = whole("steps", steps, 1), whole("meta_batch", meta_batch, 1)
    chunk = whole("chunk", chunk, 1)
    microbatch = _optional("microbatch", microbatch, "all that fit")
    seeds = _optional("seeds", seeds, "a single run")
    max_skipped = real("max_skipped", max_skipped, "from 0 to 1, a share", lambda m: 0 <= m <= 1)
    mesh = task_mesh(devices)
    tx = outer_optimizer(steps) if optimizer is None else _check_optimizer(optimizer)
    state, done = begin(method, tasks, tx, state, steps=steps, seed=seed, seeds=seeds)
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
        here = local(state, mesh)
        if not is_sound(here.params, here.step).any():
            raise FloatingPointError(DIVERGED.format(start=done - length, stop=done))
        watch.look(done - length, done, host)
        if callback is not None:
            seconds = time.perf_counter() - begun
            callback(Progress(done, steps, host, seconds, compile_seconds, here, omitted))
    if watch.in_doubt:
        losses = [_try_step(state, tasks, done + i, **settings)[0] for i in range(3)]
        watch.look(done, done + 3, {"loss": np.min(losses, axis=0)})
    if every and callback is None:
        warnings.warn(
            f"training left out {len(every)} tasks, whose loss or gradient is not finite; the "
            f"first is task {every[0][-1]} of step {every[0][0]}; Trained.skipped has all of them",
            stacklevel=2,
        )
    stacked = {name: np.stack([h[name] for h in history]) for name in history[0]}
    return Trained(here.params, here, stacked, every)


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
