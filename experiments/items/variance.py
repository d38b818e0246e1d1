"""How much the estimate of one task depends on which points it was given."""

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

TITLE = "sine waves: variance of the estimate over support sets"
NAME = "variance"
SHOTS = (2, 5, 10, 20)
RATE = 1e-3
FIGURE, SCATTER = "variance.png", "variance_scatter.png"
_CONTEXT = lavajax.Context(size=2)
# One inner step of one fixed size for both, as in the paper.
METHODS: dict[str, Any] = {
    "CAVIA": lavajax.Cavia(subspace=_CONTEXT, learn_inner_rate=False),
    "LAVA, context": lavajax.Lava(subspace=_CONTEXT, learn_inner_rate=False),
}


def works(scale: Scale) -> list[Work]:
    """A cell for each method and N."""
    shots = SHOTS[:1] if scale.quick else SHOTS
    return [_work(scale, method, n) for n in shots for method in METHODS]


def _work(scale: Scale, method: str, shots: int) -> Work:
    protocol = scale.protocol
    settings: dict[str, Any] = {"steps": protocol.steps, "seeds": protocol.seeds, "rate": RATE}
    settings |= {"tasks": 2 if scale.quick else 8, "sets": 10 if scale.quick else 100}
    key = {"method": to_json(METHODS[method]), "task": to_json(lavajax.Sine(shots=shots))}
    return Work(
        *(NAME, f"{method} N={shots}", {**key, **settings}),
        partial(_compute, METHODS[method], shots, **settings),
        seconds=10 + protocol.seeds * protocol.steps * 1.5e-3,
    )


def _compute(
    method: Any,
    shots: int,
    folders: Folders,
    *,
    steps: int,
    seeds: int,
    rate: float,
    tasks: int,
    sets: int,
) -> dict[str, Any]:
    del folders
    measure = jax.jit(partial(variances, shots=shots, tasks=tasks, sets=sets))
    found: dict[str, Any] = {"parameter": [], "function": [], "mse": []}
    for seed in range(seeds):
        curve: list[dict[str, float]] = []

        def record(progress: lavajax.Progress, curve: list[dict[str, float]] = curve) -> None:
            values = {k: float(v) for k, v in measure(progress.state.params)[0].items()}
            curve.append({"step": progress.step, **values})

        try:
            trained = lavajax.train(
                method,
                lavajax.Sine(shots=shots),
                steps=steps,
                seed=seed,
                optimizer=lavajax.outer_optimizer(steps, rate=rate),
                chunk=max(steps // 100, 1),
                callback=record,
            )
        except FloatingPointError:  # diverged, and left out
            continue
        found["step"] = [each["step"] for each in curve]
        for name in ("parameter", "function"):
            found[name].append([float(f"{each[name]:.4g}") for each in curve])
        found["mse"].append(
            lavajax.evaluate(trained.params, lavajax.Sine(shots=shots), num_tasks=1000).mean
        )
        if "scatter" not in found:
            contexts = np.asarray(measure(trained.params)[1][0], float)
            found["scatter"] = np.round(contexts, 4).tolist()
    return found


def variances(
    params: lavajax.MetaParams, *, shots: int, tasks: int, sets: int
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Variance over support sets of a task, averaged over unseen tasks.

    Returns:
        ``parameter``, the trace of the contexts' covariance over their size C, in the scale that
        training happened to give them; ``function``, the variance of the prediction, averaged over
        inputs, which has the units of the targets. And the contexts ``[tasks, sets, C]``.
    """
    grid = jnp.linspace(-5.0, 5.0, 100)[:, None]

    def one_task(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        amplitude_key, phase_key, points_key = jax.random.split(key, 3)
        amplitude = jax.random.uniform(amplitude_key, minval=0.1, maxval=5.0)
        phase = jax.random.uniform(phase_key, maxval=jnp.pi)

        def one_set(key: jax.Array) -> tuple[jax.Array, jax.Array]:
            x = jax.random.uniform(key, (shots, 1), minval=-5.0, maxval=5.0)
            adapted = lavajax.adapt(params, (x, amplitude * jnp.sin(x + phase)))
            return adapted.block, lavajax.predict(params, adapted, grid).mean

        return jax.vmap(one_set)(jax.random.split(points_key, sets))

    contexts, predictions = jax.vmap(one_task)(jax.random.split(jax.random.key(1), tasks))
    spread = {
        "parameter": jnp.mean(jnp.var(contexts, axis=1)),
        "function": jnp.mean(jnp.var(predictions, axis=1)),
    }
    return spread, contexts


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    every = {
        (method, n): result
        for n in SHOTS
        for method in METHODS
        if (result := _work(scale, method, n).result(folders)) is not None
    }
    found = {at: result for at, result in every.items() if result["mse"]}
    if not found:
        return ""
    draw(found, folders.results / FIGURE)
    parts = [f"![Variance of the estimate during training]({folders.results.name}/{FIGURE})"]
    shots = sorted({n for _, n in found})
    at = 10 if 10 in shots else shots[0]
    if all((method, at) in found for method in METHODS):
        draw_scatter({m: found[m, at]["scatter"] for m in METHODS}, folders.results / SCATTER)
        parts.append(
            f"![Contexts of one task]({folders.results.name}/{SCATTER})\n\nContexts of one unseen "
            f"task from {len(next(iter(found.values()))['scatter'])} support sets of {at} points, "
            "first seed."
        )
    head = ["method", "N", "function, at its peak", "function, at the end", "context, at the end"]
    lines = [f"| {' | '.join([*head, 'test MSE'])} |", "| --- " * (len(head) + 1) + "|"]
    for (method, n), result in found.items():
        function = np.mean(result["function"], axis=0)
        parameter = np.mean(result["parameter"], axis=0)
        peak = int(np.argmax(function))
        cells = [
            *(method, str(n), f"{function[peak]:.3g} (step {result['step'][peak]:,})"),
            *(f"{function[-1]:.3g}", f"{parameter[-1]:.3g}", f"{np.mean(result['mse']):.3g}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return section(
        "## Variance of the estimate",
        "The variance over support sets of the same task, for contexts of 2 numbers and one inner "
        f"step of 0.1, {scale.protocol.steps:,} outer steps at rate {RATE:g}, means over "
        f"{scale.protocol.seeds} seeds, but for those that diverged. The variance of the context "
        "is in the scale that training happened to give it; that of the function, averaged over "
        "inputs, can be compared.",
        "\n".join(lines),
        f"Diverged in every seed: {', '.join(lost)}."
        if (lost := [f"{method} at N = {n}" for method, n in every if (method, n) not in found])
        else "",
        *parts,
    )


def draw(found: dict[tuple[str, int], Any], path: Path) -> None:
    """Variance against the outer step: of the function above, of the context below."""
    plt = figures.pyplot()
    shots = sorted({n for _, n in found})
    figure, axes = plt.subplots(
        *(2, len(shots)),
        figsize=(2.3 * len(shots) + 0.6, 4.2),
        squeeze=False,
        sharex=True,
        sharey="row",
        layout="constrained",
    )
    for (method, n), result in found.items():
        column = shots.index(n)
        for row, what in enumerate(("function", "parameter")):
            values = np.array(result[what], float)
            colour = figures.LOOKS[method][0]
            for seed in values:
                axes[row, column].plot(result["step"], seed, color=colour, lw=0.5, alpha=0.35)
            label = figures.short(method)
            axes[row, column].plot(result["step"], values.mean(0), color=colour, label=label)
            axes[row, column].set_yscale("log")
        axes[0, column].set_title(f"N = {n}", fontsize=9)
        axes[1, column].set_xlabel("outer step")
    axes[0, 0].set_ylabel("variance\nof the function")
    axes[1, 0].set_ylabel("variance\nof the context")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figures.save(figure, path)


def draw_scatter(contexts: dict[str, Any], path: Path) -> None:
    """The contexts of one task, a panel for each method, at one scale."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(5.6, 2.8), layout="constrained")
    half = 1.1 * max(
        np.max(np.abs(v - np.mean(v, axis=0))) for v in map(np.array, contexts.values())
    )
    for axis, (method, values) in zip(axes, contexts.items(), strict=True):
        axis.plot(*np.transpose(values), "o", ms=3, alpha=0.6, color=figures.LOOKS[method][0])
        axis.set_title(figures.short(method), fontsize=9)
        axis.set_xlabel("context, first")
        axis.set_ylabel("context, second")
        middle = np.mean(values, axis=0)
        axis.set_xlim(middle[0] - half, middle[0] + half)
        axis.set_ylim(middle[1] - half, middle[1] + half)
        axis.set_aspect("equal")
    figures.save(figure, path)
