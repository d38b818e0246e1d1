"""Where the time of a training step of LAVA's head goes, and how near it is to a matrix product's.

    python benchmarks/profile_step.py [--quick] [--out FOLDER]

The step is taken apart into programs that do ever more of it: drawing tasks; the features of
support and query together; with the solve and the query's loss; with the meta-gradient; and the
optimiser alone. Each runs over many meta-batches inside one compiled scan, as in training, and they
take turns. What a part costs is the difference from the one before it. The rate is that of the
products of the network's layers, forward and backward, over the time of the whole step, as a
fraction of what a large ``jnp.dot`` reaches in the same run.
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import measuring

# isort: split
import jax
import jax.numpy as jnp
import optax

import figures
import lavajax
from lavajax import network
from lavajax.outer import BatchExpectation, apply_gradient, meta_gradient
from lavajax.start import init_state
from lavajax.steps import draw as draw_tasks
from lavajax.steps import fitting, run_steps
from lavajax.subspace import net_of
from lavajax.types import Array, Task, TrainState

PARTS = {
    "sampling": figures.GREY,
    "features": figures.SKY,
    "solve and query loss": figures.VERMILION,
    "backward": figures.BLUE,
    "optimiser": figures.ORANGE,
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        sizes: meta-batches.
        steps: in one turn.
        repeats: turns.
        dot: rows and columns of the large product.
        model: backbone.
    """

    sizes: tuple[int, ...] = (10, 1024)
    steps: int = measuring.STEPS
    repeats: int = 5
    dot: int = 2048
    model: lavajax.MLP = lavajax.MLP()


QUICK = Settings((2, 4), 8, 2, 64, lavajax.MLP((8,)))


def layer_flops(model: lavajax.MLP, points: int) -> float:
    """Operations of the products of the layers at some points, forward and backward.

    Two for each weight and point, and three products: the outputs, and the gradients in weights
    and inputs, the last not for the first layer, whose inputs are data.
    """
    widths = [1, *model.hidden, *([model.feature_dim or model.hidden[-1]] * model.linear_features)]
    sizes = [a * b for a, b in itertools.pairwise(widths)]
    return 2.0 * points * (3 * sum(sizes) - sizes[0])


def measure(settings: Settings, size: int) -> dict[str, Any]:
    """Milliseconds of a step and its parts, and its rate beside that of a large product."""
    method, tasks, tx = lavajax.Lava(settings.model), lavajax.Sine(), optax.adam(1e-3)
    state = init_state(method, tasks, tx, jax.random.key(0))
    steps = settings.steps

    def drawn(key: Array) -> tuple[Task, Array]:
        return draw_tasks(tasks, key, jnp.arange(steps), size)

    def features(state: TrainState, batch: tuple[Task, Array]) -> Array:
        task, _ = batch
        net = net_of(state.params)
        both = jnp.concatenate([task.support.x, task.query.x], axis=1)
        return jnp.sum(jax.vmap(lambda x: network.features(method.model, net, {}, x))(both))

    at_once = fitting(size)  # as in training

    def loss(state: TrainState, batch: tuple[Task, Array]) -> Array:
        expect = BatchExpectation(*batch, microbatch=at_once)
        return expect(lambda task, key: method.loss(state.params, task, key))

    def gradient(
        state: TrainState, batch: tuple[Task, Array], microbatch: int | None = at_once
    ) -> Array:
        expect = BatchExpectation(*batch, microbatch=microbatch)
        value, gradient = meta_gradient(method, state.params, expect)
        return value + sum(jnp.sum(leaf) for leaf in jax.tree.leaves(gradient))

    def over(function: Any) -> Any:
        """A scan over meta-batches; each waits for the one before."""

        def scanned(state: TrainState, batches: tuple[Task, Array]) -> Array:
            def body(total: Array, batch: tuple[Task, Array]) -> tuple[Array, None]:
                return total + function(state, batch), None

            return jax.lax.scan(body, jnp.zeros(()), batches)[0]

        return jax.jit(scanned)

    def optimise(state: TrainState) -> TrainState:
        grads = jax.tree.map(lambda leaf: 1e-3 * leaf, state.params.learned)
        return jax.lax.fori_loop(0, steps, lambda _, s: apply_gradient(s, grads, tx), state)

    batches = jax.jit(drawn)(state.key)
    square = jax.random.normal(jax.random.key(0), (settings.dot, settings.dot))
    whole = jax.jit(lambda s: run_steps(s, tasks, tx, 0, steps, meta_batch=size))
    runs = {
        "sampling": partial(jax.jit(drawn), state.key),
        "features": partial(over(features), state, batches),
        "loss": partial(over(loss), state, batches),
        "gradient": partial(over(gradient), state, batches),
        "optimiser": partial(jax.jit(optimise), state),
        "whole step": partial(whole, state),
        "dot": partial(jax.jit(jnp.dot), square, square),
    }
    seconds = measuring.interleaved(runs, repeats=settings.repeats)
    ms = {name: 1e3 * value / steps for name, value in seconds.items() if name != "dot"}
    parts = {
        "sampling": ms["sampling"],
        "features": ms["features"],
        "solve and query loss": ms["loss"] - ms["features"],
        "backward": ms["gradient"] - ms["loss"],
        "optimiser": ms["optimiser"],
    }
    one = jax.tree.map(lambda leaf: leaf[0], batches)
    # All at once: of a loop the analysis counts one turn.
    counted = jax.jit(partial(gradient, microbatch=None)).lower(state, one).compile()
    analysis = counted.cost_analysis() or {}
    flops = layer_flops(settings.model, size * (tasks.shots + tasks.queries))
    rate, dot = flops / (1e6 * ms["whole step"]), 2 * settings.dot**3 / (1e9 * seconds["dot"])
    return {
        "meta_batch": size,
        "step_ms": ms["whole step"],
        "parts_ms": parts,
        "layer_flops": flops,
        "xla_flops": analysis.get("flops"),
        "xla_bytes": analysis.get("bytes accessed"),
        "gflops": rate,
        "dot_gflops": dot,
        "fraction": rate / dot,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = []
    for row in rows:
        lines.append(f"B = {row['meta_batch']}: {row['step_ms']:.3f} ms a step, of which")
        lines += [f"  {name:24s}{ms:9.3f} ms" for name, ms in row["parts_ms"].items()]
        lines.append(f"  {'sum of the parts':24s}{sum(row['parts_ms'].values()):9.3f} ms")
        lines.append(
            f"  {row['gflops']:.1f} GFLOP/s in the layers; a dot reaches {row['dot_gflops']:.1f}: "
            f"{row['fraction']:.2f} of its rate (above 0.25 is wanted at B = 1,024)"
        )
        counted = f"{row['xla_flops'] or 0:.3g} operations, {row['xla_bytes'] or 0:.3g} bytes"
        lines.append(f"  XLA counts {counted} in loss and gradient; the layers have ")
        lines[-1] += f"{row['layer_flops']:.3g} operations"
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar for each meta-batch, of the parts in microseconds per task."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(5.6, 1.2 + 0.5 * len(rows)), layout="constrained")
    for index, row in enumerate(rows):
        left = 0.0
        for name, colour in PARTS.items():
            width = max(0.0, 1e3 * row["parts_ms"][name] / row["meta_batch"])
            label = None if index else name
            axis.barh(index, width, left=left, color=colour, label=label)
            left += width
        axis.plot(1e3 * row["step_ms"] / row["meta_batch"], index, "k|", ms=18)
    axis.set_yticks(range(len(rows)), [f"B = {row['meta_batch']:,d}" for row in rows])
    axis.set_xlabel("µs per task; the mark is the whole step")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    figures.save(figure, path)


def main() -> None:
    """Measures every meta-batch, and writes the results."""
    args = measuring.options(__doc__).parse_args()
    settings = QUICK if args.quick else Settings()
    rows = [measure(settings, size) for size in settings.sizes]
    print(table(rows))
    measuring.write_results("profile_step", {"rows": rows}, args.out)
    draw(rows, args.out / "profile_step.png")


if __name__ == "__main__":
    main()
