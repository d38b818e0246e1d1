"""The sine table: test error by method and number of support points."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import figures
import lavajax
from comparison import curve_tasks
from protocols import PAPER_ROWS, Scale
from reference import sine_errors
from tables import Table, rows_of, section
from works import Folders, Work

TITLE = "sine waves: test error by method and N"
NAME = "sine"
SHOTS = (1, 2, 10, 20)
QUICK_ROWS = tuple(
    row for row in PAPER_ROWS if row.name in ("ANIL", "LAVA, the paper's setting", "ridge head")
)
FIGURE = "sine.png"
PANELS = (
    "LAVA",
    "what the paper compares it with",
    "further gradient methods",
    "closed forms and encoders",
)
IN_EVERY_PANEL = "LAVA, the paper's setting"
_Curve: TypeAlias = tuple[np.ndarray, np.ndarray]  # seconds and errors, [points] each
NOTES = """\
What is behind the numbers:

- **LAVA with a head is a close relative of ridge regression**, and trained on squared error it is
  no better: its gain over ANIL is the gain of solving the last layer instead of stepping on it.
  Converged steps and a learned epsilon take it to the ridge head's level; the paper's setting, with
  one rate for steps of all lengths, stays above it.
- **At N = 10 and 20 the likelihood is worth more than the form of the estimate.** ALPaCA trained on
  the density of the query has an 8th and a 17th of the error that it has trained on its squared
  error. At N = 2 that is worth 1.3 times, and the form, a prior of full covariance counted once,
  2.2 times (`ALPaCA, MSE` against the ridge head).
- **`LAVA, Bayesian`** is the head with the prior counted once, each point at its own maximum a
  posteriori, a floor of 1e-6 below epsilon in place of 2e-4, and that density to train on. Its mean
  is three times closer at N = 2 and ten times at N = 10 and 20 than converged LAVA's and ridge's;
  it is level with ALPaCA's at N = 2 and 10, and at N = 20 ALPaCA's is 30% lower. Noise is learned,
  in ALPaCA here it is not: hence the higher density and the coverage near 95%.
- **Training ends where the prior's start lets it.** `LAVA, Bayesian, firm` is the same with epsilon
  from 10 instead of 0.1, and ends at about half the error at N = 10 and 20: what a task needs then
  has to grow in the features. This start was chosen for LAVA by hand, on validation tasks of other
  problems, while ALPaCA's prior starts as its paper's does: the row is left out of the comparisons
  above. At N = 20 even its difference to ALPaCA is within the spread over seeds. It is no better
  everywhere: on PM2.5, tried by hand, it was less steady in training, and worse.
- **`ALPaCA, firm`** is ALPaCA from the same start, prior precision 10 instead of 1, and what
  `LAVA, Bayesian, firm` is to be held against.
- **At N = 1** there is nothing to weigh: one-step LAVA is one-step ANIL. The table's ANIL takes 8
  steps; converged LAVA, whose one point is fitted to the end, equals it. Methods that need not pass
  through the point come closer to the best that is possible: TNP-D reaches it, then come the
  hypernetwork, the CNPs, and contexts.
- **A context of 4 numbers** holds less of a task than a head of 65. LAVA in a context is better
  than CAVIA at N = 2 and worse at N = 10 and 20, where CAVIA can take 8 steps.
- **Inner steps** are what separates most baselines from the paper's. With a single one, from N = 2
  on, VFML, LLAMA and MetaMix are near its numbers (next table), and ANIL and CAVIA above: these two
  must have taken more there. With the number chosen on validation tasks all are far lower.
- **LLAMA** is CAVIA with a log determinant of weight 1e-6 in the outer loss, and performs like it,
  as it must. That the paper's is ten times worse than its CAVIA at N = 10 is not explained by the
  method.
- **VR-MAML as released** takes inner steps of 0.001 that are not learned, and trains by plain SGD
  of rate 0.01 without clipping. It hardly adapts: here and in the paper its errors are those of
  no adaptation, or it diverges, and they say nothing of the method. `VR-MAML, tuned` trains by
  Adam with inner steps from 0.1 that are learned, and does adapt.
- **DKT** is trained on the density of all 60 points of a task together, which teaches a kernel and
  not to predict from few: with an RBF kernel it is worse than predicting 0 at N = 1 and 2, and sure
  of it. With a linear kernel it is ALPaCA trained so.
- **Neural processes** know how sure they are, and are less exact from N = 2 on: there TNP-D has 6
  times the error of the best row, the two CNPs 19 and 30 times; at N = 10 and 20 TNP-D has some
  230 and 90 times, the CNPs thousands of times. They adapt no parameters, and what they say of a
  task passes through an encoding.
- **The spread of an ensemble** is no error bar by itself. BMAML's ten particles are trained
  each for its own error, and their 95% intervals hold 0.2 to 46% of the targets; those of
  PLATIPUS's samples, which are trained to differ, 78 to 95%.
- **Reptile** learns from all 60 points of a task together, and its start becomes as curved as its
  steps can bear: at an inner rate of 0.02, which is stable up to a curvature of 100, the loss of 60
  points had 68 after 1,000 outer steps, and that of a single point up to 540 (measured by hand).
  From one point or two the steps grow, on some tasks without bound, at every inner rate; a smaller
  one is answered by a start that is more curved. From 20 the median over tasks is 0.001 for every
  seed; four seeds have means of 0.008 to 0.009, and a few tasks of the fifth make its mean 38.
- **iMAML** ends far apart from seed to seed, at N = 10 between 0.011 and 0.108, at N = 20 between
  0.018 and 1.27. Its gradient is that of a minimum, which its 16 steps may not reach.
- **First-order gradients do not suffice where all weights move.** `MAML, first order` and `VFML,
  storm` learn as if the inner steps did not turn with the start. With two steps or more most
  settings diverge or do worse than one, and one step is what `VFML, storm` is left with at every N.
  First-order MAML takes one too at N = 1 and 2, where they are equal, and at N = 20, where it is at
  0.168 and `VFML, storm` at 0.939.
- **Methods that move all weights by gradient steps are brittle here**: VFML, MetaMix and VR-MAML
  diverge in training at most settings of 5 inner steps, and at N = 2 already of 3. VFML is lower
  after the 5,000 steps of its search than after all 20,000: at N = 10 0.029 on validation tasks and
  0.066 in the end, at N = 20 0.026 and 0.102.
"""

NOTES_ARE_OF = "7e9ed4aa5676"
"""The digest of the errors that the notes speak of: beside others they would not be true."""


def table(scale: Scale, folders: Folders | None = None) -> Table:
    """The cells."""
    columns = {f"N = {n}": lavajax.Sine(shots=n) for n in ((2,) if scale.quick else SHOTS)}
    rows = QUICK_ROWS if scale.quick else rows_of(scale.extended)
    return Table(NAME, columns, scale.protocol, rows, folders)


def timed(scale: Scale) -> str:
    """The column whose times are measured."""
    return "N = 2" if scale.quick else "N = 10"


def works(scale: Scale) -> list[Work]:
    """All cells."""
    return table(scale).works([timed(scale)] if scale.times else [])


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    cells = table(scale, folders)
    if not cells.found:
        return ""
    drawing, at = "", timed(scale)
    curves = {row.name: curve for row in cells.rows if (curve := _curve(cells, row.name, at))}
    if curves:
        lost = {n for n in curves if np.isnan(cells.errors(n, at)).any()}
        draw(curves, folders.results / FIGURE, lost)
        drawing = (
            f"![Test error against training time]({folders.results.name}/{FIGURE})\n\n"
            f"Test error on {curve_tasks(scale.protocol)} unseen tasks against seconds of "
            f"training, compilation apart, at {at}, first seed: outer steps times the time of a "
            "step."
        )
    references = sine_errors(lavajax.Sine(shots=1)).items()
    return section(
        "## Sine waves",
        "Mean squared error; in brackets the LAVA paper's value. " + cells.describe(),
        cells.show_errors(timed=at),
        f"Times at {at}, on {machine}: an outer step, and adaptation and prediction of a task as "
        "it is scored, in a batch of 100; the least of several measurements in one process. From "
        "process to process the same program differs by up to a third."
        if (machine := cells.machine(at))
        else "",
        cells.sampling(),
        cells.exceptions(),
        f"Without learning: {'; '.join(f'{name}: {value:g}' for name, value in references)}.",
        cells.compare(),
        cells.show_settings(),
        cells.at_the_edge(),
        cells.given_up(),
        NOTES.strip() if digest(cells) == NOTES_ARE_OF else "",
        f"At one inner step, on {scale.protocol.validation_tasks:,} validation tasks after the "
        f"{scale.protocol.search_steps:,} outer steps of the search, the better of the rates; in "
        "brackets the paper's test errors:",
        cells.single_step(),
        cells.show_densities(),
        drawing,
    )


def digest(cells: Table) -> str:
    """A name for the errors of all cells, to three digits."""
    errors = {f"{row}, {at}": f"{np.mean(cells.errors(row, at)):.3g}" for row, at in cells.found}
    return hashlib.sha256(json.dumps(errors, sort_keys=True).encode()).hexdigest()[:12]


def _panel(name: str) -> str:
    lava, papers, further, others = PANELS
    if name.startswith("LAVA"):
        return lava
    if figures.LOOKS[name][0] in (figures.PURPLE, figures.BLACK):
        return others
    return papers if name in {row.name for row in PAPER_ROWS} else further


def draw(curves: Mapping[str, _Curve], path: Path, lost: Collection[str] = ()) -> None:
    """Test error against seconds of training: a panel for each kind of method.

    Args:
        curves: by method.
        path: of the figure.
        lost: the methods of which a seed has diverged.
    """
    plt = figures.pyplot()
    panels = {
        title: shown for title in PANELS if (shown := [n for n in curves if _panel(n) == title])
    }
    columns = min(2, len(panels))
    figure, axes = plt.subplots(
        -(-len(panels) // columns),
        columns,
        figsize=(5.2 * columns, 3.0 * -(-len(panels) // columns)),
        layout="constrained",
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_axis_off()
    ends: dict[Any, list[tuple[str, list[float]]]] = {axis: [] for axis in axes.flat}
    for axis, (title, names) in zip(axes.flat, panels.items(), strict=False):
        # One curve stands in every panel, to be held against.
        every = names if IN_EVERY_PANEL in names else [IN_EVERY_PANEL, *names]
        for number, name in enumerate((name for name in every if name in curves), start=1):
            look = figures.line(name) | ({"lw": 1.2} if IN_EVERY_PANEL in names else {})
            label = f"{number}  {name}{', diverged' if name in lost else ''}"
            axis.plot(*curves[name], label=label, **look)
            ends[axis].append((str(number), [float(values[-1]) for values in curves[name]]))
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(title, loc="left", fontsize=9)
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=7.5, handlelength=4.5)
    figure.canvas.draw()  # which settles how large the panels are
    for axis, labels in ends.items():
        _number_ends(axis, labels)
    figure.supxlabel("training, s", fontsize=9)
    figure.supylabel("test MSE", fontsize=9)
    figures.save(figure, path)


def _number_ends(axis: Any, ends: Sequence[tuple[str, list[float]]]) -> None:
    """Relatives share a colour: a number beside its end tells which curve is whose."""
    points, size = 72 / axis.figure.dpi, 7
    at = {label: axis.transData.transform(end) * points for label, end in ends}
    placed: list[tuple[float, float]] = []
    for label, end in sorted(ends, key=lambda each: at[each[0]][1]):
        x, y = at[label]
        near = [top for left, top in placed if abs(left - x) < 2 * size]
        height = max([y, *(top + size for top in near)])
        placed.append((x, height))
        offset = (4, height - y - size / 3)
        axis.annotate(label, end, offset, textcoords="offset points", fontsize=size)


def _curve(cells: Table, row: str, column: str) -> _Curve | None:
    """Of the first seed; None where it is not known."""
    result = cells.found.get((row, column))
    if result is None or result["times"] is None:
        return None
    curve, step_ms = result["seeds"][0]["curve"], result["times"]["step_ms"]
    if not curve or step_ms is None:  # diverged before the first point
        return None
    steps, errors = np.array(curve, float).T
    return steps * step_ms / 1e3, errors
