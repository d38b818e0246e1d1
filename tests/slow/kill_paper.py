"""Kill ``paper.py`` at random moments until it is done, and compare with an unbroken run.

    python tests/slow/kill_paper.py [--items sine geometry] [--kills 10] [--seed 0]

Everything is tiny (``--quick``), in one process and in two. Every start goes on from what the last
one had kept: all errors must be those of the unbroken run, to the last digit; times are others.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, items: list[str], workers: int) -> list[str]:
    """The command line that computes the items in a folder."""
    script = str(ROOT / "experiments" / "paper.py")
    places = [f"--results={folder / 'results'}", f"--work={folder / 'work'}"]
    return [sys.executable, script, *items, "--quick", f"--workers={workers}", *places]


def results(folder: Path) -> dict[str, Any]:
    """What the cells hold, times left out."""
    found = {}
    for file in sorted((folder / "results").glob("*/*.json")):
        if not file.name.endswith("-time.json"):
            found[f"{file.parent.name}/{file.name}"] = without_times(json.loads(file.read_text()))
    return found


def without_times(value: Any) -> Any:
    """The same without entries called ``seconds``."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k != "seconds"}
    return [without_times(v) for v in value] if isinstance(value, list) else value


def run(line: list[str]) -> float:
    """Runs to the end; the seconds it took."""
    begun = time.monotonic()
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return time.monotonic() - begun


def kill(line: list[str], after: float) -> bool:
    """Starts, and kills it and its workers ``after`` seconds; whether it had ended before."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(line, stdout=quiet, stderr=quiet, start_new_session=True)
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


def main() -> int:
    """Runs the trials; 1 where any result differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", nargs="+", default=["sine", "geometry"])
    parser.add_argument("--kills", type=int, default=10, help="at most, of each number of workers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    moments, good = random.Random(args.seed), True
    with tempfile.TemporaryDirectory() as parent:
        whole = Path(parent) / "unbroken"
        seconds = run(command(whole, args.items, 1))
        expected = results(whole)
        assert expected
        for workers in (1, 2):
            folder = Path(parent) / str(workers)
            line, kills = command(folder, args.items, workers), 0
            while kills < args.kills and not kill(line, moments.uniform(2.0, seconds / 4)):
                kills += 1
            run(line)
            same = results(folder) == expected and kills > 0
            good = good and same
            print(
                f"{workers} workers, killed {kills} times: {len(expected)} cells "
                f"{'equal' if same else 'DIFFERENT'}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
