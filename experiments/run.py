"""One run: meta-train a method on a source of tasks, and score it on unseen ones.

python experiments/run.py --task=sine
python experiments/run.py --task=sine --method=lava --shots=2 --inner-steps=1 --help
python experiments/run.py --task=table --data=FILE --group=station --x=TEMP,PRES --y=PM2.5
python experiments/run.py --resume=runs/sine-lava-20250101-120000
python experiments/run.py --eval=runs/sine-lava-20250101-120000
python experiments/run.py --task=sine --coordinator=HOST:PORT --processes=2 --process=0
"""

from __future__ import annotations

import threads  # noqa: F401

# isort: split
import contextlib
import dataclasses
import importlib.metadata
import os
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import lavajax
from lavajax import checkpoint
from lavajax.extras import require
from lavajax.rescue import left_out as count_skipped
from lavajax.start import start_state

try:
    for package in ("tyro", "docstring_parser", "rich", "orbax.checkpoint"):
        require(package, "experiments", "experiments/run.py")
except ModuleNotFoundError as missing:
    sys.exit(f"error: {missing}")

from rich.console import Console

import figures
from folder import (
    CONFIG,
    GROUPS,
    LEARNING_FIGURE,
    RESULTS,
    TASKS_FIGURE,
    TENSORBOARD,
    RunFolder,
    read_json,
)
from gaussian_process import require_sklearn
from options import METHODS, Evaluate, Resume, RunOptions, Settings, Variant, parse
from peers import Peers, split
from reference import has_gaussian_process, paper_value, reference_errors
from report import Reporter, TensorBoard, table, target_table
from targets import mean_squared, table_of, target_errors, windows_of
from unseen import groups_of, known_groups, left_out


class Stopped(KeyboardInterrupt):
    """A signal asked the run to stop.

    Attributes:
        number: of the signal.
        together: whether all processes stop, after the same step.
    """

    def __init__(self, number: int, *, together: bool = False) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.together = together


def main() -> int:
    """Runs the command line.

    Returns:
        0; 2 for a setting that cannot be, 1 for a run that failed, 128 and the number of the
        signal for a run that was stopped.
    """
    console = Console()
    warnings.showwarning = lambda message, *_, **__: _say(console, f"warning: {message}", "yellow")
    try:
        machines, args = split(sys.argv[1:])
        command = parse(args)
        if isinstance(command, Evaluate) and args != sys.argv[1:]:
            raise ValueError("--eval is for one process: --coordinator and the like are to train")
        peers = Peers(machines)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        return _fail(console, error, 2)
    if not peers.first:
        console.quiet = True
    try:
        return run_command(command, peers, console)
    except Exception:
        if peers.joined:  # the others must not wait for this one
            traceback.print_exc()
        peers.abandon(1)
        raise


def run_command(command: Settings | Resume | Evaluate, peers: Peers, console: Console) -> int:
    """Does what the command line says; returns the exit code."""
    try:
        if isinstance(command, Evaluate):
            score_saved(command, console)
            return 0
        job = prepare(command, peers, console)
    except (ValueError, OSError, ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:
        code = 1 if isinstance(error, jax.errors.JaxRuntimeError) else 2
        return peers.abandon(_fail(console, error, code, peers), lost=peers.misses(error))
    except KeyboardInterrupt:
        _say(console, "stopped before training", "bold")
        return peers.abandon(128 + signal.SIGINT)
    with job.folder or contextlib.nullcontext():
        return finish(job)


def finish(job: Job) -> int:
    """Runs a prepared run to its end, or to where it has to stop; returns the exit code."""
    console, peers = job.console, job.peers
    try:
        with stopping_at_signals(console, peers) as stop:
            done = execute(job, stop)
            if done is not None:
                params, results = done
                settings = job.settings
                show(settings.method_name, settings.task_name, settings.task, results, console)
                if settings.run.figures:
                    draw(job, params, results)
                _say(console, f"files: {_short(job.path)}")
    except Stopped as stopped:
        if stopped.together:
            peers.leave()
        _say(console, f"stopped by {stopped}; {_how_to_go_on(job.path)}", "bold")
        return peers.abandon(128 + stopped.number)
    except FloatingPointError as error:  # on all of them
        peers.leave()
        _fail(console, error, 1)
        scored = f"; --eval={_short(job.path)} scores it" if _saved_steps(job) else ""
        _say(console, f"{_what_is_saved(job)}{scored}")
        return 1
    except (ValueError, OSError, ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:
        _fail(console, error, 1, peers)
        if peers.first and not isinstance(error, ValueError):
            _say(console, f"{_what_is_saved(job)}; {_how_to_go_on(job.path)}")
        return peers.abandon(1, lost=peers.misses(error))
    return 0


def prepare(command: Settings | Resume, peers: Peers, console: Console) -> Job:
    """The run that was asked for, checked, and in process 0 its folder.

    Raises:
        ValueError: a setting cannot be.
        OSError: a file is missing, or the folder cannot be written.
        ModuleNotFoundError: an extra is missing.
    """
    folder = None
    if not isinstance(command, Resume):
        settings = command
    elif peers.first:
        folder = RunFolder.of(command.path)
        settings = Settings.from_json(read_json(folder.path / CONFIG))
    if not peers.first:
        told = peers.share(None)
        settings, path = Settings.from_json(told["settings"]), Path(told["path"])
    source = load_source(settings.task)
    describe(source, console)
    check_model(settings, source)
    check_extras(settings)
    optimizer = make_optimizer(settings.run)
    if peers.first:
        if folder is None:
            name = f"{settings.task_name}-{settings.method_name}"
            folder = RunFolder.new(settings.run.out, name, overwrite=settings.run.overwrite)
            folder.write(CONFIG, settings.to_json())
        if (groups := groups_of(source)) is not None and not (folder.path / GROUPS).is_file():
            folder.write(GROUPS, groups)
        path = folder.path
        peers.share({"settings": settings.to_json(), "path": str(path)})
    peers.on_loss(_how_to_go_on(path))
    return Job(settings, source, optimizer, folder, path, console, peers)


def load_source(task: Any, units: lavajax.Units | None = None, known: Any = None) -> Any:
    """The source of tasks of a setting: its data read, where it has any.

    A user's table is standardised as the training data of a model was, by its ``units``, and groups
    that are ``known`` keep their splits.
    """
    base, variant = Variant.split(task)
    if isinstance(base, lavajax.Table):
        return variant.of(base.load(units=units, known=known))
    return task.load() if hasattr(task, "load") else task


def describe(source: Any, console: Console) -> None:
    """Says what stored data hold, and what of it was left out."""
    if (table := table_of(source)) is not None:
        _say(console, f"table: {table}")
    if (windows := windows_of(source)) is not None:
        _say(console, f"windows: {windows}")


def show(method: str, task_name: str, task: Any, results: dict[str, Any], console: Console) -> None:
    """Prints the results."""
    console.print(table(method, task_name, task, results))
    if "targets" in results:
        console.print(target_table(results["targets"]))


def make_optimizer(run: RunOptions) -> optax.GradientTransformation:
    """The outer optimiser of a run."""
    if run.optimizer == "sgd":
        return optax.sgd(run.outer_rate)
    rate, warmup, clip = run.outer_rate, run.warmup, run.clip
    return lavajax.outer_optimizer(run.steps, rate=rate, warmup=warmup, clip=clip)


def check_model(settings: Settings, source: Any) -> None:
    """Refuses parts that do not fit together, by an abstract run of everything."""

    def one(key: jax.Array) -> jax.Array:
        task = source.sample(key, "train")
        params = settings.method.init(key, task.support.x, task.support.y)
        return settings.method.loss(params, task, key)

    jax.eval_shape(one, jax.random.key(0))


def check_extras(settings: Settings) -> None:
    """Refuses a run now that would lack a package at its end."""
    if settings.run.tensorboard:
        require("tensorboardX", "experiments", "--tensorboard")
    if settings.run.figures:
        require("matplotlib", "experiments", "drawing figures (--no-figures leaves them out)")
    if has_gaussian_process(Variant.split(settings.task)[0]):
        require_sklearn()


@dataclasses.dataclass
class StopRequest:
    """What signals have asked for.

    Attributes:
        number: of the signal that came, or None.
        waits: whether the run stops by itself where it can; else a signal ends it at once.
    """

    number: int | None = None
    waits: bool = False


@contextlib.contextmanager
def stopping_at_signals(console: Console, peers: Peers) -> Iterator[StopRequest]:
    """Ctrl-C and SIGTERM ask the run to stop; a second one ends the process at once.

    Python runs a handler between two of its own instructions, and so not before the compiled steps
    that are under way have ended. A thread that is woken by the signal itself answers meanwhile.
    """
    request = StopRequest()

    def handle(number: int, _: object) -> None:
        request.number = number
        if not request.waits:
            raise Stopped(number)

    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        seen = 0
        while signals := ours.recv(1):
            seen += 1
            if seen > 1:
                os._exit(peers.abandon(128 + signals[0]))
            if request.waits:
                _say(console, "stopping after these steps; once more ends the run at once", "bold")

    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, handle)
    woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield request
    finally:
        signal.set_wakeup_fd(woken)
        for each, handler in before.items():
            signal.signal(each, handler)
        theirs.close()
        watcher.join()
        ours.close()


@dataclasses.dataclass(frozen=True)
class Job:
    """A run that is about to go on.

    Attributes:
        settings: what was asked for.
        source: the tasks.
        optimizer: of the outer loop.
        folder: where its files go; None in a process that writes none.
        path: that folder's, on the machine of process 0.
        console: what is printed to; quiet where another process prints.
        peers: the other processes.
    """

    settings: Settings
    source: Any
    optimizer: Any
    folder: RunFolder | None
    path: Path
    console: Console
    peers: Peers


Done = tuple[list[lavajax.MetaParams], dict[str, Any]]
"""The parameters of each seed, and the results."""


def execute(job: Job, stop: StopRequest) -> Done | None:
    """Trains from where the folder stands, scores, and writes the results.

    Where process 0 does the last of these, the others return None after training.

    Raises:
        OSError: a file of the folder cannot be written. Training on would end in nothing: the run
            stops there, its earlier checkpoints are untouched, and it goes on from the last of them
            when there is room.
    """
    settings, source, folder = job.settings, job.source, job.folder
    state = train(job, stop)
    if folder is None:
        return None
    begun = time.perf_counter()
    params = split_seeds(state.params, settings.run.stacked)
    run = settings.run
    results = score(params, settings.task, source, run.test_tasks, first_seed=run.seed)
    spent = {
        "train": sum(row["seconds"] for row in folder.metrics()),
        "test": time.perf_counter() - begun,
    }
    results |= {"seconds": spent, "command": shlex.join(["python", *sys.argv])}
    folder.write(RESULTS, results)
    return params, results


def draw(job: Job, params: list[lavajax.MetaParams], results: dict[str, Any]) -> None:
    """Draws the figures of a run; tasks by its first seed that was not given up."""
    assert job.folder is not None
    sound = [each for each, seed in zip(params, results["seeds"], strict=True) if _sound(seed)]
    one = (sound or params)[0]
    figures.draw_tasks(one, job.settings.task, job.source, job.path / TASKS_FIGURE)
    rows, metric = job.folder.metrics(), results["metric"]
    figures.draw_learning(rows, metric, job.path / LEARNING_FIGURE)


def _sound(seed: dict[str, Any]) -> bool:
    return bool(np.isfinite(seed["mean"]))


def train(job: Job, stop: StopRequest) -> lavajax.TrainState:
    """Trains to the end, with reports and checkpoints; the final state is one of them."""
    settings, source, optimizer = job.settings, job.source, job.optimizer
    folder, console, peers = job.folder, job.console, job.peers
    run = settings.run
    seeds = run.stacked
    config = settings.to_json()
    state, start = restore(job, config)
    saved_at = time.monotonic()

    def record(progress: lavajax.Progress) -> None:
        stopped_by = peers.most(stop.number)  # all stop after the same step
        if folder is not None:
            write(folder, progress, stopped_by)
        if stopped_by is not None:
            raise Stopped(stopped_by, together=True)

    def write(folder: RunFolder, progress: lavajax.Progress, stopped_by: int | None) -> None:
        nonlocal saved_at
        params = split_seeds(progress.state.params, run.stacked)
        scores = [lavajax.evaluate(p, source, num_tasks=200, seed=1) for p in params]
        test = [s.mean for s in scores]
        row = {
            "step": progress.step,
            "seconds": progress.seconds,
            "compile_seconds": progress.compile_seconds,
            **{name: value.tolist() for name, value in progress.metrics.items()},
            f"test_{scores[0].metric}": test[0] if seeds is None else test,
        }
        if board is not None:
            board.add(row)
        if progress.skipped:
            row["skipped"] = [list(each) for each in progress.skipped]
            step, *_, index = progress.skipped[0]
            count = f"{len(progress.skipped)} tasks whose loss or gradient is not finite"
            _say(console, f"left out: {count}; the first is task {index} of step {step}", "yellow")
        folder.add_metrics(row)
        reporter.show(progress, scores[0].metric, float(np.mean(test)))
        due = time.monotonic() - saved_at >= run.checkpoint_seconds
        if due or progress.step == run.steps or stopped_by is not None:
            checkpoint.save_state(progress.state, folder.path, settings=config)
            saved_at = time.monotonic()

    with contextlib.ExitStack() as stack:
        reporter = stack.enter_context(Reporter(console, start, run.steps))
        board = None
        if run.tensorboard and folder is not None:
            board = stack.enter_context(TensorBoard(folder.path / TENSORBOARD, start))
        stop.waits = True
        trained = lavajax.train(
            settings.method,
            source,
            steps=run.steps,
            seed=run.seed,
            seeds=seeds,
            meta_batch=run.meta_batch,
            microbatch=run.microbatch,
            optimizer=optimizer,
            max_skipped=run.max_skipped,
            skipped=skipped_before(job),
            chunk=run.report_every,
            callback=record,
            state=state,
        )
    stopped_by = peers.most(stop.number)
    stop.waits = False
    if stopped_by is not None:
        raise Stopped(stopped_by, together=True)
    peers.leave()  # what is left to do needs one process
    return trained.state


def restore(job: Job, config: dict[str, Any]) -> tuple[lavajax.TrainState | None, int]:
    """The state that the folder has last, or None, and its step; the files after it give way."""
    run, folder, console = job.settings.run, job.folder, job.console
    like = jax.eval_shape(
        lambda: start_state(
            job.settings.method, job.source, job.optimizer, seed=run.seed, seeds=run.stacked
        )
    )
    saved = folder and checkpoint.restore_state(folder.path, like, settings=config)
    state = job.peers.share_state(saved, like)
    start = 0 if state is None else int(np.max(state.step))
    if folder is not None:
        for aside in checkpoint.set_aside_after(folder.path, start):
            _say(console, f"set aside: {_short(aside)}", "yellow")
        folder.keep_metrics(start)
    if state is not None:
        _say(console, f"going on from step {start:,} of {run.steps:,}")
    return state, start


def skipped_before(job: Job) -> Any:
    """How many tasks were left out before the run was paused; of several seeds, a list."""
    rows = job.folder.metrics() if job.folder is not None else []
    places = [tuple(place) for row in rows for place in row.get("skipped", [])]
    seeds = job.settings.run.stacked
    return job.peers.share(count_skipped(tuple(places), np.zeros(seeds or ())).tolist())


def split_seeds(params: lavajax.MetaParams, seeds: int | None) -> list[lavajax.MetaParams]:
    """The parameters of each seed."""
    if seeds is None:
        return [params]
    return [jax.tree.map(lambda leaf, i=i: leaf[i], params) for i in range(seeds)]


def score(
    params: list[lavajax.MetaParams],
    task: Any,
    source: Any,
    test_tasks: int,
    *,
    first_seed: int = 0,
    test_seed: int = 0,
) -> dict[str, Any]:
    """The error of each seed on unseen tasks, beside the paper's and those without learning."""
    scores = [lavajax.evaluate(p, source, num_tasks=test_tasks, seed=test_seed) for p in params]
    seeds = [
        {
            "seed": first_seed + i,
            "mean": s.mean,
            "interval": s.interval,
            "median": s.median,
            "not_finite": s.not_finite,
            "learned": scalars(p),
        }
        for i, (s, p) in enumerate(zip(scores, params, strict=True))
    ]
    results = {
        "method": type(params[0].method).__name__,
        "metric": scores[0].metric,
        "test_tasks": test_tasks,
        "seeds": seeds,
        "paper": paper_value(task, params[0].method),
        "references": reference_errors(task, source, test_tasks, seed=test_seed),
        "synthetic": getattr(Variant.split(task)[0], "synthetic", False),
        "machine": machine(),
    }
    if table_of(source) is not None:
        targets = target_errors(params, source, test_tasks, seed=test_seed)
        results["references"] = {
            name: mean_squared(source, errors) for name, errors in targets["references"].items()
        }
        results["targets"] = targets
    return results


def score_saved(command: Evaluate, console: Console) -> None:
    """Scores a saved model, and prints the table."""
    params = lavajax.load(command.path)
    every = split_seeds(params, checkpoint.seeds_of(params))
    known = known_groups(command.path, command.task)
    source = load_source(command.task, params.units, known)
    describe(source, console)
    if table_of(source) is not None:
        told = left_out(source, known=known is not None)
        _say(console, told, "" if known is not None else "yellow")
    options = command.options
    method, first = trained_as(command.path, params.method)
    results = score(
        *(every, command.task, source, options.test_tasks),
        first_seed=first,
        test_seed=options.test_seed,
    )
    show(method, command.task_name, command.task, results, console)


def trained_as(path: Path, method: Any) -> tuple[str, int]:
    """What a saved model is called, and the first of its seeds: those of its run, if it has one."""
    if (path / checkpoint.CHECKPOINTS).is_dir() and (path / CONFIG).is_file():
        settings = Settings.from_json(read_json(path / CONFIG))
        return settings.method_name, settings.run.seed
    own = type(method)
    return next((name for name, m in METHODS.items() if type(m) is own), own.__name__), 0


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


def _what_is_saved(job: Job) -> str:
    """How far a run that goes on need not train again."""
    steps = _saved_steps(job)
    return f"the last checkpoint is of step {steps[0]:,}" if steps else "no checkpoint is saved yet"


def _saved_steps(job: Job) -> list[int]:
    """The newest first; in other processes than the first, none."""
    return [] if job.folder is None else checkpoint.saved_steps(job.path)


def _how_to_go_on(path: Path) -> str:
    command = shlex.join(["python", sys.argv[0], f"--resume={_short(path)}"])
    return f"go on with: {command}"


def _fail(console: Console, error: Exception, code: int, peers: Peers | None = None) -> int:
    """Says what went wrong, and in which of several processes: all but the first are quiet else."""
    if peers is not None and not peers.first:
        console.quiet = False
        _say(console, f"process {peers.number}: error: {error}", "bold red")
    else:
        _say(console, f"error: {error}", "bold red")
    return code


def _say(console: Console, text: str, style: str = "") -> None:
    """Plain text: nothing in it is markup, and a path is not broken over lines."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _short(path: Path) -> Path:
    """Relative to where the user stands, where that is shorter."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


if __name__ == "__main__":
    sys.exit(main())
