"""Two processes of four simulated devices each train one model, over gloo on this machine.

    python tests/slow/two_processes.py [--only agree killed parts]

agree: the run ends where that of one process does, to rounding, and one process alone writes.
killed: one process is killed; the other stops within a minute and says why; the run goes on from
its last checkpoint, in two processes and in one.
parts: each process has data of its own, and the step is that of all of them; of data of other
shapes it is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lavajax
from lavajax.outer import BatchExpectation
from lavajax.sharding import ALONE
from lavajax.start import start_state
from lavajax.steps import draw

RUN = Path(__file__).resolve().parents[2] / "experiments" / "run.py"
OPTIONS = [
    *("--task=sine", "--method=anil", "--hidden", "8", "--shots=3", "--queries=4"),
    *("--test-tasks=10", "--checkpoint-seconds=0", "--no-figures"),
]
PATIENCE = 280
STEPS = 100_000


def start(
    args: list[str], devices: int = 4, script: Path = RUN, folder: Path | None = None
) -> subprocess.Popen[str]:
    """Starts a run on simulated devices, in a folder."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flag}"
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        # Fewer threads than devices would let collectives wait for each other.
        env={**os.environ, "XLA_FLAGS": flags, "NPROC": "16", "JAX_PLATFORMS": "cpu"},
    )


def start_two(
    args: list[str], folders: tuple[Path | None, ...] = (None, None)
) -> list[subprocess.Popen[str]]:
    """Starts a run in two processes, each in a folder."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    joined = [f"--coordinator=localhost:{port}", "--processes=2"]
    return [
        start([*args, *joined, f"--process={i}"], folder=folder) for i, folder in enumerate(folders)
    ]


def end(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Waits for their ends; exit codes, and what they printed."""
    try:
        found = [p.communicate(timeout=PATIENCE)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, text) for p, text in zip(processes, found, strict=True)]


def parameters(params: lavajax.MetaParams) -> np.ndarray:
    """All learned numbers."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params.learned)])


GLOO = (
    r"\[Gloo\] Rank |\d* is connected to |\d+( peer ranks\. Expected number of connected .*: \d+)?"
)
"""What Gloo's threads say of connections, at once and into each other's lines."""


def agree(parent: Path) -> None:
    """The same numbers as one process, and silence from the second."""
    args = [*OPTIONS, "--steps=4", "--report-every=2"]
    folders = parent / "first", parent / "second"
    for folder in folders:
        folder.mkdir()
    (code, text), (other_code, other) = end(start_two([*args, "--out=two"], folders))
    assert code == other_code == 0, text + other
    method, tasks = lavajax.Anil(lavajax.MLP(hidden=(8,))), lavajax.Sine(shots=3, queries=4)
    alone = lavajax.train(method, tasks, steps=4).params
    np.testing.assert_allclose(
        parameters(lavajax.load(folders[0] / "two")), parameters(alone), rtol=1e-5, atol=1e-6
    )
    assert "files:" in text, text
    assert not re.sub(GLOO, "", other).strip(), other
    assert not list(folders[1].iterdir())


def killed(parent: Path) -> None:
    """The end of the other within a minute, whichever is killed, and the way on."""
    args = [*OPTIONS, f"--steps={STEPS}", "--report-every=50"]
    for victim in (1, 0):
        folder = parent / f"killed-{victim}"
        processes = start_two([*args, f"--out={folder}"])
        until = time.monotonic() + PATIENCE
        while len(list((folder / "checkpoints").glob("[0-9]*"))) < 2:
            assert time.monotonic() < until, "no checkpoints"
            assert all(p.poll() is None for p in processes), end(processes)
            time.sleep(0.2)
        processes[victim].kill()
        begun = time.monotonic()
        code, text = end([processes[1 - victim]])[0]
        seconds = time.monotonic() - begun
        processes[victim].communicate()
        assert code != 0, text
        assert seconds < 60, f"{seconds:.0f} s"
        assert "another of the processes has died or cannot be reached" in text, text
        assert f"--resume={folder}" in text, text
        print(f"process {victim} killed: the other ended after {seconds:.0f} s", flush=True)

    # A run that is stopped by a signal to either of them ends in both, at the same step.
    processes = start_two([f"--resume={folder}"])
    before = len((folder / "metrics.jsonl").read_text().splitlines())
    until = time.monotonic() + PATIENCE
    while len((folder / "metrics.jsonl").read_text().splitlines()) < before + 2:
        assert time.monotonic() < until, "it does not go on"
        assert all(p.poll() is None for p in processes), end(processes)
        time.sleep(0.2)
    processes[1].terminate()
    (code, text), (other_code, other) = end(processes)
    assert code == other_code == 128 + 15, text + other
    assert "going on from step" in text, text
    assert "stopped by SIGTERM" in text, text
    print("resumed in two processes, and stopped in both by a signal to one", flush=True)
    compare_with_alone(folder)

    alone = start([f"--resume={folder}"], devices=3)
    assert alone.stdout is not None
    seen = ""
    while "compiled in" not in seen:
        line = alone.stdout.readline()
        assert line, seen
        seen += line
    alone.terminate()
    code, text = end([alone])[0]
    assert "going on from step" in seen, seen
    assert code == 128 + 15, seen + text
    print("resumed in one process of three devices", flush=True)


def compare_with_alone(folder: Path) -> None:
    """The last checkpoint, after a death, two starts and a stop, is that of one process alone."""
    steps = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    method, tasks = lavajax.Anil(lavajax.MLP(hidden=(8,))), lavajax.Sine(shots=3, queries=4)
    optimizer = lavajax.outer_optimizer(STEPS)
    alone = lavajax.train(method, tasks, steps=steps, optimizer=optimizer).params
    # Adam makes a difference of rounding grow, where a gradient is small.
    np.testing.assert_allclose(
        parameters(lavajax.load(folder)), parameters(alone), rtol=1e-2, atol=1e-3
    )
    print(f"as in one process, after {steps} steps", flush=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lines:
    """Lines of stored slopes."""

    slopes: jax.Array

    def sample(self, key: jax.Array, split: str = "train") -> lavajax.Task:
        """Four points, of which two are the support."""
        slope_key, x_key = jax.random.split(key)
        x = jax.random.normal(x_key, (4, 1))
        y = jax.random.choice(slope_key, self.slopes) * x
        return lavajax.Task(lavajax.Points(x[:2], y[:2]), lavajax.Points(x[2:], y[2:]))


METHOD, SGD = lavajax.Anil(lavajax.MLP(hidden=(8,))), optax.sgd(0.1)
PARTS = ([1.0, 2.0, 3.0], [-4.0, -5.0, -6.0])


def train_on_part(number: int, port: int, size: int) -> None:
    """One step of eight tasks in one process of two, on its part; prints the parameters."""
    jax.distributed.initialize(f"localhost:{port}", 2, number)
    lines = Lines(jnp.array(PARTS[number][:size]))
    params = lavajax.train(METHOD, lines, steps=1, meta_batch=8, optimizer=SGD).params
    print("parameters", *parameters(params).tolist(), flush=True)
    jax.distributed.shutdown()


def parts(parent: Path) -> None:
    """The step of the first four tasks of one part and the last four of the other."""
    del parent
    for sizes in ((3, 3), (3, 2)):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        children = [
            start(["--part", str(number), str(port), str(size)], script=Path(__file__))
            for number, size in enumerate(sizes)
        ]
        ends = end(children)
        if len(set(sizes)) > 1:
            for code, text in ends:
                assert code != 0
                assert "tasks must have arrays of the same shapes" in text, text
            continue
        found = []
        for code, text in ends:
            assert code == 0, text
            (line,) = (one for one in text.splitlines() if one.startswith("parameters "))
            found.append(np.array(line.split()[1:], float))
    np.testing.assert_array_equal(*found)

    state = start_state(METHOD, Lines(jnp.array(PARTS[0])), SGD)
    drawn = [draw(Lines(jnp.array(p)), state.key, jnp.int32(0), 8, ALONE) for p in PARTS]
    tasks, keys = jax.tree.map(lambda one, other: jnp.concatenate([one[:4], other[4:]]), *drawn)
    new, _ = METHOD.step(state, BatchExpectation(tasks, keys), SGD)
    np.testing.assert_allclose(found[0], parameters(new.params), rtol=1e-5, atol=1e-6)


TRIALS = {"agree": agree, "killed": killed, "parts": parts}


def main() -> int:
    """Runs the trials."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--part", nargs=3, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        train_on_part(*args.part)
        return 0
    for name in args.only:
        with tempfile.TemporaryDirectory() as parent:
            TRIALS[name](Path(parent))
        print(f"{name}: as it should be", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
