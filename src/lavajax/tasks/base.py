"""What a source of tasks is."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp

from lavajax.types import Array, Points, Task

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


def check_split(split: Any) -> None:
    """Requires the name of a split.

    Raises:
        ValueError: it is something else.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(map(repr, SPLITS))}, got {split!r}")


def split_key(key: Array, split: Split) -> Array:
    """A key of its own for each split, so that no task is drawn in two of them."""
    return jax.random.fold_in(key, SPLITS.index(split))


def uniform(key: Array, shape: tuple[int, ...], interval: tuple[float, float]) -> Array:
    """Numbers from the uniform distribution over an interval."""
    return jax.random.uniform(key, shape, minval=interval[0], maxval=interval[1])


def distinct(key: Array, size: Array | int, number: int) -> Array:
    """Different numbers from 0 to size - 1, ``[number]``, in random order; every choice as likely.

    Floyd's algorithm (Bentley and Floyd, Communications of the ACM 30(9), 1987), at a cost that
    does not depend on ``size``. With ``size < number`` all of them come first, and what follows
    repeats 0.
    """
    draw_key, order_key = jax.random.split(key)
    count = jnp.minimum(size, number)
    last = jnp.maximum(size - count + jnp.arange(number), 0)
    draws = jax.random.randint(draw_key, (number,), 0, last + 1)

    def choose(i: Array, chosen: Array) -> Array:
        taken = jnp.any((chosen == draws[i]) & (jnp.arange(number) < i))
        return chosen.at[i].set(jnp.where(taken, last[i], draws[i]))

    chosen = jax.lax.fori_loop(0, number, choose, jnp.zeros(number, draws.dtype))
    real = jnp.arange(number) < count
    order = jnp.argsort(jnp.where(real, jax.random.uniform(order_key, (number,)), 2.0))
    return jnp.where(real, chosen[order], 0)


class TaskSource(Protocol):
    """Where tasks come from: a sampler on the device, or stored data on it.

    A source is a pytree: its arrays are arguments of the compiled training step, its settings are
    static. Tasks of one source have the same shapes; supports of different size have a mask. A
    source of standardised data has their ``lavajax.Units`` as a static attribute ``units``.

    A source, or settings with a ``load`` that returns one, may name what its tasks want, and the
    command line takes it: ``point_loss``, the loss; ``model``, a backbone, where no other is
    chosen; ``test_tasks``, how many tasks to score on by default.
    """

    def sample(self, key: Array, split: Split = "train") -> Task:
        """Draws one task. Pure; tasks of different splits never coincide.

        Args:
            key: PRNG key.
            split: ``"train"``, ``"validation"`` or ``"test"``; static.
        """


def check_source(tasks: Any) -> None:
    """Requires an object that ``train`` and ``evaluate`` can hand to a compiled function.

    Raises:
        ValueError: it does not sample, or JAX does not know it as a pytree.
    """
    if isinstance(tasks, type) or not callable(getattr(tasks, "sample", None)):
        hint = "; give what its load() returns" if hasattr(tasks, "load") else ""
        raise ValueError(
            f"tasks must be a source with sample(key, split), got {type(tasks).__name__}{hint}"
        )
    if any(leaf is tasks for leaf in jax.tree.leaves(tasks)):
        raise ValueError(
            f"tasks must be a pytree, and JAX does not know {type(tasks).__name__}: decorate it "
            "with jax.tree_util.register_dataclass, or register_static if it holds no arrays"
        )


def check_task(task: Any) -> Task:
    """Requires what a source samples to be a task, whose support and query have points alike.

    Arrays of other shapes than they seem to have would be broadcast, and trained on.

    Raises:
        ValueError: it is something else; the message says what differs.
    """
    if not isinstance(task, Task) or not all(
        isinstance(part, Points) for part in (task.support, task.query)
    ):
        raise ValueError(f"tasks must sample Task(Points, Points), got {type(task).__name__}")
    for name in ("support", "query"):
        part = getattr(task, name)
        shapes = {field: jnp.shape(getattr(part, field)) for field in ("x", "y")}
        if not shapes["x"] or shapes["y"][:1] != shapes["x"][:1]:
            raise ValueError(
                f"tasks must sample as many targets as inputs, got a {name} with x of shape "
                f"{shapes['x']} and y of {shapes['y']}"
            )
        if part.mask is not None and (
            jnp.shape(part.mask) != shapes["x"][:1] or part.mask.dtype != bool
        ):
            raise ValueError(
                f"tasks must sample masks of booleans, one for each point, got a {name} of "
                f"{shapes['x'][0]} points with a mask of shape {jnp.shape(part.mask)} and dtype "
                f"{part.mask.dtype}"
            )
    for field in ("x", "y"):
        one, other = (getattr(part, field) for part in (task.support, task.query))
        kinds = [jnp.issubdtype(each.dtype, jnp.floating) for each in (one, other)]
        if one.shape[1:] != other.shape[1:] or kinds[0] != kinds[1]:
            raise ValueError(
                f"tasks must have a query of points like those of the support, got {field} of "
                f"shape {one.shape} and {one.dtype} in the support, {other.shape} and "
                f"{other.dtype} in the query"
            )
    return task
