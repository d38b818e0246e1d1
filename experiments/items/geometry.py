"""The space of a 2-d context: where single points pull to, and where they agree."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import figures
import lavajax
from lavajax.config import to_json
from protocols import Scale
from tables import section
from works import Folders, Work

TITLE = "sine waves: the space of 2-d contexts, CAVIA and LAVA"
NAME = "geometry"
SHOTS = 3
TASKS = 3
RATE = 1e-3
FIGURE = "geometry.png"
COLOURS = (figures.ORANGE, figures.SKY, figures.PURPLE)  # of points
_CONTEXT = lavajax.Context(size=2)
METHODS: dict[str, Any] = {
    "CAVIA": lavajax.Cavia(subspace=_CONTEXT),
    "LAVA, context": lavajax.Lava(subspace=_CONTEXT),
}


def works(scale: Scale) -> list[Work]:
    """A cell for each method."""
    return [work(scale, method) for method in METHODS]


def work(scale: Scale, method: str) -> Work:
    """The cell of a method."""
    steps, cells = scale.protocol.steps, 8 if scale.quick else 80
    key = {"method": to_json(METHODS[method]), "task": to_json(lavajax.Sine(shots=SHOTS))}
    return Work(
        *(NAME, method, {**key, "steps": steps, "rate": RATE, "tasks": TASKS, "cells": cells}),
        partial(_compute, METHODS[method], steps, cells),
        seconds=30.0,
    )


def _compute(method: Any, steps: int, cells: int, folders: Folders) -> dict[str, Any]:
    del folders
    source = lavajax.Sine(shots=SHOTS)
    tx = lavajax.outer_optimizer(steps, rate=RATE)
    params = lavajax.train(method, source, steps=steps, optimizer=tx).params
    tasks = [look(params, source.sample(key, "test"), cells) for key in _keys()]
    return {"tasks": tasks, "mse": lavajax.evaluate(params, source, num_tasks=1000).mean}


def _keys() -> jax.Array:
    return jax.random.split(jax.random.key(4), TASKS)


def look(params: lavajax.MetaParams, task: lavajax.Task, cells: int) -> dict[str, Any]:
    """The contexts of one task.

    Returns:
        ``support``, x and y; ``prior`` c_0, ``points`` c_i, ``result`` c; for LAVA ``precisions``,
        H_i + eps I; ``box``, the frame of all these, and ``heat`` over it, the sum over points of
        the logarithm of the squared error, rows along the second number.
    """
    support = task.support
    adapted = lavajax.adapt(params, support)
    prior = np.asarray(params["context"], float)
    result = np.asarray(adapted.block, float)
    found: dict[str, Any] = {}
    if isinstance(params.method, lavajax.Lava):
        parts = params.method.diagnose(params, support)
        each = np.asarray(parts.theta, float)
        precisions = np.asarray(parts.hessians, float) + float(parts.epsilon) * np.eye(2)
        found["precisions"] = _rounded(precisions)
    else:  # where a step on each point alone would lead
        alone = [(support.x[i : i + 1], support.y[i : i + 1]) for i in range(SHOTS)]
        each = np.stack([np.asarray(lavajax.adapt(params, one).block, float) for one in alone])
    marks = np.concatenate([prior[None], each, result[None]])
    middle = (marks.min(axis=0) + marks.max(axis=0)) / 2
    half = max(np.ptp(marks, axis=0).max(), 1e-3)
    low, high = middle - half, middle + half
    axes = [np.linspace(low[i], high[i], cells) for i in (0, 1)]
    contexts = np.stack(np.meshgrid(*axes), axis=-1).reshape(-1, 2)

    @jax.jit
    @jax.vmap
    def heat(context: jax.Array) -> jax.Array:
        mean = lavajax.predict(params, lavajax.Adapted(context), support.x).mean
        return jnp.sum(jnp.log((mean - support.y) ** 2 + 1e-12))

    values = np.asarray(heat(jnp.asarray(contexts, jnp.float32)), float).reshape(cells, cells)
    return found | {
        "support": _rounded(np.concatenate([support.x, support.y], axis=1)),
        "prior": _rounded(prior),
        "points": _rounded(each),
        "result": _rounded(result),
        "box": _rounded(np.stack([low, high])),
        "heat": np.round(values, 1).tolist(),
    }


def _rounded(values: Any) -> Any:
    return np.vectorize(lambda v: float(f"{v:.5g}"))(np.asarray(values, float)).tolist()


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    found = {
        method: result
        for method in METHODS
        if (result := work(scale, method).result(folders)) is not None
    }
    if len(found) < len(METHODS):
        return ""
    draw(found, folders.results / FIGURE)
    errors = ", ".join(f"{figures.short(m)} {r['mse']:.3g}" for m, r in found.items())
    return section(
        "## The space of contexts",
        f"Contexts of 2 numbers for three unseen sine waves with {SHOTS} points each, after "
        f"{scale.protocol.steps:,} outer steps (one seed; test error {errors}; both take one inner "
        "step). Colour: the sum over points of the logarithm of the squared error, dark where all "
        "points fit, in each panel from its least to its largest value. Cross: "
        "before adaptation; dots: one step on each point alone; diamond: the result. Ellipses: "
        "one standard deviation of each point's Gaussian, in its colour, which is long where the "
        "point says nothing.",
        f"![Parameter space of CAVIA and LAVA]({folders.results.name}/{FIGURE})",
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """CAVIA above, LAVA below; a column for each task."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(
        *(len(found), TASKS), figsize=(8.2, 5.4), squeeze=False, layout="constrained"
    )
    for row, (method, result) in enumerate(found.items()):
        for column, task in enumerate(result["tasks"]):
            axis = axes[row, column]
            (left, bottom), (right, top) = task["box"]
            heat = np.asarray(task["heat"], float)
            axis.imshow(
                # A point's loss falls to 0 on a line, the narrower the lower: a grid meets it
                # here and there.
                np.maximum(heat, np.quantile(heat, 0.05)),
                origin="lower",
                extent=(left, right, bottom, top),
                cmap="cividis",
                aspect="auto",
                interpolation="bilinear",
            )
            axis.grid(visible=False)
            marks = {"mec": "white", "mew": 0.7, "ls": "none"}
            axis.plot(*task["prior"], "X", color=figures.BLACK, ms=9, label="prior", **marks)
            for index, (point, colour) in enumerate(zip(task["points"], COLOURS, strict=True)):
                if "precisions" in task:
                    curve = ellipse(point, task["precisions"][index])
                    axis.plot(*curve, color=colour, lw=1.2)
                label = f"step on point {index + 1}"
                axis.plot(*point, "o", color=colour, ms=6, label=label, **marks)
            colour, label = figures.LOOKS[method][0], f"{figures.short(method)}'s result"
            axis.plot(*task["result"], "D", color=colour, ms=7, label=label, **marks)
            axis.set_xlim(left, right)
            axis.set_ylim(bottom, top)
            if row == 0:
                axis.set_title(f"task {column + 1}", fontsize=9)
            if column == 0:
                axis.set_ylabel(f"{figures.short(method)}\ncontext, second")
            if row == len(found) - 1:
                axis.set_xlabel("context, first")
    shown: dict[str, Any] = {}
    for axis in axes[:, 0]:
        handles, labels = axis.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=3)
    figures.save(figure, path)


def ellipse(center: Any, precision: Any) -> np.ndarray:
    """One standard deviation of a Gaussian, ``[2, 100]``."""
    values, vectors = np.linalg.eigh(np.asarray(precision, float))
    angle = np.linspace(0, 2 * np.pi, 100)
    circle = np.stack([np.cos(angle), np.sin(angle)])
    return np.asarray(center)[:, None] + vectors @ (circle / np.sqrt(values)[:, None])
