"""experiments/run.py, called as a user calls it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lavajax
from lavajax.config import from_json

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--hidden", "8", "8", "--steps=20", "--test-tasks=50", "--meta-batch=2"]


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "run.py"), *args],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )


def test_default_task_prints_a_table_and_writes_its_files(tmp_path):
    done = run("--task=sine", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 20/20" in done.stdout
    assert "the paper's LAVA" in done.stdout
    assert "predict 0" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert from_json(config["method"]).model.hidden == (8, 8)
    assert config["run"]["steps"] == 20
    results = json.loads((folder / "results.json").read_text())
    (seed,) = results["seeds"]
    assert seed["interval"][0] < seed["mean"] < seed["interval"][1]
    assert results["paper"] == 0.0011
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 20
    assert lines[-1]["loss"] > 0


def test_options_of_task_method_subspace_and_seeds_reach_the_run(tmp_path):
    done = run(
        *("--task=sine", "--method=lava", "--subspace=context", "--context-size=3", "--shots=2"),
        *("--inner-steps=converged", "--seeds=2", "--out=here", *TINY),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    config = json.loads((tmp_path / "here" / "config.json").read_text())
    method, task = from_json(config["method"]), from_json(config["task"])
    assert method.subspace.size == 3
    assert method.inner_steps == "converged"
    assert task.shots == 2
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert [s["seed"] for s in results["seeds"]] == [0, 1]
    assert results["seeds"][0]["mean"] != results["seeds"][1]["mean"]
    assert "mean of 2 seeds" in done.stdout


def test_a_noisy_fixed_system_is_trained_on_and_scored_elsewhere(tmp_path):
    """And --eval starts from the task as it was trained on."""
    done = run(
        *(
            "--task=mass-spring",
            "--label-noise=0.5",
            "--fixed-tasks=5",
            "--fixed-seed=3",
            "--out=here",
            *TINY,
        ),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    task = from_json(json.loads((tmp_path / "here" / "config.json").read_text())["task"])
    assert task == lavajax.NoisyLabels(lavajax.FixedTasks(lavajax.MassSpring(), 5, 3), 0.5)
    scores = []
    for args in ([], ["--label-noise=0"], ["--task=mass-spring-shifted", "--shots=3"]):
        done = run("--eval=here", "--test-tasks=50", *args, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        scores.append(done.stdout)
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert f"{results['seeds'][0]['mean']:.3g}" in scores[0]
    assert len(set(scores)) == 3


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--shotz=2"], "--shotz is not an option .* did you mean '--shots'"),
        (["--inner-rate=-1"], r"Lava\.inner_rate .* at least 0, got -1"),
        (["--inner-steps=0"], r"Lava\.inner_steps must be an integer of at least 1, got 0"),
        (["--method=maml", "--epsilon=1"], "--epsilon is not an option"),
        (["--method=anil", "--subspace=full"], "anil always adapts head"),
        (["--method=anil", "--subspace=full"], "choice for lava, lava-converged, .*meta-sgd"),
        (["--method=cavia", "--subspace=full"], "Cavia.subspace must be a Context"),
        (["--solver=dual", "--curvature=hessian"], "form of the system for curvature='ggn'"),
        (["--steps=0"], "--steps must be at least 1, got 0"),
        (["--warmup=50", "--steps=20"], "warmup must be at least 0 and below steps"),
        (["--optimizer=sgd", "--warmup=5"], "--warmup is for --optimizer=adam"),
        (["--task=air-quality", "--data=none.zip"], "none.zip, which is not there"),
        (["--task=sinus"], "invalid choice 'sinus'"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_computed(args, reason, monkeypatch):
    """In this process: what a start of Python and JAX costs is not needed ten times."""
    import re

    monkeypatch.setattr(sys, "argv", ["run.py", *args])
    import run as script

    def compute(*_):
        raise AssertionError("the run has started")

    monkeypatch.setattr(script, "execute", compute)
    monkeypatch.setattr(script.RunFolder, "new", compute)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        code, text = call(script)
    assert code == 2
    assert re.search(reason, " ".join(text.split())), text


def call(script) -> tuple[int, str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = script.main()
        except SystemExit as stop:  # the command-line parser's own way to refuse
            code = stop.code
    return code, out.getvalue()


def test_subspace_is_a_choice_for_every_method_that_leaves_it_open(monkeypatch):
    import options

    vfml = options.parse(["--method=vfml", "--subspace=head", "--variant=storm"]).method
    assert (type(vfml.subspace).__name__, vfml.variant) == ("Head", "storm")
    assert vfml.first_order is None
    llama = options.parse(["--method=llama", "--subspace=context", "--context-size=3"]).method
    assert llama.subspace.size == 3
    # what a method already adapts keeps the method's own settings
    cavia = options.parse(["--method=cavia", "--subspace=context"]).method
    assert cavia.subspace.start == "zeros"


def test_outer_optimizer_is_a_choice(monkeypatch):
    import jax.numpy as jnp

    import options
    import run as script

    chosen = options.parse(["--method=vr-maml-released", "--optimizer=sgd", "--outer-rate=0.01"])
    tx = script.make_optimizer(chosen.run)
    updates, _ = tx.update(jnp.array([3000.0]), tx.init(jnp.zeros(1)))
    assert updates[0] == pytest.approx(-30.0)  # neither clipped nor warmed up
    adam = script.make_optimizer(options.parse(["--outer-rate=0.01", "--warmup=0"]).run)
    updates, _ = adam.update(jnp.array([3000.0]), adam.init(jnp.zeros(1)))
    assert updates[0] == pytest.approx(-0.01, rel=1e-4)


def test_folder_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "results.json").write_text("mine")
    done = run("--out=kept", *TINY, cwd=tmp_path)
    assert done.returncode == 2
    assert "kept is in use" in done.stdout
    assert (tmp_path / "kept" / "results.json").read_text() == "mine"


def test_help_lists_the_options_of_the_choice_alone(tmp_path):
    done = run("--method=cavia", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--context-size" in done.stdout
    assert "--shots" in done.stdout
    assert "--epsilon" not in done.stdout
