"""Figures of a run, in one style.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from files import whole
from lavajax.extras import require

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
GREY = "#777777"

# A method has the same colour and dashes everywhere; relatives share a colour.
_SHORT, _LONG = (0, (1, 3)), (0, (5, 1, 1, 1, 1, 1))
LOOKS: dict[str, tuple[str, Any]] = {
    "LAVA": (VERMILION, "-"),
    "LAVA, literal": (VERMILION, "--"),
    "LAVA, the paper's setting": (VERMILION, "-"),
    "LAVA, learned epsilon": (VERMILION, "--"),
    "LAVA, converged": (VERMILION, ":"),
    "LAVA, Bayesian": (VERMILION, (0, (3, 1, 1, 1, 1, 1))),
    "LAVA, Bayesian, firm": (VERMILION, (0, (5, 1, 1, 1))),
    "LAVA, Bayesian, correlated": (VERMILION, (0, (1, 1))),
    "LAVA, context": (VERMILION, "-."),
    "LAVA, context, at prior": (VERMILION, _SHORT),
    "LAVA, all weights": (VERMILION, _LONG),
    "ANIL": (BLUE, "-"),
    "CAVIA": (GREEN, "-"),
    "LLAMA": (GREEN, "--"),
    "MAML": (ORANGE, "-"),
    "MAML, first order": (ORANGE, "--"),
    "Meta-SGD": (ORANGE, ":"),
    "iMAML": (ORANGE, "-."),
    "Reptile": (ORANGE, _LONG),
    "VFML": (SKY, "-"),
    "VR-MAML, tuned": (SKY, "--"),
    "VR-MAML, as released": (SKY, ":"),
    "MetaMix": (SKY, "-."),
    "VFML, storm": (SKY, _LONG),
    "ridge head": (PURPLE, "-"),
    "ALPaCA": (PURPLE, "--"),
    "ALPaCA, firm": (PURPLE, _SHORT),
    "ALPaCA, MSE": (PURPLE, _LONG),
    "DKT, linear": (PURPLE, ":"),
    "DKT, RBF": (PURPLE, "-."),
    "CNP": (BLACK, "-"),
    "attentive CNP": (BLACK, "--"),
    "TNP-D": (BLACK, ":"),
    "PLATIPUS": (GREY, "-"),
    "PLATIPUS, Gaussian": (GREY, ":"),
    "BMAML, head": (GREY, "--"),
    "BMAML, Gaussian": (GREY, "-."),
    "hypernetwork": (BLACK, "-."),
}

STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E5E5E5",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "savefig.dpi": 150,
}


def line(name: str) -> dict[str, Any]:
    """Colour and dashes of a method by its name in a table."""
    colour, dashes = LOOKS[name]
    return {"color": colour, "ls": dashes, "lw": 2.0 if name.startswith("LAVA") else 1.2}


def short(name: str) -> str:
    """A method's name where there is one of its kind."""
    return name.split(",", maxsplit=1)[0]


def pyplot() -> Any:
    """Matplotlib's pyplot, drawing into files."""
    matplotlib = require("matplotlib", "experiments", "drawing figures")
    matplotlib.use("Agg")
    plt = require("matplotlib.pyplot", "experiments", "drawing figures")
    plt.rcParams.update(STYLE)
    return plt


def save(figure: Any, path: Path) -> None:
    """Writes a figure, whole or not at all."""
    with warnings.catch_warnings(), whole(path) as temporary:
        warnings.simplefilter("ignore")  # of fonts that lack a glyph
        figure.savefig(temporary, format=path.suffix[1:], bbox_inches="tight")
    pyplot().close(figure)


def draw_tasks(params: lavajax.MetaParams, task: Any, source: Any, path: Path) -> None:
    """Three unseen tasks before and after adaptation.

    With one input, curves over it, a row for each of the first two outputs; with more, predictions
    against targets; of images, those of the support and some of the query with their predictions.
    """
    plt = pyplot()
    if isinstance(params.method.point_loss, lavajax.CrossEntropy):
        _draw_images(params, source, path)
        return
    if source is task and hasattr(task, "queries"):  # drawn, not stored: as many as a curve needs
        source = dataclasses.replace(task, queries=200)
    keys = jax.random.split(jax.random.key(2), 3)
    tasks = [_as_measured(params, source.sample(key, "test")) for key in keys]
    curves = tasks[0].query.x.shape[1:] == (1,)
    rows = min(tasks[0].query.y.shape[1], 2)
    figure, axes = plt.subplots(
        rows, 3, figsize=(8.5, 0.4 + 2.3 * rows), squeeze=False, sharex=curves, layout="constrained"
    )
    synthetic = " (synthetic)" if getattr(task, "synthetic", False) else ""
    for column, each in enumerate(tasks):
        before, after = (_predictor(params, s) for s in (_nothing(each.support), each.support))
        for row in range(rows):
            draw = _draw_curves if curves else _draw_parity
            draw(axes[row, column], each, before, after, row)
            if row == 0:
                axes[row, column].set_title(f"unseen task {column + 1}{synthetic}", fontsize=9)
            if row == rows - 1:
                axes[row, column].set_xlabel("x" if curves else "target")
            if column == 0:
                name = "y" if curves else "prediction"
                axes[row, column].set_ylabel(name if rows == 1 else f"{name}, output {row + 1}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    save(figure, path)


def _as_measured(params: lavajax.MetaParams, task: lavajax.Task) -> lavajax.Task:
    """A task without padding, in the units of its user where the model knows them."""
    units = params.units

    def real(points: lavajax.Points) -> lavajax.Points:
        if points.mask is not None:
            points = lavajax.Points(points.x[points.mask], points.y[points.mask])
        return points if units is None else units.restore_points(points)

    return lavajax.Task(real(task.support), real(task.query))


def _draw_images(params: lavajax.MetaParams, source: Any, path: Path) -> None:
    """Three unseen tasks: a column for each class, one support image of it, and three queries.

    Above a query stands the probability of its own class after adapting.
    """
    plt = pyplot()
    tasks = [source.sample(key, "test") for key in jax.random.split(jax.random.key(2), 3)]
    classes = params.method.point_loss.out_dim(())
    figure = plt.figure(figsize=(0.75 * 3 * classes, 3.6), layout="constrained")
    for index, (part, task) in enumerate(zip(figure.subfigures(1, 3), tasks, strict=True)):
        part.suptitle(f"unseen task {index + 1}", fontsize=9)
        after = _predictor(params, task.support)(task.query.x)
        axes = part.subplots(4, classes, squeeze=False)
        for axis in axes.flat:
            axis.set_axis_off()
        for label in range(classes):
            axes[0, label].set_title("support", fontsize=7, color=BLUE)
            _show(axes[0, label], task.support.x[np.argmax(np.asarray(task.support.y) == label)])
            queries = np.flatnonzero(np.asarray(task.query.y) == label)[:3]
            for axis, query in zip(axes[1:, label], queries, strict=False):
                colour = GREEN if np.argmax(after[query]) == label else VERMILION
                axis.set_title(f"{after[query, label]:.2f}", fontsize=7, color=colour)
                _show(axis, task.query.x[query])
    save(figure, path)


def _show(axis: Any, image: Any) -> None:
    """An image in grey or colour, whatever its values have been scaled to."""
    image = np.asarray(image)
    image = (image - image.min()) / max(np.ptp(image), 1e-9)
    axis.imshow(image.squeeze(-1) if image.shape[-1] == 1 else image, cmap="Greys")


def _nothing(support: lavajax.Points) -> lavajax.Points:
    return lavajax.Points(support.x, support.y, jnp.zeros(support.x.shape[0], bool))


def _predictor(params: lavajax.MetaParams, support: lavajax.Points) -> Any:
    adapted = jax.jit(lavajax.adapt)(params, support)  # without an estimate, a task has no curve
    return lambda x: np.asarray(lavajax.predict(params, adapted, x).mean)


def _draw_curves(axis: Any, task: lavajax.Task, before: Any, after: Any, output: int) -> None:
    order = np.argsort(task.query.x[:, 0])
    x, y = np.asarray(task.query.x)[order, 0], np.asarray(task.query.y)[order, output]
    low = min(x.min(), float(task.support.x.min()))
    high = max(x.max(), float(task.support.x.max()))
    grid = np.linspace(low, high, 300)[:, None]
    axis.plot(x, y, color=BLACK, lw=3.2, alpha=0.25, label="truth")
    axis.plot(grid, before(grid)[:, output], color=GREY, ls=":", label="before")
    axis.plot(grid, after(grid)[:, output], color=VERMILION, label="after adapting")
    support_y = np.asarray(task.support.y)[:, output]
    axis.plot(task.support.x[:, 0], support_y, "o", color=BLUE, ms=5, label="support", zorder=3)


def _draw_parity(axis: Any, task: lavajax.Task, before: Any, after: Any, output: int) -> None:
    y = np.asarray(task.query.y)[:, output]
    ends = np.array([y.min(), y.max()])
    axis.plot(ends, ends, color=BLACK, lw=3.2, alpha=0.25, label="truth")
    for predict, colour, marker, label in (
        (before, GREY, "x", "before"),
        (after, VERMILION, "o", "after adapting"),
    ):
        predicted = predict(task.query.x)[:, output]
        axis.plot(y, predicted, marker, color=colour, ms=3.5, label=label)


def draw_learning(rows: list[dict[str, Any]], metric: str, path: Path) -> None:
    """Training loss and test metric against the outer step, of every seed."""
    if not rows:
        return
    plt = pyplot()
    steps = [row["step"] for row in rows]
    lowest = np.inf
    figure, axis = plt.subplots(figsize=(5.2, 3.0), layout="constrained")
    for name, colour, label in (
        ("loss", SKY, "training loss"),
        (f"test_{metric}", VERMILION, f"test {metric}, 200 tasks"),
    ):
        values = np.array([np.atleast_1d(row[name]) for row in rows], float)
        lowest = np.nanmin(values, initial=lowest)
        for seed in range(values.shape[1]):
            axis.plot(steps, values[:, seed], color=colour, lw=1.3, label=None if seed else label)
    if metric != "accuracy" and lowest > 0:  # a log density may be below 0
        axis.set_yscale("log")
    axis.set_xlabel("outer step")
    axis.set_ylabel(metric if metric == "accuracy" else "error")
    figure.legend(loc="outside lower center", ncols=2)
    save(figure, path)
