"""The tables and figures of the paper, and ours beside them.

    python experiments/paper.py sine [--extended] [--quick] [--rows NAME ...] [--shots N ...]

Results go cell by cell into small files under ``results/``, from which ``RESULTS.md`` and the
figures are made anew each time; trained parameters stay outside the repository, under
``runs/paper``. What is there is not computed again: stop it anywhere, and start it again. Several
processes may share the work by ``--rows`` and ``--shots``; ``--render`` only draws.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import sine_table
from cells import Cells
from comparison import compute, measure
from files import write_whole
from protocols import EXTENDED_ROWS, HEADLINE, PAPER_ROWS, QUICK, Row

ROOT = Path(__file__).resolve().parents[1]
ITEMS = {"sine": sine_table}


def main() -> int:
    """Computes what is missing, and renders what is there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("item", choices=ITEMS, help="table or figure")
    parser.add_argument("--extended", action="store_true", help="methods beyond the paper's too")
    parser.add_argument("--quick", action="store_true", help="3 methods at N = 2, hardly trained")
    parser.add_argument("--time", action="store_true", help="measure times too, on an idle machine")
    parser.add_argument("--render", action="store_true", help="compute nothing")
    parser.add_argument("--rows", nargs="+", help="only these methods")
    parser.add_argument("--shots", type=int, nargs="+", help="only these N")
    parser.add_argument("--results", type=Path, help="cells; results/ where not given")
    parser.add_argument("--work", type=Path, help="everything else; runs/paper where not given")
    args = parser.parse_args()
    work = args.work or Path("runs/paper_quick" if args.quick else "runs/paper")
    results = args.results or (work / "results" if args.quick else ROOT / "results")
    item = ITEMS[args.item]
    protocol = QUICK if args.quick else HEADLINE
    rows = PAPER_ROWS + EXTENDED_ROWS
    chosen: tuple[Row, ...] = rows if args.extended else PAPER_ROWS
    shots = args.shots or list(item.SHOTS)
    if args.quick:
        chosen, shots = item.QUICK_ROWS, args.shots or [2]
    if args.rows:
        names = {row.name for row in rows}
        if unknown := set(args.rows) - names:
            print(f"error: --rows must be of {'; '.join(sorted(names))}: got {'; '.join(unknown)}")
            return 2
        chosen = tuple(row for row in rows if row.name in args.rows)
    cells = Cells(results / args.item)
    pieces = Cells(work / args.item / "pieces")
    jobs = [item.job(row, n, protocol) for n in shots for row in chosen]
    for index, job in enumerate([] if args.render else jobs):
        begun = time.monotonic()
        if cells.get(job.name, job.key) is None:
            print(f"{index + 1}/{len(jobs)}  {job.name}", end=" ", flush=True)
            compute(job, cells, pieces, work / args.item / "models")
            print(f"{time.monotonic() - begun:.0f} s", flush=True)
        if args.time:
            times = partial(measure, job, cells.get(job.name, job.key)["chosen"])
            cells.compute(f"{job.name} time", job.key, times)
    sections = [item.render(cells, protocol, results)]
    text = "\n\n".join(["# Results", *sections]) + "\n"
    write_whole(results.parent / "RESULTS.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
