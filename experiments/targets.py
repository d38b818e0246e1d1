"""Errors on a user's table: of each target in its own units, beside those without meta-learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from lavajax import points

RIDGES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
"""Strengths that the ridge regression on a support chooses from."""


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
        for each predictor that needs no meta-learning.
    """
    std = np.array(source.units.y.std)

    def rmse(fn: Callable[..., jax.Array]) -> list[float]:
        errors = lavajax.score(fn, source, num_tasks=test_tasks, seed=seed)
        return [float(e) for e in std * np.sqrt(errors.mean(axis=0))]

    return {
        "names": list(source.units.y.names),
        "seeds": [rmse(jax.tree_util.Partial(model_error, each)) for each in params],
        "references": {name: rmse(fn) for name, fn in references(source, test_tasks).items()},
    }


def mean_squared(source: Any, rmse: Sequence[float]) -> float:
    """The mean over targets of squared errors that are standardised, of errors in units."""
    return float(np.mean((np.array(rmse) / np.array(source.units.y.std)) ** 2))


def references(source: Any, test_tasks: int) -> dict[str, Callable[..., jax.Array]]:
    """By name, the errors ``[k]`` on a task of predictors that need no meta-learning.

    The strength of the ridge regression is the best on validation tasks. The pooled regression does
    not see the support; every training group weighs the same in it.
    """
    found = lavajax.score(ridge_errors, source, num_tasks=test_tasks, split="validation")
    ridge = RIDGES[int(np.argmin(found.mean(axis=(0, 2))))]

    def ridge_error(task: lavajax.Task, key: jax.Array) -> jax.Array:
        return ridge_errors(task, key)[RIDGES.index(ridge)]

    table = source
    while not isinstance(table, lavajax.TableTasks):  # within variants
        table = table.tasks
    return {
        "support mean": mean_error,
        f"ridge on the support ({ridge:g})": ridge_error,
        "pooled linear regression": jax.tree_util.Partial(
            linear_error, jnp.asarray(pooled_regression(table), jnp.result_type(float))
        ),
    }


def model_error(params: lavajax.MetaParams, task: lavajax.Task, key: jax.Array) -> jax.Array:
    """Of a model that adapts to the support."""
    adapted = params.method.adapt(params, task.support, key=key)
    query = points.sanitise(task.query)
    return _error(params.method.predict(params, adapted, query.x, mask=query.mask).mean, query)


def mean_error(task: lavajax.Task, key: jax.Array) -> jax.Array:
    """Of the mean of the support's targets."""
    del key
    support, query = points.sanitise(task.support), points.sanitise(task.query)
    return _error(points.average(support.y, support), query)


def ridge_errors(task: lavajax.Task, key: jax.Array) -> jax.Array:
    """Of linear regression on the support alone, ``[strengths, k]``; its intercept is free."""
    del key
    support, query = points.sanitise(task.support), points.sanitise(task.query)
    x_mean, y_mean = points.average(support.x, support), points.average(support.y, support)
    x = (support.x - x_mean) * points.weights(support)[:, None]

    def error(ridge: jax.Array) -> jax.Array:
        gram = x.T @ x + ridge * jnp.eye(x.shape[1])
        weights = jax.scipy.linalg.solve(gram, x.T @ (support.y - y_mean), assume_a="pos")
        return _error((query.x - x_mean) @ weights + y_mean, query)

    return jax.vmap(error)(jnp.asarray(RIDGES))


def linear_error(weights: jax.Array, task: lavajax.Task, key: jax.Array) -> jax.Array:
    """Of fixed weights ``[d + 1, k]``, the last row an intercept."""
    del key
    query = points.sanitise(task.query)
    return _error(query.x @ weights[:-1] + weights[-1], query)


def pooled_regression(table: lavajax.TableTasks) -> np.ndarray:
    """Least squares on all rows of the training groups, weights and intercept ``[d + 1, k]``."""
    sizes, train = np.asarray(table.sizes), np.asarray(table.splits["train"])
    weight = np.where(np.isin(np.arange(len(sizes)), train), 1 / np.sqrt(sizes), 0.0)
    weight = np.repeat(weight, sizes)[:, None]
    x = np.asarray(table.x, np.float64)
    inputs = np.concatenate([x, np.ones((len(x), 1))], axis=1)
    return np.linalg.lstsq(weight * inputs, weight * np.asarray(table.y), rcond=None)[0]


def _error(mean: jax.Array, query: lavajax.Points) -> jax.Array:
    return points.average((mean - query.y) ** 2, query)
