"""How far error bars can be trusted, from no point to many."""

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
from cells import rounded
from comparison import COVERAGES, DENSITIES, Job, spelt
from protocols import EXTENDED_ROWS, GAUSSIAN_ROWS, Row, Scale
from tables import listed, section
from works import Folders, Work

TITLE = "sine waves with noise: error bars, from no point to many"
NAME = "calibration"
FIGURE, BANDS = "calibration.png", "bands.png"
STD = 0.1
SIZES = (1, 2, 5, 10, 20)
WAVES = lavajax.NoisyLabels(lavajax.Sine(shots=max(SIZES)), STD, "both")
TASKS = lavajax.VaryingShots(WAVES, SIZES)
LEVELS = np.linspace(0.05, 0.95, 19)
LAVA = "LAVA, Bayesian"
CORRELATED = "LAVA, Bayesian, correlated"
# All that predict a density; those whose noise can be learned learn it. Those with a prior over
# weights end where its start lets them.
_STARTS = (10.0, 100.0, 1000.0, 10_000.0)
_SPEED = 100.0  # as firm a prior as the last start must change a hundredfold
ROWS = (
    Row(LAVA, lavajax.lava_bayesian(), also=("epsilon", (0.1, *_STARTS))),
    Row(
        CORRELATED,
        lavajax.lava_bayesian(model=lavajax.Correlated(speed=_SPEED)),
        also=("epsilon", (0.1, *_STARTS)),
    ),
    Row(
        "ALPaCA",
        lavajax.Alpaca(noise=0.1, learn_noise=True),
        also=("prior_precision", (1.0, *_STARTS)),
    ),
    Row("DKT, linear", lavajax.Dkt(kernel="linear", objective="predictive")),
    Row("DKT, RBF", lavajax.Dkt(kernel="rbf", objective="predictive")),
    *(row for row in EXTENDED_ROWS if row.name in ("CNP", "attentive CNP", "TNP-D")),
)
QUICK_ROWS = (dataclasses.replace(ROWS[0], also=None),)
_GRID = np.linspace(-5, 5, 101)
_SHOWN = (0, 1, 2, 3, 5, 10)


def _sizes(scale: Scale) -> tuple[int, ...]:
    return SIZES[:1] if scale.quick else SIZES


def _rows(scale: Scale) -> tuple[Row, ...]:
    return QUICK_ROWS if scale.quick else ROWS + (GAUSSIAN_ROWS if scale.extended else ())


def _job(scale: Scale, row: Row) -> Job:
    protocol = dataclasses.replace(scale.protocol, seeds=3)
    return Job(NAME, row, "trained", TASKS, protocol, by_density=True)


def works(scale: Scale) -> list[Work]:
    """Scores of each method, and the curves of LAVA as points arrive."""
    return [*(_scored(scale, row) for row in _rows(scale)), _bands(scale)]


def _scored(scale: Scale, row: Row) -> Work:
    job, tasks = _job(scale, row), 20 if scale.quick else 2_000
    sizes = _sizes(scale)
    key = {**job.key, "tasks": tasks, "sizes": sizes, "levels": len(LEVELS)}
    compute = partial(_score, job, tasks, sizes)
    return Work(NAME, row.name, key, compute, after=(job.work,), seconds=60.0)


def _score(job: Job, tasks: int, sizes: tuple[int, ...], folders: Folders) -> list[dict[str, Any]]:
    """For each seed and N: the scores, their standard errors, and coverage at every level."""
    found = []
    for params in job.trained(folders):
        by_size = {}
        for n in sizes:
            waves = dataclasses.replace(WAVES, tasks=lavajax.Sine(shots=n))
            scores = lavajax.evaluate(params, waves, num_tasks=tasks)
            each: dict[str, Any] = {"mse": scores.mean}
            for name in DENSITIES:
                values = getattr(scores, name)
                if values is None:
                    continue
                each[name] = float(values.mean())
                each[f"{name} error"] = float(values.std(ddof=1) / np.sqrt(tasks))
            inside = lavajax.score(
                jax.tree_util.Partial(_inside, params), waves, num_tasks=min(tasks, 500)
            )
            each["inside"] = np.round(inside.mean(axis=0), 4).tolist()
            by_size[str(n)] = each
        found.append(by_size)
    return found


def _inside(params: lavajax.MetaParams, task: lavajax.Task, key: jax.Array) -> jax.Array:
    """The share of a task's query inside the central interval of every level."""
    adapted = lavajax.adapt(params, task.support, key=key)
    prediction = lavajax.predict(params, adapted, task.query.x)
    assert prediction.variance is not None
    z = jnp.abs(task.query.y - prediction.mean) / jnp.sqrt(prediction.variance)
    probability = 2 * jax.scipy.stats.norm.cdf(z) - 1  # of the interval that ends at the target
    return jnp.mean(probability[..., None] <= LEVELS, axis=(0, 1))


def _bands(scale: Scale) -> Work:
    job = _job(scale, _rows(scale)[0])
    key = {**job.key, "shown": _SHOWN}
    return Work(NAME, "bands", key, partial(_draw_points, job), after=(job.work,), seconds=20.0)


def _draw_points(job: Job, folders: Folders) -> dict[str, Any]:
    """Mean, band and functions of one wave as its points arrive."""
    params = job.params(folders, 0)
    task = WAVES.sample(jax.random.key(3), "test")
    grid, panels = jnp.asarray(_GRID)[:, None], []
    for n in _SHOWN:
        mask = jnp.arange(max(SIZES)) < n
        adapted = lavajax.adapt(params, lavajax.Points(task.support.x, task.support.y, mask))
        prediction = lavajax.predict(params, adapted, grid)
        drawn = lavajax.sample(params, adapted, grid, jax.random.key(n), number=8)
        assert prediction.epistemic is not None
        panels.append(
            {
                "mean": rounded(prediction.mean),
                "std": rounded(jnp.sqrt(prediction.epistemic)),
                "functions": [rounded(each) for each in drawn],
            }
        )
    return {"x": rounded(task.support.x), "y": rounded(task.support.y), "panels": panels}


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    found = {
        row.name: result
        for row in _rows(scale)
        if (result := _scored(scale, row).result(folders))  # not all seeds have diverged
    }
    if not found:
        return ""
    draw(found, folders.results / FIGURE)
    bands = _bands(scale).result(folders)
    if bands is not None:
        draw_bands(bands, folders.results / BANDS)
    return section(
        "## Error bars",
        f"Sine waves with noise of standard deviation {STD:g} on all labels; one model for all N, "
        f"trained on N drawn from {', '.join(map(str, SIZES))} by the density of the query. "
        "Means over seeds; of the density with its standard error over tasks.",
        _table(
            *("negative log density, nats", found),
            lambda each: f"{each['nll']:.3f} ± {each['nll error']:.2g}",
        ),
        _beside(found),
        _table(
            *("% of targets inside 95 / 90 / 50% intervals", found),
            lambda each: " / ".join(f"{100 * each[name]:.1f}" for name in COVERAGES),
        ),
        _table(
            *("CRPS, and the standard deviation that is predicted", found),
            lambda each: f"{each['crps']:.3g}, {each['sharpness']:.3g}",
        ),
        _table(
            *("squared error of the mean, the noise of the targets in it", found),
            lambda each: f"{each['mse']:.3g}",
        ),
        _firmness(scale, folders),
        f"{CORRELATED}: on `lavajax.Correlated(speed={_SPEED:g})`, which learns the covariance of "
        "the head's prior, as ALPaCA does."
        if CORRELATED in found
        else "",
        f"![Share of targets inside intervals]({folders.results.name}/{FIGURE})",
        f"{LAVA}: mean, two standard deviations of what the points leave open, and functions drawn "
        f"from it.\n\n![Bands as points arrive]({folders.results.name}/{BANDS})"
        if bands is not None
        else "",
    )


def _beside(found: dict[str, Any]) -> str:
    """LAVA's density beside that of the better of the exact posteriors, in standard errors."""
    exact = [found[name] for name in found if name.startswith(("ALPaCA", "DKT"))]
    if not exact:
        return ""
    parts = []
    for name in (name for name in (LAVA, CORRELATED) if name in found):
        above = {}
        for n in found[name][0]:
            best = min((_mean(seeds, n) for seeds in exact), key=lambda each: each["nll"])
            above[n] = (_mean(found[name], n)["nll"] - best["nll"]) / best["nll error"]
        beyond = [f"{share:.1f} above it at N = {n}" for n, share in above.items() if share > 1]
        parts.append(f"{name} is {', '.join(beyond)}" if beyond else f"{name} is so at every N")
    return (
        "Within one standard error of the better of ALPaCA and DKT, or below it, is the aim: "
        f"{'; '.join(parts)}."
    )


def _mean(seeds: list[dict[str, Any]], n: str) -> dict[str, Any]:
    """Of the scores at one N, over seeds."""
    values = [seed[n] for seed in seeds]
    return {key: np.mean([v[key] for v in values], axis=0) for key in values[0]}


def _firmness(scale: Scale, folders: Folders) -> str:
    """Where the learned priors start, which the search has chosen."""
    parts = []
    for row in _rows(scale):
        result = _job(scale, row).work.result(folders)
        if row.also and result is not None:
            name, values = row.also
            chosen = f"{result['chosen'][name]:g}"
            parts.append(f"{row.name}'s {spelt(name)} at {chosen}, of {listed(values)}")
    if not parts:
        return ""
    return (
        f"Chosen by the density of validation tasks, where the prior starts: {'; '.join(parts)}. "
        "The other rows, DKT's Gaussian processes among them, choose the outer rate alone."
    )


def _table(corner: str, found: dict[str, Any], show: Any) -> str:
    """A row for each method, a column for each N."""
    sizes = next(iter(found.values()))[0].keys()
    head = [corner, *(f"N = {n}" for n in sizes)]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for name, seeds in found.items():
        cells = (show(_mean(seeds, n)) for n in sizes)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[str, Any], path: Path) -> None:
    """Observed against nominal shares, a panel for each N."""
    plt = figures.pyplot()
    sizes = list(next(iter(found.values()))[0])
    figure, axes = plt.subplots(
        *(1, len(sizes)),
        figsize=(1.9 * len(sizes), 2.6),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axis, n in zip(axes[0], sizes, strict=True):
        axis.plot([0, 1], [0, 1], color=figures.GREY, lw=0.8)
        for name, seeds in found.items():
            inside = np.mean([seed[n]["inside"] for seed in seeds], axis=0)
            label = name if n == sizes[0] else None
            axis.plot(LEVELS, inside, label=label, **figures.line(name))
        axis.set_title(f"N = {n}", fontsize=9)
        axis.set_aspect("equal")
        axis.set_xlabel("nominal")
    axes[0, 0].set_ylabel("observed")
    figure.legend(loc="outside lower center", ncols=4)
    figures.save(figure, path)


def draw_bands(found: dict[str, Any], path: Path) -> None:
    """A panel for each number of points."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(
        2, 3, figsize=(8.0, 4.4), sharex=True, sharey=True, layout="constrained"
    )
    for axis, n, panel in zip(axes.flat, _SHOWN, found["panels"], strict=True):
        mean, std = np.array(panel["mean"]), np.array(panel["std"])
        axis.fill_between(_GRID, mean - 2 * std, mean + 2 * std, color=figures.SKY, alpha=0.35)
        for drawn in panel["functions"]:
            axis.plot(_GRID, drawn, color=figures.BLUE, lw=0.5, alpha=0.5)
        axis.plot(_GRID, mean, color=figures.VERMILION)
        axis.plot(found["x"][:n], found["y"][:n], "o", color=figures.BLACK, ms=4)
        axis.set_title(f"{n} point{'' if n == 1 else 's'}", fontsize=9)
    figure.supxlabel("x", fontsize=9)
    figure.supylabel("y", fontsize=9)
    figures.save(figure, path)
