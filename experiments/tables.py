"""Tables of methods by tasks, as text for RESULTS.md."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np

import lavajax
from comparison import COVERAGES, Job, further, spelt
from gaussian_process import TEST_TASKS
from lavajax.config import to_json
from protocols import EXTENDED_ROWS, PAPER_ROWS, Protocol, Row
from reference import paper_value, reference_errors
from works import Folders, Work

OURS = "LAVA, the paper's setting"


@dataclasses.dataclass(frozen=True)
class Table:
    """Cells of rows by columns.

    Attributes:
        item: the table.
        columns: tasks by title.
        protocol: of training and scoring.
        rows: methods.
        folders: where the results are.
        clips: bounds on the norm of the meta-gradient to choose from, by column, where they are not
            the protocol's.
    """

    item: str
    columns: dict[str, Any]
    protocol: Protocol
    rows: tuple[Row, ...]
    folders: Folders | None = None
    clips: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    def job(self, row: Row, column: str) -> Job:
        """A cell."""
        clips = self.clips.get(column, self.protocol.clips)
        seeds = min(row.seeds or self.protocol.seeds, self.protocol.seeds)
        protocol = dataclasses.replace(self.protocol, clips=clips, seeds=seeds)
        return Job(self.item, row, column.replace(" = ", "="), self.columns[column], protocol)

    def works(self, timed: Sequence[str] = ()) -> list[Work]:
        """All cells, and times of the columns ``timed``."""
        jobs = [self.job(row, column) for column in self.columns for row in self.rows]
        return [job.work for job in jobs] + [
            self.job(row, column).time_work for column in timed for row in self.rows
        ]

    @cached_property
    def found(self) -> dict[tuple[str, str], Any]:
        """The cells that are there, by row and column."""
        assert self.folders is not None
        found = {}
        for row in self.rows:
            for column in self.columns:
                if (result := self.job(row, column).result(self.folders)) is not None:
                    found[row.name, column] = result
        return found

    @property
    def metric(self) -> str:
        """``mse``, or ``accuracy``, of which more is better."""
        return self.rows[0].method.point_loss.metric_name

    def errors(self, name: str, column: str, what: str | None = None) -> np.ndarray:
        """The metric, or something else, of all seeds; NaN where one has diverged."""
        seeds, what = self.found[name, column]["seeds"], what or self.metric
        return np.array([np.nan if s[self.metric] is None else s[what] for s in seeds])

    def _spread(self, name: str, column: str, what: str | None = None) -> str:
        """Mean and standard deviation over seeds, or how many of them have none, and why."""
        lost = [s for s in self.found[name, column]["seeds"] if s[self.metric] is None]
        trained = bool(lost) and not any(s.get("diverged", True) for s in lost)
        return spread(self.errors(name, column, what), "not finite" if trained else "diverged")

    def references(self, test_tasks: int) -> dict[str, Work]:
        """Errors of predictors that need no meta-learning, by column."""
        return {
            column: Work(
                self.item,
                f"references {column}",
                {"task": to_json(task), "test_tasks": test_tasks},
                partial(_compute_references, task, test_tasks),
                seconds=20.0,
                data=getattr(task, "data", None),
            )
            for column, task in self.columns.items()
        }

    def show_references(self, test_tasks: int) -> str:
        """Rows to stand below ``show_errors``; "" where there are none."""
        assert self.folders is not None
        works = self.references(test_tasks)
        errors = [works[column].result(self.folders) or {} for column in self.columns]
        return "\n".join(
            _line([name, *(f"{each[name]:.3g}" if name in each else "" for each in errors)])
            for name in dict.fromkeys(name for each in errors for name in each)
        )

    def show_errors(self, *, what: str | None = None, timed: str | None = None) -> str:
        """Mean and standard deviation over seeds, and the paper's value in brackets.

        Args:
            what: of every seed; the metric if not given.
            timed: the column whose times stand in two more columns.
        """

        def show(row: Row, column: str) -> str:
            value = paper_value(self.columns[column], row.method)
            beside = "" if value is None or not row.paper or what is not None else f" ({value:g})"
            there = (row.name, column) in self.found
            return (self._spread(row.name, column, what) if there else "") + beside

        if timed is None:
            return self.show("method", show)
        times = {"ms a step": "step_ms", "µs a task": "task_us"}

        def show_time(row: Row, column: str) -> str:
            known = self.found.get((row.name, timed), {}).get("times") or {}
            return f"{known[times[column]]:.3g}" if known.get(times[column]) is not None else ""

        return self.show("method", show, times, show_time)

    def show_settings(self) -> str:
        """What was chosen."""

        def show(row: Row, column: str) -> str:
            if (row.name, column) not in self.found:
                return ""
            validation = self.found[row.name, column].get("validation", {})
            if validation and all(value is None for value in validation.values()):
                return "none trained"
            chosen = self.found[row.name, column]["chosen"]
            steps = f"S = {chosen['inner_steps']}, " if row.searched else ""
            clip = f", clip {chosen['clip']:g}" if "clip" in chosen else ""
            return f"{steps}{further(row, chosen)}rate {chosen['outer_rate']:g}{clip}"

        return self.show("chosen", show)

    def show_densities(self) -> str:
        """Scores of the predicted densities, of the methods with error bars."""

        def show(row: Row, column: str) -> str:
            seeds = self.found.get((row.name, column), {}).get("seeds", [])
            known = [s for s in seeds if s.get("coverage") is not None]

            if not known:
                return ""

            def mean(name: str, unit: float = 1.0) -> str:
                values = [s[name] for s in known if s.get(name) is not None]
                if 0 < len(values) < len(known):
                    return "not finite"
                return f"{unit * np.mean(values):.3g}" if values else "–"

            parts = [mean("nll"), mean("crps"), mean("sharpness")]
            parts += [" / ".join(mean(name, 100) for name in COVERAGES)]
            lost = len(seeds) - len(known)
            parts += [f"{lost} of {len(seeds)} seeds diverged"] if lost else []
            return ", ".join(parts)

        head = "NLL, CRPS, mean σ, % inside 95 / 90 / 50% intervals (–: not known, or not finite)"
        return self.show(head, show)

    def show(
        self,
        corner: str,
        show: Callable[[Row, str], str],
        more: Sequence[str] | dict[str, Any] = (),
        show_more: Callable[[Row, str], str] | None = None,
    ) -> str:
        """Rows that have anything to show; "" where none has."""
        lines = []
        for row in self.rows:
            cells = [show(row, column) for column in self.columns]
            if any((row.name, column) in self.found for column in self.columns) and any(cells):
                cells += [show_more(row, column) for column in more] if show_more else []
                lines.append(f"| {row.name} | {' | '.join(cells)} |")
        head = [corner, *self.columns, *more]
        return "\n".join([_line(head), "| --- " * len(head) + "|", *lines]) if lines else ""

    def describe(self, contexts: str = "4 numbers and a learned start") -> str:
        """The protocol in words, as far as the rows that are there are concerned."""
        protocol, names = self.protocol, {name for name, _ in self.found}
        rows = [row for row in self.rows if row.name in names]
        kinds = [type(getattr(row.method, "subspace", None)) for row in rows if row.searched]
        grids = []
        if any(kind is not lavajax.Full for kind in kinds):
            grids.append(listed(protocol.inner_steps))
        if lavajax.Full in kinds:
            grids.append(f"{listed(protocol.inner_steps_full)} where all weights adapt")
        steps = " and, where a method has them, the inner steps are" if grids else " is"
        of_steps = f" and S of {', or '.join(grids)}" if grids else ""
        context = any(
            isinstance(getattr(r.method, "subspace", None), lavajax.Context) for r in rows
        )
        return (
            f"Protocol `{protocol.name}`: {protocol.steps:,} outer steps of {protocol.meta_batch} "
            f"fresh tasks, final parameters; for each cell the outer rate{steps} chosen on "
            f"{protocol.validation_tasks:,} validation tasks after {protocol.search_steps:,} steps "
            f"of one seed, from rates {listed(protocol.rates)}{of_steps}. Entries are means over "
            f"{protocol.test_tasks:,} unseen tasks, {over_seeds(protocol.seeds)}."
            + (f" Contexts have {contexts}." if context else "")
        )

    def compare(self) -> str:
        """LAVA against the methods that the paper compares it with, and the best of it against all.

        Means and standard deviations over seeds; a ratio of errors above 1 says that LAVA is lower,
        a difference of accuracies below 0 that it is higher. The best are those of the test errors.
        Methods of which a seed has no finite error are left out, and named, and so are rows with a
        setting chosen by hand.
        """
        papers = {row.name for row in self.rows if row.paper}
        by_hand = {row.name for row in self.rows if row.by_hand}
        lines = []
        for column in self.columns:
            there = [row.name for row in self.rows if (row.name, column) in self.found]
            errors = {n: self.errors(n, column) for n in there if n not in by_hand}
            lost = [name for name, values in errors.items() if np.isnan(values).any()]
            means = {n: float(values.mean()) for n, values in errors.items() if n not in lost}
            lava = {name: mean for name, mean in means.items() if name.startswith("LAVA")}
            others = {name: mean for name, mean in means.items() if name not in lava}
            rivals = {name: mean for name, mean in others.items() if name in papers}

            def told(name: str, own: str, errors: dict[str, np.ndarray] = errors) -> str:
                other, ours = errors[name].mean(), errors[own].mean()
                apart = f"{other / ours:.3g} times as much"
                if self.metric == "accuracy":
                    apart = f"{100 * (other - ours):+.2g} percentage points"
                if _is_within_spread(errors[name], errors[own]):
                    apart += ", within the spread over seeds"
                return f"{spread(errors[name])} ({name}), {apart}"

            parts = []
            if OURS in lava and rivals:
                parts.append(
                    f"LAVA in the paper's setting {spread(errors[OURS])}, the best of the methods "
                    f"that the paper compares it with {told(self._best(rivals), OURS)}"
                )
            if lava and len(others) > len(rivals):
                best = self._best(lava)
                parts.append(
                    f"the best form of LAVA {spread(errors[best])} ({best}), the best of the "
                    f"other rows {told(self._best(others), best)}"
                )
            if parts and lost:
                parts.append(f"left out, for seeds that are lost: {in_a_row(lost)}")
            if parts and (chosen := [name for name in there if name in by_hand]):
                parts.append(f"left out, as chosen by hand: {' and '.join(chosen)}")
            if parts:
                lines.append(f"- {column}: {'; '.join(parts)}.")
        if not lines:
            return ""
        return "\n".join(["The best are those of the errors above, on test tasks:", "", *lines])

    def sampling(self) -> str:
        """The standard error over test tasks of each column's best row, where any cells have it.

        The spread over seeds does not show it: all seeds are scored on the same tasks. It is that
        of independent tasks.
        """
        parts, unknown = [], []
        for column in self.columns:
            errors = {name: self.errors(name, at) for name, at in self.found if at == column}
            means = {n: float(each.mean()) for n, each in errors.items() if np.isfinite(each).all()}
            if not means:
                continue
            best = self._best(means)
            seeds = self.found[best, column]["seeds"]
            if known := [s["standard_error"] for s in seeds if "standard_error" in s]:
                parts.append(f"{np.median(known):.1g} at {column} ({best})")
            else:  # a cell of an earlier version
                unknown.append(f"not known at {column} ({best})")
        if not parts:
            return ""
        parts += unknown
        return (
            "± is the spread over seeds alone: all rows and seeds are scored on the same test "
            "tasks. The standard error of a mean over these tasks, for each column's best row: "
            f"{'; '.join(parts)}."
        )

    def _best(self, means: dict[str, float]) -> str:
        pick = max if self.metric == "accuracy" else min
        return pick(means, key=lambda name: means[name])

    def exceptions(self) -> str:
        """The rows for which the protocol is another."""
        parts = []
        for row in self.rows:
            if not any((row.name, column) in self.found for column in self.columns):
                continue
            if row.optimizer == "sgd":
                parts.append(f"{row.name} is trained by plain SGD")
            if row.rates is not None:
                parts.append(f"{row.name} has outer rates of {listed(row.rates)}")
            if row.also:
                name, values = row.also
                parts.append(f"{row.name} has {spelt(name)}s of {listed(values)}")
            if row.seeds is not None:
                parts.append(f"{row.name} has {row.seeds} seeds")
            own_steps = hasattr(row.method, "inner_steps") and not row.name.startswith("LAVA")
            if own_steps and not row.searched:
                parts.append(f"{row.name} has S = {row.method.inner_steps}")
        return f"Not chosen, or from another grid: {'; '.join(parts)}." if parts else ""

    def machine(self, column: str) -> str:
        """Where the times of a column were taken."""
        times = [r["times"] for (_, c), r in self.found.items() if c == column and r["times"]]
        return " and ".join(sorted({each["machine"] for each in times}))

    def single_step(self) -> str:
        """The errors of the search at one inner step, beside the paper's."""

        def show(row: Row, column: str) -> str:
            if not row.searched:
                return ""
            searched = self.found.get((row.name, column), {}).get("validation", {})
            errors = [v for k, v in searched.items() if k.startswith("S=1,") and v is not None]
            value = paper_value(self.columns[column], row.method) if row.paper else None
            return f"{min(errors):.3g}{'' if value is None else f' ({value:g})'}" if errors else ""

        return self.show("S = 1", show)

    def given_up(self) -> str:
        """The cells whose first choice diverged in training."""
        cells = [
            f"{name} at {column} ({' and '.join(map(_plain, result['given_up']))})"
            for (name, column), result in self.found.items()
            if result.get("given_up")
        ]
        if not cells:
            return ""
        return (
            "Where a seed diverged in training, the next best candidate took the place of: "
            f"{in_a_row(cells)}."
        )

    def at_the_edge(self) -> str:
        """Where the most inner steps of the grid were chosen, and more might do better."""
        ends = []
        for row in self.rows:
            if not row.searched:
                continue
            most = max(each.method.inner_steps for each in row.candidates(self.protocol))
            columns = [
                column
                for column in self.columns
                if (row.name, column) in self.found
                and self.found[row.name, column]["chosen"]["inner_steps"] == most
            ]
            if most > 1 and columns:
                ends.append(f"{row.name} at {in_a_row(columns, ' and ')} (S = {most})")
        if not ends:
            return ""
        return "The most inner steps of the grid were chosen for " + "; ".join(ends) + "."


def _compute_references(task: Any, test_tasks: int, folders: Folders) -> dict[str, float]:
    return reference_errors(task, folders.source(task), test_tasks)


def rows_of(extended: bool) -> tuple[Row, ...]:
    """The paper's methods, and with ``extended`` the others."""
    return PAPER_ROWS + (EXTENDED_ROWS if extended else ())


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _is_within_spread(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two means over seeds are less than two standard errors of their difference apart."""
    if min(len(one), len(other)) < 2:
        return False
    error = np.sqrt(one.var(ddof=1) / len(one) + other.var(ddof=1) / len(other))
    return bool(abs(one.mean() - other.mean()) < 2 * error)


def spread(errors: np.ndarray, lost: str = "diverged") -> str:
    """Mean ± standard deviation over seeds, or how many of them are lost."""
    if np.isnan(errors).any():
        return f"{lost} in {int(np.isnan(errors).sum())} of {len(errors)} seeds"
    beside = f" ± {errors.std(ddof=1):.1g}" if len(errors) > 1 else ""
    return f"{errors.mean():.3g}{beside}"


def over_seeds(number: int) -> str:
    """What stands in a cell of so many seeds, in words."""
    return f"then mean ± standard deviation over {number} seeds" if number > 1 else "of one seed"


def process_note(test_tasks: int) -> str:
    """On how many tasks the Gaussian process among the references is scored, in words."""
    if test_tasks <= TEST_TASKS:
        return ""
    return (
        f", and which is scored on {TEST_TASKS:,} of the test tasks: its error there, relative to "
        "that of linear interpolation, stands for all"
    )


def in_a_row(names: Sequence[str], apart: str = "; ") -> str:
    """Names with commas between them, or with ``apart`` where one has a comma itself."""
    return (apart if any("," in name for name in names) else ", ").join(names)


def _plain(label: str) -> str:
    """A candidate's label without the inner steps of a method that has none."""
    return label.removeprefix("S=None, ")


def listed(values: Sequence[float]) -> str:
    """Numbers with commas."""
    return ", ".join(f"{value:g}" for value in values)


def section(*parts: str) -> str:
    """Parts that are not empty, with a line between."""
    return "\n\n".join(part for part in parts if part)
