"""What a run shows while it goes on, and at the end."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

import lavajax
from lavajax import disk
from lavajax.extras import require
from options import Variant


class Reporter:
    """A progress bar in a terminal; elsewhere, a plain line for every tenth of the run."""

    def __init__(self, console: Console, start: int, steps: int) -> None:
        self._console, self._steps, self._start, self._shown = console, steps, start, start
        self._seconds = 0.0
        self._compiled = False
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                BarColumn(bar_width=None),  # what the text leaves of the line
                TextColumn("{task.description}"),
                console=console,
                expand=True,
            )

    def __enter__(self) -> Reporter:
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("compiling", total=self._steps, completed=self._start)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, progress: lavajax.Progress, metric: str, test: float) -> None:
        """Shows how the run stands; ``test`` is the metric on a few unseen tasks."""
        if not self._compiled:
            self._compiled = True
            text = f"compiled in {progress.compile_seconds:.1f} s"
            self._console.print(text, highlight=False)
        self._seconds += progress.seconds
        rate = (progress.step - self._start) / self._seconds
        loss = float(np.mean(progress.metrics["loss"]))
        left = _duration((self._steps - progress.step) / rate)
        text = (
            f"{progress.step}/{self._steps}  loss {loss:.2g}  test {metric} {test:.2g}  "
            f"{_pace(rate)} steps/s  {left} left"
        )
        due = math.floor(10 * progress.step / self._steps)
        if self._bar is not None:
            self._bar.update(self._task, completed=progress.step, description=text)
        elif due > math.floor(10 * self._shown / self._steps):
            self._console.print(f"step {text}", highlight=False, soft_wrap=True)
        self._shown = progress.step


def _pace(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.2g}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes / 60:.1f} h"


class TensorBoard:
    """Logs for TensorBoard, one series for each number of a report; hold it by ``with``."""

    def __init__(self, folder: Path, start: int) -> None:
        board = require("tensorboardX", "experiments", "--tensorboard")
        self._folder = folder
        # Steps after ``start`` that an earlier part of the run has logged are taken again.
        with disk.writing(folder):
            self._writer = board.SummaryWriter(str(folder), purge_step=start + 1)

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, *_: object) -> None:
        with disk.writing(self._folder):
            self._writer.close()

    def add(self, row: dict[str, Any]) -> None:
        """Adds a report."""
        for name, value in row.items():
            if name == "step":
                continue
            for seed, number in enumerate(np.atleast_1d(value)):
                series = name if np.ndim(value) == 0 else f"{name}/{seed}"
                self._writer.add_scalar(series, number, row["step"])
        with disk.writing(self._folder):
            self._writer.flush()  # what is buffered does not outlive a kill


def target_table(targets: dict[str, Any]) -> Table:
    """Errors of each target of a user's table, in its own units."""
    view = Table(title="RMSE in the units of the data", title_justify="left")
    view.add_column("")
    for name in targets["names"]:
        view.add_column(name, justify="right")
    seeds = np.array(targets["seeds"])
    label = "this run" if len(seeds) == 1 else f"this run, mean of {len(seeds)} seeds"
    view.add_row(label, *(f"{error:.4g}" for error in seeds.mean(axis=0)))
    view.add_section()
    for name, errors in targets["references"].items():
        view.add_row(name, *(f"{error:.4g}" for error in errors))
    return view


def _support(task: Any) -> str:
    if hasattr(task, "ways"):
        return f"{task.ways}-way {task.shots}-shot"
    return f"{task.shots} support points"


def table(method_name: str, task_name: str, task: Any, results: dict[str, Any]) -> Table:
    """The result, beside the paper's and the errors that need no learning."""
    seeds, metric = results["seeds"], results["metric"]
    metric = metric.upper() if metric == "mse" else metric  # an abbreviation
    means = np.array([s["mean"] for s in seeds])
    base, variant = Variant.split(task)
    kind = " (synthetic)" if getattr(base, "synthetic", False) else ""
    view = Table(
        title=f"{method_name} on {task_name}{kind}, {_support(base)}{variant}, "
        f"{results['test_tasks']:,} unseen tasks",
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
    if any(lost := [seed.get("not_finite", 0) for seed in seeds]):
        each = ", ".join(f"{number:,}" for number in lost)
        of = ", by seed" if len(lost) > 1 else ""
        view.caption = f"tasks without a finite estimate, which leave no mean{of}: {each}"
    view.add_section()
    if results["paper"] is not None:
        unstated = {"air-quality": " (window unstated)", "radio": " (points unstated)"}
        note = unstated.get(task_name, "")
        name = results["method"].upper()
        view.add_row(f"the paper's {name}{note}", f"{results['paper']:.3g}", "", "")
    for name, value in results["references"].items():
        view.add_row(name, f"{value:.3g}", "", "")
    return view
