"""Outer steps without the tasks that would spoil them.

Training checks nothing from step to step: what is not finite spreads, and shows at the end of a
chunk. The chunk is then taken again with care.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lavajax.outer import BatchExpectation, training_loss
from lavajax.types import Array, MetaParams, PyTree, Task, TrainState

if TYPE_CHECKING:
    from lavajax.methods.base import Method


DIVERGED = (
    "training diverged: what is learned, or its loss, is not finite between steps {start} and "
    "{stop}; a lower outer rate, or a larger epsilon or epsilon_floor, may help"
)


def not_finite(method: Method, params: MetaParams, expect: BatchExpectation) -> Array:
    """``[B]`` booleans: the tasks whose loss, or its gradient, is not finite."""
    learned = expect.own(params.learned)

    def is_bad(task: Task, key: Array) -> Array:
        def loss(learned: dict[str, Any]) -> Array:
            return training_loss(method, params.replace_learned(learned), task, key)

        return ~all_finite(jax.value_and_grad(loss)(learned))

    return lax.map(
        lambda each: is_bad(*each),
        (expect.tasks, expect.keys),
        batch_size=expect.microbatch or expect.keys.shape[0],
    )


def all_finite(tree: PyTree) -> Array:
    """Whether no floating leaf has a NaN or an infinity, a boolean scalar."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in _inexact(tree)]))


def _inexact(tree: PyTree) -> list[Array]:
    return [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.inexact)]


def careful_step(
    state: TrainState, expect: BatchExpectation, tx: optax.GradientTransformation
) -> tuple[TrainState, dict[str, Array], Array]:
    """The method's outer step, without the tasks that would spoil it.

    Returns:
        The next state, the metrics, and the tasks left out, ``[B]`` booleans, of this device.
        Where no task is good on any device, only the step is counted.
    """
    method = state.params.method

    def check() -> Array:
        return not_finite(method, state.params, expect)

    def again(bad: Array) -> tuple[TrainState, dict[str, Array]]:
        return method.step(state, expect.without(bad), tx)

    new, metrics = method.step(state, expect, tx)
    none = expect.own(jnp.zeros(expect.keys.shape[0], bool))
    bad = lax.cond(all_finite((new, metrics)), lambda: none, check)
    good = expect.any(~bad if expect.real is None else ~bad & expect.real)
    redo = expect.any(bad) & good  # the same on all devices, which step together
    new, metrics = lax.cond(redo, again, lambda _: (new, metrics), bad)
    stay = dataclasses.replace(state, step=state.step + 1)
    new = lax.cond(good, lambda: new, lambda: stay)
    return new, metrics, bad


def is_sound(tree: PyTree, like: Array) -> np.ndarray:
    """Whether all is finite, of each seed where ``like`` has an axis of them.

    By NumPy, once in a chunk: a compiled form takes longer to compile than all chunks to look at.
    """
    sound = np.ones(like.shape, bool)
    for leaf in _inexact(tree):
        sound &= np.isfinite(np.asarray(leaf)).reshape(*like.shape, -1).all(axis=-1)
    return sound


def spoiled(before: TrainState, after: TrainState, metrics: dict[str, Array]) -> bool:
    """Whether a run, or a seed, that was sound has become NaN or infinite, in state or metrics."""
    sound = is_sound(before.params, before.step)
    return bool(np.any(sound & ~is_sound((after, metrics), after.step)))


def run_carefully(
    state: TrainState,
    step: Callable[..., Any],
    length: int,
    room: np.ndarray,
    earlier: tuple[tuple[int, ...], ...] = (),
) -> tuple[TrainState, dict[str, np.ndarray], tuple[tuple[int, ...], ...]]:
    """A chunk step by step, without the tasks that would spoil it; and which they were.

    Args:
        state: at the beginning of the chunk.
        step: ``careful_step``, or that of every seed.
        length: of the chunk.
        room: how many tasks may still be left out, a scalar, or ``[seeds]``. A seed that would need
            more is lost: its parameters become NaN.
        earlier: the tasks that earlier chunks left out, for the message.

    Returns:
        The state, the means of the metrics over steps that have them (NaN where none has), and the
        tasks left out.

    Raises:
        FloatingPointError: the run, or every seed, is lost.
    """
    first = int(np.max(state.step))
    total: dict[str, np.ndarray] = {}
    skipped: list[tuple[int, ...]] = []
    lost = ~is_sound(state.params, state.step)
    left_out = np.zeros(lost.shape, int)
    known = np.zeros(lost.shape, int)
    for number in range(first, first + length):
        state, metrics, bad = step(state)
        bad = np.asarray(bad) & ~lost[..., None]
        skipped += [(number, *map(int, where)) for where in np.argwhere(bad)]
        left_out += bad.sum(axis=-1)
        lost = lost | (left_out > room)
        if lost.all():
            every = bool(np.all(bad, axis=-1).any())
            raise FloatingPointError(_why([*earlier, *skipped], first, first + length, every=every))
        host = {name: np.asarray(value) for name, value in metrics.items()}
        finite = np.all([np.isfinite(value) for value in host.values()], axis=0)
        known += finite
        total = {n: total.get(n, 0) + np.where(finite, value, 0) for n, value in host.items()}
    means = {
        name: np.where(lost | (known == 0), np.nan, value / np.maximum(known, 1))
        for name, value in total.items()
    }
    return _give_up(state, lost), means, tuple(skipped)


def left_out(skipped: tuple[tuple[int, ...], ...], room: np.ndarray) -> np.ndarray:
    """How many tasks of the run, or of each seed, these are; of the shape of ``room``."""
    if not room.ndim:
        return np.asarray(len(skipped))
    return np.bincount([seed for _, seed, _ in skipped], minlength=len(room))


def _why(skipped: list[tuple[int, ...]], start: int, stop: int, *, every: bool) -> str:
    """What has ended a run; ``every``: all tasks of a step were bad."""
    if every:
        return DIVERGED.format(start=start, stop=stop)
    return (
        f"{len(skipped)} tasks up to step {skipped[-1][0]} have a loss or a gradient that is not "
        f"finite, more than max_skipped allows; the first is task {skipped[0][-1]} of step "
        f"{skipped[0][0]}. A lower inner rate may help, or a look at the data"
    )


def _give_up(state: TrainState, lost: np.ndarray) -> TrainState:
    """The state, with parameters of NaN for the seeds that are lost."""
    if not lost.any():
        return state

    def spoil(leaf: Array) -> Array:
        return jnp.where(lost.reshape(lost.shape + (1,) * (leaf.ndim - lost.ndim)), jnp.nan, leaf)

    learned = jax.tree.map(spoil, state.params.learned)
    return dataclasses.replace(state, params=state.params.replace_learned(learned))
