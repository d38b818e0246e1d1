"""The documentation's code, run as written."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import lavajax

ROOT = Path(__file__).resolve().parents[1]


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)


def test_readme_code_runs_as_written_and_adapts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks("README.md", "python"):
        exec(compile(block, "README.md", "exec", dont_inherit=True), names)
    task, prediction = names["task"], names["prediction"]
    error = jnp.mean((prediction.mean - task.query.y) ** 2)
    assert error < 0.1 * jnp.var(task.query.y)
    # The user's own source of tasks and NNX model: lines are easy.
    assert names["score"].mean < 1.0


def test_guide_runs_as_written_and_adapts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for block in blocks("docs/guide.md", "python"):
        exec(compile(block, "guide.md", "exec", dont_inherit=True), names)
    prediction, task, waves = names["prediction"], names["task"], names["waves"]
    assert prediction.variance.shape == task.query.y.shape
    assert names["many"].block.shape[0] == 100
    whole, again = names["whole"].params.learned, names["again"].params.learned
    assert jax.tree.all(jax.tree.map(jnp.array_equal, whole, again))
    zero = lavajax.score(lambda task, key: jnp.mean(task.query.y**2), waves, num_tasks=200).mean()
    assert names["score"].mean < 0.5 * zero


def test_a_loop_of_ones_own_over_devices_runs_as_written():
    (loop,) = (each for each in blocks("docs/devices.md", "python") if "pmap" in each)
    names: dict = {}
    exec(compile(loop, "devices.md", "exec", dont_inherit=True), names)
    assert (names["state"].step == 100).all()
    assert jnp.isfinite(names["metrics"]["loss"]).all()


def test_readme_has_the_two_commands_that_continuous_integration_reads():
    commands = "".join(blocks("README.md", "sh")).splitlines()
    assert len(commands) == 2
    assert "experiments/run.py --task=sine" in commands[0]
    assert "pytest" in commands[1]


def test_contributing_example_is_a_method_and_does_not_adapt():
    (example,) = blocks("CONTRIBUTING.md", "python")
    names: dict = {}
    exec(compile(example, "CONTRIBUTING.md", "exec", dont_inherit=True), names)
    method = names["NearestPrior"](model=lavajax.MLP(hidden=(8,)))
    tasks = lavajax.Sine(shots=3, queries=4)
    trained = lavajax.train(method, tasks, steps=5, meta_batch=2)
    task = tasks.sample(jax.random.key(0))
    adapted = lavajax.adapt(trained.params, (task.support.x, task.support.y))
    assert jnp.array_equal(adapted.block, trained.params["head"])


@pytest.mark.parametrize("path", ["src/lavajax", "experiments", "benchmarks"])
def test_map_of_the_code_names_every_file(path):
    """A module that the map leaves out is a module that a newcomer does not find."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for file in (ROOT / path).glob("*.py"):
        assert file.name in text, f"{path}/{file.name} is missing from the map in CONTRIBUTING.md"


def test_readme_shows_pictures_that_exist_and_no_placeholder():
    text = (ROOT / "README.md").read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", text)
    assert len(pictures) >= 2
    for name in pictures + re.findall(r"\]\(([a-z/_]+\.txt)\)", text):
        assert (ROOT / name).is_file(), name
    assert "_OUTPUT" not in text
