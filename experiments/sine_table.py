"""The sine table: test error by method and number of support points."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import figures
import lavajax
from cells import Cells
from comparison import Job
from protocols import EXTENDED_ROWS, PAPER_ROWS, Protocol, Row
from reference import PAPER_SINE, sine_errors

SHOTS = (1, 2, 10, 20)
QUICK_ROWS = tuple(
    row for row in PAPER_ROWS if row.name in ("ANIL", "LAVA, the paper's setting", "ridge head")
)
FIGURE = "sine.png"


def task(shots: int) -> lavajax.Sine:
    """The tasks of a column."""
    return lavajax.Sine(shots=shots)


def job(row: Row, shots: int, protocol: Protocol) -> Job:
    """A cell."""
    return Job(row, f"N={shots}", task(shots), protocol)


def render(cells: Cells, protocol: Protocol, folder: Path) -> str:
    """Draws the figure into ``folder``, and returns the section of RESULTS.md."""
    found = {
        (row.name, n): result
        for row in PAPER_ROWS + EXTENDED_ROWS
        for n in SHOTS
        if (result := cells.get((each := job(row, n, protocol)).name, each.key)) is not None
    }
    parts = [_table(found), _settings(found), _densities(found), _verdict(found)]
    if any(n == 10 for _, n in found):
        draw(found, folder / FIGURE)
        parts.append(
            f"![Test error against training time, N = 10]({folder.name}/{FIGURE})\n\n"
            "Test error on 500 unseen tasks against seconds of training, compilation apart, at "
            "N = 10, first seed."
        )
    intro = (
        f"Mean squared error on {protocol.test_tasks:,} unseen sine waves, final parameters, mean "
        f"and standard deviation over {protocol.seeds} seeds; in brackets the LAVA paper's value. "
        f"Protocol `{protocol.name}`: {protocol.steps:,} outer steps of {protocol.meta_batch} "
        "fresh tasks; for each cell the outer rate and, where a method has them, the inner steps "
        f"are chosen on {protocol.validation_tasks:,} validation tasks after "
        f"{protocol.search_steps:,} steps of one seed. Made by\n\n"
        "```text\npython experiments/paper.py sine --extended\n```"
    )
    references = ", ".join(f"{name} {value:g}" for name, value in sine_errors(task(1)).items())
    return "\n\n".join(
        ["## Sine waves", intro, *filter(None, parts), f"Without learning: {references}."]
    )


def _errors(result: dict[str, Any]) -> np.ndarray:
    return np.array([np.nan if s["mse"] is None else s["mse"] for s in result["seeds"]])


def _show(errors: np.ndarray) -> str:
    if np.isnan(errors).any():
        return f"diverged in {int(np.isnan(errors).sum())} of {len(errors)} seeds"
    spread = f" ± {errors.std(ddof=1):.1g}" if len(errors) > 1 else ""
    return f"{errors.mean():.3g}{spread}"


def _table(found: dict[tuple[str, int], Any]) -> str:
    """The errors, and times at the largest N that has them."""
    head = ["method", *(f"N = {n}" for n in SHOTS), "ms a step", "us an adaptation"]
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for row in PAPER_ROWS + EXTENDED_ROWS:
        results = {n: found.get((row.name, n)) for n in SHOTS}
        if not any(results.values()):
            continue
        shown = []
        for n, result in results.items():
            paper = PAPER_SINE.get(row.paper or "", {}).get(n)
            beside = "" if paper is None else f" ({paper:g})"
            shown.append(("" if result is None else _show(_errors(result))) + beside)
        timed = results[10] or next(r for r in results.values() if r)
        for name in ("step_ms", "adapt_us"):
            times = [s[name] for s in timed["seeds"] if name in s]
            shown.append(f"{np.median(times):.3g}" if times else "")
        lines.append(f"| {row.name} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n\nTimes are medians over seeds at N = 10."


def _settings(found: dict[tuple[str, int], Any]) -> str:
    """What was chosen."""
    lines = ["| chosen | " + " | ".join(f"N = {n}" for n in SHOTS) + " |", "| --- " * 5 + "|"]
    for row in PAPER_ROWS + EXTENDED_ROWS:
        shown = []
        for n in SHOTS:
            chosen = found.get((row.name, n), {}).get("chosen")
            steps = "" if not row.searched or chosen is None else f"S = {chosen['inner_steps']}, "
            shown.append("" if chosen is None else f"{steps}rate {chosen['outer_rate']:g}")
        if any(shown):
            lines.append(f"| {row.name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _densities(found: dict[tuple[str, int], Any]) -> str:
    """Negative log-likelihood and coverage of the methods with error bars."""
    lines = []
    for row in PAPER_ROWS + EXTENDED_ROWS:
        shown = []
        for n in SHOTS:
            seeds = found.get((row.name, n), {}).get("seeds", [])
            pairs = [(s["nll"], s["coverage"]) for s in seeds if s.get("nll") is not None]
            nll, coverage = np.mean(pairs, axis=0) if pairs else (0, 0)
            shown.append(f"{nll:.3g}, {100 * coverage:.1f}%" if pairs else "")
        if any(shown):
            lines.append(f"| {row.name} | {' | '.join(shown)} |")
    if not lines:
        return ""
    head = "| NLL, 95% coverage | " + " | ".join(f"N = {n}" for n in SHOTS) + " |"
    return "\n".join([head, "| --- " * 5 + "|", *lines])


def _verdict(found: dict[tuple[str, int], Any]) -> str:
    """LAVA against the methods that the paper compares it with."""
    lines = []
    for n in SHOTS:
        lava = found.get(("LAVA, the paper's setting", n))
        rivals = {
            row.name: float(np.nanmean(_errors(found[row.name, n])))
            for row in PAPER_ROWS
            if (row.name, n) in found and not row.name.startswith(("LAVA", "ridge"))
        }
        if lava is None or not rivals:
            continue
        own, best = float(_errors(lava).mean()), min(rivals, key=lambda name: rivals[name])
        lines.append(
            f"- N = {n}: LAVA in the paper's setting {own:.3g}, the best method that the paper "
            f"compares it with {rivals[best]:.3g} ({best}), a ratio of {rivals[best] / own:.3g}."
        )
    return "\n".join(lines)


def draw(found: dict[tuple[str, int], Any], path: Path) -> None:
    """Test error against seconds of training at N = 10."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for row in PAPER_ROWS + EXTENDED_ROWS:
        result = found.get((row.name, 10))
        curve = np.array(result["seeds"][0]["curve"]) if result else np.zeros((0, 2))
        if len(curve):
            axis.plot(*curve.T, label=row.name, **figures.line(row.name))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("training, s")
    axis.set_ylabel("test MSE")
    figure.legend(loc="outside right upper", fontsize=7.5)
    figures.save(figure, path)
