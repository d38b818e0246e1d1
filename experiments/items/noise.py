"""What label noise does to methods that were trained without."""

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
from protocols import EXTENDED_ROWS, PAPER_ROWS, Row, Scale
from tables import section
from works import Folders, Work

TITLE = "sine waves: how label noise fades with the number of points"
NAME = "noise"
STD = 3.0
SIZES = (5, 10, 20, 50, 100, 200)
FIGURE = "noise.png"
ROWS = (
    *(row for row in PAPER_ROWS if row.name in ("ANIL", "LAVA, the paper's setting")),
    *(row for row in EXTENDED_ROWS if row.name == "hypernetwork"),
)


def works(scale: Scale) -> list[Work]:
    """A cell for each method."""
    return [_work(scale, row) for row in _rows(scale)]


def _rows(scale: Scale) -> tuple[Row, ...]:
    return ROWS[:2] if scale.quick else ROWS


def _work(scale: Scale, row: Row) -> Work:
    sizes = SIZES[:2] if scale.quick else SIZES
    tasks = lavajax.VaryingShots(lavajax.Sine(shots=max(sizes)), sizes)
    job = Job(NAME, row, "trained", tasks, scale.protocol)
    settings: dict[str, Any] = (
        {"tasks": 8, "draws": 2} if scale.quick else {"tasks": 500, "draws": 20}
    )
    return Work(
        *(NAME, row.name, {**job.key, **settings, "std": STD}),
        partial(_compute, job, sizes, **settings),
        after=(job.work,),
        seconds=120.0,
    )


def _compute(
    job: Job, sizes: tuple[int, ...], folders: Folders, *, tasks: int, draws: int
) -> dict[str, Any]:
    seeds = []
    for params in job.trained(folders):
        found = [change(params, n, tasks=tasks, draws=draws) for n in sizes]
        seeds.append({name: [each[name] for each in found] for name in found[0]})
    return {"sizes": list(sizes), "seeds": seeds}


def change(params: lavajax.MetaParams, shots: int, *, tasks: int, draws: int) -> dict[str, float]:
    """What noise on the labels of the support changes.

    A head method's prediction is affine in the labels, f = A y + b: the expected change of the
    mean squared error is then exactly sigma^2 mean_q ||A_q||^2, a row of A for each query.

    Returns:
        ``clean``, the error without noise; ``change``, what noise of standard deviation 3 adds,
        averaged over draws and tasks; ``expected``, the same in closed form, where it holds.
    """
    fn = jax.tree_util.Partial(_Change(draws), params)  # other seeds compile nothing
    scores = lavajax.score(fn, lavajax.Sine(shots=shots), num_tasks=tasks, batch=min(tasks, 25))
    return {name: float(values.mean()) for name, values in scores.items()}


@dataclasses.dataclass(frozen=True)
class _Change:
    """What ``change`` finds on one task, as a function of the parameters, task and key."""

    draws: int

    def __call__(
        self, params: lavajax.MetaParams, task: lavajax.Task, key: jax.Array
    ) -> dict[str, jax.Array]:
        def predict(y: jax.Array) -> jax.Array:
            adapted = lavajax.adapt(params, lavajax.Points(task.support.x, y))
            return lavajax.predict(params, adapted, task.query.x).mean

        y = task.support.y
        noise = STD * jax.random.normal(key, (self.draws, *y.shape))
        clean = jnp.mean((predict(y) - task.query.y) ** 2)
        noisy = jnp.mean((jax.vmap(predict)(y + noise) - task.query.y) ** 2)
        found = {"clean": clean, "change": noisy - clean}
        head = isinstance(getattr(params.method, "subspace", None), lavajax.Head)
        if head and not isinstance(params.method, lavajax.HyperNetwork):  # affine in the labels
            rows = jax.jacrev(predict)(y).reshape(task.query.y.size, -1)
            found["expected"] = STD**2 * jnp.mean(jnp.sum(rows**2, axis=1))
        return found


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    every = {
        row.name: result
        for row in ROWS
        if (result := _work(scale, row).result(folders)) is not None
    }
    found = {name: result for name, result in every.items() if result["seeds"]}
    if not found:
        return ""
    draw(found, folders.results / FIGURE)
    sizes = next(iter(found.values()))["sizes"]
    head = ["method", *(f"N = {n}" for n in sizes)]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, result in found.items():
        for what, label, unit in (
            ("clean", ", error without noise", 1.0),
            ("change", "", 1.0),
            ("expected", ", closed form", 1.0),
            ("change", ", over the noise's variance", STD**2),
        ):
            if what in result["seeds"][0]:
                values = np.mean([seed[what] for seed in result["seeds"]], axis=0) / unit
                lines.append(f"| {name}{label} | {' | '.join(f'{v:.3g}' for v in values)} |")
    return section(
        "## Label noise",
        f"Trained on sine waves without noise, with N drawn from {', '.join(map(str, sizes))}; "
        f"what noise of standard deviation {STD:g} on the labels of the support then adds to the "
        "mean squared error, by N, the mean over seeds that have not diverged. A head is affine in "
        "the labels, so that the addition is known in closed form: it falls like 1/N where the "
        "estimate is consistent.",
        "\n".join(lines),
        f"Diverged in every seed: {', '.join(lost)}."
        if (lost := [name for name in every if name not in found])
        else "",
        f"![Added error under label noise]({folders.results.name}/{FIGURE})",
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """Added error against N, of every seed, and its closed form."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for name, result in found.items():
        for index, seed in enumerate(result["seeds"]):
            label = figures.short(name) if index == 0 else None
            axis.plot(result["sizes"], seed["change"], label=label, **figures.line(name))
            if "expected" in seed:
                axis.plot(
                    *(result["sizes"], seed["expected"], "o"),
                    color=figures.LOOKS[name][0],
                    mfc="white",
                    ms=4,
                    label="closed form" if name.startswith("LAVA") and index == 0 else None,
                    zorder=3,
                )
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("support points N")
    axis.set_ylabel("added test MSE")
    sizes = next(iter(found.values()))["sizes"]
    axis.set_xticks(sizes, [str(n) for n in sizes])
    axis.minorticks_off()
    figure.legend(loc="outside right upper")
    figures.save(figure, path)
