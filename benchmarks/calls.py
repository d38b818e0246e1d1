"""Time of the calls that a user makes: to adapt, to adapt on-line, and to import the library.

    python benchmarks/calls.py [--quick] [--out FOLDER]

A call is compared with an empty one, compiled and of the same signature: what handing over the
parameters and points costs by itself. JAX runs an empty call at once, and on a CPU leaves others to
a thread, unless it is told not to: in a process that does, all are timed once more. An import is
compared with that of JAX, Flax and optax in a process of its own, in CPU time, which other work on
the machine disturbs least.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import measuring

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

import lavajax
from ratios import Ratio, publish

TARGETS = {"adapt": 5.0, "on-line": 10.0, "import": 1.15}
PARTS = "import jax, flax.linen, optax"
AT_ONCE = "--at-once"


def main() -> int:
    """Measures, prints the table and writes the results."""
    parser = measuring.options(__doc__)
    parser.add_argument(
        AT_ONCE, action="store_true", help="no more than the calls, without that thread, as JSON"
    )
    args = parser.parse_args()
    repeats, imports = (2, 1) if args.quick else (40, 9)
    if args.at_once:
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        print(json.dumps(measure(repeats)))
        return 0
    rows, microseconds = [], {}
    for beside, times in (("", measure(repeats)), (", at once", _measured_at_once(args.quick))):
        for what, seconds in times.items():
            microseconds[what + beside] = {name: 1e6 * s for name, s in seconds.items()}
            empty = seconds.pop("empty")
            at = ("N=10" if what == "adapt" else "P=65") + beside
            for name, s in seconds.items():
                most = TARGETS[what] if name in TIMED and not beside else None
                rows.append(Ratio(name, "empty jitted call", at, s / empty, most))
    library, parts = import_seconds(("import lavajax", PARTS), imports)
    rows.append(Ratio("import lavajax", PARTS, "CPU time", library / parts, TARGETS["import"]))
    data: dict[str, Any] = {"microseconds": microseconds, "import_seconds": [library, parts]}
    publish("calls", rows, data, args.out)
    return 0


TIMED = ("jax.jit(lavajax.adapt)", "jax.jit of update and estimate, 1 point")


def measure(repeats: int) -> dict[str, dict[str, float]]:
    """The calls of both kinds in this process."""
    return {"adapt": adapt(repeats, calls=50), "on-line": online(repeats, calls=50)}


def _measured_at_once(quick: bool) -> dict[str, dict[str, float]]:
    """``measure`` without that thread, in a process of its own: JAX is told before it starts."""
    command = [sys.executable, __file__, AT_ONCE, *(["--quick"] if quick else [])]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def adapt(repeats: int, calls: int, model: lavajax.Model | None = None) -> dict[str, float]:
    """Median seconds of adapting to one task, and of a call that does nothing."""
    params, support = _example(10, model)
    compiled = jax.jit(lavajax.adapt)
    empty = jax.jit(
        lambda params, support: lavajax.Adapted(jnp.zeros_like(params["head"])), keep_unused=True
    )
    arrays = np.asarray(support.x), np.asarray(support.y)
    runs = {
        "empty": lambda: empty(params, support),
        TIMED[0]: lambda: compiled(params, support),
        "lavajax.adapt, NumPy arrays": lambda: lavajax.adapt(params, arrays),
    }
    return measuring.interleaved(runs, repeats=repeats, calls=calls)


def online(repeats: int, calls: int, model: lavajax.Model | None = None) -> dict[str, float]:
    """Median seconds of taking in one point and reading the estimate, and of an empty call."""
    params, support = _example(1, model)
    sums = lavajax.online(params, support)
    point = np.asarray(support.x), np.asarray(support.y)
    empty = jax.jit(
        lambda params, sums, support: lavajax.Adapted(jnp.zeros_like(params["head"])),
        keep_unused=True,
    )

    @jax.jit
    def compiled(params: lavajax.MetaParams, sums: lavajax.Sums, x: Any, y: Any) -> Any:
        sums = lavajax.update(params, sums, (x, y))
        return sums, lavajax.estimate(params, sums)

    runs = {
        "empty": lambda: empty(params, sums, support),
        TIMED[1]: lambda: compiled(params, sums, *point),
        "update and estimate, 1 point": lambda: lavajax.estimate(
            params, lavajax.update(params, sums, point)
        ),
        "update": lambda: lavajax.update(params, sums, point),
        "estimate": lambda: lavajax.estimate(params, sums),
    }
    return measuring.interleaved(runs, repeats=repeats, calls=calls)


def _example(points: int, model: lavajax.Model | None) -> tuple[lavajax.MetaParams, lavajax.Points]:
    method = lavajax.Lava() if model is None else lavajax.Lava(model)
    support = lavajax.Sine(shots=points).sample(jax.random.key(0)).support
    return method.init(jax.random.key(1), support.x, support.y), support


def import_seconds(imports: Sequence[str], repeats: int) -> list[float]:
    """Median CPU seconds of each import, in fresh processes that take turns."""
    times = [[_import_seconds(code) for code in imports] for _ in range(repeats)]
    return [statistics.median(each) for each in zip(*times, strict=True)]


def _import_seconds(code: str) -> float:
    script = f"import time; begun = time.process_time(); {code}; print(time.process_time() - begun)"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
