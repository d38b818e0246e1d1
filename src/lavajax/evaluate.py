"""Scores on held-out tasks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import gaussian, points
from lavajax.arguments import check_params
from lavajax.methods.batch_norm import check_batch
from lavajax.tasks.base import Split, TaskSource, check_source, check_split, check_task
from lavajax.types import Array, MetaParams, PyTree, Task
from lavajax.units import Units
from lavajax.validate import check_seed, whole

_STREAM = 0x7E57


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores on held-out tasks.

    Attributes:
        metric: the name of the metric, such as ``mse``.
        values: the metric of each task, averaged over its query points, ``[tasks]``; NaN, and so
            are all other scores, of a task none of whose query points is real.
        nll: the negative log density of the query targets under a Gaussian with the predicted mean
            and variance (epistemic and noise together), in nats, averaged over points and outputs,
            ``[tasks]``; None for methods that do not predict the noise of observations.
        crps: its continuous ranked probability score, likewise, in units of the targets: lower is
            better, for wide and for wrong densities alike.
        sharpness: its mean standard deviation, likewise.
        coverage: the share of query targets, of all outputs, inside the central 95% interval of
            that Gaussian, ``[tasks]``; None for methods without error bars, and for classes.
        coverage_90: likewise, for 90%.
        coverage_50: likewise, for 50%.
    """

    metric: str
    values: np.ndarray
    nll: np.ndarray | None = None
    crps: np.ndarray | None = None
    sharpness: np.ndarray | None = None
    coverage: np.ndarray | None = None
    coverage_90: np.ndarray | None = None
    coverage_50: np.ndarray | None = None

    @property
    def not_finite(self) -> int:
        """How many tasks have no finite value: of those there is no estimate, and no mean of all.

        Their indices are ``np.flatnonzero(~np.isfinite(values))``.
        """
        return int(np.sum(~np.isfinite(self.values)))

    @property
    def mean(self) -> float:
        """Over tasks."""
        return float(np.mean(self.values))

    @property
    def median(self) -> float:
        """Over tasks."""
        return float(np.median(self.values))

    @property
    def standard_error(self) -> float:
        """Of the mean over tasks: how far other tasks of the same source would move it."""
        std = np.std(self.values, ddof=1, dtype=np.float64)
        return float(std) / math.sqrt(self.values.size)

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the mean over tasks: 1.96 standard errors to each side."""
        half = 1.96 * self.standard_error
        return self.mean - half, self.mean + half


def evaluate(
    params: MetaParams,
    tasks: TaskSource,
    *,
    num_tasks: int = 10_000,
    seed: int = 0,
    split: Split = "test",
    batch: int | None = None,
) -> Evaluation:
    """Adapts to held-out tasks one by one and scores the query of each.

    Scores are of the numbers that the source samples: of standardised targets, where it has units.

    Args:
        params: meta-parameters of a single seed.
        tasks: source of tasks.
        num_tasks: how many tasks, at least 2.
        seed: of the tasks and, for stochastic methods, their randomness.
        split: which tasks.
        batch: tasks computed at once; bounds memory, not the result. None: 250, or as many as have
            4 MiB of points, of which a network makes many times more: 13 of 100 Omniglot images.

    Raises:
        ValueError: ``num_tasks`` is below 2 or ``batch`` below 1, or ``seed`` not from 0 to
            2^32 - 1; there is no such split; params are not those of one seed; the tasks are no
            source, their query has no points, or their points are not like those in training, or
            in other units.
    """
    check_params(params)
    check_source(tasks)
    example = _example(tasks, split)
    _check_fit(params, example, getattr(tasks, "units", None))
    batch = _batch_size(example) if batch is None else batch
    scorer = jax.tree_util.Partial(task_scores, params)
    found = score(scorer, tasks, num_tasks=num_tasks, seed=seed, split=split, batch=batch)
    return Evaluation(params.method.point_loss.metric_name, **found)


def _example(tasks: TaskSource, split: Split) -> Task:
    """The shapes of a task."""
    check_split(split)
    return jax.eval_shape(lambda key: tasks.sample(key, split), jax.random.key(0))


def _check_fit(params: MetaParams, example: Task, units: Units | None) -> None:
    """Requires tasks of points like those that the parameters were made for."""
    query = check_task(example).query
    if query.x.shape[0] == 0:
        raise ValueError("tasks must sample a query of at least one point to be scored, got none")
    found, spec = (query.x.shape[1:], query.y.shape[1:]), params.spec
    check_batch(params, query.x, query.x.shape[0], "the query of tasks")
    if found != (spec.x_shape, spec.y_shape):
        raise ValueError(
            f"tasks must have points like those in training, inputs {spec.x_shape} and targets "
            f"{spec.y_shape}, got {found[0]} and {found[1]}"
        )
    if params.units is not None and units != params.units:
        raise ValueError(
            "tasks must be standardised as the data that the model was trained on, and are "
            f"{'not by any units' if units is None else 'by other units'}: give "
            "Table(...).load(units=params.units), or, where tasks are in the model's own numbers, "
            "evaluate params.standardised"
        )


def score(
    fn: Callable[[Task, Array], PyTree],
    tasks: TaskSource,
    *,
    num_tasks: int = 10_000,
    seed: int = 0,
    split: Split = "test",
    batch: int | None = None,
) -> Any:
    """``fn(task, key)`` on the same held-out tasks that ``evaluate`` uses.

    Args:
        fn: any function of a task with a scalar result, or a pytree of results, such as a
            reference that learns nothing. As a ``jax.tree_util.Partial`` its arrays are arguments,
            and new ones compile nothing.
        tasks: source of tasks.
        num_tasks: how many tasks, at least 2.
        seed: of the tasks and the keys.
        split: which tasks.
        batch: tasks computed at once; bounds memory, not the result. None: 250, or as many as have
            4 MiB of points, of which a network makes many times more: 13 of 100 Omniglot images.

    Returns:
        The results as NumPy arrays, each with a leading axis ``[num_tasks]``.

    Raises:
        ValueError: ``num_tasks`` is below 2 or ``batch`` below 1, or ``seed`` not from 0 to
            2^32 - 1; there is no such split; or the tasks are no source, or ``fn`` no function.
    """
    if not callable(fn):
        raise ValueError(f"fn must be a function of a task and a key, got {fn!r}")
    check_source(tasks)
    check_split(split)
    num_tasks = whole("num_tasks", num_tasks, 2, ", for an interval")
    if batch is None:
        batch = _batch_size(_example(tasks, split))
    batch = whole("batch", batch, 1)
    if not isinstance(fn, jax.tree_util.Partial):
        fn = jax.tree_util.Partial(fn)
    keys = task_keys(seed, num_tasks)
    found = _score(fn, tasks, keys, split=split, batch=min(batch, num_tasks))
    return jax.tree.map(np.asarray, found)


def _batch_size(example: Task) -> int:
    """How many tasks to compute at once: at most 250, and 4 MiB."""
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(example))
    return min(250, max(1, 2**22 // max(1, size)))


def task_keys(seed: int, num_tasks: int) -> Array:
    """The keys ``[num_tasks]`` of the tasks of an evaluation.

    They lie apart from those that a training run of the same seed splits and folds. Each is split
    in two: the first half draws the task, the second goes to ``fn``.

    Raises:
        ValueError: the seed is not from 0 to 2^32 - 1.
    """
    key = jax.random.key(check_seed(seed))
    return jax.random.split(jax.random.fold_in(key, _STREAM), num_tasks)


@partial(jax.jit, static_argnames=("split", "batch"))
def _score(
    fn: Callable[[Task, Array], PyTree], tasks: TaskSource, keys: Array, *, split: Split, batch: int
) -> PyTree:
    def one(key: Array) -> PyTree:
        task_key, fn_key = jax.random.split(key)
        return fn(tasks.sample(task_key, split), fn_key)

    return jax.lax.map(one, keys, batch_size=batch)


def task_scores(params: MetaParams, task: Task, key: Array | None = None) -> dict[str, Array]:
    """The scores of the query of one task after adapting to its support.

    Returns:
        Scalars: ``values``, the metric, and, where they are known, the others of ``Evaluation``.
    """
    method = params.method
    query = points.sanitise(task.query)
    adapted = method.adapt(params, task.support, key=key)
    prediction = method.predict(params, adapted, query.x, mask=query.mask)
    scores = {"values": points.mean_metric(method.point_loss, prediction.mean, query)}

    def add(name: str, values: Array) -> None:
        """The mean over points and outputs of values ``[M, k]``."""
        scores[name] = points.average(jnp.mean(values, axis=-1), query)

    variance = prediction.variance
    y = method.point_loss.cast(query.y, prediction.mean.dtype)
    if variance is not None and jnp.issubdtype(y.dtype, jnp.floating):
        for name, level in (("coverage", 0.95), ("coverage_90", 0.9), ("coverage_50", 0.5)):
            add(name, gaussian.inside_interval(prediction.mean, variance, y, level))
        if prediction.noise is not None:
            add("nll", gaussian.negative_log_density(prediction.mean, variance, y))
            add("crps", gaussian.crps(prediction.mean, variance, y))
            add("sharpness", jnp.sqrt(variance))
    some = points.any_real(query)  # a mean over no points is 0, which would be a perfect score
    return {name: jnp.where(some, score, jnp.nan) for name, score in scores.items()}
