"""One run: meta-train a method on a source of tasks, and score it on unseen ones.

python experiments/run.py --task=sine
python experiments/run.py --task=sine --method=lava --shots=2 --inner-steps=1 --help
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import lavajax
from lavajax.config import to_json
from lavajax.extras import require

try:
    for package in ("tyro", "docstring_parser", "rich"):
        require(package, "experiments", "experiments/run.py")
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}")

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from options import RunOptions, Settings, parse
from reference import paper_value, reference_errors


def main() -> int:
    """Runs the command line; 2 for a setting that cannot be, 1 for a run that failed."""
    console = Console()
    try:
        settings = parse(sys.argv[1:])
        source = settings.task.load() if hasattr(settings.task, "load") else settings.task
        optimizer = make_optimizer(settings.run)
        check_model(settings, source)
        folder = make_folder(settings)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 2
    try:
        results = execute(settings, source, optimizer, folder, console)
    except FloatingPointError as error:
        console.print(f"error: {error}", style="bold red", markup=False, highlight=False)
        return 1
    console.print(table(settings, results))
    console.print(f"files: {folder}", markup=False, highlight=False, soft_wrap=True)
    return 0


def make_optimizer(run: RunOptions) -> optax.GradientTransformation:
    """The outer optimiser of a run."""
    tx = lavajax.outer_optimizer(run.steps, rate=run.outer_rate, warmup=run.warmup, clip=run.clip)
    return tx if run.optimizer == "adam" else optax.sgd(run.outer_rate)


def check_model(settings: Settings, source: Any) -> None:
    """Refuses parts that do not fit together, by an abstract run of everything."""
    key = jax.random.key(0)

    def one(key: jax.Array) -> jax.Array:
        task = source.sample(key, "train")
        params = settings.method.init(key, task.support.x, task.support.y)
        return settings.method.loss(params, task, key)

    jax.eval_shape(one, key)


def make_folder(settings: Settings) -> Path:
    """A new folder for the files of the run, with its configuration."""
    folder = settings.run.out
    if folder is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = Path("runs") / f"{settings.task_name}-{settings.method_name}-{stamp}"
    folder.mkdir(parents=True, exist_ok=settings.run.out is not None)
    run = {k: v for k, v in dataclasses.asdict(settings.run).items() if k != "out"}
    config = {"task": to_json(settings.task), "method": to_json(settings.method), "run": run}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return folder


def execute(
    settings: Settings, source: Any, optimizer: Any, folder: Path, console: Console
) -> dict[str, Any]:
    """Trains, scores and writes metrics.jsonl and results.json; returns the latter."""
    run = settings.run
    start = time.perf_counter()
    with (folder / "metrics.jsonl").open("w") as log, Reporter(console, run.steps) as reporter:

        def record(progress: lavajax.Progress) -> None:
            metrics = {name: value.tolist() for name, value in progress.metrics.items()}
            entry = {"step": progress.step, "seconds": progress.seconds, **metrics}
            log.write(json.dumps(entry) + "\n")
            log.flush()
            reporter.show(progress)

        trained = lavajax.train(
            settings.method,
            source,
            steps=run.steps,
            seed=run.seed,
            seeds=None if run.seeds == 1 else run.seeds,
            meta_batch=run.meta_batch,
            optimizer=optimizer,
            callback=record,
        )
    train_seconds = time.perf_counter() - start
    params = [trained.params] if run.seeds == 1 else [trained.seed(i) for i in range(run.seeds)]
    start = time.perf_counter()
    scores = [lavajax.evaluate(p, source, num_tasks=run.test_tasks) for p in params]
    results = {
        "metric": scores[0].metric,
        "test_tasks": run.test_tasks,
        "seeds": [
            {
                "seed": run.seed + i,
                "mean": s.mean,
                "interval": s.interval,
                "median": s.median,
                "learned": scalars(p),
            }
            for i, (s, p) in enumerate(zip(scores, params, strict=True))
        ],
        "paper": paper_value(settings.task, settings.method),
        "references": reference_errors(settings.task, source, run.test_tasks),
        "train_seconds": train_seconds,
        "test_seconds": time.perf_counter() - start,
        "machine": machine(),
        "command": " ".join(["python", *sys.argv]),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def scalars(params: lavajax.MetaParams) -> dict[str, float]:
    """The learned scalars: the inner rate, log epsilon."""
    return {
        name: float(leaf)
        for name, leaf in params.learned.items()
        if isinstance(leaf, jax.Array) and leaf.ndim == 0
    }


def machine() -> dict[str, Any]:
    """What the run ran on."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "lavajax", "optax")}
    device = jax.devices()[0].device_kind
    return {"device": device, "devices": jax.device_count(), "cores": os.cpu_count(), **versions}


class Reporter:
    """A progress line in a terminal; elsewhere, a plain line for every tenth of the run."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console, self._steps, self._shown = console, steps, 0
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("step {task.completed}/{task.total}"),
                BarColumn(bar_width=20),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
            )

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("compiling", total=self._steps)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: lavajax.Progress) -> None:
        """Shows how the run stands."""
        loss = float(np.mean(progress.metrics["loss"]))
        rate = (progress.step - self._shown) / progress.seconds
        text = f"loss {loss:.3g}" + ("" if progress.compiled else f"  {rate:.0f} steps/s")
        due = math.floor(10 * progress.step / self._steps)
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.step, description=text)
        elif due > math.floor(10 * self._shown / self._steps):
            self._console.print(f"step {progress.step}/{self._steps}  {text}", highlight=False)
        self._shown = progress.step


def table(settings: Settings, results: dict[str, Any]) -> Table:
    """The result, beside the paper's and the errors that need no learning."""
    seeds, metric = results["seeds"], results["metric"].upper()
    means = np.array([s["mean"] for s in seeds])
    view = Table(
        title=f"{settings.method_name} on {settings.task_name}, "
        f"{settings.task.shots} support points, {results['test_tasks']:,} unseen tasks",
        title_justify="left",
    )
    view.add_column("")
    view.add_column(f"test {metric}", justify="right")
    view.add_column("95% interval", justify="right")
    view.add_column("median", justify="right")
    if len(seeds) == 1:
        low, high = seeds[0]["interval"]
        view.add_row(
            "this run", f"{means[0]:.3g}", f"{low:.3g} to {high:.3g}", f"{seeds[0]['median']:.3g}"
        )
    else:
        # Over seeds: t quantiles would be honest for few seeds, the standard deviation is plain.
        view.add_row(
            f"this run, mean of {len(seeds)} seeds",
            f"{means.mean():.3g} ± {means.std(ddof=1):.2g}",
            "",
            f"{np.mean([s['median'] for s in seeds]):.3g}",
        )
        for seed in seeds:
            low, high = seed["interval"]
            view.add_row(
                f"  seed {seed['seed']}",
                f"{seed['mean']:.3g}",
                f"{low:.3g} to {high:.3g}",
                f"{seed['median']:.3g}",
            )
    view.add_section()
    if results["paper"] is not None:
        name = type(settings.method).__name__.upper()
        note = " (window unstated)" if settings.task_name == "air-quality" else ""
        view.add_row(f"the paper's {name}{note}", f"{results['paper']:.3g}", "", "")
    for name, value in results["references"].items():
        view.add_row(name, f"{value:.3g}", "", "")
    return view


if __name__ == "__main__":
    sys.exit(main())
