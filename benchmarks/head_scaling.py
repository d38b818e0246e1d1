"""Time of adapting a head against its size: min(N, P)^2 max(N, P), and no Hessian is built.

    python benchmarks/head_scaling.py [--quick] [--out FOLDER]

Sweeps with k = 10 outputs, of features that are given: N points at P = 4,096 features; P features
at N = 4,096 points; the larger of the two where the other is 1,024; and P features at N = 10
points, beside the paper's literal route, whose N Hessians have (k P)^2 numbers each. That one runs
in a process of bounded memory, and only where XLA's account of the compiled program leaves room.
"""

from __future__ import annotations

import dataclasses
import resource
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import measuring

# isort: split
import jax
import numpy as np

import figures
import lavajax
from lavajax.methods.on_features import Given
from lavajax.types import Array, MetaParams, Points

NUMBERS = {"N": "points N", "P": "features P"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        large: N and P where they do not vary.
        middle: the smaller of them where the larger varies.
        sizes: of the sweeps.
        outputs: k.
        points: N of the literal route.
        literal: its P.
        repeats: turns of every timing.
        calls: in a turn, where there are few points.
        memory: bytes that the literal route may take.
    """

    large: int = 4096
    middle: int = 1024
    sizes: tuple[int, ...] = (10, 32, 128, 512, 1024, 2048, 4096)
    outputs: int = 10
    points: int = 10
    literal: tuple[int, ...] = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    repeats: int = 7
    calls: int = 100
    memory: int = 16 * 2**30


QUICK = Settings(64, 16, (16, 32, 64), 2, 3, (4, 8), 2, 1, 2**31)
NAIVE = {"curvature": "hessian", "solver": "naive"}


def problem(n: int, p: int, k: int, **options: Any) -> tuple[MetaParams, Points]:
    """A head ``[P, k]`` before adaptation, and N points for it."""
    x = jax.random.normal(jax.random.key(0), (n, p - 1)) / np.sqrt(p)
    y = jax.random.normal(jax.random.key(1), (n, k))
    return lavajax.Lava(Given(), **options).init(jax.random.key(2), x, y), Points(x, y)


def adapted(params: MetaParams, support: Points) -> Array:
    """The adapted head."""
    return params.method.adapt(params, support).block


def literal_seconds(n: int, p: int, k: int, repeats: int, memory: int) -> tuple[int, float | None]:
    """Bytes and seconds of the literal route; None where it would take too many bytes."""
    params, support = problem(n, p, k, **NAIVE)
    compiled = jax.jit(adapted).lower(params, support).compile()
    needed = measuring.temporaries(compiled)
    if needed > memory:
        return needed, None
    run = partial(compiled, params, support)
    return needed, measuring.interleaved({"": run}, repeats=repeats)[""]


def bounded(memory: int) -> None:
    """Bounds the address space of this process, beyond what an idle one reserves."""
    limit = memory + 4 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def literal(settings: Settings, p: int) -> tuple[int, float | None]:
    """The same in a process of its own."""
    with ProcessPoolExecutor(
        1, mp_context=get_context("spawn"), initializer=bounded, initargs=(settings.memory,)
    ) as pool:
        arguments = (settings.points, p, settings.outputs, settings.repeats, settings.memory)
        try:
            return pool.submit(literal_seconds, *arguments).result()
        except (BrokenProcessPool, MemoryError, jax.errors.JaxRuntimeError) as error:
            print(f"the literal route at P = {p} failed: {str(error).splitlines()[0][:80]}")
            return 0, None


def measure(settings: Settings) -> dict[str, Any]:
    """All sweeps: ``[size, seconds]`` of each, and ``[size, bytes, seconds]`` literally."""
    large, middle, k = settings.large, settings.middle, settings.outputs

    def sweep(
        at: dict[str, int], name: str, sizes: tuple[int, ...], calls: int = 1
    ) -> list[tuple[int, float]]:
        shapes = {size: at | {name: size} for size in sizes}
        runs = {
            size: partial(jax.jit(adapted), *problem(shape["N"], shape["P"], k))
            for size, shape in shapes.items()
        }
        times = measuring.interleaved(runs, repeats=settings.repeats, calls=calls)
        for size, shape in shapes.items():
            print(f"N = {shape['N']}, P = {shape['P']}: {1e3 * times[size]:.3f} ms", flush=True)
        return list(times.items())

    every = tuple(sorted({*settings.literal, large}))
    larger = tuple(size for size in settings.sizes if size >= middle)
    found: dict[str, Any] = {
        "points": sweep({"P": large}, "N", settings.sizes),
        "features": sweep({"N": large}, "P", settings.sizes),
        "more points": sweep({"P": middle}, "N", larger),
        "more features": sweep({"N": middle}, "P", larger),
        # A tenth of a millisecond each: one call would be no longer than what disturbs it.
        "few points": sweep({"N": settings.points}, "P", every, calls=settings.calls),
        "literal": [],
    }
    for p in settings.literal:
        needed, time = literal(settings, p)
        found["literal"].append((p, needed, time))
        shown = "does not fit" if time is None else f"{1e3 * time:.3f} ms"
        print(f"literally, P = {p}: {needed / 2**20:.0f} MiB, {shown}", flush=True)
        if time is None:
            break
    return found | {"powers": powers(found, settings)}


def powers(found: dict[str, Any], settings: Settings) -> dict[str, float]:
    """Exponents of time in min(N, P), in max(N, P), and for few points in P, of the larger half.

    Below, the product of the inputs with the head, of time N P k, is a large part.
    """
    rows = {name: found[name] for name in found if name not in ("literal", "powers")}
    rows["literal"] = [(p, time) for p, _, time in found["literal"] if time is not None]
    fitted = {}
    for name, values in rows.items():
        if len(values) < 2:
            continue
        few = 0 if name.startswith("more") else max(2, len(values) // 2)  # 0: all of them
        x, y = np.log(np.array(values[-few:])).T
        fitted[name] = float(np.polyfit(x, y, 1)[0])
    return fitted


def draw(found: dict[str, Any], settings: Settings, path: Path) -> None:
    """Time against N and P, and beside the literal route."""
    plt = figures.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.2), layout="constrained")
    power = found["powers"]
    large = f"{settings.large:,d}"

    def line(axis: Any, rows: list[Any], look: str, colour: str, label: str) -> None:
        axis.plot(*zip(*rows, strict=True), look, color=colour, ms=4, label=label)

    shown = f"N points, P = {large}: time ~ N^{power['points']:.1f}"
    line(left, found["points"], "o-", figures.VERMILION, shown)
    shown = f"P features, N = {large}: time ~ P^{power['features']:.1f}"
    line(left, found["features"], "s--", figures.BLUE, shown)
    middle = f"{settings.middle:,d}"
    for name, look, colour, letters in (
        ("more points", "o:", figures.ORANGE, "NP"),
        ("more features", "s:", figures.SKY, "PN"),
    ):
        if name in power:
            shown = f"{name}, {letters[1]} = {middle}: time ~ {letters[0]}^{power[name]:.1f}"
            line(left, found[name], look, colour, shown)
    left.set_xlabel("N or P")
    shown = f"closed form: time ~ P^{power['few points']:.1f}"
    line(right, found["few points"], "o-", figures.VERMILION, shown)
    if literal := [(p, time) for p, _, time in found["literal"] if time is not None]:
        shown = f"literal: time ~ P^{power['literal']:.1f}" if "literal" in power else "literal"
        line(right, literal, "s--", figures.VERMILION, shown)
    right.axvline(found["literal"][-1][0], color=figures.GREY, ls=":", lw=1)
    right.set_xlabel(f"features P, with N = {settings.points} points")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.legend(fontsize=7)
    left.set_ylabel("seconds to adapt")
    figures.save(figure, path)


def main() -> None:
    """Measures, prints the exponents, and writes the results."""
    args = measuring.options(__doc__).parse_args()
    settings = QUICK if args.quick else Settings()
    found = measure(settings)
    peak = measuring.peak_bytes() / 2**30
    for name, power in found["powers"].items():
        expected = {"literal": "as large as it likes", "points": "2", "features": "2"}
        limit = expected.get(name, "1")
        print(f"{name:14s} time grows by the power {power:.2f}; expected at most: {limit}")
    print(f"peak memory in closed form {peak:.2f} GiB, of 24")
    data = {"settings": dataclasses.asdict(settings), "peak_gib": peak, **found}
    measuring.write_results("head_scaling", data, args.out)
    draw(found, settings, args.out / "head_scaling.png")


if __name__ == "__main__":
    main()
