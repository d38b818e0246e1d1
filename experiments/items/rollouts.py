"""Trajectories of learned vector fields against those of the true ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import figures
import lavajax
from comparison import Job
from items import systems_table
from lavajax.extras import require
from protocols import Scale
from tables import section
from works import Folders, Work

TITLE = "dynamical systems: trajectories of the learned fields"
NAME = "rollouts"
METHODS = ("LAVA, the paper's setting", "ANIL", "CAVIA")
TIME = 2.0
STARTS = 5
FIGURE = "rollouts.png"


def works(scale: Scale) -> list[Work]:
    """A cell for each system and method."""
    return [_work(scale, system, method) for system in _systems(scale) for method in METHODS]


def _systems(scale: Scale) -> list[str]:
    """Those with a state; the cartpole's is inverse dynamics."""
    names = [name for name, task in systems_table.systems(scale).items() if hasattr(task, "BOX")]
    return names[:1] if scale.quick else names


def _job(scale: Scale, system: str, method: str) -> Job:
    return systems_table.table(scale).job(systems_table.row(method), system)


def _work(scale: Scale, system: str, method: str) -> Work:
    job, tasks = _job(scale, system, method), 4 if scale.quick else 200
    samples = 40 if system == "Van der Pol" else 20
    settings = {"tasks": tasks, "starts": STARTS, "time": TIME, "samples": samples}
    compute = partial(_compute, job, tasks, samples)
    return Work(NAME, job.name, {**job.key, **settings}, compute, after=(job.work,), seconds=60.0)


def _compute(job: Job, tasks: int, samples: int, folders: Folders) -> dict[str, Any]:
    seeds, first = [], None
    for params in job.trained(folders):
        rolled = roll_out(params, job.task, tasks, samples)
        median = float(np.median(np.asarray(rolled["rmse"], float)))
        failed = int(np.sum(rolled["failed"]))
        seeds.append({"median": median if np.isfinite(median) else None, "failed": failed})
        if first is None:
            first = {name: np.asarray(rolled[name][0], float) for name in ("true", "learned")}
    # An integration that fails leaves infinities, which are neither JSON nor drawn.
    paths = {
        name: [p[np.isfinite(p).all(axis=1)].round(3).tolist() for p in path]
        for name, path in (first or {}).items()
    }
    return {"seeds": seeds, "trajectories": tasks * STARTS, "first": paths}


def roll_out(params: lavajax.MetaParams, task: Any, tasks: int, samples: int) -> dict[str, Any]:
    """Integrates true and learned fields of unseen tasks, from states of their queries.

    Returns:
        ``true`` and ``learned`` trajectories ``[tasks, starts, samples, 2]``; ``rmse``
        ``[tasks]``, over the instants before the true trajectory leaves the training box, infinite
        where an integration fails before that; ``failed`` ``[tasks, starts]``, those.
    """
    times = jnp.linspace(0.0, TIME, samples)
    low, high = jnp.asarray(task.BOX).T

    @jax.jit
    @jax.vmap
    def one(key: jax.Array) -> dict[str, jax.Array]:
        drawn = task.sample(key, "test")
        parameters = task.parameters(key, "test")
        adapted = lavajax.adapt(params, drawn.support)

        def learned(state: jax.Array) -> jax.Array:
            return lavajax.predict(params, adapted, state[None]).mean[0]

        starts = drawn.query.x[:STARTS]
        field = partial(_call, task.field, parameters)
        true = jax.vmap(partial(integrate, field, times))(starts)
        path = jax.vmap(partial(integrate, learned, times))(starts)
        inside = jnp.all((true >= low) & (true <= high), axis=-1)
        inside = jnp.cumprod(inside, axis=-1)[..., None]
        error = jnp.where(inside > 0, path - true, 0.0)
        failed = ~jnp.all(jnp.isfinite(error), axis=(1, 2))
        rmse = jnp.sqrt(jnp.sum(error**2) / (2 * jnp.sum(inside)))
        rmse = jnp.where(jnp.any(failed), jnp.inf, rmse)
        return {"true": true, "learned": path, "rmse": rmse, "failed": failed}

    return one(jax.random.split(jax.random.key(0), tasks))


def _call(field: Callable[..., jax.Array], parameters: Any, state: jax.Array) -> jax.Array:
    return field(state, **parameters)


def integrate(
    field: Callable[[jax.Array], jax.Array], times: jax.Array, start: jax.Array
) -> jax.Array:
    """The trajectory ``[samples, 2]`` from a state; infinite from where it cannot be integrated."""
    diffrax = require("diffrax", "ode", "integrating dynamical systems")
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda t, y, args: field(y)),
        diffrax.Dopri5(),
        times[0],
        times[-1],
        None,
        start,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-6),
        max_steps=4096,
        throw=False,
    )
    return solution.ys


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    found = {
        (system, method): result
        for system in _systems(scale)
        for method in METHODS
        if (result := _work(scale, system, method).result(folders)) is not None
    }
    if not found:
        return ""
    draw(scale, found, folders.results / FIGURE)
    head = ["method", *_systems(scale)]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    failures = []
    for method in METHODS:
        shown = []
        for system in _systems(scale):
            result = found.get((system, method))
            medians = [s["median"] for s in result["seeds"]] if result else []
            lost = None in medians or not medians
            shown.append(
                "most fail" if result and lost else f"{np.mean(medians):.3g}" if medians else ""
            )
            if result and (failed := sum(s["failed"] for s in result["seeds"])):
                number = result["trajectories"] * len(result["seeds"])
                failures.append(f"{method} on {system}, {failed} of {number:,}")
        lines.append(f"| {method} | {' | '.join(shown)} |")
    some = next(iter(found.values()))
    return section(
        "### Trajectories",
        f"Root mean squared error of the state along trajectories of 0 to {TIME:g} in time, from "
        f"{STARTS} states of the query, up to where the true one leaves the training box: the "
        f"median over {some['trajectories'] // STARTS} unseen tasks, then the mean over "
        "the seeds that have not diverged. The models are those of the table of dynamical systems; "
        "both fields are integrated by an adaptive Runge-Kutta method of orders 4 and 5. "
        "Integrations that failed before the true one left the box: "
        + (", ".join(failures) if failures else "none")
        + ".",
        "\n".join(lines),
        f"![Trajectories of learned and true fields]({folders.results.name}/{FIGURE})\n\n"
        "Grey: true; coloured: learned from 10 points; dots: initial states; "
        "dotted: the box that training states are from, where it is in view. The first unseen "
        "task, first seed.",
    )


def draw(scale: Scale, found: dict[tuple[str, str], Any], path: Path) -> None:
    """A row for each method, a column for each system."""
    plt = figures.pyplot()
    systems = _systems(scale)
    figure, axes = plt.subplots(
        *(len(METHODS), len(systems)),
        figsize=(2.2 * len(systems) + 0.6, 6.2),
        squeeze=False,
        layout="constrained",
    )
    for column, system in enumerate(systems):
        names = systems_table.SYSTEMS[system].STATES
        for row, method in enumerate(METHODS):
            axis = axes[row, column]
            if found.get((system, method), {}).get("first"):
                first = found[system, method]["first"]
                for true, learned in zip(first["true"], first["learned"], strict=True):
                    axis.plot(*np.transpose(true), color=figures.BLACK, lw=3.2, alpha=0.25)
                    axis.plot(*np.transpose(learned), color=figures.LOOKS[method][0], lw=1.3)
                    axis.plot(*true[0], "o", color=figures.BLACK, ms=3)
                (left, right), (low, high) = systems_table.SYSTEMS[system].BOX
                box = np.array([(left, low), (right, low), (right, high), (left, high)])
                axis.plot(*box[[0, 1, 2, 3, 0]].T, ":", color=figures.BLACK, lw=0.8)
                # The true trajectories set the frame: a learned one may leave it.
                every = np.concatenate(first["true"])
                margin = 0.15 * np.ptp(every, axis=0)
                axis.set_xlim(every[:, 0].min() - margin[0], every[:, 0].max() + margin[0])
                axis.set_ylim(every[:, 1].min() - margin[1], every[:, 1].max() + margin[1])
            if row == 0:
                axis.set_title(system, fontsize=9)
            if row == len(METHODS) - 1:
                axis.set_xlabel(names[0])
            axis.set_ylabel(f"{figures.short(method)}\n{names[1]}" if column == 0 else names[1])
    figures.save(figure, path)
