"""The idea in one picture: each point of a task fits many tasks, all of them together one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import figures
from items import geometry
from protocols import Scale
from tables import section
from works import Folders, Work

TITLE = "sine waves: the idea, points whose solutions overlap in one task"
METHOD = "LAVA, context"
FIGURE = "overlap.png"


def works(scale: Scale) -> list[Work]:
    """LAVA's cell of the space of contexts."""
    return [geometry.work(scale, METHOD)]


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    result = geometry.work(scale, METHOD).result(folders)
    if result is None:
        return ""
    draw(result["tasks"][0], folders.results / FIGURE)
    return section(
        "## Task overlap",
        "Left: the points of one task, and other tasks that pass through each. Right: what each "
        "point says of a context of 2 numbers, in the same colours, as a Gaussian of which one "
        "and two standard deviations are drawn; LAVA's result is where all of them agree.",
        f"![Task overlap]({folders.results.name}/{FIGURE})",
    )


def waves_through(x: float, y: float, number: int, rng: np.random.Generator) -> list[Any]:
    """(amplitude, phase) of random sine waves of the usual ranges that pass through a point."""
    found: list[Any] = []
    for _ in range(1000 * number):  # through a point near the largest amplitude hardly any passes
        if len(found) == number:
            break
        phase = rng.uniform(0, np.pi)
        amplitude = y / np.sin(x + phase)
        if 0.1 <= amplitude <= 5:
            found.append((amplitude, phase))
    return found


def draw(task: dict[str, Any], path: Path) -> None:
    """Functions on the left, contexts on the right."""
    plt = figures.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3.2), layout="constrained")
    grid, rng = np.linspace(-5, 5, 300), np.random.default_rng(0)
    for (x, y), colour in zip(task["support"], geometry.COLOURS, strict=True):
        for amplitude, phase in waves_through(x, y, 12, rng):
            left.plot(grid, amplitude * np.sin(grid + phase), color=colour, lw=0.8, alpha=0.3)
        left.plot(x, y, "o", color=colour, ms=8, mec="white", zorder=3)
    left.set_xlabel("x")
    left.set_ylabel("y")
    marks = np.array([task["prior"], *task["points"], task["result"]])
    for index, (point, precision, colour) in enumerate(
        zip(task["points"], task["precisions"], geometry.COLOURS, strict=True)
    ):
        for deviations, alpha in ((1, 0.28), (2, 0.14)):
            curve = geometry.ellipse(point, np.asarray(precision) / deviations**2)
            right.fill(*curve, color=colour, alpha=alpha, lw=0)
        label = "step on one point" if index == 0 else None
        right.plot(*point, "o", color=colour, ms=6, mec="white", label=label)
    right.plot(*task["prior"], "X", color=figures.BLACK, ms=8, mec="white", label="prior")
    right.plot(*task["result"], "D", color=figures.VERMILION, ms=8, mec="white", label="LAVA")
    middle, half = marks.mean(axis=0), 1.2 * np.ptp(marks, axis=0).max()
    right.set_xlim(middle[0] - half, middle[0] + half)
    right.set_ylim(middle[1] - half, middle[1] + half)
    right.locator_params(nbins=4)
    right.set_xlabel("context, first")
    right.set_ylabel("context, second")
    figure.legend(loc="outside lower right", ncols=3)
    figures.save(figure, path)
