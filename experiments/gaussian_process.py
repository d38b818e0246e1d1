"""A Gaussian process as a reference: it learns three numbers from the training tasks, no network.

Kernel: constant * Matern(3/2) + white noise (Rasmussen & Williams, "Gaussian processes for machine
learning", 2006, equations 4.17 and 2.23 to 2.30), zero mean, from scikit-learn.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

import lavajax
from lavajax.extras import require
from lavajax.tasks.base import TaskSource

TRAIN_TASKS = 200
TEST_TASKS = 2_000  # milliseconds each
_NEEDED = "data", "the Gaussian process to compare with"


def require_sklearn() -> Any:
    """scikit-learn's module of Gaussian processes, or the error that says how to install it."""
    return require("sklearn.gaussian_process", *_NEEDED)


def gaussian_process_error(source: TaskSource, test_tasks: int, *, seed: int = 0) -> float:
    """MSE of a Gaussian process, given the support, on the query of test tasks.

    Its hyperparameters are those of the greatest likelihood of training tasks, support and query
    together, and the same for all. Each output is a process of its own, with the same ones.

    Args:
        source: of tasks with inputs ``[N, d]`` and targets ``[N, k]``.
        test_tasks: how many.
        seed: of the test tasks.
    """
    train = _tasks(source, "train", TRAIN_TASKS)
    test = _tasks(source, "test", test_tasks, seed)
    # Threads cost ten times what they save on matrices of this size.
    with require("threadpoolctl", *_NEEDED).threadpool_limits(1):
        kernel = fit_kernel(
            np.concatenate([train.support.x, train.query.x], axis=1),
            np.concatenate([train.support.y, train.query.y], axis=1),
        )
        errors = [
            np.mean((_conditioned(kernel, x, y).predict(at).reshape(target.shape) - target) ** 2)
            for x, y, at, target in zip(
                test.support.x, test.support.y, test.query.x, test.query.y, strict=True
            )
        ]
    return float(np.mean(errors))


def fit_kernel(x: np.ndarray, y: np.ndarray) -> Any:
    """The kernel that makes all tasks together likeliest, one length for each input.

    Args:
        x: ``[tasks, N, d]``.
        y: ``[tasks, N, k]``.
    """
    optimize = require("scipy.optimize", *_NEEDED)
    kernels = require_sklearn().kernels
    kernel = (
        kernels.ConstantKernel(1.0, (1e-3, 1e3))
        * kernels.Matern(np.ones(x.shape[2]), (1e-2, 1e3), nu=1.5)
    ) + kernels.WhiteKernel(1e-2, (1e-6, 1e1))
    processes = [_conditioned(kernel, *task) for task in zip(x, y, strict=True)]

    def negative(theta: np.ndarray) -> tuple[float, np.ndarray]:
        """-log likelihood of a point, in nats, and its gradient."""
        each = [
            process.log_marginal_likelihood(theta, eval_gradient=True, clone_kernel=False)
            for process in processes
        ]
        value, gradient = (sum(part) for part in zip(*each, strict=True))
        return -value / y.size, -gradient / y.size

    found = optimize.minimize(
        negative, kernel.theta, jac=True, method="L-BFGS-B", bounds=kernel.bounds
    )
    return kernel.clone_with_theta(found.x)


def _conditioned(kernel: Any, x: np.ndarray, y: np.ndarray) -> Any:
    """The process with this kernel, as it is, given points x ``[N, d]``, y ``[N, k]``."""
    return require_sklearn().GaussianProcessRegressor(kernel, optimizer=None).fit(x, y)


def _tasks(source: TaskSource, split: Any, number: int, seed: int = 0) -> Any:
    """Tasks with a leading axis on every array, in float64; those for testing as in evaluation."""
    tasks = lavajax.score(lambda task, key: task, source, num_tasks=number, split=split, seed=seed)
    return jax.tree.map(lambda leaf: leaf.astype(np.float64), tasks)
