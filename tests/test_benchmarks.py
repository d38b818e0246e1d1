"""The benchmarks run, and what they divide by exists."""

from __future__ import annotations

from pathlib import Path

import lavajax

ROOT = Path(__file__).resolve().parents[1]


def test_step_cost_times_every_method_it_is_given(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_cost

    model = lavajax.MLP(hidden=(4,))
    methods = {"anil": lavajax.Anil(model=model), "lava head": lavajax.Lava(model=model)}
    seconds = step_cost.measure(methods, shots=2, meta_batch=2, repeats=2, steps=3)
    assert seconds.keys() == methods.keys()
    assert all(value > 0 for value in seconds.values())
    for name in step_cost.METHODS:
        reference = step_cost.REFERENCE.get(name.split(",")[0])
        assert reference is None or reference in step_cost.METHODS
