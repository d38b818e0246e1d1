"""Condition numbers of the curvature that LAVA sums, with and without its regularisation."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from lavajax.config import to_json
from protocols import Scale
from tables import section
from works import Folders, Work

TITLE = "sine waves: condition numbers by size of the context"
NAME = "conditions"
SHOTS = 10
RATE = 1e-3
EARLY = 100
METHODS: dict[str, Any] = {
    **{f"C = {c}": lavajax.Lava(subspace=lavajax.Context(size=c)) for c in (2, 4, 8, 16)},
    "head": lavajax.Lava(),
}
# The paper's table, at its epochs 1 and 200: of the sum of H_i, then regularised.
PAPER = {
    "C = 2": (4.96, 1.94, 1.04, 1.96),
    "C = 4": (1.31e2, 6.26e2, 1.04, 41.03),
    "C = 8": (5.28e6, 1.78e6, 1.03, 66.73),
    "C = 16": (1.35e10, 5.31e9, 1.04, 36.0),
    "head": (1.89e11, 1.36e11, 74.36, 217.86),
}


def works(scale: Scale) -> list[Work]:
    """A cell for each size."""
    names = ("C = 2", "head") if scale.quick else tuple(METHODS)
    return [_work(scale, name) for name in names]


def _work(scale: Scale, name: str) -> Work:
    protocol, method = scale.protocol, METHODS[name]
    settings: dict[str, Any] = {"steps": protocol.steps, "seeds": protocol.seeds, "rate": RATE}
    settings |= {"early": max(protocol.steps * EARLY // 20_000, 1), "tasks": 100}
    key = {"method": to_json(method), "task": to_json(lavajax.Sine(shots=SHOTS))}
    return Work(
        *(NAME, name, {**key, **settings}),
        partial(_compute, method, **settings),
        seconds=20 + protocol.seeds * protocol.steps * 1e-3,
    )


def _compute(
    method: Any, folders: Folders, *, steps: int, seeds: int, rate: float, early: int, tasks: int
) -> dict[str, Any]:
    del folders
    source, found = lavajax.Sine(shots=SHOTS), []
    for seed in range(seeds):
        at: dict[str, Any] = {}

        def record(progress: lavajax.Progress, at: dict[str, Any] = at) -> None:
            if progress.step == early:
                at["early"] = jax.tree.map(jnp.copy, progress.state.params)

        try:
            at["end"] = lavajax.train(
                method,
                source,
                steps=steps,
                seed=seed,
                optimizer=lavajax.outer_optimizer(steps, rate=rate),
                chunk=early,
                callback=record,
            ).params
        except FloatingPointError:  # diverged, and left out
            continue
        found.append({when: conditions(params, tasks) for when, params in at.items()})
    return {"early": early, "seeds": found}


def _numbers(counts: set[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{most}" if least == most else f"{least} to {most}"


def conditions(params: lavajax.MetaParams, tasks: int) -> dict[str, float]:
    """Mean and median over unseen tasks of the ratio of largest to smallest eigenvalue.

    Returns:
        ``raw_mean`` and ``raw_median`` of sum_i H_i, whose eigenvalues are counted from 1e-12 of
        the largest on; ``mean`` and ``median`` of sum_i H_i + N eps I. In float64.
    """
    source = lavajax.Sine(shots=SHOTS)
    supports = jax.vmap(lambda key: source.sample(key, "test").support)(
        jax.random.split(jax.random.key(0), tasks)
    )
    assert isinstance(params.method, lavajax.Lava)
    with jax.enable_x64(True):
        double = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), params.learned
        )
        precise = dataclasses.replace(params, learned=double)
        points = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), supports)
        parts = jax.jit(jax.vmap(params.method.diagnose, in_axes=(None, 0)))(precise, points)
        total = np.asarray(parts.hessians, np.float64).sum(axis=1)
        epsilon = np.asarray(parts.epsilon, np.float64)
    values = np.linalg.eigvalsh(total)  # [tasks, n], ascending
    smallest = np.where(values > 1e-12 * values[:, -1:], values, np.inf).min(axis=1)
    raw = values[:, -1] / smallest
    shift = SHOTS * epsilon
    regular = (values[:, -1] + shift) / (np.maximum(values[:, 0], 0.0) + shift)
    return {
        "raw_mean": float(raw.mean()),
        "raw_median": float(np.median(raw)),
        "mean": float(regular.mean()),
        "median": float(np.median(regular)),
    }


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    head = ["", *(f"{w}, {when}" for w in ("sum of H", "regularised") for when in ("early", "end"))]
    lines, early, seeds = [], 0, set[int]()
    for name in METHODS:
        result = _work(scale, name).result(folders)
        if result is None or not result["seeds"]:
            continue
        early, cells = result["early"], []
        seeds.add(len(result["seeds"]))
        for index, (what, when) in enumerate(
            (what, when) for what in ("raw_", "") for when in ("early", "end")
        ):
            mean, median = (
                np.mean([seed[when][what + stat] for seed in result["seeds"]])
                for stat in ("mean", "median")
            )
            cells.append(f"{mean:.3g}, {median:.3g} ({PAPER[name][index]:.3g})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    if not lines:
        return ""
    return section(
        "## Condition numbers",
        f"Of LAVA's curvature at N = {SHOTS}, after {early:,} and {scale.protocol.steps:,} outer "
        f"steps: mean and median over 100 unseen tasks, each the mean over {_numbers(seeds)} "
        "seeds, in float64; in brackets the paper's, at its epochs 1 and 200. Of the sum of the "
        "H_i only eigenvalues above 1e-12 of the largest are counted. N points with one output "
        "have at most N of them: the sum is singular for a context of 16 and for a head, its "
        "condition number is infinite, and the paper's 1e10 and 1e11 are the rounding of float32.",
        "\n".join([f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines]),
    )
