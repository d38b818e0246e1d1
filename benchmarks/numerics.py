"""What float32 costs LAVA's head: its predictions against those in float64.

    python benchmarks/numerics.py [--quick] [--out FOLDER]

The features are those of a network with random weights at inputs of a sine wave, scaled. Both
precisions get the same stored numbers, so that the error is that of the adaptation alone: the
largest of 50 predictions, relative to the largest prediction or target.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import measuring

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import figures
import lavajax
from lavajax.methods.on_features import Given
from lavajax.types import Array

POINTS = (1, 10, 100, 1000)
SCALES = (1e-2, 1.0, 1e1, 1e2)
# A name, the setting, and the dtype in which head and features are stored.
SETTINGS: list[tuple[str, lavajax.Lava, str]] = [
    ("Lava()", lavajax.Lava(), "float32"),
    ("lava_converged()", lavajax.lava_converged(), "float32"),
    ("lava_converged()", lavajax.lava_converged(), "bfloat16"),
    ("lava_bayesian()", lavajax.lava_bayesian(), "float32"),
    (
        "lava_bayesian(epsilon_floor=1e-4)",
        lavajax.lava_bayesian(epsilon_floor=1e-4),
        "float32",
    ),
]
COLOURS = {
    "Lava()": figures.VERMILION,
    "lava_converged()": figures.BLUE,
    "lava_bayesian()": figures.GREEN,
    "lava_bayesian(epsilon_floor=1e-4)": figures.ORANGE,
}


def features(number: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features ``[number, 64]`` with a mean square of 1, and targets ``[number, 1]``."""
    model = lavajax.MLP()
    x = jax.random.uniform(jax.random.key(seed), (number, 1), minval=-5.0, maxval=5.0)
    phi = model.features(*model.init(jax.random.key(1), x), x)
    return np.asarray(phi / jnp.sqrt(jnp.mean(phi**2))), np.sin(np.asarray(x))


def error(method: lavajax.Lava, number: int, scale: float, stored: str = "float32") -> float:
    """The relative error of the predictions from ``number`` points."""
    (x, y), (at, _) = features(number), features(50, seed=2)
    method = dataclasses.replace(method, model=Given())
    params = method.init(jax.random.key(3), jnp.asarray(x), jnp.asarray(y))
    low = jax.tree.map(lambda a: jnp.asarray(a, stored), (params.learned, scale * x, scale * at))
    with jax.enable_x64(True):
        high = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), float), low)
        exact = np.asarray(_predict(params, *high, jnp.asarray(y, float)))
    found = np.asarray(_predict(params, *low, jnp.asarray(y)))
    assert found.dtype == np.float32
    return float(np.max(np.abs(found - exact)) / max(np.max(np.abs(exact)), np.max(np.abs(y))))


@jax.jit
def _predict(
    params: lavajax.MetaParams, learned: dict[str, Array], x: Array, at: Array, y: Array
) -> Array:
    method, params = params.method, params.replace_learned(learned)
    return method.predict(params, method.adapt(params, lavajax.Points(x, y)), at).mean


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Error against N, a panel for each scale and a line for each setting."""
    plt = figures.pyplot()
    figure, axes = plt.subplots(1, len(SCALES), figsize=(9, 3), sharey=True, layout="constrained")
    for index, (axis, scale) in enumerate(zip(axes, SCALES, strict=True)):
        for name, _, stored in SETTINGS:
            here = [row for row in rows if (row["setting"], row["stored"]) == (name, stored)]
            numbers, errors = [row["N"] for row in here], [row["errors"][index] for row in here]
            dashes = "-" if stored == "float32" else "--"
            label = name if stored == "float32" else f"{name}, {stored}"
            axis.plot(numbers, errors, "o", ls=dashes, color=COLOURS[name], ms=4, label=label)
        axis.set(xscale="log", yscale="log", xlabel="N", title=f"scale {scale:g}")
    axes[0].set_ylabel("error in float32, relative")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=7)
    figures.save(figure, path)


def main() -> None:
    """Prints the table, as Markdown, and writes the numbers and the figure."""
    args = measuring.options(__doc__).parse_args()
    rows = []
    print("| setting | stored in | N | " + " | ".join(f"scale {s:g}" for s in SCALES) + " |")
    print("| --- | --- | --- |" + " --- |" * len(SCALES))
    for name, method, stored in SETTINGS:
        for number in POINTS[:1] if args.quick else POINTS:
            errors = [error(method, number, scale, stored) for scale in SCALES]
            rows.append({"setting": name, "stored": stored, "N": number, "errors": errors})
            cells = " | ".join(f"{e:.0e}" for e in errors)
            print(f"| `{name}` | {stored} | {number} | {cells} |", flush=True)
    path = measuring.write_results("numerics", {"scales": SCALES, "rows": rows}, args.out)
    draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
