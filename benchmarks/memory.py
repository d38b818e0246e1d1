"""Memory of adapting all weights: it grows with the width, not with the number of weights.

    python benchmarks/memory.py [--quick] [--out FOLDER]

The tangent kernel and the step need only what enters each layer and the signal that comes back to
its output, N points times the width. Shown is what the compiled program needs beside its arguments
and results, by XLA's own account: of adapting to B tasks, whose result is B copies of the weights,
and of the loss and meta-gradient of B tasks, where there is no such copy, with curvature at the
prior and at the adapted points. Beside them stands the same of a backbone that hides its layers,
which has a row of the Jacobian for every point. At one width also by the number of points and of
tasks.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import measuring

# isort: split
import jax
import numpy as np

import figures
import lavajax
from lavajax.outer import BatchExpectation, meta_gradient
from lavajax.types import Array, MetaParams, PyTree, Task

PARTS = {
    "adaptation": ("o-", figures.VERMILION),
    "training step": ("s-", figures.BLUE),
    "adaptation, at adapted": ("o--", figures.PURPLE),
    "training step, at adapted": ("s--", figures.GREEN),
    "adaptation, layers hidden": ("o:", figures.ORANGE),
    "training step, layers hidden": ("s:", figures.SKY),
}


@dataclasses.dataclass(frozen=True)
class Hidden:
    """A backbone that does not show the layers of another."""

    inner: lavajax.MLP

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """As the other's."""
        return self.inner.init(key, x, context)

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """As the other's."""
        return self.inner.features(weights, fixed, x, context=context, mask=mask)


SWEPT = 512
"""The width at which the numbers of points and of tasks vary."""


def measure(
    width: int, meta_batch: int, tasks: lavajax.Sine, *, others: bool = True
) -> dict[str, Any]:
    """Bytes of temporaries of every part, of the copies of the weights, and of N B widths."""
    shown = lavajax.MLP(hidden=(width,) * 3)
    keys = jax.random.split(jax.random.key(0), meta_batch)
    batch = jax.eval_shape(lambda: jax.vmap(tasks.sample)(keys))
    found: dict[str, Any] = {"width": width, "points": tasks.shots, "tasks": meta_batch}
    usual = lavajax.Lava(shown, subspace=lavajax.Full())
    methods = {"": usual}
    if others:
        methods[", at adapted"] = dataclasses.replace(usual, curvature_at="adapted")
        methods[", layers hidden"] = dataclasses.replace(usual, model=Hidden(shown))
    for suffix, method in methods.items():
        example = jax.eval_shape(tasks.sample, keys[0]).support
        params = jax.eval_shape(method.init, keys[0], example.x, example.y)

        def adapt(params: MetaParams, batch: Task, method: lavajax.Lava = method) -> PyTree:
            return jax.vmap(lambda task: method.adapt(params, task.support).block)(batch)

        def train(params: MetaParams, batch: Task, method: lavajax.Lava = method) -> PyTree:
            return meta_gradient(method, params, BatchExpectation(batch, keys))

        for name, function in (("adaptation", adapt), ("training step", train)):
            compiled = jax.jit(function).lower(params, batch).compile()
            found[name + suffix] = measuring.temporaries(compiled)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params.learned))
    return found | {
        "copies of the weights": 4 * meta_batch * weights,
        "points times width": 4 * meta_batch * tasks.shots * width,
    }


def exponents(rows: list[dict[str, Any]], by: str = "width") -> dict[str, float]:
    """The power of the width, or another number, by which each part grows, over the upper half."""
    most = rows[len(rows) // 2 - (len(rows) < 4) :]
    x = np.log([row[by] for row in most])
    names = [name for name in (*PARTS, "copies of the weights") if name in rows[0]]
    return {name: float(np.polyfit(x, np.log([row[name] for row in most]), 1)[0]) for name in names}


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, in MB."""
    names = [*PARTS, "copies of the weights"]
    lines = ["width" + "".join(f"{name:>30s}" for name in names)]
    lines += [
        f"{row['width']:5d}" + "".join(f"{row[name] / 1e6:27.1f} MB" for name in names)
        for row in rows
    ]
    growth = exponents(rows)
    lines.append("power" + "".join(f"{growth[name]:30.2f}" for name in names))
    lines.append("the first four should be about 1")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Bytes against the width."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
    widths = [row["width"] for row in rows]
    for name, (look, colour) in PARTS.items():
        axis.plot(widths, [row[name] / 1e6 for row in rows], look, color=colour, ms=4, label=name)
    copies = [row["copies of the weights"] / 1e6 for row in rows]
    axis.plot(widths, copies, "--", color=figures.GREY, label="B copies of the weights")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("width of the layers")
    axis.set_ylabel("MB of temporaries")
    figure.legend(loc="outside lower center", ncols=2, fontsize=7)
    figures.save(figure, path)


def main() -> None:
    """Compiles at every width, and writes the results."""
    parser = measuring.options(__doc__)
    part: dict[str, Any] = {"type": int, "default": 10, "action": measuring.Part}
    parser.add_argument("--meta-batch", help="tasks, B", **part)
    parser.add_argument("--shots", help="support points, N", **part)
    args = parser.parse_args()
    tasks = lavajax.Sine(shots=args.shots)
    widths = (16, 32) if args.quick else (64, 128, 256, 512, 1024)
    rows = []
    for width in widths:
        rows.append(measure(width, args.meta_batch, tasks))
        print(f"width {width} compiled", flush=True)
    print(table(rows))
    wide, numbers = (32, (2, 4)) if args.quick else (SWEPT, (8, 16, 32, 64))
    sweeps = {
        "points": [
            measure(wide, args.meta_batch, lavajax.Sine(shots=n), others=False) for n in numbers
        ],
        "tasks": [measure(wide, 2 * n, tasks, others=False) for n in numbers],
    }
    powers = {by: exponents(found, by) for by, found in sweeps.items()}
    for by, power in powers.items():
        found = ", ".join(f"{name} {power[name]:.2f}" for name in list(PARTS)[:2])
        print(f"powers of the number of {by} at width {wide}: {found}; 1 is expected")
    settings = {"meta_batch": args.meta_batch, "shots": tasks.shots, "queries": tasks.queries}
    data = {**settings, "rows": rows, "powers": exponents(rows)}
    data |= {"sweeps": sweeps, "powers of others": powers}
    measuring.write_results("memory", data, args.out)
    draw(rows, args.out / "memory.png")


if __name__ == "__main__":
    main()
