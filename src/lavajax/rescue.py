"""Outer steps without the tasks that would spoil them.

Training checks nothing from step to step: what is not finite spreads, and shows at the end of a
chunk. The chunk is then taken again with care.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from lavajax.outer import BatchExpectation
from lavajax.types import Array, MetaParams, PyTree, Task, TrainState

if TYPE_CHECKING:
    from lavajax.methods.base import Method


def not_finite(method: Method, params: MetaParams, expect: BatchExpectation) -> Array:
    """``[B]`` booleans: the tasks whose loss, or its gradient, is not finite."""
    learned = expect.own(params.learned)

    def is_bad(task: Task, key: Array) -> Array:
        def loss(learned: dict[str, Any]) -> Array:
            return method.loss(params.replace_learned(learned), task, key)

        return ~all_finite(jax.value_and_grad(loss)(learned))

    return jax.vmap(is_bad)(expect.tasks, expect.keys)


def all_finite(tree: PyTree) -> Array:
    """Whether no floating leaf has a NaN or an infinity, a boolean scalar."""
    leaves = [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.inexact)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(a)) for a in leaves]))


def careful_step(
    state: TrainState, expect: BatchExpectation, tx: optax.GradientTransformation
) -> tuple[TrainState, dict[str, Array], Array]:
    """The method's outer step, without the tasks that would spoil it.

    Returns:
        The next state, the metrics, and the tasks left out, ``[B]`` booleans, of this device.
        Where no task is good on any, they all are bad, and the state is what the step makes of
        them.
    """
    method = state.params.method

    def check() -> Array:
        return not_finite(method, state.params, expect)

    def again(bad: Array) -> tuple[TrainState, dict[str, Array]]:
        return method.step(state, expect.without(bad), tx)

    new, metrics = method.step(state, expect, tx)
    none = expect.own(jnp.zeros(expect.keys.shape[0], bool))
    bad = lax.cond(all_finite((new, metrics)), lambda: none, check)
    redo = expect.any(bad) & expect.any(~bad)  # the same on all devices, which step together
    new, metrics = lax.cond(redo, again, lambda _: (new, metrics), bad)
    return new, metrics, bad


def spoiled(before: TrainState, loss: np.ndarray) -> bool:
    """Whether a run, or a seed, that was sound has become NaN or infinite."""
    if np.isfinite(loss).all():
        return False
    check = all_finite if loss.ndim == 0 else jax.vmap(all_finite)
    return bool(np.any(np.asarray(check(before.params)) & ~np.isfinite(loss)))


def run_carefully(
    state: TrainState, step: Callable[..., Any], length: int, most: float
) -> tuple[TrainState, dict[str, np.ndarray], tuple[tuple[int, ...], ...]]:
    """A chunk step by step, without the tasks that would spoil it; and which they were.

    A seed of which no task is good any more is lost, and left as it is.

    Raises:
        FloatingPointError: of a single run, or of every seed, more than ``most`` tasks are bad.
    """
    total: dict[str, np.ndarray] = {}
    skipped: list[tuple[int, ...]] = []
    for _ in range(length):
        number = int(np.max(state.step))
        state, metrics, bad = step(state)
        bad = np.asarray(bad)
        lost = np.all(bad, axis=-1, keepdims=True)
        if lost.all():  # diverged: the caller says so
            return state, {"loss": np.full(bad.shape[:-1], np.nan)}, ()
        skipped += [(number, *map(int, where)) for where in np.argwhere(bad & ~lost)]
        if len(skipped) > most * lost.size:
            raise FloatingPointError(
                f"{len(skipped)} tasks up to step {number + 1} have a loss or a gradient that is "
                f"not finite, more than max_skipped allows; the first is task {skipped[0][-1]} of "
                f"step {skipped[0][0]}. A lower inner rate may help, or a look at the data"
            )
        total = {name: total.get(name, 0) + np.asarray(v) for name, v in metrics.items()}
    return state, {name: value / length for name, value in total.items()}, tuple(skipped)
