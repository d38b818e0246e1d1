"""The benchmarks run, and what they divide by exists."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax

TINY = lavajax.MLP(hidden=(4,))
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def test_step_cost_compares_what_it_is_given():
    import step_cost

    methods = {"ANIL": lavajax.Anil(TINY), "supervised": step_cost.Supervised(TINY)}
    seconds = step_cost.measure(methods, shots=2, meta_batch=2, repeats=2, steps=3)
    assert seconds.keys() == methods.keys()
    assert all(value > 0 for value in seconds.values())
    assert step_cost.compare(seconds, 2, 2) == []
    made_up = {"LAVA, head": 3.0, "ANIL": 2.0, "supervised": 1.0}
    found = {(r.against, r.value, r.target) for r in step_cost.compare(made_up, 50, 10)}
    assert found == {("ANIL", 1.5, 1.25), ("supervised", 3.0, 1.25)}
    named = {name for pair in step_cost.PAIRS for name in pair[:2]}
    assert named == step_cost.METHODS.keys()


def test_without_adaptation_the_loss_is_that_of_all_points():
    import step_cost

    task = lavajax.Sine(shots=2, queries=3).sample(jax.random.key(0))
    method = step_cost.Supervised(TINY)
    params = method.init(jax.random.key(1), task.support.x, task.support.y)
    x, y = (jnp.concatenate([getattr(p, n) for p in (task.support, task.query)]) for n in "xy")
    mean = method.predict(params, method.adapt(params, task.support), x).mean
    expected = jnp.mean((mean - y) ** 2)
    assert float(method.loss(params, task, None)) == pytest.approx(float(expected), rel=1e-6)


def test_ratios_above_their_target_are_marked(tmp_path, capsys):
    import ratios

    rows = [
        ratios.Ratio("a", "b", "N=1", 1.2, 1.1),
        ratios.Ratio("c", "d", "N=1", 1.0, 1.1),
        ratios.Ratio("e", "f", "N=1", 9.0),
    ]
    ratios.publish("some", rows, {"more": 1}, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert [line.endswith("missed") for line in lines[1:]] == [True, False, False]
    record = json.loads((tmp_path / "some.json").read_text())
    assert record["ratios"][0]["value"] == 1.2
    assert record["more"] == 1
    assert (tmp_path / "some.png").read_bytes().startswith(b"\x89PNG")


def test_calls_are_timed_against_empty_ones():
    import calls

    for found in (calls.adapt(2, 1, TINY), calls.online(2, 1, TINY)):
        assert "empty" in found
        assert any(name in calls.TIMED for name in found)
        assert all(value > 0 for value in found.values())
    slow, fast = calls.import_seconds(("import re; sum(range(10**7))", "import re"), 1)
    assert slow > fast + 0.02


def test_batches_and_seeds_are_timed():
    import batches

    method = lavajax.Lava(TINY)
    per_task = batches.measure_batches(method, (1, 2), steps=2, repeats=2)
    assert per_task.keys() == {1, 2}
    assert all(value > 0 for value in per_task.values())
    assert min(batches.measure_seeds(method, 2, steps=2, repeats=1)) > 0


def test_time_to_accuracy_trains_and_scores_a_seed():
    import time_to_accuracy

    protocol = time_to_accuracy.PROTOCOL | {"steps": 2, "warmup": 1}
    run = time_to_accuracy.train_once(**protocol, seed=0, tasks=2, split="validation")
    assert run["mse"] > 0
    assert run["ended"] > run["import_seconds"] >= 0
    assert run["compile_seconds"] > 0
    assert not set(time_to_accuracy.SEEDS) & set(time_to_accuracy.SEARCH_SEEDS)


def test_inner_steps_times_every_method_and_draws_them(monkeypatch, tmp_path):
    import inner_steps

    tiny = lavajax.MLP(hidden=(4,))
    families = {
        "ANIL": (lambda s: lavajax.Anil(tiny, inner_steps=s), 1),
        "LAVA": (lambda s: lavajax.Lava(tiny, inner_steps=s), 1),
        "LAVA, literal": (lambda s: lavajax.Lava(tiny, inner_steps=s, solver="naive"), 1),
    }
    assert families.keys() < inner_steps.FAMILIES.keys()
    monkeypatch.setattr(inner_steps, "FAMILIES", families)
    monkeypatch.setattr(sys, "argv", ["inner_steps.py", "--quick", "--out", str(tmp_path)])
    assert inner_steps.main() == 0
    rows = json.loads((tmp_path / "inner_steps.json").read_text())["cells"]
    assert [(r["method"], r["shots"], r["inner_steps"]) for r in rows] == [
        (name, 2, 1) for name in families
    ]
    assert all(row[name] > 0 for row in rows for name in inner_steps.TIMES)
    assert (tmp_path / "inner_steps.png").read_bytes().startswith(b"\x89PNG")
    assert "LAVA, literal" in (tmp_path / "inner_steps.txt").read_text()
    assert len(inner_steps.methods(8)) == 3


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("", None),
        ("--some 2", "runs/benchmarks_part"),
        ("--some 2 --quick", "runs/benchmarks_part"),
        ("--quick", "runs/benchmarks_quick"),
        ("--out here --some 2", "here"),
        ("--some 2 --out here", "here"),
    ],
)
def test_a_part_of_a_benchmark_does_not_replace_the_whole(given, where):
    import measuring

    parser = measuring.options("Some.")
    parser.add_argument("--some", type=int, nargs="+", action=measuring.Part)
    out = parser.parse_args(given.split()).out
    assert str(out) == (where or str(measuring.RESULTS))


def test_the_check_of_an_accelerator_sees_what_is_off(capsys):
    """The CPU is its own accelerator here: float32 against float64."""
    import gpu_check

    cpu = jax.devices()[0]
    model = lavajax.MLP(hidden=(4,))
    tiny = {"anil": lavajax.Anil(model=model)}
    gaps = gpu_check.compare(tiny["anil"], cpu)
    drawing = gpu_check.compare(lavajax.MetaMix(model=model), cpu)
    assert max(max(parts.values()) for parts in drawing.values()) < 1e-4
    for name in ("cpu", "highest", "default"):
        for part in ("adapt", "gradient"):
            assert 0 < gaps[name][part] < 1e-4
    assert not gpu_check.is_off(gaps)
    for wrong in (1e-2, float("nan")):
        assert gpu_check.is_off(gaps | {"highest": {"adapt": 1e-7, "gradient": wrong}})
    assert gpu_check.print_comparison(tiny, cpu, seconds=0.0) == ([], ["anil"])


def test_the_check_of_an_accelerator_looks_at_each_array():
    import gpu_check

    assert gpu_check.distance([jnp.array([3.0, 4.0])], [jnp.array([3.0, 0.0])]) == 4 / 3
    one = {"large": np.array([3.0, 4.0]), "small": np.array([0.1]), "zero": np.zeros(2)}
    assert gpu_check.worst_leaf(one, one) == 0
    assert gpu_check.worst_leaf(one | {"small": np.array([0.2])}, one) == pytest.approx(1.0)
    off = gpu_check.worst_leaf(one | {"zero": np.array([0.001, 0.0])}, one)
    assert off == pytest.approx(0.2, rel=1e-3)  # of a thousandth of 5

    value = {"adapt": (np.ones(3), np.full(3, np.nan)), "gradient": (one, one)}
    exact = value | {"adapt": (np.ones(3), np.ones(3))}
    programs = {
        name: mock.Mock(run=lambda found=found: found)
        for name, found in (("exact", exact), ("highest", value))
    }
    gaps = gpu_check.gaps_of(programs)
    assert np.isnan(gaps["highest"]["adapt"])  # a variance may be what is not a number
    assert gaps["highest"]["gradient"] == 0


@dataclasses.dataclass(frozen=True)
class Untraceable(lavajax.Anil):
    def adapt(self, *_, **__):
        raise NotImplementedError("no such solver\nhere")


@dataclasses.dataclass(frozen=True)
class Failing(lavajax.Anil):
    def adapt(self, params, support, **options):
        def fail(x):
            raise MemoryError("too large")

        block = super().adapt(params, support, **options)
        jax.debug.callback(fail, support.x)
        return block


def test_a_method_that_fails_on_an_accelerator_is_named_and_the_rest_goes_on(monkeypatch, capsys):
    import gpu_check

    methods = {"untraceable": Untraceable(TINY), "failing": Failing(TINY)}
    monkeypatch.setattr(gpu_check, "METHODS", methods)
    monkeypatch.setattr(gpu_check, "SIZES", (2,))
    monkeypatch.setattr(gpu_check, "accelerators", jax.devices)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--quick"])
    assert gpu_check.main() == 1
    out = capsys.readouterr().out
    assert "untraceable       FAILED: NotImplementedError: no such solver\n" in out
    assert "failing           FAILED: " in out
    assert "not as they should be: untraceable, failing" in out
    assert out.splitlines()[-3].split()[0] == "2"  # the time of a step of two tasks


@pytest.mark.parametrize(
    ("named", "device_file", "says"),
    [
        (None, False, None),
        ("cpu", True, None),
        (None, True, "is jax[cuda] installed?"),
        ("cuda,cpu", False, "finds the CPU alone of JAX_PLATFORMS=cuda,cpu"),
        ("cuda", False, "must name the CPU too, to compare with: cuda,cpu"),
    ],
)
def test_without_an_accelerator_the_check_says_so(
    monkeypatch, tmp_path, capsys, named, device_file, says
):
    import gpu_check

    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    monkeypatch.setattr(gpu_check, "accelerators", list)
    monkeypatch.setattr(gpu_check, "NVIDIA", tmp_path if device_file else tmp_path / "none")
    if named is None:
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    else:
        monkeypatch.setenv("JAX_PLATFORMS", named)
    if says is None:
        assert gpu_check.main() == 0
        assert "no accelerator" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit) as stop:
        gpu_check.main()
    assert stop.value.code == 2
    assert says in capsys.readouterr().err


def test_the_check_needs_no_more_than_jax_flax_optax_and_chex():
    """A lent machine may have no extras; what Flax itself needs it has."""
    extras = "tyro docstring_parser matplotlib tensorboardX tensorflow_datasets array_record dill"
    extras += " h5py pandas pyarrow PIL sklearn diffrax flatbuffers torch higher pytest"
    script = (
        f"import sys; sys.modules.update(dict.fromkeys({extras.split()})); "
        f"sys.path.insert(0, {str(BENCHMARKS)!r}); import gpu_check; sys.exit(gpu_check.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no accelerator" in done.stdout


def test_the_check_knows_every_method():
    import gpu_check
    from lavajax.config import classes

    every = {name for name, cls in classes().items() if hasattr(cls, "adapt")}
    assert {type(method).__name__ for method in gpu_check.METHODS.values()} == every


def test_more_inner_steps_are_no_larger_a_program():
    """They are scanned: what compiles is as large for 50 as for 2."""
    import gpu_check

    source = lavajax.Sine(shots=2, queries=2)
    task = source.sample(jax.random.key(0))
    checked = 0
    for name, method in gpu_check.METHODS.items():
        if not isinstance(getattr(method, "inner_steps", None), int):
            continue

        def size(steps, method=method):
            method = dataclasses.replace(method, inner_steps=steps)
            params = jax.eval_shape(
                lambda: method.init(jax.random.key(0), task.support.x, task.support.y)
            )
            return len(
                str(
                    jax.make_jaxpr(
                        lambda p, key: jax.grad(
                            lambda learned: method.loss(p.replace_learned(learned), task, key)
                        )(p.learned)
                    )(params, jax.random.key(1))
                )
            )

        assert size(50) < 1.1 * size(2), name
        checked += 1
    assert checked > 10


def test_compile_time_measures_tracing_and_compiling():
    import compile_time

    assert min(compile_time.measure(lavajax.Anil(TINY), meta_batch=2)) > 0


def test_rivals_are_timed_beside_ours_and_left_out_by_name(monkeypatch):
    import rivals

    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    losses, skipped = rivals.torch_losses(compiling=False)
    assert losses == {}
    assert [line.split(":")[0] for line in skipped] == [
        rivals.CLOSED,
        rivals.COMPILED,
        rivals.FULL,
        rivals.LOOP,
    ]
    rows = rivals.measure(rivals.QUICK, 2, torch=False)
    assert [row["name"] for row in rows] == [rivals.OURS, rivals.NAIVE, rivals.PLAIN]
    assert all(row["ms"] > 0 for row in rows)
    assert set(rivals.check({}, rivals.QUICK)) == {rivals.PLAIN}
    one, two = ([row | {"meta_batch": b} for row in rows[:2]] for b in (2, 4))
    for row, ms in zip([*one, *two], (2.0, 9.0, 10.0, 5.0), strict=True):
        row["ms"] = ms
    found = rivals.with_ratios([*one, *two])
    assert [row.get("ratio") for row in found] == [None, 4.5, None, 0.5]
    assert [row.get("target") for row in found] == [None, 4, None, 4]
    assert "vmap(jax.hessian)" in rivals.table(found)


@pytest.mark.parametrize("skipped", [[], ["PyTorch, closed form, torch.compile: not asked for"]])
def test_published_rivals_are_not_replaced_by_fewer(monkeypatch, tmp_path, skipped):
    import measuring
    import rivals

    published, part = tmp_path / "published", tmp_path / "part"
    monkeypatch.setattr(measuring, "RESULTS", published)
    monkeypatch.setattr(measuring, "PART", part)
    monkeypatch.setattr(sys, "argv", ["rivals.py"])
    rows = [{"name": rivals.OURS, "meta_batch": 2, "ms": 1.0, "threads": None}]
    monkeypatch.setattr(rivals, "torch_losses", lambda compiling: ({"a": None}, skipped))
    monkeypatch.setattr(rivals, "check", lambda *_: {"a": 1e-6})
    monkeypatch.setattr(rivals, "measure", lambda *_, **__: rows)
    rivals.main()
    assert (published / "rivals.json").exists() == (not skipped)
    assert (part / "rivals.json").exists() == bool(skipped)


def test_rivals_are_the_same_step():
    pytest.importorskip("torch")
    import rivals

    losses, _ = rivals.torch_losses(compiling=False)
    assert {rivals.CLOSED, rivals.FULL} <= losses.keys()
    assert rivals.check(losses, rivals.QUICK).keys() == losses.keys()
    rows = rivals.measure(rivals.QUICK, 2)
    assert {rivals.OURS, rivals.CLOSED, rivals.FULL} <= {row["name"] for row in rows}

    def wrong(network, x, y, shots):
        return losses[rivals.CLOSED](network, x, 1.01 * y, shots)

    with pytest.raises(AssertionError, match="not the same step"):
        rivals.check({"wrong": wrong}, rivals.QUICK)


def test_memory_of_all_weights_is_less_than_a_copy_for_each_task(tmp_path):
    """Of 16 tasks, in adaptation (beside its result) and in training; more with hidden layers."""
    import memory

    row = memory.measure(256, 16, lavajax.Sine(shots=3, queries=4))
    for part in ("adaptation", "training step"):
        for each in (part, f"{part}, at adapted"):
            assert 0 < row[each] < row["copies of the weights"] < row[f"{part}, layers hidden"]
    assert (row["width"], row["points"], row["tasks"]) == (256, 3, 16)
    rows = [dict.fromkeys(row, 10.0 * w**2) | {"width": w, "points": w**4} for w in (2, 4)]
    assert memory.exponents(rows)["training step"] == pytest.approx(2)
    assert memory.exponents(rows, "points")["training step"] == pytest.approx(0.5)
    assert "MB" in memory.table(rows)
    memory.draw(rows, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_head_scaling_measures_every_sweep_and_stops_where_memory_ends(tmp_path):
    import head_scaling

    settings = dataclasses.replace(head_scaling.QUICK, sizes=(2, 8), large=8, middle=2, memory=1)
    found = head_scaling.measure(settings)
    sweeps = {"points", "features", "more points", "more features", "few points"}
    assert found["powers"].keys() == sweeps
    ((p, needed, time),) = found["literal"]
    assert p == settings.literal[0]
    assert needed > 1
    assert time is None
    needed, time = head_scaling.literal_seconds(3, 4, 2, repeats=1, memory=2**30)
    assert time > 0
    found["literal"] = [(4, needed, time), (8, needed, 2 * time)]
    found["powers"] = head_scaling.powers(found, settings)
    assert found["powers"]["literal"] == pytest.approx(1)
    head_scaling.draw(found, settings, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_windows_are_prepared_where_their_file_is_given(monkeypatch, capsys):
    import windows

    monkeypatch.setattr(sys, "argv", ["windows.py", "--quick"])
    assert windows.main() == 0
    assert "no --data" in capsys.readouterr().out
    assert windows.drawing(lavajax.Sine(shots=2, queries=2), 2) > 0


def test_profile_takes_a_step_apart():
    import profile_step

    row = profile_step.measure(profile_step.QUICK, 2)
    assert row["parts_ms"].keys() == profile_step.PARTS.keys()
    assert row["parts_ms"]["sampling"] > 0
    assert row["fraction"] > 0
    # 1-8-8: 72 weights, of which the first 8 send nothing back
    assert profile_step.layer_flops(lavajax.MLP((8,)), 10) == 2 * 10 * (3 * 72 - 8)
    assert "GFLOP/s" in profile_step.table([row])


def test_a_quick_run_leaves_what_was_measured_alone():
    import measuring

    parse = measuring.options("Something.").parse_args
    assert parse([]).out == measuring.RESULTS
    assert parse(["--quick"]).out != measuring.RESULTS
    for line in (["--quick", "--out=here"], ["--out=here", "--quick"]):
        assert (parse(line).quick, str(parse(line).out)) == (True, "here")
