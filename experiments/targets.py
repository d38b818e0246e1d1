"""Errors on a user's table: of each target in its own units, beside those without meta-learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from lavajax import points
from lavajax.tasks.air_quality import AirWindows
from lavajax.tasks.base import Split

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Strengths of ridge regression on a support; the best on validation groups is reported, on groups
for training where there are none."""


def target_errors(
    params: Sequence[lavajax.MetaParams], source: Any, test_tasks: int, *, seed: int = 0
) -> dict[str, Any]:
    """Root mean squared errors of each target on unseen tasks, in its own units.

    Args:
        params: of each seed.
        source: tasks of a table, or a variant of them.
        test_tasks: how many tasks; every one counts the same.
        seed: of the tasks.

    Returns:
        ``names`` of the k targets; ``seeds``, k errors for each seed; and ``references``, k errors
        for each predictor that needs no meta-learning, by name.
    """
    std = np.array(source.units.y.std)

    def rmse(errors: np.ndarray) -> list[float]:
        return [float(error) for error in std * np.sqrt(errors.mean(axis=0))]

    def score(fn: Callable[..., Any], *arrays: Any, split: Split = "test") -> Any:
        fn = jax.tree_util.Partial(fn, *arrays)
        return lavajax.score(fn, source, num_tasks=test_tasks, seed=seed, split=split)

    table = table_of(source)
    weights = jnp.asarray(pooled_regression(table), jnp.result_type(float))
    found = score(reference_errors, weights)
    # A table of new groups alone has none to choose on but those that are scored.
    splits: tuple[Split, ...] = ("validation", "train", "test")
    chosen_on = next(split for split in splits if table.groups(split))
    tried = score(reference_errors, weights, split=chosen_on)["ridge"]
    best = int(np.argmin(tried.mean(axis=(0, 2))))
    how = f"{RIDGES[best]:g}" + (", the best here" if chosen_on == "test" else "")
    references = {
        "support mean": rmse(found["mean"]),
        f"ridge on the support ({how})": rmse(found["ridge"][:, best]),
    }
    if table.groups("train"):
        references["pooled linear regression"] = rmse(found["linear"])
    return {
        "names": list(source.units.y.names),
        "seeds": [rmse(score(model_error, each)) for each in params],
        "references": references,
    }


def table_of(source: Any) -> Any:
    """The table in a source of tasks, which may be a variant of it; None where there is none."""
    return _within(source, lavajax.TableTasks)


def windows_of(source: Any) -> Any:
    """The windows of stored series in a source of tasks, likewise."""
    return _within(source, AirWindows)


def _within(source: Any, kind: type) -> Any:
    while not isinstance(source, kind | None):
        source = getattr(source, "tasks", None)
    return source


def mean_squared(source: Any, rmse: Sequence[float]) -> float:
    """The mean over targets of squared errors that are standardised, of errors in units."""
    return float(np.mean((np.array(rmse) / np.array(source.units.y.std)) ** 2))


def model_error(params: lavajax.MetaParams, task: lavajax.Task, key: jax.Array) -> jax.Array:
    """Of a model that adapts to the support."""
    adapted = params.method.adapt(params, task.support, key=key)
    query = points.sanitise(task.query)
    return _error(params.method.predict(params, adapted, query.x, mask=query.mask).mean, query)


def reference_errors(
    weights: jax.Array, task: lavajax.Task, key: jax.Array
) -> dict[str, jax.Array]:
    """Of predictors that need no meta-learning.

    Args:
        weights: of the pooled regression, ``[d + 1, k]``, the last row an intercept.
        task: any task.
        key: not used.

    Returns:
        ``mean``, of the mean of the support's targets, ``[k]``; ``ridge``, of a linear regression
        on the support with a free intercept, ``[strengths, k]``; ``linear``, of the pooled
        regression, which does not see the support, ``[k]``.
    """
    del key
    support, query = points.sanitise(task.support), points.sanitise(task.query)
    x_mean, y_mean = points.average(support.x, support), points.average(support.y, support)
    x = (support.x - x_mean) * points.weights(support)[:, None]

    def ridge(strength: jax.Array) -> jax.Array:
        gram = x.T @ x + strength * jnp.eye(x.shape[1])
        slope = jax.scipy.linalg.solve(gram, x.T @ (support.y - y_mean), assume_a="pos")
        return _error((query.x - x_mean) @ slope + y_mean, query)

    return {
        "mean": _error(y_mean, query),
        "ridge": jax.vmap(ridge)(jnp.asarray(RIDGES)),
        "linear": _error(query.x @ weights[:-1] + weights[-1], query),
    }


def pooled_regression(table: lavajax.TableTasks) -> np.ndarray:
    """Least squares on all rows of the training groups, weights and intercept ``[d + 1, k]``.

    Every group weighs the same, as it does among the tasks.
    """
    sizes, train = np.asarray(table.sizes), np.asarray(table.splits["train"])
    weight = np.where(np.isin(np.arange(len(sizes)), train), 1 / np.sqrt(sizes), 0.0)
    weight = np.repeat(weight, sizes)[:, None]
    x = np.asarray(table.x, np.float64)
    inputs = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return np.linalg.lstsq(weight * inputs, weight * np.asarray(table.y), rcond=None)[0]


def _error(mean: jax.Array, query: lavajax.Points) -> jax.Array:
    return points.average((mean - query.y) ** 2, query)
