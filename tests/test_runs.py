"""Runs that are left alone: killed, stopped, resumed, scored again."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pty
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import lavajax
from helpers import call_script
from slow import kill_and_resume as trial

ROOT = Path(__file__).resolve().parents[1]
# As many test tasks as a report takes: one compilation.
TINY = [
    *("--task=sine", "--shots=3", "--hidden", "8", "8", "--meta-batch=2", "--test-tasks=200"),
    *("--steps=40", "--report-every=10", "--checkpoint-seconds=0"),
]


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Calls the script in this process, in an empty folder; its exit code and output."""
    monkeypatch.chdir(tmp_path)
    import run as script

    return partial(call_script, script)


def steps_of(folder: Path) -> list[int]:
    return [
        json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().split("\n")[:-1]
    ]


def test_run_folder_has_every_file_and_the_log_stays_plain(call, tmp_path):
    code, text = call(*TINY, "--out=a", "--seeds=2", "--tensorboard")
    assert code == 0, text
    assert "\x1b" not in text
    assert re.search(r"^compiled in [\d.]+ s$", text, re.M)
    line = r"^step 40/40  loss \S+  test mse \S+  \S+ steps/s  0 s left$"
    assert re.search(line, text, re.M)
    names = {p.name for p in (tmp_path / "a").iterdir()}
    assert names == {
        *(".lock", "config.json", "metrics.jsonl", "results.json", "checkpoints"),
        *("tasks.png", "learning.png", "tensorboard"),
    }
    for figure in ("tasks.png", "learning.png"):
        assert (tmp_path / "a" / figure).read_bytes().startswith(b"\x89PNG")
    (events,) = (tmp_path / "a" / "tensorboard").iterdir()
    assert events.stat().st_size > 500
    rows = [json.loads(r) for r in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [10, 20, 30, 40]
    assert all(len(r["loss"]) == len(r["test_mse"]) == 2 for r in rows)
    assert lavajax.load(tmp_path / "a")["head"].shape == (2, 9, 1)

    # what is scored again is what was scored
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    code, again = call("--eval=a", "--test-tasks=200")
    assert code == 0, again
    mean = np.mean([s["mean"] for s in results["seeds"]])
    assert f"{mean:.3g}" in again
    # a finished run that is resumed trains no more
    before = steps_of(tmp_path / "a")
    code, resumed = call("--resume=a")
    assert code == 0, resumed
    assert "going on from step 40 of 40" in resumed
    assert steps_of(tmp_path / "a") == before


def test_saved_model_is_scored_on_any_task(call, tmp_path):
    lavajax.save(
        lavajax.train(lavajax.Anil(lavajax.MLP((8,))), lavajax.Sine(), steps=2).params, "m"
    )
    code, text = call("--eval=m", "--task=sine", "--shots=4", "--test-tasks=20", "--test-seed=5")
    assert code == 0, text
    assert "anil on sine, 4 support points, 20 unseen tasks" in text
    code, text = call("--eval=m", "--method=lava")
    assert code == 2
    assert "--eval scores the method that was saved; leave --method=lava out" in text
    code, text = call("--eval=none")
    assert code == 2
    assert "path must be a saved model or a run folder" in text


def test_damaged_checkpoint_is_named_and_the_one_before_it_gives_the_same_run(call, tmp_path):
    assert call(*TINY, "--out=a")[0] == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    newest = tmp_path / "b" / "checkpoints" / "000000040"
    (newest / "config.json").write_text("{}")
    (tmp_path / "b" / "results.json").unlink()
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 50, "lo')  # as a kill leaves it
    code, text = call("--resume=b")
    assert code == 0, text
    assert "000000040/config.json is damaged" in text
    assert "set aside: b/checkpoints/000000040.damaged" in text
    assert "going on from step 30 of 40" in text
    assert steps_of(tmp_path / "b") == [10, 20, 30, 40]
    for a, b in zip(
        lavajax.load("a").learned["weights"], lavajax.load("b").learned["weights"], strict=True
    ):
        np.testing.assert_array_equal(a["weight"], b["weight"])


def test_existing_folder_is_only_overwritten_when_asked_and_if_it_is_a_run(call, tmp_path):
    assert call(*TINY, "--out=a", "--no-figures")[0] == 0
    (tmp_path / "a" / "notes.txt").write_text("mine")
    code, text = call(*TINY, "--out=a", "--steps=20")
    assert code == 2
    assert "a is in use; --resume goes on with a run, --overwrite replaces one" in text
    assert steps_of(tmp_path / "a")[-1] == 40
    code, text = call(*TINY, "--out=a", "--steps=20", "--overwrite", "--no-figures")
    assert code == 0, text
    assert steps_of(tmp_path / "a") == [10, 20]
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text("mine")
    for config in (None, '{"model_type": "other"}', "no JSON"):  # others have files of that name
        if config is not None:
            (tmp_path / "other" / "config.json").write_text(config)
        code, text = call(*TINY, "--out=other", "--overwrite")
        assert code == 2
        assert "what it holds is not the run of run.py that --overwrite replaces" in text
        assert (tmp_path / "other" / "results.json").read_text() == "mine"
    code, text = call(*TINY, "--overwrite")
    assert code == 2
    assert "--overwrite needs --out" in text


def test_resume_takes_no_other_settings_and_needs_a_run(call, tmp_path):
    for other in ("--steps=50", "--help", "--eval=b", "--method=anil"):
        for args in (("--resume=a", other), (other, "--resume=a")):
            code, text = call(*args)
            assert code == 2
            assert "takes its settings from the run's own configuration" in text
    code, text = call("--resume=a")
    assert code == 2
    assert "must be the folder of a run, and has no config.json" in text
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text('{"task": 1}')
    code, text = call("--resume=a")
    assert code == 2
    assert "configuration is damaged" in text


def test_configuration_that_has_changed_is_not_resumed(call, tmp_path):
    """A checkpoint knows the settings of its run: another seed or rate would be another run."""
    assert call(*TINY, "--out=a", "--no-figures")[0] == 0
    file = tmp_path / "a" / "config.json"
    config = json.loads(file.read_text())
    config["run"]["seed"], config["task"]["shots"] = 5, 4
    file.write_text(json.dumps(config))
    code, text = call("--resume=a")
    assert code == 1
    assert (
        "settings.task.shots is saved as 3, got 4; settings.run.seed is saved as 0, got 5" in text
    )


def test_damaged_metrics_are_named(call, tmp_path):
    assert call(*TINY, "--out=a", "--no-figures")[0] == 0
    file = tmp_path / "a" / "metrics.jsonl"
    file.write_text("{" + file.read_text())
    code, text = call("--resume=a")
    assert code == 1
    assert "metrics.jsonl is damaged: line 1 is no report" in text


@pytest.mark.parametrize(("number", "goes_on"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_written_to(monkeypatch, tmp_path, number, goes_on):
    """Such as those of some clusters."""
    import folder

    def flock(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(folder.fcntl, "flock", flock)
    if goes_on:
        with folder.RunFolder.new(tmp_path / "a", "sine", overwrite=False):
            assert (tmp_path / "a" / folder.LOCK).is_file()
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            folder.RunFolder.new(tmp_path / "a", "sine", overwrite=False)


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    line = [sys.executable, str(ROOT / "experiments" / "run.py"), f"--out={folder}", *args]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(ready, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 120
    while not ready():
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def test_signal_saves_and_says_how_to_go_on_and_a_second_run_is_refused(call, tmp_path):
    """The end of a run that nobody could wait for, in 100,000 steps."""
    folder = tmp_path / "a"
    process = start(folder, *TINY, "--steps=100000", "--checkpoint-seconds=1000")
    wait_until(lambda: (folder / "metrics.jsonl").exists() and steps_of(folder), process)
    code, text = call("--resume=a")
    assert code == 2
    assert f"a is in use by another run, process {process.pid}" in text
    assert call(*TINY, "--out=a", "--overwrite")[0] == 2
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "stopping after these steps; once more ends the run at once" in out
    assert re.search(r"stopped by SIGTERM; go on with: python \S*run\.py --resume=\S*a$", out, re.M)
    (saved,) = (folder / "checkpoints").iterdir()
    assert int(saved.name) == steps_of(folder)[-1] < 100_000


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(call, tmp_path):
    """By steps of sgd so long that the second loss is beyond float32."""
    sgd = ("--optimizer=sgd", "--outer-rate=1e12", "--report-every=1", "--max-skipped=0")
    code, text = call(*TINY, *sgd, "--out=a")
    assert code == 1
    assert re.search(r"error: training diverged|error: .*max_skipped", text), text
    (step,) = (int(p.name) for p in (tmp_path / "a" / "checkpoints").iterdir() if p.name.isdigit())
    assert f"the last checkpoint is of step {step}; --eval=a scores it" in text
    assert np.isfinite(lavajax.load(tmp_path / "a")["head"]).all()


def test_second_signal_ends_a_run_whose_steps_take_long(tmp_path):
    folder = tmp_path / "a"
    process = start(folder, *TINY, "--steps=10000000", "--report-every=10000000")
    wait_until((folder / "metrics.jsonl").exists, process)  # made just before training
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT, out
    assert "once more ends the run at once" in out


def test_killed_runs_end_at_the_same_bits(tmp_path):
    """One of the fifty kills of ``slow/kill_and_resume.py``, in mid-training."""
    expected, _ = trial.unbroken(tmp_path / "unbroken", 300)
    folder = tmp_path / "killed"
    process = start(folder, "--steps=300", *trial.OPTIONS)
    wait_until(lambda: any((folder / "checkpoints").glob("0*")), process)
    time.sleep(random.Random(1).uniform(0, 0.4))
    process.kill()
    process.communicate()
    assert not (folder / "results.json").exists()
    for actual, wanted in zip(trial.resume(folder, 300), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_progress_fits_a_terminal_of_eighty_columns(tmp_path):
    main, side = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    line = [sys.executable, str(ROOT / "experiments" / "run.py"), *TINY, "--no-figures"]
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        line, cwd=tmp_path, stdout=side, stderr=side, env={**environment, "TERM": "xterm"}
    )
    os.close(side)
    shown = b""
    while True:
        ready, _, _ = select.select([main], [], [], 120)
        assert ready
        try:
            piece = os.read(main, 65536)
        except OSError:  # how a pseudo-terminal ends
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    assert process.wait(timeout=60) == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())
    lines = re.split(r"[\r\n]+", plain)
    assert max(len(each.rstrip()) for each in lines) <= 80
    assert any(re.search(r"40/40  loss .* steps/s  0 s left", each) for each in lines)
    assert any("compiling" in each for each in lines)


def test_a_seed_that_was_given_up_is_null_and_another_is_drawn(call, tmp_path, monkeypatch):
    """The figure, which comes last, does not keep the table from being shown.

    What is scored again is called as the run was, and so are its seeds.
    """
    real = lavajax.train

    def lose_the_first(*args, **options):
        trained = real(*args, **options)
        learned = jax.tree.map(lambda leaf: leaf.at[0].set(np.nan), trained.params.learned)
        params = trained.params.replace_learned(learned)
        state = dataclasses.replace(trained.state, params=params)
        return dataclasses.replace(trained, params=params, state=state)

    monkeypatch.setattr(lavajax, "train", lose_the_first)
    code, text = call(*TINY, "--method=lava-converged", "--seed=5", "--seeds=2", "--out=a")
    assert code == 0, text
    assert "seed 6" in text

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    results = json.loads((tmp_path / "a" / "results.json").read_text(), parse_constant=refuse)
    assert results["seeds"][0]["mean"] is None
    assert results["seeds"][1]["mean"] > 0
    assert (tmp_path / "a" / "tasks.png").is_file()
    code, text = call("--eval=a", "--test-tasks=200")
    assert code == 0
    assert "lava-converged on sine" in text
    assert "seed 5" in text
    assert "seed 6" in text


def test_a_stop_before_training_is_no_traceback(call, monkeypatch):
    import run as script

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "prepare", stop)
    code, text = call(*TINY)
    assert code == 130
    assert "stopped before training" in text
