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
    found: dict[tuple[str, int], Any] = {}
    for row in PAPER_ROWS + EXTENDED_ROWS:
        for n in SHOTS:
            each = job(row, n, protocol)
            if (result := cells.get(each.name, each.key)) is not None:
                times = cells.get(f"{each.name} time", each.key)
                found[row.name, n] = {**result, "times": times}
    parts = [_table(found), _settings(found), _densities(found), _verdict(found)]
    if any(n == 10 and result["times"] for (_, n), result in found.items()):
        draw(found, folder / FIGURE)
        parts.append(
            f"![Test error against training time, N = 10]({folder.name}/{FIGURE})\n\n"
            "Test error on 500 unseen tasks against seconds of training, compilation apart, at "
            "N = 10, first seed: outer steps times the time of a step."
        )
    intro = (
        f"Mean squared error on {protocol.test_tasks:,} unseen sine waves, final parameters, mean "
        f"and standard deviation over {protocol.seeds} seeds; in brackets the LAVA paper's value. "
        f"Protocol `{protocol.name}`: {protocol.steps:,} outer steps of {protocol.meta_batch} "
        "fresh tasks; for each cell the outer rate and, where a method has them, the inner steps "
        f"are chosen on {protocol.validation_tasks:,} validation tasks after "
        f"{protocol.search_steps:,} steps of one seed, from rates {_list(protocol.rates)} and S of "
        f"{_list(protocol.inner_steps)}, or {_list(protocol.inner_steps_full)} where all weights "
        "adapt. Contexts have 4 numbers and a learned start. Made by\n\n"
        "```text\npython experiments/paper.py sine --extended\n"
        "python experiments/paper.py sine --extended --time\n```"
    )
    references = ", ".join(f"{name} {value:g}" for name, value in sine_errors(task(1)).items())
    return "\n\n".join(
        ["## Sine waves", intro, *filter(None, parts), f"Without learning: {references}."]
    )


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _errors(result: dict[str, Any]) -> np.ndarray:
    return np.array([np.nan if s["mse"] is None else s["mse"] for s in result["seeds"]])


def _show(errors: np.ndarray) -> str:
    if np.isnan(errors).any():
        return f"diverged in {int(np.isnan(errors).sum())} of {len(errors)} seeds"
    spread = f" ± {errors.std(ddof=1):.1g}" if len(errors) > 1 else ""
    return f"{errors.mean():.3g}{spread}"


def _table(found: dict[tuple[str, int], Any]) -> str:
    """The errors, and times at N = 10."""
    head = ["method", *(f"N = {n}" for n in SHOTS), "ms a step", "us a task"]
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
        times = (results[10] or {}).get("times") or {}
        shown += [f"{times[t]:.3g}" if t in times else "" for t in ("step_ms", "task_us")]
        lines.append(f"| {row.name} | {' | '.join(shown)} |")
    return "\n".join(lines) + (
        "\n\nTimes at N = 10, on 2 CPU cores: an outer step, and adaptation and prediction of a "
        "task as it is scored, in a batch of 100."
    )


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
            known = [s for s in seeds if s.get("coverage") is not None]
            nll = [s["nll"] for s in known if s["nll"] is not None]
            parts = [f"{np.mean(nll):.3g}"] if nll else []
            parts += [f"{100 * np.mean([s['coverage'] for s in known]):.1f}%"] if known else []
            shown.append(", ".join(parts))
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
            row.name: float(_errors(found[row.name, n]).mean())
            for row in PAPER_ROWS + EXTENDED_ROWS
            if (row.name, n) in found and row.name != "LAVA, the paper's setting"
        }
        papers = {row.name for row in PAPER_ROWS if row.paper}
        if lava is None or not rivals:
            continue
        own = float(_errors(lava).mean())
        for title, names in (
            ("of the methods that the paper compares it with", papers),
            ("of all others", rivals.keys() - papers),
        ):
            here = {k: v for k, v in rivals.items() if k in names and np.isfinite(v)}
            if here:
                best = min(here, key=lambda name: here[name])
                lines.append(
                    f"- N = {n}: LAVA in the paper's setting {own:.3g}; the best {title} "
                    f"{here[best]:.3g} ({best}), {here[best] / own:.3g} times as much."
                )
    return "\n".join(lines)


def draw(found: dict[tuple[str, int], Any], path: Path) -> None:
    """Test error against seconds of training at N = 10."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 4.2), layout="constrained")
    for row in PAPER_ROWS + EXTENDED_ROWS:
        result = found.get((row.name, 10))
        if result is None or result["times"] is None:
            continue
        steps, errors = np.array(result["seeds"][0]["curve"], float).T
        seconds = steps * result["times"]["step_ms"] / 1e3
        axis.plot(seconds, errors, label=row.name, **figures.line(row.name))
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("training, s")
    axis.set_ylabel("test MSE")
    figure.legend(loc="outside right upper", fontsize=7.5)
    figures.save(figure, path)
