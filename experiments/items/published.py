"""Sine waves by LAVA and ANIL under two other protocols: the paper's code, and its text."""

from __future__ import annotations

import math
from typing import Any

import lavajax
from protocols import Protocol, Row, Scale
from tables import Table, over_seeds, section
from works import Folders, Work

TITLE = "sine waves: LAVA and ANIL by the protocols of the paper's code and text"
NAME = "published"
SHOTS = (1, 2, 10)
# The published code: 100 fixed tasks, 32 of them a step, four hidden layers and one more without a
# ReLU. Its steps of 200 epochs do not reach the paper's numbers; these are 2,000 epochs.
CODE = Protocol(
    "paper-code",
    steps=8_000,
    search_steps=2_000,
    rates=(1e-3,),
    meta_batch=32,
    validation_tasks=500,
)
# The paper's text, word by word: features end in a ReLU, tasks are fresh, the rate of 0.1 is fixed.
TEXT = Protocol("paper-text", steps=8_000, rates=(1e-3,))
_DEEP = lavajax.MLP(hidden=(64, 64, 64, 64))
_PLAIN = lavajax.MLP(linear_features=False)
LAVA, ANIL = "LAVA", "ANIL, best of 1 to 8 steps"
CODE_ROWS = (
    Row(LAVA, lavajax.Lava(_DEEP), optimizer="constant adam", paper=True),
    Row(ANIL, lavajax.Anil(_DEEP), True, optimizer="constant adam", paper=True),
)
TEXT_ROWS = (
    Row(
        "LAVA, as in the text",
        lavajax.Lava(_PLAIN, learn_inner_rate=False),
        optimizer="constant adam",
        paper=True,
    ),
    Row(
        "ANIL, as in the text",
        lavajax.Anil(_PLAIN, learn_inner_rate=False),
        optimizer="constant adam",
        paper=True,
    ),
)
# Where runs of another implementation under the protocol of the code have ended, in two seeds.
BANDS = {LAVA: (0.0005, 0.003), ANIL: (0.003, 0.03)}
APART = 0.03


def tables(scale: Scale, folders: Folders | None = None) -> dict[str, Table]:
    """The cells of each protocol, and of each range of the phase."""
    shots = SHOTS[1:2] if scale.quick else SHOTS

    def make(begin: str, protocol: Protocol, rows: tuple[Row, ...], tasks: Any) -> Table:
        columns = {f"{begin}, N = {n}": tasks(n) for n in shots}
        return Table(NAME, columns, scale.protocol if scale.quick else protocol, rows, folders)

    def fixed(phase: tuple[float, float]) -> Any:
        return lambda n: lavajax.FixedTasks(lavajax.Sine(shots=n, phase=phase))

    code = make("0 to pi", CODE, CODE_ROWS, fixed((0.0, math.pi)))
    if scale.quick:
        return {"code": code}
    return {
        "code": code,
        "code, all phases": make("-pi to pi", CODE, CODE_ROWS, fixed((-math.pi, math.pi))),
        "text": make("0 to pi", TEXT, TEXT_ROWS, lambda n: lavajax.Sine(shots=n)),
    }


def works(scale: Scale) -> list[Work]:
    """All cells."""
    return [work for table in tables(scale).values() for work in table.works()]


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    shown = {name: table for name, table in tables(scale, folders).items() if table.found}
    if not shown:
        return ""

    def show(name: str) -> str:
        return shown[name].show_errors() if name in shown else ""

    return section(
        "## The paper's own protocols",
        f"Mean squared error on {next(iter(shown.values())).protocol.test_tasks:,} unseen sine "
        f"waves, {over_seeds(CODE.seeds)}, final parameters; in brackets the LAVA paper's value. "
        f"Adam at a constant rate of 1e-3, {CODE.steps:,} steps.",
        f"`{CODE.name}`: {CODE.meta_batch} of 100 fixed tasks a step, four hidden layers and a "
        "linear one, learned inner rates; ANIL's inner steps are chosen on validation tasks. The "
        "paper does not state the range of the phase: from 0, and from -pi, as in its code."
        if "code" in shown or "code, all phases" in shown
        else "",
        show("code"),
        _within(shown["code"]) if "code" in shown else "",
        show("code, all phases"),
        f"`{TEXT.name}`: {TEXT.meta_batch} fresh tasks a step, three hidden layers that end in a "
        "ReLU, one inner step of 0.1 that is not learned:"
        if "text" in shown
        else "",
        show("text"),
        *(table.show_settings() for name, table in shown.items() if name != "text"),
        *(table.given_up() for table in shown.values()),
    )


def _within(table: Table) -> str:
    """Whether errors are where those of an earlier implementation of the protocol were."""

    def mean(name: str, shots: int) -> float | None:
        column = f"0 to pi, N = {shots}"
        return float(table.errors(name, column).mean()) if (name, column) in table.found else None

    parts = []
    for name, (low, high) in BANDS.items():
        if (found := mean(name, 10)) is not None:
            verdict = "is" if low <= found <= high else "is not"
            parts.append(f"{name} at N = 10 {verdict} between {low:g} and {high:g}")
    lava, anil = mean(LAVA, 1), mean(ANIL, 1)
    if lava is not None and anil is not None:
        verdict = "are" if abs(lava - anil) < APART * anil else "are not"
        parts.append(f"at N = 1 the two {verdict} within {100 * APART:g}% of each other")
    if not parts:
        return ""
    return f"Against an earlier implementation of the same protocol: {'; '.join(parts)}."
