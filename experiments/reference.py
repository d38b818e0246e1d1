"""Numbers to print beside a result: the paper's, and errors that need no learning.

The paper is Reichlin, Tegner et al., "Reducing Variance in Meta-Learning via Laplace Approximation
for Regression Tasks", TMLR 2024; its numbers are means over 5 seeds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from gaussian_process import TEST_TASKS, gaussian_process_error
from lavajax import points
from lavajax.tasks.base import TaskSource
from lavajax.tasks.radio import STEPS
from options import Variant

# Test MSE on sine waves by support size (the paper's table, which prints units of 1e-2).
PAPER_SINE = {
    "Lava": {1: 1.6938, 2: 0.0701, 10: 0.0011, 20: 0.0009},
    "Anil": {1: 1.7107, 2: 0.4605, 10: 0.0132, 20: 0.0037},
    "Cavia": {1: 2.476, 2: 0.5675, 10: 0.0296, 20: 0.0144},
    "Vfml": {1: 2.86, 2: 1.0631, 10: 0.3172, 20: 0.1863},
    "Llama": {1: 2.4848, 2: 1.0975, 10: 0.2908, 20: 0.1831},
    "MetaMix": {1: 3.299, 2: 1.2012, 10: 0.4204, 20: 0.2485},
    "VrMaml": {1: 3.1821, 2: 3.383, 10: 2.8305, 20: 2.9228},
}
# Test MSE on air quality; the paper does not state the length of its windows.
PAPER_AIR = {
    **{"Lava": 0.0465, "Anil": 0.0763, "Cavia": 0.0825, "Llama": 0.1537},
    **{"Vfml": 0.0921, "MetaMix": 0.5676},
}
# Test MSE on RadioML; the paper states neither support nor query size.
PAPER_RADIO = {
    **{"Lava": 0.0038, "Anil": 0.047, "Cavia": 0.5016, "Llama": 0.5017},
    **{"Vfml": 0.156, "MetaMix": 0.0471, "VrMaml": 0.491},
}

# Test MSE on vector fields at 10 support points (the paper's table, in natural units). Its cartpole
# is described without the details that would make numbers comparable.
PAPER_SYSTEMS = {
    "FitzHughNagumo": {
        **{"Lava": 0.17, "Anil": 0.64, "Cavia": 0.19, "Llama": 1.18},
        **{"Vfml": 1.27, "MetaMix": 3.56, "VrMaml": 3.88},
    },
    "MassSpring": {
        **{"Lava": 0.0002, "Anil": 0.0009, "Cavia": 0.01, "Llama": 0.0051},
        **{"Vfml": 0.0053, "MetaMix": 0.0065, "VrMaml": 0.0328},
    },
    "Pendulum": {
        **{"Lava": 0.0007, "Anil": 0.0022, "Cavia": 0.0034, "Llama": 0.0329},
        **{"Vfml": 0.0462, "MetaMix": 0.0368, "VrMaml": 0.2155},
    },
    "VanDerPol": {
        **{"Lava": 1.50, "Anil": 12.29, "Cavia": 3.57, "Llama": 6.78},
        **{"Vfml": 6.36, "MetaMix": 46.01, "VrMaml": 32.26},
    },
}

# Test accuracy on mini-ImageNet, 5-way, by shots (the paper's appendix).
PAPER_MINI_IMAGENET = {
    "Anil": {1: 0.4594, 5: 0.6286},
    "Cavia": {1: 0.4784, 5: 0.6309},
    "Llama": {1: 0.4019, 5: 0.5650},
    "Vfml": {1: 0.4960, 5: 0.6620},
    "MetaMix": {1: 0.5051, 5: 0.6573},
    "VrMaml": {1: 0.4920, 5: 0.6360},
    "Lava": {1: 0.4669, 5: 0.6151},
}

# Sine waves with amplitude U[0.1, 5] by the upper end of the range of phases, whose lower end is 0
# or its negative: (predict 0, the best predictor that ignores the task, Bayes error at N = 1).
_SINE_ERRORS = {
    (0.0, math.pi): (4.25, 3.01, 1.237),
    (-math.pi, math.pi): (4.25, 4.25, 2.127),
}


def interpolation_error(task: lavajax.Task, key: jax.Array) -> jax.Array:
    """Squared error of linear interpolation between the support points, by their first input.

    Beyond the first and last support point the nearest value is kept. Of k outputs ``[N, k]``,
    each is interpolated, and the mean error over real query points taken.
    """
    del key
    # Padding becomes a copy of a real point, which changes no line between points.
    support, query = points.sanitise(task.support), points.sanitise(task.query)
    order = jnp.argsort(support.x[:, 0])
    x, y = support.x[order, 0], support.y[order]
    at = jax.vmap(lambda column: jnp.interp(query.x[:, 0], x, column), 1, 1)(y)
    return points.average(jnp.mean((at - query.y) ** 2, axis=-1), query)


def paper_value(task: Any, method: Any) -> float | None:
    """The paper's MSE, or accuracy, for the cell of a run, or None where its table has none."""
    task, variant = Variant.split(task)
    name = type(method).__name__
    # The paper's tables do not say which cells of LAVA would be its context form.
    unpublished = name == "Lava" and not isinstance(method.subspace, lavajax.Head)
    return None if variant.label_noise or unpublished else _published(task).get(name)


def _published(task: Any) -> dict[str, float]:
    """The paper's column for a task, by method; empty where it has none."""
    if isinstance(task, lavajax.AirQuality):
        return PAPER_AIR if dataclasses.replace(task, data="") == lavajax.AirQuality("") else {}
    if isinstance(task, lavajax.Radio):
        return {} if task.synthetic else PAPER_RADIO
    if isinstance(task, lavajax.Sine):
        return _column(PAPER_SINE, task.shots) if _published_sine(task) else {}
    if isinstance(task, lavajax.MiniImageNet):
        return _column(PAPER_MINI_IMAGENET, task.shots) if task.ways == 5 else {}
    row = PAPER_SYSTEMS.get(type(task).__name__, {})
    return row if row and dataclasses.replace(task, queries=50) == type(task)() else {}


def _column(table: dict[str, dict[int, float]], shots: int) -> dict[str, float]:
    return {name: row[shots] for name, row in table.items() if shots in row}


def reference_errors(
    task: Any, source: TaskSource, test_tasks: int, *, seed: int = 0
) -> dict[str, float]:
    """MSE, or accuracy, of predictors that need no meta-learning, by name.

    They are scored on the tasks that methods are scored on. A Gaussian process takes milliseconds
    for each: it sees 2,000 tasks, and its error there, relative to that of linear interpolation on
    the same, stands for all.
    """
    given = task
    task, variant = Variant.split(task)
    if isinstance(task, (lavajax.Omniglot, lavajax.MiniImageNet)):
        return {"chance": 1 / task.ways}
    if has_gaussian_process(task):

        def errors(drawn: lavajax.Task, key: jax.Array) -> jax.Array:
            return jnp.stack([jnp.mean(drawn.query.y**2), interpolation_error(drawn, key)])

        scores = lavajax.score(errors, source, num_tasks=test_tasks, seed=seed)
        zero, interpolated = scores.mean(axis=0)
        few = min(test_tasks, TEST_TASKS)
        # Not the first of all: keys of fewer tasks may be others, by the version of JAX.
        there = lavajax.score(errors, source, num_tasks=few, seed=seed).mean(axis=0)[1]
        process = gaussian_process_error(source, few, seed=seed)
        found = {
            "predict 0": float(zero),
            "linear interpolation": float(interpolated),
            "Gaussian process, Matern 3/2": float(interpolated * process / there),
        }
        places = STEPS if isinstance(task, lavajax.Radio) else task.shots + task.queries
        if task is given and getattr(task, "inputs", "hour") == "hour":
            found["best linear predictor"] = linear_error(source, places, test_tasks, seed=seed)
        if isinstance(task, lavajax.Radio) and not variant.label_noise:
            name = "noise" if task.synthetic else "noise, by the file's SNRs"
            found[name] = noise_floor(source)
        return found
    found = sine_errors(task) if isinstance(task, lavajax.Sine) else {}
    if hasattr(task, "field"):
        found = field_errors(task, test_tasks, seed=seed)
    # Noise on the query's labels adds its variance to the error of every predictor.
    noise = variant.label_noise**2 if variant.noise_on == "both" else 0.0
    return {name: value + noise for name, value in found.items()}


def linear_error(source: Any, places: int, test_tasks: int, *, seed: int = 0) -> float:
    """MSE of the best linear predictor of a series' query from its support.

    Best by the second moments of 20,000 training series, with a ten-thousandth added to the
    variances: no kernel, no network, and ``places`` (``places`` + 1) / 2 numbers learned. What a
    head of fixed features predicts is linear in the labels too: it can hardly do better.

    Args:
        source: of series whose only input runs from -1 to 1 over ``places`` steps; with several
            outputs, each is predicted from its own labels, by the moments of all.
        places: T.
        test_tasks: how many.
        seed: of the test tasks.
    """

    def series(task: lavajax.Task, key: jax.Array) -> jax.Array:
        del key
        x, y = (
            jnp.concatenate(parts)
            for parts in ((task.support.x, task.query.x), (task.support.y, task.query.y))
        )
        return y[jnp.argsort(x[:, 0])]

    whole = dataclasses.replace(source, shots=places // 2, queries=places - places // 2)
    drawn = lavajax.score(series, whole, num_tasks=20_000, split="train")
    rows = np.moveaxis(drawn, 2, 1).reshape(-1, places).astype(np.float64)
    moments = jnp.asarray(rows.T @ rows / len(rows) + 1e-4 * np.eye(places), jnp.float32)

    def error(task: lavajax.Task, key: jax.Array) -> jax.Array:
        del key
        seen, asked = (
            jnp.round((points.x[:, 0] + 1) / 2 * (places - 1)).astype(int)
            for points in (task.support, task.query)
        )
        weights = jnp.linalg.solve(moments[seen][:, seen], moments[seen][:, asked])
        return jnp.mean((weights.T @ task.support.y - task.query.y) ** 2)

    return float(lavajax.score(error, source, num_tasks=test_tasks, seed=seed).mean())


def has_gaussian_process(task: Any) -> bool:
    """Whether a Gaussian process is among the references of a task, which needs scikit-learn."""
    return isinstance(task, (lavajax.AirQuality, lavajax.Radio))


def noise_floor(source: Any) -> float:
    """The MSE of a predictor that knows the signals of a radio source, but not their noise."""
    while hasattr(source, "tasks"):
        source = source.tasks
    return source.noise_floor


def field_errors(task: Any, test_tasks: int, *, seed: int = 0) -> dict[str, float]:
    """MSE without meta-learning for tasks that are a field of random parameters.

    The mean over parameters, here of 300 draws, which adds a three-hundredth to its error, is the
    best prediction that ignores the task, where inputs say nothing of it.
    """
    draws = jax.vmap(task.parameters)(jax.random.split(jax.random.key(0), 300))

    def errors(drawn: lavajax.Task, key: jax.Array) -> jax.Array:
        del key
        every = jax.vmap(lambda parameters: task.field(drawn.query.x, **parameters))(draws)
        y = drawn.query.y
        return jnp.stack([jnp.mean(y**2), jnp.mean((y - every.mean(axis=0)) ** 2)])

    zero, best = lavajax.score(errors, task, num_tasks=test_tasks, seed=seed).mean(axis=0)
    return {"predict 0": float(zero), "mean over parameters": float(best)}


def sine_errors(task: lavajax.Sine) -> dict[str, float]:
    """MSE on sine waves without meta-learning, by name; empty for unpublished ranges."""
    if not _published_sine(task, phases=tuple(_SINE_ERRORS)):
        return {}
    zero, best, bayes = _SINE_ERRORS[task.phase]
    found = {"predict 0": zero, "no adaptation, at best": best}
    return found | ({"one point, at best": bayes} if task.shots == 1 else {})


def _published_sine(
    task: lavajax.Sine, phases: tuple[tuple[float, float], ...] = ((0.0, math.pi),)
) -> bool:
    published = lavajax.Sine()
    return (
        task.phase in phases
        and task.amplitude == published.amplitude
        and task.x_range == published.x_range
    )
