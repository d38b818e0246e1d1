"""A pendulum whose mass changes while it is being tracked: adaptation as points arrive."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import figures
import lavajax
from comparison import Job
from protocols import Row, Scale
from tables import section
from works import Folders, Work

TITLE = "a pendulum whose mass changes: adaptation as points arrive"
NAME = "tracking"
FIGURE = "tracking.png"
NOISE = 0.05
SIZES = (1, 3, 10, 30, 100)
PENDULUM = lavajax.Pendulum(shots=max(SIZES))
TASKS = lavajax.VaryingShots(lavajax.NoisyLabels(PENDULUM, NOISE, "both"), SIZES)
ROW = Row("LAVA, Bayesian", lavajax.lava_bayesian())
FORGET = (1.0, 0.95, 0.8)
LABELS = {forget: f"forget = {forget:g}" for forget in FORGET}
POINTS, PENDULUMS, STATES = 120, 200, 50  # points before the change, and as many after it
SHOWN = {
    "before the change": POINTS,
    **{f"{n} point{'' if n == 1 else 's'} after it": POINTS + n for n in (1, 10, 30, POINTS)},
}
"""What the table shows of a curve: after how many points."""


def _job(scale: Scale) -> Job:
    protocol = dataclasses.replace(scale.protocol, seeds=1)
    return Job(NAME, ROW, "trained", TASKS, protocol)


def _pendulums(scale: Scale) -> int:
    return 4 if scale.quick else PENDULUMS


def _work(scale: Scale) -> Work:
    job, pendulums = _job(scale), _pendulums(scale)
    key = {"model": job.key, "pendulums": pendulums, "points": POINTS, "forget": FORGET}
    return Work(
        NAME, "tracked", key, partial(_track, job, pendulums), after=(job.work,), seconds=40.0
    )


def works(scale: Scale) -> list[Work]:
    """The model, and how it follows pendulums that it has never seen."""
    return [_work(scale)]


def _track(job: Job, pendulums: int, folders: Folders) -> dict[str, Any]:
    """Error and predicted standard deviation after every point, by ``FORGET``."""
    params = job.params(folders, 0)

    def follow(key: jax.Array) -> dict[str, jax.Array]:
        """One pendulum, ``[FORGET, points]``."""
        keys = jax.random.split(key, 4)
        before = PENDULUM.parameters(keys[0], "test")
        changed = {**before, "mass": PENDULUM.parameters(keys[1], "test")["mass"]}
        low, high = np.array(PENDULUM.BOX).T
        states = jax.random.uniform(keys[2], (2 * POINTS, 2), minval=low, maxval=high)
        changes = jnp.arange(2 * POINTS) >= POINTS

        def field(at: jax.Array, new: jax.Array) -> jax.Array:
            fields = [PENDULUM.field(at, **parameters) for parameters in (before, changed)]
            return jnp.where(new[..., None], fields[1], fields[0])

        noise = NOISE * jax.random.normal(keys[3], states.shape)
        labels = field(states, changes) + noise
        at = jax.random.uniform(key, (STATES, 2), minval=low, maxval=high)

        def follow_with(forget: float) -> dict[str, jax.Array]:
            def take(sums: lavajax.Sums, point: Any) -> Any:
                x, y, new = point
                sums = lavajax.update(params, sums, (x[None], y[None]), forget=forget)
                prediction = lavajax.predict(params, lavajax.estimate(params, sums), at)
                truth = field(at, jnp.broadcast_to(new, at.shape[:1]))
                assert prediction.epistemic is not None
                return sums, {
                    "error": jnp.mean((prediction.mean - truth) ** 2),
                    "variance": jnp.mean(prediction.epistemic),
                }

            return jax.lax.scan(take, lavajax.online(params), (states, labels, changes))[1]

        found = [follow_with(forget) for forget in FORGET]
        return jax.tree.map(lambda *each: jnp.stack(each), *found)

    found = jax.lax.map(jax.jit(follow), jax.random.split(jax.random.key(5), pendulums))
    return {
        LABELS[forget]: {
            name: [float(f"{v:.4g}") for v in np.sqrt(np.mean(values[:, index], axis=0))]
            for name, values in jax.tree.map(np.asarray, found).items()
        }
        for index, forget in enumerate(FORGET)
    }


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    found = _work(scale).result(folders)
    if found is None:
        return ""
    draw(found, folders.results / FIGURE)
    return section(
        "## Points that arrive",
        f"Pendulums are followed by single noisy values of their field (standard deviation "
        f"{NOISE:g}); after {POINTS} points the mass changes. With every new point, what earlier "
        "ones have said counts `forget` times what it did. Root mean square of the error over "
        f"{STATES} states of a pendulum and {_pendulums(scale)} pendulums, and in brackets of what "
        "LAVA believes it to be.",
        _table(found),
        f"![Error as points arrive]({folders.results.name}/{FIGURE})",
    )


def _table(found: dict[str, Any]) -> str:
    head = ["RMSE of the field", *SHOWN]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for label, curves in found.items():
        pairs = [(curves["error"][at - 1], curves["variance"][at - 1]) for at in SHOWN.values()]
        lines.append(f"| {label} | {' | '.join(f'{e:.2g} ({std:.2g})' for e, std in pairs)} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Errors and predicted standard deviations against the number of points."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 3.4), layout="constrained")
    colours = (figures.BLACK, figures.VERMILION, figures.SKY)
    for (label, curves), colour in zip(found.items(), colours, strict=True):
        points = np.arange(1, len(curves["error"]) + 1)
        axis.plot(points, curves["error"], color=colour, label=label)
        axis.plot(points, curves["variance"], color=colour, ls=":")
    axis.plot([], [], color=figures.GREY, ls=":", label="believed")
    axis.axvline(POINTS, color=figures.GREY, lw=0.8)
    above = axis.get_xaxis_transform()
    axis.text(POINTS, 1.01, "mass changes", transform=above, ha="center", va="bottom")
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(plt.NullLocator())
    axis.set_xlabel("points")
    axis.set_ylabel("RMSE of the field")
    figure.legend(loc="outside right upper")
    figures.save(figure, path)
