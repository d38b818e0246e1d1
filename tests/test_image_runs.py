"""experiments/run.py and paper.py on images, from drawings in the published format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import lavajax
from helpers import call_script
from lavajax.config import from_json
from options import parse
from test_datasets import drawings, write_zip

TINY = ("--task=omniglot", "--ways=2", "--queries=2", "--width=2", "--meta-batch=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Four alphabets of five characters each: one for validation, and one for test."""
    folder = tmp_path_factory.mktemp("data") / "omniglot"
    folder.mkdir()
    made = {}
    for alphabet in "ABCD":
        made |= drawings(alphabet, 5)
    write_zip(folder / "images_background.zip", made)
    return folder


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Calls a script in this process, in an empty folder; its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "prepared"))
    return lambda name, *args: call_script(__import__(name), *args)


def test_a_run_takes_loss_model_and_number_of_test_tasks_from_its_task(call, folder, tmp_path):
    data = f"--data={folder}"
    assert parse([*TINY, data]).run.test_tasks == 600
    tasks = "--test-tasks=200"  # as many as a report takes: one compilation
    code, text = call("run", *TINY, data, "--steps=4", "--report-every=4", "--out=a", tasks)
    assert code == 0, text
    assert "lava on omniglot, 2-way 1-shot, 200 unseen tasks" in text
    assert "test accuracy" in text
    assert "chance" in text
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    method = from_json(config["method"])
    assert method == lavajax.Lava(lavajax.Conv4(2), lavajax.CrossEntropy(2))
    results = json.loads((tmp_path / "a" / "results.json").read_text())
    assert results["metric"] == "accuracy"
    assert 0 <= results["seeds"][0]["mean"] <= 1
    assert results["references"] == {"chance": 0.5}
    from matplotlib.image import imread

    assert imread(tmp_path / "a" / "tasks.png").std() > 0.02


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--model=mlp", "--hidden", "8"), r"x must have shape \[N, d\] for MLP"),
        (("--width=2", "--method=lava-converged"), "needs a loss of constant curvature"),
        (("--width=2", "--method=alpaca"), "predicts a normal density of real targets"),
        (("--width=2", "--reduction=sum"), "--reduction is not an option of this task"),
        (("--width=2", "--subspace=context"), r"couples the points of a batch"),
        (("--width=2", "--label-noise=1"), "must have real targets"),
        (("--width=2", "--split=lake"), "needs all 50 alphabets"),
        (("--width=2", "--ways=6"), "validation split has 5"),
    ],
)
def test_what_does_not_fit_images_is_refused_with_the_reason(call, folder, args, reason):
    import re

    code, text = call("run", "--task=omniglot", f"--data={folder}", *args)
    assert code == 2
    assert re.search(reason, " ".join(text.split())), text


def test_the_table_of_omniglot_is_computed_where_the_data_is_and_left_out_else(
    call, folder, tmp_path
):
    quick = ("omniglot", "--quick", "--workers=1", "--results=results")
    code, text = call("paper", *quick)
    assert code == 1
    assert "left out: omniglot, for want of omniglot, without --data" in text
    code, text = call("paper", *quick, f"--data={folder.parent}")
    assert code == 0, text
    text = (tmp_path / "RESULTS.md").read_text()
    assert "## Omniglot" in text
    assert "The data has 20 characters: 10 for training, 5 for validation, 5 for test." in text
    (cell,) = (tmp_path / "results" / "omniglot").glob("*-way-*")
    record = json.loads(cell.read_text())
    assert 0 <= record["result"]["seeds"][0]["accuracy"] <= 1
    assert str(folder.parent) not in cell.read_text()
