"""The state that a run starts from, and whether a given one is such."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lavajax import leaves
from lavajax.losses import DirectionError
from lavajax.methods.base import Method
from lavajax.methods.batch_norm import check_batch
from lavajax.tasks.base import TaskSource, check_task
from lavajax.types import Array, MetaParams, PyTree, TrainState
from lavajax.units import Units
from lavajax.validate import check_seed


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
    """The units of a source that has any, which must fit its inputs and targets, and the loss."""
    units = getattr(tasks, "units", None)
    if units is None:
        return None
    sizes = params.spec.x_shape, params.spec.y_shape
    if not isinstance(units, Units) or sizes != ((len(units.x.mean),), (len(units.y.mean),)):
        raise ValueError(
            f"tasks.units must be Units of inputs {sizes[0]} and targets {sizes[1]}, got {units!r}"
        )
    as_they_are = not any(units.y.mean) and set(units.y.std) == {1.0}
    if isinstance(params.method.point_loss, DirectionError) and not as_they_are:
        raise ValueError(
            "tasks must give directions as they are, got standardised targets, which are none; a "
            "Table standardises all that it reads: give a source of your own"
        )
    return units


def _check_directions(method: Method, tasks: TaskSource, seed: int) -> None:
    """Looks at the targets of 20 tasks, where the loss takes directions.

    Raises:
        ValueError: they are none.
    """
    if not isinstance(method.point_loss, DirectionError):
        return
    keys = jax.random.split(jax.random.key(seed), 20)
    drawn = jax.vmap(lambda key: check_task(tasks.sample(key, "train")))(keys)
    for some in (drawn.support, drawn.query):
        real = np.ones(some.y.shape[:2], bool) if some.mask is None else np.asarray(some.mask)
        method.point_loss.check(np.asarray(some.y)[real])


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


def begin(
    method: Method,
    tasks: TaskSource,
    tx: optax.GradientTransformation,
    state: TrainState | None,
    *,
    steps: int,
    seed: int,
    seeds: int | None,
) -> tuple[TrainState, int]:
    """The state that a run of so many steps begins at, a given one or ``start_state``; its step.

    Raises:
        ValueError: as ``check_state`` and ``start_state``; or the run ends before the given one.
    """
    if state is None:
        _check_directions(method, tasks, seed)
        state = start_state(method, tasks, tx, seed=seed, seeds=seeds)
    else:
        check_state(state, method, tasks, tx, seeds)
        state = jax.tree.map(jnp.copy, state)  # the caller's own is not given up to the chunks
    done = int(np.max(state.step))
    if done > steps:
        raise ValueError(f"state must not be beyond steps = {steps}, got one of step {done}")
    return state, done


# Compiled, so that no two leaves of the state share a buffer: all are given up to each chunk.
@partial(jax.jit, static_argnames=("method", "tx"))
def _start(
    tasks: TaskSource, key: Array, *, method: Method, tx: optax.GradientTransformation
) -> TrainState:
    return init_state(method, tasks, tx, key)


def check_state(
    state: TrainState,
    method: Method,
    tasks: TaskSource,
    tx: optax.GradientTransformation,
    seeds: int | None,
) -> None:
    """Requires a state to be one that these arguments lead to.

    Raises:
        ValueError: it is of another method, source, optimiser or number of seeds.
    """
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
