"""Outer steps on drawn tasks, as one compiled program."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lavajax.outer import BatchExpectation
from lavajax.rescue import careful_step
from lavajax.sharding import ALONE, Share, over_devices, share_of
from lavajax.tasks.base import TaskSource
from lavajax.types import Array, PyTree, Task, TrainState

# Most steps whose tasks are drawn at once.
MOST_DRAWN = 100


def draw(
    tasks: TaskSource, key: Array, step: Array, meta_batch: int, share: Share = ALONE
) -> tuple[Task, Array]:
    """The meta-batches of outer steps, or a device's share of them: tasks, and a key for each.

    All randomness is folded from the run's key, the absolute step and a task's index in the whole
    meta-batch, so a run split anywhere into chunks gives the same bits, and every number of devices
    sees the same tasks.

    Args:
        tasks: source of tasks.
        key: of the run.
        step: one step, or several, ``[...]``.
        meta_batch: tasks per step, on all devices.
        share: what this device takes of them, b.

    Returns:
        Tasks and keys ``[..., b]``.
    """
    index = share.indices(meta_batch)
    steps = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i)))(jnp.ravel(step))

    # All in one axis: LLVM unrolls a short last one, such as that of the tasks, and then takes five
    # times as long for each random kernel, which made up most of the compilation of a step.
    def of_each_task(keys: Array) -> Array:
        return jax.vmap(jax.random.fold_in)(
            jnp.repeat(keys, len(index)), jnp.tile(index, len(keys))
        )

    batch = jax.vmap(partial(tasks.sample, split="train"))(of_each_task(steps[:, 0]))
    shape = (*jnp.shape(step), len(index))
    return jax.tree.map(
        lambda leaf: leaf.reshape(*shape, *leaf.shape[1:]), (batch, of_each_task(steps[:, 1]))
    )


def _expectation(batch: tuple[Task, Array], meta_batch: int, share: Share) -> BatchExpectation:
    number, microbatch = share.size(meta_batch), share.at_once
    if microbatch is None and jax.default_backend() == "cpu":
        microbatch = fitting(number)
    if microbatch is not None and microbatch >= number:  # a share is small on many devices
        microbatch = None
    return BatchExpectation(*batch, share.axis_name, share.real(meta_batch), microbatch)


def fitting(number: int) -> int | None:
    """So many tasks at once that what a layer computes stays in a core's cache; None: all.

    1,024 tasks of 60 points, one LAVA step, take 1.6, 1.3, 1.1 and 2 times as long by 16, 32, 128
    and all at once as by 64.
    """
    if number <= 64:
        return None
    return next((size for size in range(64, 15, -1) if number % size == 0), None)


def run_steps(
    state: TrainState,
    tasks: TaskSource,
    tx: optax.GradientTransformation,
    start: Array | int,
    stop: Array | int,
    *,
    meta_batch: int,
    microbatch: int | None = None,
    share: Share = ALONE,
) -> tuple[TrainState, dict[str, Array]]:
    """Takes the outer steps ``start`` to ``stop - 1``. Pure; ``train`` compiles it.

    With a ``share``, it is one device's part, for ``shard_map`` or ``pmap`` over the named axis
    with everything replicated; the devices then end with the same state.

    Tasks are drawn for a whole block of steps at a time, since inside the loop the small random
    kernels cost as much as the step itself. Blocks begin at multiples of their size, and a step
    finds its tasks at the same place of its block however the run is split: to the same bits.

    Args:
        state: the state after ``start`` steps.
        tasks: source of tasks.
        tx: optimiser.
        start: first step, a scalar that may be traced.
        stop: where to end; any ``stop`` is the same compilation.
        meta_batch: tasks per outer step, on all devices together.
        microbatch: as in ``train``.
        share: what this device takes of them.

    Returns:
        The state after ``stop`` steps, and the mean of each metric over the steps taken.
    """
    share = dataclasses.replace(share, at_once=microbatch)
    size = _block_size(tasks, state.key, meta_batch, share)
    start, stop = jnp.asarray(start, jnp.int32), jnp.asarray(stop, jnp.int32)

    def draw_block(first: Array) -> tuple[Task, Array]:
        return draw(tasks, state.key, first + jnp.arange(size), meta_batch, share)

    def step(state: TrainState, batch: tuple[Task, Array]) -> tuple[TrainState, dict[str, Array]]:
        return state.params.method.step(state, _expectation(batch, meta_batch, share), tx)

    def take(carry: PyTree, batch: tuple[Task, Array]) -> PyTree:
        state, total = carry
        state, metrics = step(state, batch)
        return state, jax.tree.map(jnp.add, total, metrics)

    def block(index: Array, carry: PyTree) -> PyTree:
        first = index * size
        drawn = draw_block(first)
        return jax.lax.fori_loop(
            jnp.maximum(start, first),
            jnp.minimum(stop, first + size),
            lambda i, carry: take(carry, jax.tree.map(lambda leaf: leaf[i - first], drawn)),
            carry,
        )

    like = jax.eval_shape(lambda s: step(s, draw(tasks, s.key, start, meta_batch, share))[1], state)
    zeros = jax.tree.map(lambda m: jnp.zeros(m.shape, m.dtype), like)
    state, total = jax.lax.fori_loop(
        start // size, (stop + size - 1) // size, block, (state, zeros)
    )
    return state, jax.tree.map(lambda m: m / jnp.maximum(stop - start, 1), total)


def _block_size(tasks: TaskSource, key: Array, meta_batch: int, share: Share) -> int:
    """How many steps to draw tasks for at a time: at most ``MOST_DRAWN``, and 16 MiB."""
    one = jax.eval_shape(lambda key: draw(tasks, key, jnp.int32(0), meta_batch, share)[0], key)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(one))
    return max(n for n in (1, 2, 5, 10, 20, 50, MOST_DRAWN) if n == 1 or n * size <= 2**24)


@partial(jax.jit, static_argnames=("tx", "meta_batch", "microbatch", "mesh"))
def step_with_care(
    state: TrainState,
    tasks: TaskSource,
    *,
    tx: optax.GradientTransformation,
    meta_batch: int,
    microbatch: int | None,
    mesh: Mesh | None,
) -> tuple[TrainState, dict[str, Array], Array]:
    """One step, or one of each seed, without the tasks that would spoil it: ``[B]`` booleans."""
    share = dataclasses.replace(share_of(mesh), at_once=microbatch)

    def run(state: TrainState, tasks: TaskSource) -> tuple[TrainState, dict[str, Array], Array]:
        def step(state: TrainState) -> tuple[TrainState, dict[str, Array], Array]:
            batch = draw(tasks, state.key, state.step, meta_batch, share)
            new, metrics, bad = careful_step(state, _expectation(batch, meta_batch, share), tx)
            return new, metrics, share.whole(bad, meta_batch)

        return jax.vmap(step)(state) if state.step.ndim else step(state)

    return over_devices(run, mesh)(state, tasks)


@partial(jax.jit, static_argnames=("tx", "meta_batch", "microbatch", "mesh"), donate_argnums=0)
def run_chunk(
    state: TrainState,
    tasks: TaskSource,
    start: int,
    stop: int,
    *,
    tx: optax.GradientTransformation,
    meta_batch: int,
    microbatch: int | None,
    mesh: Mesh | None,
) -> tuple[TrainState, dict[str, Array]]:
    """``run_steps`` on all devices; where the state holds several seeds, of all of them."""
    settings: dict[str, Any] = {
        "meta_batch": meta_batch,
        "microbatch": microbatch,
        "share": share_of(mesh),
    }

    def run(
        state: TrainState, tasks: TaskSource, start: Array, stop: Array
    ) -> tuple[TrainState, dict[str, Array]]:
        def chunk(state: TrainState) -> tuple[TrainState, dict[str, Array]]:
            return run_steps(state, tasks, tx, start, stop, **settings)

        return jax.vmap(chunk)(state) if state.step.ndim else chunk(state)

    return over_devices(run, mesh)(state, tasks, start, stop)
