"""experiments/run.py, called as a user calls it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import optax
import pytest

import lavajax
from helpers import call_script
from lavajax.config import from_json

ROOT = Path(__file__).resolve().parents[1]
# As many tasks as a report takes: one compilation.
TINY = ["--hidden", "8", "8", "--steps=20", "--test-tasks=200", "--meta-batch=2"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Calls the script in this process, in an empty folder; its exit code and output."""
    monkeypatch.chdir(tmp_path)
    import run as script

    return lambda *args: call_script(script, *args)


def test_default_task_prints_a_table_and_writes_its_files(tmp_path):
    """In a process of its own, as a user starts it."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "run.py"), "--task=sine", *TINY],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 20/20" in done.stdout
    assert "the paper's LAVA" in done.stdout
    assert "predict 0" in done.stdout
    (folder,) = (tmp_path / "runs").iterdir()
    config = json.loads((folder / "config.json").read_text())
    assert from_json(config["method"]).model.hidden == (8, 8)
    assert "microbatch" not in config["run"]  # as in earlier runs, whose settings must be the same
    assert config["run"]["steps"] == 20
    results = json.loads((folder / "results.json").read_text())
    (seed,) = results["seeds"]
    assert seed["interval"][0] < seed["mean"] < seed["interval"][1]
    assert results["paper"] == 0.0011
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 20
    assert lines[-1]["loss"] > 0


def test_options_of_task_method_subspace_and_seeds_reach_the_run(run, tmp_path):
    code, text = run(
        *("--task=sine", "--method=lava", "--subspace=context", "--context-size=3", "--shots=2"),
        *("--inner-steps=converged", "--seeds=2", "--microbatch=1", "--out=here", "--no-figures"),
        *TINY,
    )
    assert code == 0, text
    config = json.loads((tmp_path / "here" / "config.json").read_text())
    method, task = from_json(config["method"]), from_json(config["task"])
    assert method.subspace.size == 3
    assert method.inner_steps == "converged"
    assert task.shots == 2
    assert config["run"]["microbatch"] == 1
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert [s["seed"] for s in results["seeds"]] == [0, 1]
    assert results["seeds"][0]["mean"] != results["seeds"][1]["mean"]
    assert "mean of 2 seeds" in text


def test_a_noisy_fixed_system_is_trained_on_and_scored_elsewhere(run, tmp_path):
    """And --eval starts from the task as it was trained on."""
    code, text = run(
        *("--task=mass-spring", "--label-noise=0.5", "--fixed-tasks=5", "--fixed-seed=3"),
        *("--out=here", "--no-figures", *TINY),
    )
    assert code == 0, text
    task = from_json(json.loads((tmp_path / "here" / "config.json").read_text())["task"])
    assert task == lavajax.NoisyLabels(lavajax.FixedTasks(lavajax.MassSpring(), 5, 3), 0.5)
    scores = []
    for args in ([], ["--label-noise=0"], ["--task=mass-spring-shifted", "--shots=3"]):
        code, text = run("--eval=here", "--test-tasks=200", *args)
        assert code == 0, text
        scores.append(text)
    results = json.loads((tmp_path / "here" / "results.json").read_text())
    assert f"{results['seeds'][0]['mean']:.3g}" in scores[0]
    assert len(set(scores)) == 3


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--shotz=2"], "--shotz is not an option .* did you mean '--shots'"),
        (["--microbatch=0"], "--microbatch must be at least 1, got 0"),
        (["--inner-rate=-1"], r"Lava\.inner_rate .* at least 0, got -1"),
        (["--inner-steps=0"], r"Lava\.inner_steps must be an integer of at least 1, got 0"),
        (["--method=maml", "--epsilon=1"], "--epsilon is not an option"),
        (["--method=anil", "--subspace=full"], "anil always adapts head"),
        (["--method=anil", "--subspace=full"], "choice for lava, lava-converged, .*meta-sgd"),
        (["--method=cavia", "--subspace=full"], "Cavia.subspace must be a Context"),
        (["--solver=dual", "--curvature=hessian"], "form of the system for curvature='ggn'"),
        (["--steps=0"], "--steps must be at least 1, got 0"),
        (["--warmup=50", "--steps=20"], "warmup must be at least 0 and below steps"),
        (["--optimizer=sgd", "--clip=1"], "--clip has no effect without --optimizer=adam"),
        (["--noise-on=both"], "--noise-on has no effect without --label-noise"),
        (["--fixed_seed=3"], "--fixed-seed has no effect without --fixed-tasks"),
        (["--outer-rate=0"], r"--outer-rate must be a finite number above 0, got 0\.0"),
        (["--clip=0"], r"--clip must be a number above 0, got 0\.0"),
        (["--resume=old", "--task=sine"], "--resume=old takes its settings .* no other option"),
        (["--optimizer=sgd", "--warmup=5"], "--warmup has no effect without --optimizer=adam"),
        (["--task=air-quality", "--data=none.zip"], "none.zip, which is not there"),
        (["--task=sinus"], "invalid choice 'sinus'"),
        (["--task=omniglot", "--loss=huber"], "--loss is a choice for real targets: omniglot has"),
        (["--loss=direction"], "its cos and its sin"),
        (["--method=lava-bayesian", "--loss=direction"], "predicts a normal density"),
        (["--method=dkt", "--conditioned"], "give Dkt objective='predictive', got 'mll'"),
        (["--method=vfml", "--conditioned"], "must take outer steps along .* got Vfml"),
        (["--task=omniglot", "--conditioned"], "--conditioned is a choice for real targets"),
        (["--method=anil", "--encoding-width=3"], "--encoding-width is not an option"),
    ],
)
def test_impossible_settings_are_refused_before_anything_is_computed(args, reason, monkeypatch):
    import run as script

    def compute(*_):
        raise AssertionError("the run has started")

    monkeypatch.setattr(script, "execute", compute)
    monkeypatch.setattr(script.RunFolder, "new", compute)
    code, text = call_script(script, *args, columns=200)
    assert code == 2
    assert re.search(reason, " ".join(text.split())), text


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


def test_loss_is_a_choice_with_options_of_its_own(monkeypatch):
    import options

    radio = options.parse(["--task=radio", "--method=anil", "--loss=direction"]).method
    assert radio.point_loss == lavajax.DirectionError()
    huber = options.parse(["--loss=huber", "--delta=0.3", "--reduction=sum"]).method
    assert huber.point_loss == lavajax.Huber(0.3, "sum")


def test_any_method_along_its_gradient_may_be_conditioned():
    import options

    made = options.parse(
        [
            *("--method=anil", "--conditioned", "--inner-steps=2", "--encoding-width=3"),
            *("--encoding-activation=tanh", "--loss=huber"),
        ]
    )
    base = lavajax.Anil(inner_steps=2, point_loss=lavajax.Huber())
    assert made.method == lavajax.Conditioned(base, encoding=3, activation="tanh")
    assert made.method_name == "conditioned-anil"
    process = options.parse(["--method=dkt", "--conditioned", "--objective=predictive"]).method
    assert process == lavajax.Conditioned(lavajax.Dkt(objective="predictive"))


def test_outer_optimizer_is_a_choice(monkeypatch):
    import jax.numpy as jnp

    import options
    import run as script

    chosen = options.parse(["--method=vr-maml-released", "--optimizer=sgd", "--outer-rate=0.01"])
    tx = script.make_optimizer(chosen.run)
    updates, _ = tx.update(jnp.array([3000.0]), tx.init(jnp.zeros(1)))
    assert updates[0] == pytest.approx(-30.0)  # neither clipped nor warmed up

    def second(tx):
        """Of two updates, which tells how far the first gradient was cut."""
        state = tx.init(jnp.zeros(1))
        _, state = tx.update(jnp.array([3000.0]), state)
        return float(tx.update(jnp.array([1.0]), state)[0][0])

    found = {}
    for clip in (10.0, 2.0):
        args = ["--outer-rate=0.01", "--warmup=0", "--steps=100"]
        args += [] if clip == 10 else [f"--clip={clip}"]
        found[clip] = second(script.make_optimizer(options.parse(args).run))
        schedule = optax.cosine_decay_schedule(0.01, 100)
        expected = optax.chain(optax.clip_by_global_norm(clip), optax.adam(schedule))
        assert found[clip] == pytest.approx(second(expected), rel=1e-4)
    assert found[10.0] != pytest.approx(found[2.0], rel=1e-2)


def test_help_lists_the_options_of_the_choice_alone(run):
    code, text = run("--method=cavia", "--help")
    assert code == 0
    assert "--context-size" in text
    assert "--shots" in text
    assert "--epsilon" not in text


SLOW = sorted((ROOT / "tests" / "slow").glob("*.py"))


@pytest.mark.parametrize("script", SLOW, ids=lambda path: path.stem)
def test_a_script_that_is_run_by_hand_finds_its_modules(script, tmp_path):
    """In a process of its own: pytest's own paths would hide that one is missing."""
    line = [sys.executable, str(script), "--help"]
    done = subprocess.run(line, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert script.name in done.stdout
