"""A training step of LAVA's head beside the same step elsewhere, on the CPU, in one run.

    python benchmarks/rivals.py [--quick] [--compile] [--meta-batch 10 64] [--out FOLDER]

The rivals are PyTorch with the same closed form batched by hand, plain and by ``torch.compile``;
PyTorch with the paper's Hessian of the whole head per point, by ``torch.func`` and by ``higher`` in
a loop over tasks; that Hessian by ``vmap(jax.hessian)`` in plain JAX, and by the library's naive
solver, which shares all but the adaptation with the closed form. Every one has the same network, 50
query points and Adam, and a step draws its own tasks. Before anything is timed, its loss and
gradient must equal the library's at equal parameters and data.

PyTorch is timed with one thread and with two, and the faster counts; XLA takes what it likes.
PyTorch's threads spin for a while after a step: it has a process of its own, which is stopped while
it is not its turn. What is not installed is left out, by name: pip install ".[peers]".
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import measuring

# isort: split
import jax
import optax

import figures
import jax_peer
import lavajax
from gpu_check import distance
from lavajax.outer import BatchExpectation, meta_gradient
from lavajax.start import init_state
from lavajax.steps import run_steps

OURS = "lavajax, closed form"
NAIVE = "lavajax, naive: vmap(jax.hessian)"
PLAIN = "plain JAX, vmap(jax.hessian)"
CLOSED, COMPILED = "PyTorch, closed form", "PyTorch, closed form, torch.compile"
FULL, LOOP = "PyTorch, torch.func Hessians", "PyTorch, higher, loop over tasks"
LOOKS = {
    OURS: (figures.VERMILION, "o"),
    NAIVE: (figures.VERMILION, "s"),
    PLAIN: (figures.ORANGE, "P"),
    CLOSED: (figures.BLUE, "^"),
    COMPILED: (figures.SKY, "v"),
    FULL: (figures.GREEN, "D"),
    LOOP: (figures.PURPLE, "X"),
}
CHEAP = (OURS, CLOSED, COMPILED)
RATE = 1e-3
Turn = tuple[str, int | None]
"""A rival, and its number of threads, where that is ours to say."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        sizes: meta-batches.
        literal: the largest meta-batch with a Hessian for each point.
        looped: the largest in a loop over tasks.
        points: support and query points in one turn of a rival, about: it decides its steps.
        fewest: steps in one turn, but for the loop over tasks: after a pause the first is slow.
        repeats: turns.
        model: backbone.
        shots: N.
        queries: M.
    """

    sizes: tuple[int, ...] = (10, 64, 256, 1024)
    literal: int = 64
    looped: int = 10
    points: int = 60_000
    fewest: int = 10
    repeats: int = 7
    model: lavajax.MLP = lavajax.MLP()
    shots: int = 10
    queries: int = 50

    @property
    def tasks(self) -> lavajax.Sine:
        """What is trained on."""
        return lavajax.Sine(shots=self.shots, queries=self.queries)

    def steps(self, name: str, size: int) -> int:
        """Steps in a turn at a meta-batch."""
        usual = self.points // (size * (self.shots + self.queries))
        if name in (OURS, NAIVE, PLAIN):
            return measuring.STEPS
        return 1 if name == LOOP else max(self.fewest, usual if name in CHEAP else usual // 10)

    def within(self, name: str, size: int) -> bool:
        """Whether a rival is measured at a meta-batch."""
        most = dict.fromkeys((NAIVE, PLAIN, FULL), self.literal) | {LOOP: self.looped}
        return size <= most.get(name, size)


QUICK = Settings(
    (2, 4), 4, 2, points=1, fewest=1, repeats=2, model=lavajax.MLP((8,)), shots=3, queries=4
)


def target(name: str, size: int) -> float:
    """How many times as long as ours a rival should take, at least."""
    if name in (CLOSED, COMPILED):
        return 2.0 if size <= 10 else 1.0
    return {NAIVE: 4.0, PLAIN: 4.0, FULL: 10.0, LOOP: 100.0}[name]


def torch_peers() -> Any:
    """The module of that name, which imports PyTorch."""
    return importlib.import_module("torch_peers")


def torch_losses(*, compiling: bool) -> tuple[dict[str, Any], list[str]]:
    """The losses of the PyTorch rivals by name, and what is left out, and why."""
    if importlib.util.find_spec("torch") is None:
        return {}, [f"{name}: torch is not installed" for name in (CLOSED, COMPILED, FULL, LOOP)]
    peers = torch_peers()
    losses = {CLOSED: peers.closed_form, FULL: peers.full_hessians}
    skipped = []
    if not compiling:
        skipped.append(f"{COMPILED}: not asked for, it takes minutes to compile")
    elif shutil.which("c++") is None:
        skipped.append(f"{COMPILED}: it needs a C++ compiler")
    else:
        losses[COMPILED] = peers.compiled(peers.closed_form)
    if importlib.util.find_spec("higher") is None:
        skipped.append(f"{LOOP}: higher is not installed")
    else:
        losses[LOOP] = peers.higher_loop
    return losses, skipped


def check(losses: dict[str, Any], settings: Settings, size: int = 3) -> dict[str, float]:
    """How far each rival's loss and gradient are from ours, relative; the larger of the two.

    Args:
        losses: the PyTorch rivals.
        settings: network and tasks.
        size: meta-batch.

    Raises:
        AssertionError: further than float32 explains.
    """
    method, tasks = lavajax.Lava(settings.model), settings.tasks
    state = init_state(method, tasks, optax.adam(RATE), jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), size)
    batch = jax.vmap(tasks.sample)(keys)
    expected = meta_gradient(method, state.params, BatchExpectation(batch, keys))
    found = {PLAIN: jax_peer.value_and_grad(state.params.learned, batch)}
    for name, loss in losses.items():
        found[name] = torch_peers().value_and_grad(loss, state.params.learned, batch)
    gaps = {}
    for name, pair in found.items():
        gaps[name] = max(distance(a, b) for a, b in zip(pair, expected, strict=True))
        assert gaps[name] < 1e-4, f"{name} is not the same step: off by {gaps[name]:.1e}"
    return gaps


def torch_turns(settings: Settings, size: int, *, compiling: bool) -> dict[Turn, Any]:
    """A turn of each PyTorch rival at one meta-batch, with one thread and with two."""
    losses, _ = torch_losses(compiling=compiling)
    state = init_state(
        lavajax.Lava(settings.model), settings.tasks, optax.adam(RATE), jax.random.key(0)
    )
    turns: dict[Turn, Any] = {}
    for name, loss in losses.items():
        if settings.within(name, size):
            take = torch_peers().trainer(loss, state.params.learned, settings.tasks, size, RATE)
            for count in (1, 2):
                turns[name, count] = partial(take, settings.steps(name, size), count)
    return turns


def serve(pipe: Any, settings: Settings, size: int, compiling: bool) -> None:
    """A process of PyTorch's: says what there is, and takes the turns that it is asked for."""
    turns = torch_turns(settings, size, compiling=compiling)
    pipe.send(list(turns))
    while True:
        turns[pipe.recv()]()
        pipe.send(None)


@contextlib.contextmanager
def apart(settings: Settings, size: int, *, compiling: bool) -> Iterator[dict[Turn, Any]]:
    """The turns of ``torch_turns`` in a process that is stopped between them."""
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, settings, size, compiling))
    process.start()
    theirs.close()

    def tell(name: str) -> None:
        if hasattr(signal, name):  # Windows has neither
            assert process.pid is not None
            os.kill(process.pid, getattr(signal, name))

    def take(turn: Turn) -> None:
        tell("SIGCONT")
        pipe.send(turn)
        pipe.recv()
        tell("SIGSTOP")

    try:
        found = pipe.recv()
        tell("SIGSTOP")
        yield {turn: partial(take, turn) for turn in found}
    finally:
        process.kill()
        process.join()


def measure(
    settings: Settings, size: int, *, compiling: bool = False, torch: bool = True
) -> list[dict[str, Any]]:
    """Milliseconds of a step of ours and of all rivals at one meta-batch, which take turns."""
    model, tasks, tx = settings.model, settings.tasks, optax.adam(RATE)
    learned = init_state(lavajax.Lava(model), tasks, tx, jax.random.key(0)).params.learned
    runs: dict[Turn, Callable[[], Any]] = {}
    for name, method in {
        OURS: lavajax.Lava(model),
        NAIVE: lavajax.Lava(model, curvature="hessian", solver="naive"),
    }.items():
        state = init_state(method, tasks, tx, jax.random.key(0))
        number = settings.steps(name, size)
        chunk = jax.jit(
            lambda state, number=number: run_steps(state, tasks, tx, 0, number, meta_batch=size)
        )
        if settings.within(name, size):
            runs[name, None] = partial(chunk, state)
    if settings.within(PLAIN, size):
        steps = settings.steps(PLAIN, size)
        runs[PLAIN, None] = jax_peer.trainer(learned, tasks, size, RATE, steps)
    with contextlib.ExitStack() as stack:
        if torch:
            runs |= stack.enter_context(apart(settings, size, compiling=compiling))
        seconds = measuring.interleaved(runs, repeats=settings.repeats, pause=0.3)
    fastest: dict[str, dict[str, Any]] = {}
    for turn in sorted(seconds, key=seconds.__getitem__, reverse=True):
        name, threads = turn
        ms = 1e3 * seconds[turn] / settings.steps(name, size)
        fastest[name] = {"meta_batch": size, "name": name, "threads": threads, "ms": ms}
    return [fastest[name] for name in LOOKS if name in fastest]


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, and how many times as long as ours each takes, beside the target."""
    ours = {row["meta_batch"]: row["ms"] for row in rows if row["name"] == OURS}
    return [
        row
        if row["name"] == OURS
        else row
        | {"ratio": row["ms"] / ours[row["meta_batch"]]}
        | {"target": target(row["name"], row["meta_batch"])}
        for row in rows
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'B':>5s}  {'':36s}threads   ms a step   times ours   at least"]
    for row in rows:
        times = ""
        if "ratio" in row:
            missed = "  MISSED" if row["ratio"] < row["target"] else ""
            times = f"{row['ratio']:13.2f}{row['target']:11.0f}{missed}"
        threads = row["threads"] or ""
        lines.append(
            f"{row['meta_batch']:5d}  {row['name']:36s}{threads!s:>7s}{row['ms']:12.3f}{times}"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of a step against the meta-batch, a line for each."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    for name, (colour, marker) in LOOKS.items():
        here = [row for row in rows if row["name"] == name]
        if here:
            x, y = [row["meta_batch"] for row in here], [row["ms"] for row in here]
            dashes = "--" if name == NAIVE else "-"
            axis.plot(x, y, marker, ls=dashes, color=colour, ms=5, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("tasks in a training step")
    axis.set_ylabel("ms per training step")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    figures.save(figure, path)


def main() -> None:
    """Checks, measures, and writes the results; with rivals left out apart from published ones."""
    parser = measuring.options(__doc__)
    parser.add_argument(
        "--meta-batch", type=int, nargs="+", action=measuring.Part, help="only these sizes"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile too: minutes more")
    args = parser.parse_args()
    settings = QUICK if args.quick else Settings()
    sizes = args.meta_batch or settings.sizes
    losses, skipped = torch_losses(compiling=args.compile)
    for line in skipped:
        print(f"skipped: {line}")
    gaps = check(losses, settings)
    for name, gap in gaps.items():
        print(f"{name}: loss and gradient within {gap:.0e} of ours")
    if skipped and args.out == measuring.RESULTS:
        args.out = measuring.PART
    rows = with_ratios(
        [
            row
            for size in sizes
            for row in measure(settings, size, compiling=args.compile, torch=bool(losses))
        ]
    )
    print(table(rows))
    measuring.write_results("rivals", {"gaps": gaps, "skipped": skipped, "rows": rows}, args.out)
    draw(rows, args.out / "rivals.png")


if __name__ == "__main__":
    main()
