"""Sources made of other sources: noise on labels, a fixed set of tasks, varying support sizes."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from lavajax import points, validate
from lavajax.tasks.base import Split, check_source, split_key
from lavajax.types import Array, Points, Task
from lavajax.units import Units


def _load(tasks: Any) -> Any:
    return tasks.load() if hasattr(tasks, "load") else tasks


def _units(self: Any) -> Units | None:
    """Those of the source, where it has any."""
    return getattr(self.tasks, "units", None)


@partial(jax.tree_util.register_dataclass, data_fields=["tasks"], meta_fields=["std", "on"])
@dataclasses.dataclass(frozen=True)
class NoisyLabels:
    """The tasks of another source, with Gaussian noise on their targets.

    Attributes:
        tasks: the source, or settings with a ``load``.
        std: standard deviation of the noise, in the units of the targets that the source samples.
        on: ``"support"``: the query keeps its own targets; or ``"both"``.
    """

    tasks: Any
    std: float
    on: Literal["support", "both"] = "support"

    def __post_init__(self) -> None:
        validate.number(self, "std", minimum=0.0)
        validate.choice(self, "on", ("support", "both"))

    def load(self) -> NoisyLabels:
        """The same, its data read, where there is any."""
        return dataclasses.replace(self, tasks=_load(self.tasks))

    units = property(_units)

    def sample(self, key: Array, split: Split = "train") -> Task:
        """The task that the source draws with this key, with noise.

        Raises:
            ValueError: the targets are classes; or ``tasks`` is not a source, or has noise already.
        """
        check_source(self.tasks)
        inner = self.tasks
        while inner is not None:  # a source in between hands on the key, and so the same noise
            if isinstance(inner, NoisyLabels):
                raise ValueError(
                    "NoisyLabels.tasks must not be NoisyLabels, or variants of them: give one the "
                    "standard deviation of both, sqrt(std_1^2 + std_2^2)"
                )
            inner = getattr(inner, "tasks", None)
        task = self.tasks.sample(key, split)
        noise_key = jax.random.fold_in(split_key(key, split), 0x401CE)
        support_key, query_key = jax.random.split(noise_key)
        support = self._add(support_key, task.support)
        query = self._add(query_key, task.query) if self.on == "both" else task.query
        return Task(support, query)

    def _add(self, key: Array, points: Points) -> Points:
        if not jnp.issubdtype(points.y.dtype, jnp.floating):
            raise ValueError(
                f"NoisyLabels.tasks must have real targets, got targets of {points.y.dtype}"
            )
        noise = self.std * jax.random.normal(key, points.y.shape, points.y.dtype)
        return dataclasses.replace(points, y=points.y + noise)


@partial(jax.tree_util.register_dataclass, data_fields=["tasks"], meta_fields=["number", "seed"])
@dataclasses.dataclass(frozen=True)
class FixedTasks:
    """A source with a fixed number of training tasks, each of fixed points.

    Every time that a task is drawn, its points are split anew, at random, into support and query.
    Validation and test tasks are fresh ones. This is what the LAVA paper's code trains on.

    Attributes:
        tasks: the source, or settings with a ``load``.
        number: of training tasks.
        seed: fixes which.
    """

    tasks: Any
    number: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        validate.integer(self, "number", minimum=1)
        validate.integer(self, "seed", minimum=0, maximum=2**32 - 1)

    def load(self) -> FixedTasks:
        """The same, its data read, where there is any."""
        return dataclasses.replace(self, tasks=_load(self.tasks))

    units = property(_units)

    def sample(self, key: Array, split: Split = "train") -> Task:
        """A task of the source; of training tasks, one of the fixed ones.

        Raises:
            ValueError: ``tasks`` is not a source, or its points are not all alike: with a mask, or
                with noise on the support alone (such a variant goes around this one); or they are
                of classes, each of which the support has examples of.
        """
        check_source(self.tasks)
        if getattr(self.tasks, "clean_query", False):
            raise ValueError(
                "FixedTasks.tasks must have clean_query=False, got True: targets without noise "
                "would move from query to support"
            )
        if isinstance(self.tasks, NoisyLabels):
            raise ValueError(
                "FixedTasks.tasks must be without noise, which would move from support to query: "
                "give NoisyLabels(FixedTasks(...), std)"
            )
        if split != "train":
            return self.tasks.sample(key, split)
        which_key, order_key = jax.random.split(key)
        which = jax.random.randint(which_key, (), 0, self.number)
        task = self.tasks.sample(jax.random.fold_in(jax.random.key(self.seed), which), split)
        if task.support.mask is not None or task.query.mask is not None:
            raise ValueError(
                "FixedTasks.tasks must have points without a mask, which is not split anew: give "
                "VaryingShots(FixedTasks(...), sizes)"
            )
        if not jnp.issubdtype(task.support.y.dtype, jnp.floating):
            raise ValueError(
                f"FixedTasks.tasks must have real targets, got {task.support.y.dtype}: split anew, "
                "a support may be left without an example of a class"
            )
        every = points.concatenate(task.support, task.query)
        order = jax.random.permutation(order_key, every.x.shape[0])
        mixed = jax.tree.map(lambda leaf: leaf[order], every)
        n = task.support.x.shape[0]
        return Task(
            jax.tree.map(lambda leaf: leaf[:n], mixed), jax.tree.map(lambda leaf: leaf[n:], mixed)
        )


@partial(jax.tree_util.register_dataclass, data_fields=["tasks"], meta_fields=["sizes"])
@dataclasses.dataclass(frozen=True)
class VaryingShots:
    """The tasks of another source, with supports of random size, by mask.

    A model that has seen supports of many sizes can be used with any.

    Attributes:
        tasks: the source, or settings with a ``load``; its own support size is the largest there
            can be.
        sizes: the numbers of points to choose from, each as likely.
    """

    tasks: Any
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        validate.integers(self, "sizes", minimum=1)
        if not self.sizes:
            raise ValueError("VaryingShots.sizes must have at least one number, got none")

    def load(self) -> VaryingShots:
        """The same, its data read, where there is any."""
        return dataclasses.replace(self, tasks=_load(self.tasks))

    units = property(_units)

    def sample(self, key: Array, split: Split = "train") -> Task:
        """The task that the source draws with this key; the support's first points are real.

        Raises:
            ValueError: the source's supports have fewer points than a size, or a mask of their own.
        """
        check_source(self.tasks)
        task = self.tasks.sample(key, split)
        most = task.support.x.shape[0]
        if max(self.sizes) > most or task.support.mask is not None:
            raise ValueError(
                f"VaryingShots.tasks must have supports of at least {max(self.sizes)} points, "
                f"without a mask, got {most} points"
                + ("" if task.support.mask is None else " with a mask")
            )
        size = jax.random.choice(jax.random.fold_in(key, 0x512E), jnp.asarray(self.sizes))
        support = dataclasses.replace(task.support, mask=jnp.arange(most) < size)
        return Task(support, task.query)
