"""Kill a run at random moments, go on with it, and compare its parameters with an unbroken run's.

    python tests/slow/kill_and_resume.py [--kills 50] [--seed 0]

Every trial starts a run of a small network that saves a checkpoint after every few steps, kills it
with SIGKILL at a random moment, and resumes it. All leaves of the final state (parameters,
optimiser, keys) must be those of an unbroken run, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import lavajax
from lavajax import checkpoint
from lavajax.start import start_state

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = [
    *("--task=sine", "--method=lava-converged", "--hidden", "8", "8", "--meta-batch=2"),
    *("--test-tasks=10", "--report-every=10", "--checkpoint-seconds=0", "--no-figures"),
]


def command(*args: str) -> list[str]:
    """The command line of a run."""
    return [sys.executable, str(ROOT / "experiments" / "run.py"), *args]


def start(folder: Path, steps: int) -> list[str]:
    """The command line that starts one anew."""
    return command(f"--out={folder}", f"--steps={steps}", *OPTIONS)


def final_state(folder: Path, steps: int) -> list[np.ndarray]:
    """All leaves of the state that a finished run has saved."""
    method = lavajax.lava_converged(model=lavajax.MLP(hidden=(8, 8)))
    tx = lavajax.outer_optimizer(steps)
    like = jax.eval_shape(lambda: start_state(method, lavajax.Sine(), tx))
    state = checkpoint.restore_state(folder, like)
    assert state is not None, f"{folder} has no checkpoint"
    assert int(state.step) == steps
    state = dataclasses.replace(state, key=jax.random.key_data(state.key))
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def run(line: list[str]) -> str:
    """Runs to the end; what it printed."""
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def unbroken(folder: Path, steps: int) -> tuple[list[np.ndarray], float]:
    """The state of a run that nobody kills, and the seconds it took."""
    begun = time.monotonic()
    run(start(folder, steps))
    return final_state(folder, steps), time.monotonic() - begun


def kill(folder: Path, steps: int, after: float) -> str:
    """Starts a run and kills it ``after`` seconds; says where that was."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(start(folder, steps), stdout=quiet, stderr=quiet)
    try:
        process.wait(timeout=after)
        return "after its end"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    saved = sorted(p.name for p in (folder / "checkpoints").glob("*"))
    return f"with {', '.join(saved) or 'no checkpoint'}"


def resume(folder: Path, steps: int) -> list[np.ndarray]:
    """Goes on with a killed run to its end; its final state."""
    if (folder / "config.json").is_file():
        had = any(p.name.isdecimal() for p in (folder / "checkpoints").glob("*"))
        text = run(command(f"--resume={folder}"))
        assert ("going on from step" in text) == had, text
    else:  # killed before it had written what it is
        run(start(folder, steps))
    return final_state(folder, steps)


def main() -> int:
    """Runs the trials; 1 where any of them differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    moments = random.Random(args.seed)
    equal = 0
    with tempfile.TemporaryDirectory() as parent:
        expected, seconds = unbroken(Path(parent) / "unbroken", args.steps)
        for trial in range(args.kills):
            after = moments.uniform(0.0, seconds)
            folder = Path(parent) / str(trial)
            where = kill(folder, args.steps, after)
            state = resume(folder, args.steps)
            same = all(np.array_equal(a, b) for a, b in zip(state, expected, strict=True))
            equal += same
            print(
                f"{trial + 1:3d}  killed at {after:5.2f} s of {seconds:.2f} {where}: "
                f"{'equal' if same else 'DIFFERENT'}",
                flush=True,
            )
    print(f"{equal} of {args.kills} resumed to the same bits")
    return 0 if equal == args.kills else 1


if __name__ == "__main__":
    sys.exit(main())
