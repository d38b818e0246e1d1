"""The meta-batch over several devices, which one process simulates, and over processes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lavajax
from helpers import RELU
from lavajax.sharding import ALONE, AXIS, Share, task_mesh
from lavajax.steps import _expectation, fitting

SLOW = Path(__file__).resolve().parent / "slow"


@pytest.mark.timeout(280)
def test_training_on_eight_devices_is_that_on_one():
    """A meta-batch of 10: three devices have nothing that counts, and bad tasks are left out."""
    line = [sys.executable, str(SLOW / "every_method_on_devices.py"), "--train", "--quick"]
    done = subprocess.run(
        [*line, "--only", "lava", "anil", "vr-maml"],
        capture_output=True,
        text=True,
        timeout=260,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [text.split(":")[0] for text in done.stdout.splitlines()]
    assert found == [*("lava", "anil", "vr-maml", "train, bad tasks", "train, 2 seeds")], (
        done.stdout
    )


@pytest.mark.parametrize("at_once", [None, 2, 4])
@pytest.mark.parametrize("devices", [1, 3, 8, 16])
def test_every_task_counts_once_on_some_device(devices, at_once):
    """Under ``vmap`` with an axis name, as under ``pmap``."""
    share, batch = Share(devices, AXIS, at_once), 10

    def one(_):
        real = share.real(batch)
        tasks = share.indices(batch)
        return (
            tasks,
            jnp.ones(len(tasks), bool) if real is None else real,
            share.whole(tasks, batch),
        )

    tasks, real, whole = jax.vmap(one, axis_name=AXIS)(jnp.arange(devices))
    assert tasks.shape == (devices, size := share.size(batch))
    assert size >= batch / devices
    assert at_once is None or size <= at_once or size % at_once == 0
    np.testing.assert_array_equal(tasks[real], np.arange(batch))
    np.testing.assert_array_equal(whole, np.tile(np.arange(batch), (devices, 1)))


def test_one_device_has_all_of_it_as_it_is():
    values = jnp.arange(10)
    np.testing.assert_array_equal(ALONE.indices(10), values)
    assert ALONE.whole(values, 10) is values
    assert ALONE.real(10) is None


def test_one_device_fills_up_what_it_computes_some_of_at_once():
    share = Share(at_once=4)
    np.testing.assert_array_equal(share.indices(10), [*range(10), 9, 9])
    np.testing.assert_array_equal(share.real(10), [True] * 10 + [False] * 2)
    np.testing.assert_array_equal(share.whole(jnp.arange(12), 10), np.arange(10))


def test_a_device_that_is_named_gives_the_bits_of_the_only_one():
    run = {"steps": 3, "meta_batch": 2}
    tasks = lavajax.Sine(shots=3, queries=4)
    one = lavajax.train(lavajax.Anil(RELU), tasks, **run)
    named = lavajax.train(lavajax.Anil(RELU), tasks, devices=jax.devices()[:1], **run)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(named.params), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ([], "devices must be a sequence of jax.devices"),
        (jax.devices()[0], "devices must be a sequence of jax.devices"),
        (["cpu"], "devices must hold devices such as jax.devices"),
        (jax.devices()[:1] * 2, "devices must be different ones"),
    ],
)
def test_bad_devices_are_refused(devices, message):
    with pytest.raises(ValueError, match=message):
        task_mesh(devices)
    with pytest.raises(ValueError, match=message):
        lavajax.train(lavajax.Anil(RELU), lavajax.Sine(), steps=1, devices=devices)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Spoiled:
    """Sine waves, of which one in four has a NaN for a label."""

    tasks: lavajax.Sine

    def sample(self, key, split="train"):
        task = self.tasks.sample(key, split)
        bad = jax.random.bernoulli(jax.random.fold_in(key, 1), 0.25)
        y = jnp.where(bad, jnp.nan, task.support.y)
        return lavajax.Task(lavajax.Points(task.support.x, y), task.query)


@pytest.mark.parametrize(
    ("method", "number"),
    [(lavajax.Lava(RELU), 2), (lavajax.VrMaml(RELU), 2), (lavajax.VrMaml(RELU), 4)],
)
@pytest.mark.filterwarnings("ignore:training left out")
def test_a_few_tasks_at_a_time_train_as_all_together(method, number, x64):
    """Of 6 tasks, of which one is bad at times: by twos, or four and what is filled up, and all."""
    tasks = Spoiled(lavajax.Sine(shots=2, queries=3))

    def trained(microbatch):
        options = {"meta_batch": 6, "microbatch": microbatch, "max_skipped": 1.0}
        return lavajax.train(method, tasks, steps=4, optimizer=optax.sgd(1e-2), **options)

    whole, parts = (jax.tree.leaves(trained(size).params) for size in (6, number))
    for leaf, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(other, leaf, rtol=1e-10, atol=1e-13)


def test_microbatches_are_chosen_where_they_fit_a_cache():
    assert [fitting(b) for b in (10, 64, 128, 100, 127, 1024, 1000)] == [
        *(None, None, 64, 50, None, 64, 50)
    ]


def test_as_many_tasks_at_once_as_a_device_has_or_more_are_all():
    """On more devices each has fewer, and a run goes on there."""
    batch = lavajax.Sine(), jnp.zeros(6)
    found = [_expectation(batch, 6, Share(at_once=size)).microbatch for size in (3, 6, 8)]
    assert found == [3, None, None]


def test_no_task_at_once_is_refused():
    with pytest.raises(ValueError, match="microbatch must be an integer of at least 1"):
        lavajax.train(lavajax.Lava(RELU), lavajax.Sine(), steps=1, meta_batch=6, microbatch=0)
