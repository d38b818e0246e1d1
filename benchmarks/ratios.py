"""Measured ratios beside what they should be at most: a plain table, JSON and a figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import measuring

# isort: split
import figures


@dataclasses.dataclass(frozen=True)
class Ratio:
    """One measured ratio.

    Attributes:
        what: what is measured.
        against: what it is divided by.
        at: the setting, such as ``N=10 B=10``.
        value: the ratio.
        target: the most that it should be; None where it is only reported.
    """

    what: str
    against: str
    at: str
    value: float
    target: float | None = None

    @property
    def missed(self) -> bool:
        """Whether the ratio is above its target."""
        return self.target is not None and self.value > self.target


def table(rows: Sequence[Ratio]) -> str:
    """The rows as text, those above their target marked."""
    lines = [f"{'what':38s} {'against':34s} {'at':14s} {'ratio':>6s} {'at most':>8s}"]
    for row in rows:
        target = "" if row.target is None else f"{row.target:.2f}"
        mark = "  missed" if row.missed else ""
        lines.append(
            f"{row.what:38s} {row.against:34s} {row.at:14s} {row.value:6.2f} {target:>8s}{mark}"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Ratio], path: Path) -> None:
    """A dot for each ratio on a logarithmic axis, and a bar where its target is."""
    plt = figures.pyplot()
    figure, axis = plt.subplots(figsize=(7.5, 0.9 + 0.24 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        colour = figures.VERMILION if row.missed else figures.BLUE
        axis.plot(row.value, place, "D" if row.missed else "o", color=colour, ms=5, zorder=3)
        beside = {"transform": axis.get_yaxis_transform(), "va": "center", "fontsize": 7}
        axis.text(1.01, place, f"{row.value:.2f}", **beside)
        if row.target is not None:
            axis.plot(row.target, place, "|", color=figures.BLACK, ms=11, mew=1.6)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_locator(plt.matplotlib.ticker.LogLocator(subs=(2, 5)))
    axis.xaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="x", which="both", labelsize=7)
    axis.set_yticks(range(len(rows)), [f"{r.what} / {r.against}, {r.at}" for r in rows], fontsize=7)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("ratio; the bar is the most that it should be, a diamond is above it")
    figures.save(figure, path)


def publish(name: str, rows: Sequence[Ratio], data: dict[str, Any], folder: Path) -> None:
    """Prints the table and writes ``NAME.json`` and ``NAME.png``."""
    print(table(rows))
    ratios = [dataclasses.asdict(row) for row in rows]
    path = measuring.write_results(name, {"ratios": ratios, **data}, folder)
    draw(rows, path.with_suffix(".png"))
