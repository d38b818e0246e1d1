"""One cell of a table: a method on some tasks, chosen, trained for every seed, and scored."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lavajax
from lavajax.config import to_json
from lavajax.watch import GROWTH
from protocols import USUAL_CLIP, Candidate, Protocol, Row
from works import Folders, Work

COVERAGES = ("coverage", "coverage_90", "coverage_50")
DENSITIES = ("nll", "crps", "sharpness", *COVERAGES)
"""What a cell has of methods with error bars, beside the error."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What a cell is made of.

    Attributes:
        item: the table.
        row: the method.
        column: name of the column, such as ``N=10``.
        task: setting of the tasks; the file that it may name is in the data folder.
        protocol: of training and scoring.
        by_density: whether what the protocol leaves open is chosen by the negative log density of
            validation tasks, and not by the error.
    """

    item: str
    row: Row
    column: str
    task: Any
    protocol: Protocol
    by_density: bool = False

    @property
    def name(self) -> str:
        """Of the cell."""
        return f"{self.row.name} {self.column}"

    @property
    def key(self) -> dict[str, Any]:
        """All that the result depends on."""
        row: dict[str, Any] = {"optimizer": self.row.optimizer, "rates": self.row.rates}
        row |= {"method": to_json(self.row.method), "searched": self.row.searched}
        if self.row.also:
            row["also"] = self.row.also
        return {
            "row": row,
            "task": to_json(self.task),
            "protocol": self.protocol.key,
            **self.criterion,
        }

    @property
    def work(self) -> Work:
        """``chosen``, ``validation``, and by seed what ``_run`` finds."""
        protocol, compiling = self.protocol, 8.0
        steps = [_step_seconds(each.method) for each in self.row.candidates(protocol)]
        seconds = compiling + protocol.seeds * protocol.steps * max(steps)
        if len(steps) > 1:
            seconds += len(steps) * compiling + protocol.search_steps * sum(steps)
        compute = partial(_compute, self)
        return Work(self.item, self.name, self.key, compute, seconds=seconds, data=self.data)

    @property
    def time_work(self) -> Work:
        """``step_ms``, an outer step; ``task_us``, a task as it is scored, of a batch of 100."""
        measure = partial(_measure, self)
        return Work(
            *(self.item, f"{self.name} time", self.key, measure),
            after=(self.work,),
            alone=True,
            seconds=20.0,
            data=self.data,
        )

    @property
    def metric(self) -> str:
        """``mse``, or ``accuracy``, of which more is better."""
        return self.row.method.point_loss.metric_name

    @property
    def criterion(self) -> dict[str, str]:
        """The part of keys that says by what is chosen, where it is not by the metric."""
        return {"chosen by": "nll"} if self.by_density else {}

    @property
    def data(self) -> str | None:
        """The file or folder of the data folder that the tasks are read from."""
        return getattr(self.task, "data", None)

    def result(self, folders: Folders) -> Any:
        """What ``work`` has computed, with ``times``; or None."""
        found = self.work.result(folders)
        return found and {**found, "times": self.time_work.result(folders)}

    def params(self, folders: Folders, seed: int) -> lavajax.MetaParams:
        """The parameters of a seed of the cell, which must be there; trained anew if they are not.

        Raises:
            FloatingPointError: the seed has diverged.
        """
        chosen = self.chosen(folders)
        if self.work.result(folders)["seeds"][seed][self.metric] is None:
            raise FloatingPointError(f"seed {seed} of {self.name} has diverged")
        path = _model(self, folders, _seed_key(self, folders, chosen, seed))
        if path.exists():
            return lavajax.load(path)
        source = folders.source(self.task)
        params = _train(self, source, chosen, seed=seed, steps=self.protocol.steps).params
        lavajax.save(params, path)
        return params

    def trained(self, folders: Folders) -> list[lavajax.MetaParams]:
        """The parameters of all seeds of the cell that have not diverged."""
        seeds = self.work.result(folders)["seeds"]
        return [self.params(folders, i) for i, s in enumerate(seeds) if s[self.metric] is not None]

    def chosen(self, folders: Folders) -> Candidate:
        """What the cell has chosen."""
        chosen, method = self.work.result(folders)["chosen"], self.row.method
        if self.row.searched:
            method = dataclasses.replace(method, inner_steps=chosen["inner_steps"])
        if self.row.also:
            name, _ = self.row.also
            method = dataclasses.replace(method, **{name: chosen[name]})
        (first, *_) = self.row.candidates(self.protocol)
        return Candidate(method, chosen["outer_rate"], chosen.get("clip", first.clip))


_MILLISECONDS = {
    **{"Cnp": 1.8, "AttentiveCnp": 4.0, "Tnp": 17.0, "Dkt": 2.0},
    **{"Platipus": 7.0, "Bmaml": 3.0, "IMaml": 13.0, "Conditioned": 4.0},
}
"""Of an outer step, of methods whose inner steps are not what takes the time."""


def _step_seconds(method: Any) -> float:
    """About how long an outer step takes on one core, for estimates of the time that is left."""
    counted = getattr(method, "inner_steps", 1)
    steps = counted if isinstance(counted, int) else 1
    inner = {lavajax.Context: 0.4, lavajax.Full: 1.1}  # a head's are next to nothing
    usual = 1.0 + steps * inner.get(type(getattr(method, "subspace", None)), 0.0)
    milliseconds = _MILLISECONDS.get(type(method).__name__, usual)
    if isinstance(method, lavajax.VrMaml):
        milliseconds *= 2  # it takes two gradients
    if isinstance(getattr(method, "model", None), lavajax.Conv4):
        milliseconds *= 4.0 * method.model.width
    return milliseconds / 1e3


def _compute(job: Job, folders: Folders) -> dict[str, Any]:
    """The best candidate that trains: where a seed diverges, the next best takes its place."""
    pieces, source = folders.pieces(job.item), folders.source(job.task)
    candidates, validation = _ranked(job, folders, source)
    given_up: list[str] = []
    for candidate in candidates:
        seeds = list[dict[str, Any]]()
        again = f" {_label(job.row, candidate)}" if given_up else ""
        for seed in range(job.protocol.seeds):
            key = _seed_key(job, folders, candidate, seed)
            model = _model(job, folders, key)
            run = partial(_run, job, source, candidate, seed=seed, model=model)
            seeds.append(pieces.compute(f"{job.name} seed {seed}{again}", key, run))
            gone = seeds[-1][job.metric] is None and seeds[-1].get("diverged", True)
            if gone and candidate != candidates[-1]:
                given_up.append(_label(job.row, candidate))
                break
        else:
            break
    steps = getattr(candidate.method, "inner_steps", None)
    chosen = {"inner_steps": steps, "outer_rate": candidate.rate}
    if job.row.also:
        name, _ = job.row.also
        chosen[name] = getattr(candidate.method, name)
    if len({each.clip for each in job.row.candidates(job.protocol)}) > 1:
        chosen["clip"] = candidate.clip
    return {
        "chosen": chosen,
        "given_up": given_up,
        "validation": validation,
        "seeds": seeds,
    }


def _ranked(
    job: Job, folders: Folders, source: Any
) -> tuple[list[Candidate], dict[str, float | None]]:
    """The candidates by their score on validation tasks; with a single one, no search."""
    candidates = job.row.candidates(job.protocol)
    if len(candidates) == 1:
        return candidates, {}
    errors: dict[str, float | None] = {}
    pieces, score = folders.pieces(job.item), "nll" if job.by_density else job.metric
    for candidate in candidates:

        def search(candidate: Candidate = candidate) -> dict[str, float | None]:
            try:
                params = _train(job, source, candidate, steps=job.protocol.search_steps).params
            except FloatingPointError:  # diverged: the worst choice there is
                return {score: None}
            found = _score(source, params, "validation", job.protocol.validation_tasks)
            value = found.mean if score == job.metric else _mean(found.nll)
            return {score: value if value is not None and np.isfinite(value) else None}

        label, protocol = _label(job.row, candidate), job.protocol
        key = _key(job, folders, candidate) | {
            "steps": protocol.search_steps,
            "validation_tasks": protocol.validation_tasks,
            **job.criterion,
        }
        found = pieces.compute(f"{job.name} search {label}", key, search)
        errors[label] = found[score]

    def order(candidate: Candidate) -> float:
        return _order(errors[_label(job.row, candidate)], score)

    ranked = sorted(candidates, key=order)
    # What has diverged already is tried no more, unless all have.
    return [c for c in ranked if np.isfinite(order(c))] or ranked[:1], errors


def _label(row: Row, candidate: Candidate) -> str:
    method, rate, clip = candidate
    label = f"S={getattr(method, 'inner_steps', None)}, {further(row, vars(method))}rate {rate:g}"
    return label if clip == USUAL_CLIP else f"{label}, clip {clip:g}"


def further(row: Row, settings: Mapping[str, Any]) -> str:
    """The further setting that a row chooses, as a part of a list: ``"epsilon 10, "``, or ""."""
    if row.also is None:
        return ""
    name, _ = row.also
    return f"{spelt(name)} {settings[name]:g}, "


def spelt(name: str) -> str:
    """A setting's name as tables show it."""
    return name.replace("_", " ")


def _order(value: float | None, metric: str) -> float:
    """The lower, the better."""
    if value is None:
        return np.inf
    return -value if metric == "accuracy" else value


def _key(job: Job, folders: Folders, candidate: Candidate) -> dict[str, Any]:
    """What a training depends on, but for its length and seed."""
    method, rate, clip = candidate
    return {
        "method": to_json(method),
        "optimizer": job.row.optimizer,
        "outer_rate": rate,
        "task": to_json(job.task),
        "meta_batch": job.protocol.meta_batch,
        **({} if clip == USUAL_CLIP else {"clip": clip}),
        **folders.content(job.data),
    }


def _seed_key(job: Job, folders: Folders, candidate: Candidate, seed: int) -> dict[str, Any]:
    protocol = job.protocol
    length = {"steps": protocol.steps, "test_tasks": protocol.test_tasks, "seed": seed}
    return _key(job, folders, candidate) | length


def _model(job: Job, folders: Folders, key: dict[str, Any]) -> Path:
    """The folder of a trained model, of a name for all that it depends on."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    return folders.models(job.item) / f"{job.name} {key['seed']} {digest}"


def _run(job: Job, source: Any, candidate: Candidate, *, seed: int, model: Path) -> dict[str, Any]:
    """One seed: trained to the end, saved and scored.

    Returns:
        The metric, its ``median`` and ``standard_error`` over test tasks (cells of an earlier
        version have no such error), means of ``DENSITIES``, ``curve``, ``seconds`` of training,
        compilation included (likewise), and, if any, ``skipped``, the tasks that training left out.
    """
    curve: list[list[float]] = []  # outer steps so far, error on a few unseen tasks
    seconds: list[float] = []
    few = curve_tasks(job.protocol)

    def record(progress: lavajax.Progress) -> None:
        seconds.append(progress.seconds + (0.0 if seconds else progress.compile_seconds))
        error = _score(source, progress.state.params, "test", few, 1)
        if np.isfinite(error.mean):
            curve.append([progress.step, error.mean])

    try:
        steps = job.protocol.steps
        trained = _train(job, source, candidate, seed=seed, steps=steps, callback=record)
    except FloatingPointError:
        return {job.metric: None, "curve": curve, "diverged": True}
    params = trained.params
    # Whether it is sound is asked of validation tasks: those of the test choose nothing.
    some = min(500, job.protocol.validation_tasks)
    checked = _score(source, params, "validation", some).mean
    found = _score(source, params, "test", job.protocol.test_tasks)
    diverged = not checked <= _most(source, some)
    if diverged or not np.isfinite(found.mean):
        return {job.metric: None, "curve": curve, "diverged": diverged}
    lavajax.save(params, model, overwrite=True)
    return {
        job.metric: found.mean,
        "median": found.median,
        "standard_error": found.standard_error,
        **{name: _mean(getattr(found, name)) for name in DENSITIES},
        "curve": curve,
        "seconds": sum(seconds),
        **({"skipped": len(trained.skipped)} if trained.skipped else {}),
    }


def curve_tasks(protocol: Protocol) -> int:
    """How many test tasks a point of a learning curve is scored on."""
    every = protocol.test_tasks
    return every // 20 if every > 500 else every  # of few, all: one compilation for both


def _most(source: Any, tasks: int) -> float:
    """The error on validation tasks beyond which a run has exploded; for classes there is none.

    So many times what predicting 0 comes to, and as many times 1, as training judges its loss.
    """

    def size(task: lavajax.Task, key: jax.Array) -> jax.Array:
        del key
        y = task.query.y
        return jnp.mean(y**2) if jnp.issubdtype(y.dtype, jnp.floating) else jnp.asarray(jnp.inf)

    sizes = lavajax.score(size, source, num_tasks=tasks, split="validation")
    return GROWTH * (1 + float(np.mean(sizes)))


def _mean(values: np.ndarray | None) -> float | None:
    """The mean; None where it is not known, or not finite: a predicted variance may overflow."""
    mean = np.nan if values is None else float(np.mean(values))
    return mean if np.isfinite(mean) else None


def _measure(job: Job, folders: Folders) -> dict[str, Any]:
    """``step_ms``, an outer step; ``task_us``, a task as it is scored, of a batch of 100.

    The least of several times: whatever else runs can only add to them.
    """
    chosen, source = job.chosen(folders), folders.source(job.task)
    steps, seconds = max(job.protocol.steps // 200, 1), list[float]()
    with contextlib.suppress(FloatingPointError):  # the time is the same
        _train(
            job,
            source,
            chosen,
            steps=15 * steps,
            schedule=job.protocol.steps,
            chunk=steps,
            callback=lambda progress: seconds.append(progress.seconds),
        )
    predict = predictor(chosen.method, source)
    jax.block_until_ready(predict())
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        jax.block_until_ready(predict())
        times.append(time.perf_counter() - begun)
    return {
        "step_ms": 1e3 * min(seconds) / steps if seconds else None,
        "task_us": 1e6 * min(times) / PREDICTED,
        "machine": machine(),
    }


PREDICTED = 100
"""Tasks in a batch, as they are scored."""


def predictor(method: Any, source: Any) -> Callable[[], jax.Array]:
    """Adapts to a batch of tasks and predicts their queries, compiled; untrained."""
    keys = jax.random.split(jax.random.key(0), PREDICTED)
    tasks = jax.vmap(lambda key: source.sample(key, "test"))(keys)
    first = jax.tree.map(lambda leaf: leaf[0], tasks.support)

    @jax.jit
    def predict(params: lavajax.MetaParams) -> jax.Array:
        def one(task: lavajax.Task, key: jax.Array) -> jax.Array:
            adapted = lavajax.adapt(params, task.support, key=key)
            return lavajax.predict(params, adapted, task.query.x).mean

        return jax.vmap(one)(tasks, keys)

    return partial(predict, method.init(keys[0], first.x, first.y))


def machine() -> str:
    """What times are of, in words."""
    if jax.default_backend() == "cpu" and hasattr(os, "sched_getaffinity"):
        return f"{len(os.sched_getaffinity(0))} CPU cores"
    return jax.devices()[0].device_kind


def _train(
    job: Job,
    source: Any,
    candidate: Candidate,
    *,
    steps: int,
    schedule: int | None = None,
    seed: int = 0,
    **options: Any,
) -> lavajax.Trained:
    """Trains; with ``schedule``, as the beginning of a run of so many steps."""
    method, rate, clip = candidate
    constant = {"sgd": optax.sgd, "constant adam": optax.adam}.get(job.row.optimizer)
    return lavajax.train(
        method,
        source,
        steps=steps,
        seed=seed,
        meta_batch=job.protocol.meta_batch,
        optimizer=constant(rate)
        if constant
        else lavajax.outer_optimizer(schedule or steps, rate=rate, clip=clip),
        **{"chunk": max(steps // 20, 1), **options},
    )


def _score(
    source: Any, params: lavajax.MetaParams, split: Any, tasks: int, seed: int = 0
) -> lavajax.Evaluation:
    return lavajax.evaluate(params, source, num_tasks=tasks, split=split, seed=seed)
