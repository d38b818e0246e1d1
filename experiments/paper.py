"""The tables and figures of the paper, and ours beside them.

    python experiments/paper.py --all --data FOLDER
    python experiments/paper.py sine --extended

Results go cell by cell into small files under ``results/``, from which ``RESULTS.md`` and the
figures are made anew each time; trained parameters stay outside the repository, under
``runs/paper``. What is there, with the same settings and of files of the same content, is not
computed again: stop it anywhere, and start it again. ``--render`` only draws. Items of published
files are left out without ``--data``; RESULTS.md says which paths this folder must hold.
"""

from __future__ import annotations

import threads  # noqa: F401

# isort: split
import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from files import write_whole
from items import (
    air_table,
    calibration,
    conditions,
    geometry,
    noise,
    omniglot_table,
    overlap,
    published,
    qualitative,
    radio_table,
    rollouts,
    sine_table,
    stations,
    systems_table,
    time_figure,
    tracking,
    variance,
)
from lavajax import disk
from lavajax.store import DamagedError
from protocols import HEADLINE, QUICK, Scale
from works import Clock, Folders, Item, Work

ROOT = Path(__file__).resolve().parents[1]
ITEMS: dict[str, Item] = {
    "sine": sine_table,
    "published": published,
    "systems": systems_table,
    "rollouts": rollouts,
    "air": air_table,
    "stations": stations,
    "radio": radio_table,
    "omniglot": omniglot_table,
    "overlap": overlap,
    "geometry": geometry,
    "variance": variance,
    "time": time_figure,
    "noise": noise,
    "conditions": conditions,
    "calibration": calibration,
    "tracking": tracking,
    "qualitative": qualitative,
}
GLOSSARY = """\
N labelled points of a task, the support, adapt a model; M others, the query, judge it. S: inner
steps, of adaptation. Rate: the learning rate of training, the outer one; clip: the bound on the
norm of its gradient. C: numbers of a context, the part of a network that adapts beside its head.
H_i: the curvature of the loss of point i. NLL: the negative log density of a target, the mean over
them, in nats. CRPS, the continuous ranked probability score, and mean σ, the predicted standard
deviation, are in the units of the targets. ±: the standard deviation over seeds, where nothing else
is said."""
MADE_BY = "All of it is made by `python experiments/paper.py"
FULL_DISK = 74
"""How a cell's process ends that could not keep its result: EX_IOERR of sysexits.h."""


def parse() -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: help was asked for, or a setting cannot be.
    """
    listing = "\n".join(f"  {name:12s}{item.TITLE}" for name, item in ITEMS.items())
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=f"items:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("items", nargs="*", metavar="item", help="tables and figures; see below")
    parser.add_argument("--all", action="store_true", help="every item")
    parser.add_argument("--extended", action="store_true", help="methods beyond the paper's too")
    parser.add_argument("--no-time", action="store_true", help="measure no times")
    parser.add_argument("--only-time", action="store_true", help="times, and the cells they need")
    parser.add_argument("--quick", action="store_true", help="everything tiny: is it sound?")
    parser.add_argument("--only", nargs="+", default=[], help="cells whose names have these words")
    parser.add_argument("--workers", type=int, help="processes; as many as cores if not given")
    parser.add_argument("--render", action="store_true", help="compute nothing")
    parser.add_argument(
        "--results", type=Path, help="cells, with RESULTS.md beside it; results/ if not given"
    )
    parser.add_argument("--work", type=Path, help="everything else; runs/paper if not given")
    parser.add_argument(
        "--data", type=Path, help="folder of published files; items that read any are left out else"
    )
    parser.add_argument("--cell", help=argparse.SUPPRESS)  # what a worker process is told to do
    args = parser.parse_args()
    if unknown := set(args.items) - ITEMS.keys():
        parser.error(f"item must be of {', '.join(ITEMS)}, got {', '.join(sorted(unknown))}")
    if not args.items and not args.all:
        parser.error(f"give --all, or items of {', '.join(ITEMS)}")
    if args.workers is not None and args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    results = args.results and args.results.resolve()
    if args.quick and results == ROOT / "results":
        parser.error("--quick is of tiny runs, which must not replace the results of whole ones")
    if results and results.parent == ROOT and results != ROOT / "results":
        parser.error(
            "--results must not be beside the RESULTS.md of results/, which would be replaced; "
            f"got {args.results}"
        )
    if args.data and not args.data.is_dir():
        parser.error(f"--data must be a folder of published files, {args.data} is none")
    if args.only_time and args.no_time:
        parser.error("--only-time and --no-time leave nothing to do")
    return args


def main() -> int:
    """Runs the command line.

    Returns:
        0; 1 where a cell failed or is damaged, an item that was named has none without published
        files, or nothing could be written any more; 2 where no cell has such a name, 130 where it
        was stopped.
    """
    args = parse()
    try:
        return make(args)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here")
        return 130
    except DamagedError as error:
        if args.cell:
            raise
        print(f"error: {error}")
        return 1
    except OSError as error:
        full = error.errno in disk.FULL
        if args.cell and not full:
            raise
        print(f"error: {error}; the same command goes on from here")
        return FULL_DISK if args.cell and full else 1


def make(args: argparse.Namespace) -> int:
    """Computes what is missing, and renders what is there.

    Raises:
        OSError: the disk is full: what further cells compute could not be kept; or RESULTS.md or
            the folder of logs cannot be written.
        DamagedError: a cell cannot be read, or RESULTS.md is another's.
    """
    scale = Scale(
        QUICK if args.quick else HEADLINE, args.extended, args.quick, times=not args.no_time
    )
    work = args.work or Path("runs/paper_quick" if args.quick else "runs/paper")
    results = args.results or (work / "results" if args.quick else ROOT / "results")
    page = results.parent / "RESULTS.md"
    if page.exists() and MADE_BY not in page.read_text(encoding="utf-8"):
        raise DamagedError(
            f"{page} is not one of ours, and would be replaced: give another --results"
        )
    if args.quick:
        mark_quick(results)
    folders = Folders(results.absolute(), work.absolute(), args.data and args.data.absolute())
    chosen = list(ITEMS) if args.all else args.items
    works = with_needed([each for name in chosen for each in ITEMS[name].works(scale)])
    if args.cell:
        next(each for each in works if each.label == args.cell).do(folders)
        return 0
    works = [each for each in works if all(text in each.label for text in args.only)]
    if args.only_time:
        works = [each for each in works if each.alone]
    if not works:
        print(f"error: --only must be of the names of cells, which {args.only} is not")
        return 2
    works = with_needed(works)
    for data in sorted({each.data for each in works if each.data and not folders.has(each.data)}):
        items = sorted({each.item for each in works if each.data == data})
        where = f"in {args.data}" if args.data else "without --data"
        print(f"left out: {', '.join(items)}, for want of {data}, {where}", flush=True)
    works = [each for each in works if folders.has(each.data)]
    failed: list[str] = []
    if not works and not args.render:  # all that was named wants published files
        return 1
    if not args.render:
        workers = args.workers or (1 if args.quick else os.cpu_count() or 1)
        failed = compute(works, folders, workers)
    failed += render(scale, folders, page, quick=args.quick)
    for each in failed:
        print(f"error: {each} failed")
    return 1 if failed else 0


def mark_quick(results: Path) -> None:
    """Marks a folder as that of tiny runs.

    Raises:
        DamagedError: it has results of whole ones, which they would replace.
        OSError: it cannot be written to.
    """
    mark = results / ".quick"
    if next(results.rglob("*.json"), None) and not mark.exists():
        raise DamagedError(
            f"{results} has results of whole runs, which the tiny ones of --quick would replace: "
            "give another --results"
        )
    with disk.writing(results):
        results.mkdir(parents=True, exist_ok=True)
        mark.touch()


def render(scale: Scale, folders: Folders, page: Path, *, quick: bool) -> list[str]:
    """Draws what is there, and writes RESULTS.md where every section can be made.

    Returns:
        What failed.

    Raises:
        DamagedError: a cell cannot be read.
    """
    everything = Scale(scale.protocol, extended=True, quick=quick, times=True)
    sections, failed = [], list[str]()
    for name, item in ITEMS.items():
        try:
            sections.append(item.render(everything, folders))
        except DamagedError:
            raise
        except Exception:  # the other figures are drawn all the same
            traceback.print_exc()
            failed.append(f"rendering of {name}")
    if failed:
        return failed  # a page that lacks a section replaces none
    how = "--quick" if quick else "--extended"
    of_data = {each.data for item in ITEMS.values() for each in item.works(everything) if each.data}
    head = [
        "# Results",
        f"{MADE_BY} --all {how} --data FOLDER`, or item by item; see `--help`. FOLDER holds the "
        f"published files, {' and '.join(f'`{path}`' for path in sorted(of_data))}.",
        GLOSSARY,
    ]
    with disk.writing(page.parent):
        page.parent.mkdir(parents=True, exist_ok=True)
    write_whole(page, "\n\n".join([*head, *filter(None, sections)]) + "\n")
    return []


def with_needed(works: list[Work]) -> list[Work]:
    """The cells with those that they read before them, each once."""
    found: dict[str, Work] = {}
    for work in works:
        found |= {each.label: each for each in with_needed(list(work.after))} | {work.label: work}
    return list(found.values())


def compute(works: list[Work], folders: Folders, workers: int) -> list[str]:
    """Computes what is missing: cells first, by all workers, and times alone after them.

    Returns:
        The labels of the cells that failed.
    """
    missing = [each for each in works if each.result(folders) is None]
    missing.sort(key=lambda each: each.alone)  # stable: cells that others read stay before them
    if not missing:
        return []
    print(f"{len(works) - len(missing)} of {len(works)} cells are there", flush=True)
    clock, failed = Clock(missing, workers), list[str]()
    run = in_this_process if workers == 1 else by_processes
    for index, (each, error, seconds) in enumerate(run(missing, folders, workers)):
        clock.done(each)
        end = f"failed: {error}" if error else f"{seconds:.0f} s"
        print(f"{index + 1}/{len(missing)}  {each.label}  {end}; {clock}", flush=True)
        if error:
            failed.append(each.label)
    return failed


Outcome = tuple[Work, str, float]
"""A cell, what went wrong or "", and the seconds it took."""


def in_this_process(works: list[Work], folders: Folders, workers: int) -> Iterator[Outcome]:
    """One cell after the other."""
    del workers
    lost: set[str] = set()
    for each in works:
        begun, error = time.monotonic(), _missing(each, lost)
        try:
            if not error:
                each.do(folders)
        except Exception as failure:  # the other cells go on
            if isinstance(failure, OSError) and failure.errno in disk.FULL:
                raise
            error = f"{type(failure).__name__}: {failure}"
        if error:
            lost.add(each.label)
        if _many_maps():
            jax.clear_caches()
        yield each, error, time.monotonic() - begun


def _many_maps() -> bool:
    """Whether what is compiled takes half of the memory maps that Linux gives a process.

    Each program takes dozens, a cell up to 16,000; and with none left JAX ends in a fault.
    """
    maps = Path("/proc/self/maps")
    return not maps.exists() or len(maps.read_bytes().splitlines()) > 2**15


def _missing(work: Work, lost: set[str]) -> str:
    """What a cell cannot be computed without, of the cells that are lost; or ""."""
    missing = [each.label for each in work.after if each.label in lost]
    return f"not started, for want of {', '.join(missing)}" if missing else ""


def by_processes(works: list[Work], folders: Folders, workers: int) -> Iterator[Outcome]:
    """Each cell in a process of its own, ``workers`` at a time; those that want it, alone."""
    waiting, running, lost = list(works), dict[str, Running](), set[str]()
    cores = _cores(workers)
    logs = folders.work / "logs"
    with disk.writing(logs):
        logs.mkdir(parents=True, exist_ok=True)
    try:
        while waiting or running:
            while len(running) < workers and (each := _next(waiting, running)) is not None:
                waiting.remove(each)
                if needs := _missing(each, lost):
                    lost.add(each.label)
                    yield each, needs, 0.0
                    continue
                taken = {one.core for one in running.values()}
                core = None if each.alone else next((c for c in cores if c not in taken), None)
                running[each.label] = Running.start(
                    each, logs / f"{os.getpid()}-{len(waiting)}.txt", core
                )
            time.sleep(0.1)
            for label, one in list(running.items()):
                if (error := one.outcome()) is not None:
                    del running[label]
                    if error:
                        lost.add(label)
                    yield one.work, error, time.monotonic() - one.begun
    finally:
        for one in running.values():
            one.stop()


def _cores(workers: int) -> list[int]:
    """A core for each worker, where there are as many.

    Small steps on a core of their own take half as long as on two that are shared.
    """
    if not hasattr(os, "sched_getaffinity"):  # not on Linux
        return []
    cores = sorted(os.sched_getaffinity(0))
    return cores if 1 < workers <= len(cores) else []


def _next(waiting: list[Work], running: dict[str, Running]) -> Work | None:
    """The next cell that may start now."""
    unfinished = {each.label for each in waiting} | running.keys()
    ready = (w for w in waiting if not any(each.label in unfinished for each in w.after))
    each = next(ready, None)
    crowd = any(other.work.alone for other in running.values())
    return None if each is None or crowd or (each.alone and running) else each


@dataclasses.dataclass(frozen=True)
class Running:
    """A cell that a process of its own computes."""

    work: Work
    process: subprocess.Popen[bytes]
    log: Path
    begun: float
    core: int | None

    @staticmethod
    def start(work: Work, log: Path, core: int | None) -> Running:
        """Starts it, on one core or on any: the command of this process, for one cell."""
        command = [sys.executable, __file__, *sys.argv[1:], "--cell", work.label]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        if core is not None:  # before JAX has started, which counts the cores then
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(process.pid, {core})
        return Running(work, process, log, time.monotonic(), core)

    def outcome(self) -> str | None:
        """None while it runs; then "", or what went wrong.

        Raises:
            OSError: the disk is full.
        """
        if self.process.poll() is None:
            return None
        if self.process.returncode == 0:
            self.log.unlink()
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if self.process.returncode == FULL_DISK:
            raise OSError(f"{self.work.label}: {lines[-1].removeprefix('error: ')}")
        return f"{lines[-1] if lines else 'killed'} ({self.log})"

    def stop(self) -> None:
        """Ends the process."""
        self.process.terminate()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stops the cells' processes too
    sys.exit(main())
