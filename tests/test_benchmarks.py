"""The benchmarks run, and what they divide by exists."""

from __future__ import annotations

import json
import sys

import pytest

import lavajax


def test_step_cost_times_every_method_it_is_given(monkeypatch):
    import step_cost

    model = lavajax.MLP(hidden=(4,))
    methods = {"anil": lavajax.Anil(model=model), "lava head": lavajax.Lava(model=model)}
    seconds = step_cost.measure(methods, shots=2, meta_batch=2, repeats=2, steps=3)
    assert seconds.keys() == methods.keys()
    assert all(value > 0 for value in seconds.values())
    for name in step_cost.METHODS:
        reference = step_cost.REFERENCE.get(name.split(",")[0])
        assert reference is None or reference in step_cost.METHODS


def test_inner_steps_fills_every_cell_once_and_draws_them(monkeypatch, tmp_path, capsys):
    import inner_steps

    def call(*args: str) -> int:
        line = ["inner_steps.py", "--out", "cells", "--summary", "summary", "--shots", "2", *args]
        monkeypatch.setattr(sys, "argv", line)
        return inner_steps.main()

    monkeypatch.chdir(tmp_path)
    tiny = lavajax.MLP(hidden=(4,))
    families = {
        "anil": (lambda s: lavajax.Anil(tiny, inner_steps=s), 1),
        "lava": (lambda s: lavajax.Lava(tiny, inner_steps=s), 1),
        "lava naive": (lambda s: lavajax.Lava(tiny, inner_steps=s, solver="naive"), 1),
    }
    assert families.keys() < inner_steps.FAMILIES.keys()
    monkeypatch.setattr(inner_steps, "FAMILIES", families)
    assert call("--quick", "--only", "time") == 0
    assert not (tmp_path / "summary").exists()
    assert call("--quick") == 0
    record = json.loads((tmp_path / "summary" / "inner_steps.json").read_text())
    rows = record["cells"]
    assert [r["method"] for r in rows] == ["anil", "lava", "lava naive"]
    for row in rows:
        for name in ("step_ms", "latency_us", "thousand_ms", "compile_s"):
            assert row[name] > 0
        assert row["mse"][0] > 0
    # the literal route computes the same numbers
    assert rows[1]["mse"] == pytest.approx(rows[2]["mse"], rel=1e-3)
    assert (tmp_path / "summary" / "inner_steps.png").read_bytes().startswith(b"\x89PNG")
    assert "left of or below" in capsys.readouterr().out
    assert "lava naive" in (tmp_path / "summary" / "inner_steps.txt").read_text()

    def again(*_):
        raise AssertionError("a finished cell is computed again")

    monkeypatch.setattr(inner_steps, "train", again)
    monkeypatch.setattr(inner_steps, "measure", again)
    assert call("--quick") == 0
    (tmp_path / "cells" / "train-n2-anil-1.json").unlink()
    with pytest.raises(AssertionError, match="computed again"):
        call("--quick")
    monkeypatch.setattr(
        inner_steps, "QUICK", inner_steps.dataclasses.replace(inner_steps.QUICK, steps=4)
    )
    with pytest.raises(AssertionError, match="computed again"):
        call("--quick", "--only", "time")  # other settings


def test_inner_steps_says_which_points_lava_does_not_beat():
    import inner_steps

    def row(method, steps, time, mse):
        return {"shots": 2, "method": method, "inner_steps": steps, "step_ms": time, "mse": [mse]}

    rows = [row("lava", 1, 1.0, 0.1), row("anil", 1, 0.9, 0.3), row("anil", 2, 1.1, 0.05)]
    assert inner_steps.beaten(rows, 2) == []
    assert inner_steps.beaten([*rows, row("cavia", 1, 0.9, 0.09)], 2) == ["cavia S=1"]
    diverged = [row("lava", 1, 1.0, None), row("anil", 1, 0.9, 0.3)]
    assert inner_steps.beaten(diverged, 2) == ["anil S=1"]
    times = {"latency_us": 1.0, "thousand_ms": 1.0, "compile_s": 1.0}
    text = inner_steps.report([each | times for each in diverged])
    assert "diverged in 1 of 1 seeds" in text
    assert "0.3 ± 0" in text
