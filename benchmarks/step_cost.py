"""Cost of one training step of each method, as ratios measured in one interleaved run.

    python benchmarks/step_cost.py [--quick] [--out FOLDER]

Every entry is the median time of a compiled chunk of outer steps on sine waves, warmed up, with N
support and 50 query points in each of B tasks; the things compared take turns, so that a noisy
machine disturbs all of them alike.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import measuring

# isort: split
import jax

import lavajax
from lavajax import points
from lavajax.methods.base import Method, check_parts, init_network, predict_mean, prior_of
from lavajax.methods.on_features import on_features
from lavajax.methods.task_loss import loss_at
from lavajax.models.base import Model
from lavajax.outer import gradient_step, no_memory
from lavajax.start import init_state
from lavajax.steps import run_steps
from ratios import Ratio, publish


@dataclasses.dataclass(frozen=True)
class Supervised:
    """The same network without adaptation: trained on support and query points alike."""

    subspace: ClassVar[lavajax.Head] = lavajax.Head()

    model: Model = lavajax.MLP()
    point_loss: lavajax.Loss = lavajax.SquaredError()

    def __post_init__(self) -> None:
        check_parts(self)

    def init(self, key: jax.Array, x: jax.Array, y: jax.Array) -> lavajax.MetaParams:
        """The network."""
        return init_network(self, key, x, y, learned={})

    def adapt(
        self,
        params: lavajax.MetaParams,
        support: lavajax.Points,
        *,
        key: jax.Array | None = None,
    ) -> lavajax.Adapted:
        """The head that was trained."""
        del support, key
        return prior_of(self, params)

    def loss(
        self, params: lavajax.MetaParams, task: lavajax.Task, key: jax.Array | None
    ) -> jax.Array:
        """The mean loss of all N + M points."""
        del key
        method, params, task = on_features(self, params, task)  # in one pass, as a head's methods
        every = points.concatenate(task.support, task.query)
        return loss_at(method, params, prior_of(method, params), every)

    predict = predict_mean
    memory = no_memory
    step = gradient_step


CONTEXT = lavajax.Context(size=4)
METHODS: dict[str, Method] = {
    "supervised": Supervised(),
    "ANIL": lavajax.Anil(),
    "LAVA, head": lavajax.Lava(),
    "LAVA, head, converged": lavajax.lava_converged(),
    "LAVA, head, literal": lavajax.Lava(curvature="hessian", solver="naive"),
    "CAVIA": lavajax.Cavia(subspace=CONTEXT),
    "LAVA, context, prior": lavajax.Lava(subspace=CONTEXT, curvature_at="prior"),
    "LAVA, context, adapted": lavajax.Lava(subspace=CONTEXT),
    "MAML": lavajax.Maml(),
    "LAVA, all weights, prior": lavajax.Lava(subspace=lavajax.Full()),
    "LAVA, all weights, adapted": lavajax.Lava(subspace=lavajax.Full(), curvature_at="adapted"),
}
# What is divided by what, and the most that it should be; at N = 50 a head has a system of 50 x 50.
PAIRS: list[tuple[str, str, float | None]] = [
    ("LAVA, head", "ANIL", 1.10),
    ("LAVA, head", "supervised", 1.4),
    ("LAVA, head, converged", "ANIL", None),
    ("LAVA, head, literal", "LAVA, head", None),
    ("LAVA, context, prior", "CAVIA", 1.15),
    ("LAVA, context, adapted", "CAVIA", 1.3),
    ("LAVA, all weights, prior", "MAML", 1.25),
    ("LAVA, all weights, adapted", "MAML", 2.2),
]
MANY_POINTS = 1.25
HEADS = ("supervised", "ANIL", "LAVA, head")
# N and B, and the methods compared there.
POINTS = {
    (10, 10): tuple(METHODS),
    (10, 64): tuple(name for name in METHODS if name != "LAVA, head, literal"),
    (2, 10): HEADS[1:],
    (2, 64): HEADS[1:],
    (50, 10): (*HEADS[1:], "LAVA, head, literal"),
    (50, 64): HEADS[1:],
}


def main() -> int:
    """Measures every point, prints the table and writes the results."""
    args = measuring.options(__doc__).parse_args()
    rows: list[Ratio] = []
    milliseconds: dict[str, dict[str, float]] = {}
    for (shots, meta_batch), names in POINTS.items():
        repeats, steps = (2, 2) if args.quick else (15, measuring.STEPS)
        chosen = {name: METHODS[name] for name in names}
        seconds = measure(chosen, shots, meta_batch, repeats=repeats, steps=steps)
        rows += compare(seconds, shots, meta_batch)
        milliseconds[_at(shots, meta_batch)] = {n: 1e3 * s for n, s in seconds.items()}
    publish("step_cost", rows, {"milliseconds": milliseconds}, args.out)
    return 0


def measure(
    methods: Mapping[str, Method], shots: int, meta_batch: int, *, repeats: int, steps: int
) -> dict[str, float]:
    """Median seconds of one training step of each method."""
    tasks = lavajax.Sine(shots=shots)
    tx = lavajax.outer_optimizer(10_000)
    chunk = jax.jit(lambda state: run_steps(state, tasks, tx, 0, steps, meta_batch=meta_batch))
    runs = {
        name: partial(chunk, init_state(method, tasks, tx, jax.random.key(0)))
        for name, method in methods.items()
    }
    return {n: s / steps for n, s in measuring.interleaved(runs, repeats=repeats).items()}


def compare(seconds: Mapping[str, float], shots: int, meta_batch: int) -> list[Ratio]:
    """The ratios of ``PAIRS`` among what was measured."""
    rows = []
    for what, against, target in PAIRS:
        if what in seconds and against in seconds:
            most = MANY_POINTS if target is not None and shots >= 50 else target
            ratio = seconds[what] / seconds[against]
            rows.append(Ratio(what, against, _at(shots, meta_batch), ratio, most))
    return rows


def _at(shots: int, meta_batch: int) -> str:
    return f"N={shots} B={meta_batch}"


if __name__ == "__main__":
    sys.exit(main())
