"""One cell of a table: a method on some tasks, chosen, trained for every seed, and scored."""

from __future__ import annotations

import dataclasses
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import lavajax
from cells import Cells
from lavajax.config import to_json
from protocols import Protocol, Row


@dataclasses.dataclass(frozen=True)
class Job:
    """What a cell is made of.

    Attributes:
        row: the method.
        column: name of the column, such as ``N=10``.
        task: setting of the tasks, as JSON and source at once.
        protocol: of training and scoring.
    """

    row: Row
    column: str
    task: Any
    protocol: Protocol

    @property
    def name(self) -> str:
        """Of the cell."""
        return f"{self.row.name} {self.column}"

    @property
    def key(self) -> dict[str, Any]:
        """All that the result depends on."""
        row: dict[str, Any] = {"optimizer": self.row.optimizer, "rates": self.row.rates}
        row |= {"method": to_json(self.row.method), "searched": self.row.searched}
        return {
            "row": row,
            "task": to_json(self.task),
            "protocol": dataclasses.asdict(self.protocol),
        }


def compute(job: Job, cells: Cells, pieces: Cells, models: Path) -> dict[str, Any]:
    """The result of a cell, from the pieces that are there.

    Args:
        job: the cell.
        cells: results of whole cells.
        pieces: results of single trainings, which a stopped cell goes on from.
        models: folder for the parameters of every seed.
    """
    return cells.compute(job.name, job.key, lambda: _compute(job, pieces, models))


def _compute(job: Job, pieces: Cells, models: Path) -> dict[str, Any]:
    method, rate, validation = _choose(job, pieces)
    key = _key(job, method, rate)
    seeds = []
    for seed in range(job.protocol.seeds):
        run = partial(_run, job, method, rate, seed, models / f"{job.name} {seed}")
        seeds.append(pieces.compute(f"{job.name} seed {seed}", key, run))
    return {
        "chosen": {"inner_steps": getattr(method, "inner_steps", None), "outer_rate": rate},
        "validation": validation,
        "seeds": seeds,
    }


def _choose(job: Job, pieces: Cells) -> tuple[Any, float, dict[str, float | None]]:
    """The candidate of least error on validation tasks; with a single one, no search."""
    candidates = job.row.candidates(job.protocol)
    if len(candidates) == 1:
        return *candidates[0], {}
    errors: dict[str, float | None] = {}
    for method, rate in candidates:

        def search(method: Any = method, rate: float = rate) -> dict[str, float | None]:
            try:
                params = _train(job, method, rate, steps=job.protocol.search_steps).params
            except FloatingPointError:  # diverged: the worst choice there is
                return {"mse": None}
            return {"mse": _score(job, params, "validation", job.protocol.validation_tasks).mean}

        label = f"S={getattr(method, 'inner_steps', None)}, rate {rate:g}"
        found = pieces.compute(f"{job.name} search {label}", _key(job, method, rate), search)
        errors[label] = found["mse"]
    best = min(range(len(candidates)), key=lambda i: _order(list(errors.values())[i]))
    return *candidates[best], errors


def _order(error: float | None) -> float:
    return np.inf if error is None or not np.isfinite(error) else error


def _key(job: Job, method: Any, rate: float) -> dict[str, Any]:
    return {**job.key, "method": to_json(method), "outer_rate": rate}


def _run(job: Job, method: Any, rate: float, seed: int, model: Path) -> dict[str, Any]:
    """One seed: trained to the end, saved and scored."""
    curve: list[list[float]] = []  # outer steps so far, error on a few unseen tasks

    def record(progress: lavajax.Progress) -> None:
        error = _score(job, progress.state.params, "test", min(500, job.protocol.test_tasks), 1)
        curve.append([progress.step, error.mean])

    try:
        steps = job.protocol.steps
        params = _train(job, method, rate, seed=seed, steps=steps, callback=record).params
    except FloatingPointError:
        return {"mse": None, "curve": curve}
    lavajax.save(params, model, overwrite=True)
    found = _score(job, params, "test", job.protocol.test_tasks)
    return {
        "mse": found.mean,
        "median": found.median,
        "nll": None if found.nll is None else float(np.mean(found.nll)),
        "coverage": None if found.coverage is None else float(np.mean(found.coverage)),
        "curve": curve,
    }


def measure(job: Job, chosen: dict[str, Any]) -> dict[str, float]:
    """Times of a cell, by themselves: they want an idle machine.

    Args:
        job: the cell.
        chosen: what ``compute`` has chosen for it.

    Returns:
        ``step_ms``, an outer step; ``task_us``, adaptation and prediction of a task, of a batch of
        100, as they are scored.
    """
    method = job.row.method
    if job.row.searched:
        method = dataclasses.replace(method, inner_steps=chosen["inner_steps"])
    steps, seconds = max(job.protocol.steps // 100, 1), []
    params = _train(
        job,
        method,
        chosen["outer_rate"],
        steps=5 * steps,
        chunk=steps,
        callback=lambda progress: seconds.append(progress.seconds),
    ).params
    keys = jax.random.split(jax.random.key(0), 100)
    tasks = jax.vmap(lambda key: job.task.sample(key, "test"))(keys)

    @jax.jit
    def predict(params: lavajax.MetaParams) -> jax.Array:
        def one(task: lavajax.Task, key: jax.Array) -> jax.Array:
            adapted = lavajax.adapt(params, task.support, key=key)
            return lavajax.predict(params, adapted, task.query.x).mean

        return jax.vmap(one)(tasks, keys)

    jax.block_until_ready(predict(params))
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        jax.block_until_ready(predict(params))
        times.append(time.perf_counter() - begun)
    return {
        "step_ms": 1e3 * statistics.median(seconds) / steps,
        "task_us": 1e6 * statistics.median(times) / len(keys),
    }


def _train(
    job: Job, method: Any, rate: float, *, steps: int, seed: int = 0, **options: Any
) -> lavajax.Trained:
    sgd = job.row.optimizer == "sgd"
    return lavajax.train(
        method,
        job.task,
        steps=steps,
        seed=seed,
        meta_batch=job.protocol.meta_batch,
        optimizer=optax.sgd(rate) if sgd else lavajax.outer_optimizer(steps, rate=rate),
        **{"chunk": max(steps // 20, 1), **options},
    )


def _score(
    job: Job, params: lavajax.MetaParams, split: Any, tasks: int, seed: int = 0
) -> lavajax.Evaluation:
    return lavajax.evaluate(params, job.task, num_tasks=tasks, split=split, seed=seed)
