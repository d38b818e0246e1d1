"""Curves of LAVA and ANIL on the same points, with and without label noise."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import figures
import lavajax
from cells import rounded
from comparison import Job
from items import sine_table
from protocols import Scale
from tables import section
from works import Folders, Work

TITLE = "sine waves: curves of LAVA and ANIL, with and without noise"
NAME = "qualitative"
METHODS = ("LAVA, the paper's setting", "ANIL")
SHOTS = (1, 2, 10, 20)
STD = 1.0
FIGURE = "qualitative.png"
_GRID = np.linspace(-5.0, 5.0, 201)


def works(scale: Scale) -> list[Work]:
    """A cell for each N."""
    return [_work(scale, n) for n in ((2,) if scale.quick else SHOTS)]


def _work(scale: Scale, shots: int) -> Work:
    cells = sine_table.table(scale)
    jobs = {row.name: cells.job(row, f"N = {shots}") for row in cells.rows if row.name in METHODS}
    key = {"std": STD, "jobs": [job.key for job in jobs.values()]}
    compute = partial(_compute, jobs, shots)
    after = tuple(job.work for job in jobs.values())
    return Work(NAME, f"N={shots}", key, compute, after=after, seconds=10.0)


def _compute(jobs: dict[str, Job], shots: int, folders: Folders) -> dict[str, Any]:
    key = jax.random.key(11)
    task = lavajax.Sine(shots=shots).sample(key, "test")
    x, y = task.support.x, task.support.y
    noisy = y + STD * jax.random.normal(jax.random.fold_in(key, 1), y.shape)
    found: dict[str, Any] = {"x": rounded(x), "y": [rounded(y), rounded(noisy)]}
    # The truth is fitted to the points of the task, which determine it.
    every_x, every_y = (np.asarray(getattr(task.query, n), float)[:, 0] for n in "xy")
    basis = np.stack([np.sin(every_x), np.cos(every_x)], axis=1)
    weights = np.linalg.lstsq(basis, every_y, rcond=None)[0]
    found["truth"] = rounded(np.stack([np.sin(_GRID), np.cos(_GRID)], axis=1) @ weights)
    grid = jnp.asarray(_GRID, jnp.float32)[:, None]
    for name, job in jobs.items():
        params = job.params(folders, 0)
        curves = []
        for targets in (y, noisy):
            adapted = lavajax.adapt(params, (x, targets))
            curves.append(rounded(lavajax.predict(params, adapted, grid).mean))
        found[name] = curves
        if name == METHODS[0]:
            nothing = lavajax.Points(x, y, jnp.zeros(shots, bool))
            before = lavajax.adapt(params, nothing)
            found["prior"] = rounded(lavajax.predict(params, before, grid).mean)
    return found


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    found = {n: result for n in SHOTS if (result := _work_or_none(scale, n, folders)) is not None}
    if not found:
        return ""
    draw(found, folders.results / FIGURE)
    return section(
        "## Curves",
        "One unseen sine wave after adapting to N of its points, without and with noise of "
        f"standard deviation {STD:g} on the labels; models of the sine table, first seed.",
        f"![Curves of LAVA and ANIL]({folders.results.name}/{FIGURE})",
    )


def _work_or_none(scale: Scale, shots: int, folders: Folders) -> Any:
    if f"N = {shots}" not in sine_table.table(scale).columns:
        return None
    return _work(scale, shots).result(folders)


def draw(found: dict[int, Any], path: Path) -> None:
    """A column for each N; noise below."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(
        *(2, len(found)),
        figsize=(2.3 * len(found) + 0.5, 4.2),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for column, (n, result) in enumerate(found.items()):
        for row in (0, 1):
            axis = axes[row, column]
            axis.plot(
                _GRID, result["truth"], color=figures.BLACK, lw=3.2, alpha=0.25, label="truth"
            )
            axis.plot(_GRID, result["prior"], color=figures.GREY, ls=":", label="LAVA, before")
            for name in METHODS[::-1]:
                axis.plot(
                    *(_GRID, result[name][row]),
                    color=figures.LOOKS[name][0],
                    label=figures.short(name),
                    lw=1.4,
                )
            axis.plot(
                *(result["x"], result["y"][row], "x"),
                color=figures.BLACK,
                ms=5,
                mew=1.3,
                label="support",
                zorder=3,
            )
            if row == 1:
                axis.set_xlabel("x")
        axes[0, column].set_title(f"N = {n}", fontsize=9)
    limit = 1.4 * max(np.abs(result["truth"]).max() for result in found.values())
    axes[0, 0].set_ylim(-limit - STD, limit + STD)
    axes[0, 0].set_ylabel("y, no noise")
    axes[1, 0].set_ylabel("y, noisy labels")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    figures.save(figure, path)
