"""Several processes: their options, and what they share; ``slow/two_processes.py`` runs two."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

import threads
from lavajax.sharding import check_processes
from peers import HEARTBEAT_SECONDS, Machines, Peers, split


def test_options_of_processes_are_taken_from_the_command_line():
    line = ["--task=sine", "--coordinator=host:12", "--processes", "3", "--process=2", "--seed=1"]
    assert split(line) == (Machines("host:12", 3, 2), ["--task=sine", "--seed=1"])
    assert split(["--distributed", "--steps=3"]) == (Machines(detect=True), ["--steps=3"])
    assert split(["--steps=3"]) == (Machines(), ["--steps=3"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--coordinator=host:12 --process=0", "must be given together"),
        ("--coordinator=host --processes=2 --process=0", "must be HOST:PORT, got host"),
        ("--coordinator=h:1 --processes=2 --process=2", "--process must be from 0 to 1, got 2"),
        ("--coordinator=h:1 --processes=0 --process=0", "--processes must be at least 1, got 0"),
        ("--distributed --process=1", "give one or the other"),
    ],
)
def test_options_of_processes_that_cannot_be_are_refused(line, message):
    with pytest.raises(ValueError, match=message):
        split(line.split())


def test_a_process_alone_agrees_with_itself():
    alone = Peers()
    state = {"a": jnp.arange(2)}
    assert alone.first
    assert alone.share({"x": 1}) == {"x": 1}
    assert alone.share_state(state, state) is state
    assert alone.most(None) is None
    assert alone.most(15) == 15
    assert alone.abandon(3) == 3
    alone.meet()
    alone.leave()


@pytest.mark.parametrize(
    ("line", "detection"),
    [("--coordinator=h:1 --processes=2 --process=1", "deactivate"), ("--distributed", None)],
)
def test_a_cluster_is_asked_only_where_that_is_wanted(monkeypatch, line, detection):
    """SLURM would give a process that knows its place one device of eight."""
    told = {}

    def initialize(*_, **options):
        told.update(options)
        raise RuntimeError("no others")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(ValueError, match="could not be joined: no others"):
        Peers(split(line.split())[0])
    assert told["cluster_detection_method"] == detection


@pytest.mark.parametrize(
    ("backend", "named", "kept"),
    [("gpu", False, False), ("gpu", True, True), ("cpu", False, True)],
)
def test_processes_on_gpus_keep_compiled_programs_only_where_all_can_see_them(
    monkeypatch, backend, named, kept
):
    """XLA on GPUs would wait for autotuning by a process that has found the program."""
    settings = {"jax_enable_compilation_cache": True}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    monkeypatch.setattr(multihost, "get_barrier_sync_fn", lambda: lambda **_: None)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(threads, "CACHE_NAMED", named)
    Peers(Machines("host:12", 2, 0)).leave()
    assert settings == {"jax_enable_compilation_cache": kept}


def test_devices_wait_for_each_other_only_when_all_processes_are_there(monkeypatch):
    """What one of them does alone, reading data or writing a file, may take long."""
    happened = []
    peers = Peers()
    monkeypatch.setattr(peers, "_joined", True)
    barrier = lambda *, key, timeout_ms: happened.append(key)  # noqa: E731
    monkeypatch.setattr(multihost, "get_barrier_sync_fn", lambda: barrier)

    def collective(value, *_):
        happened.append("devices")
        return value

    monkeypatch.setattr(multihost_utils, "broadcast_one_to_all", collective)
    monkeypatch.setattr(multihost_utils, "process_allgather", collective)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: happened.append("parted"))
    assert peers.share({"x": 1}) == {"x": 1}
    assert peers.most(3) == 3
    peers.leave()
    peers.leave()
    assert happened == [
        *("lavajax/1", "devices", "devices", "lavajax/2", "devices", "lavajax/3", "parted")
    ]


def test_processes_of_different_numbers_of_devices_are_refused(monkeypatch):
    devices = [SimpleNamespace(process_index=process) for process in (0, 0, 1, 0)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(ValueError, match="as many devices as the others, got 3, 1"):
        check_processes()
    devices += devices[2:3] * 2
    check_processes()


def test_the_cache_of_compiled_programs_follows_the_users_variables(monkeypatch):
    """Set before JAX starts, and never over JAX's own variable."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert threads.cache_folder() == Path("/caches/lavajax")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/user")
    assert threads.cache_folder() == Path("/home/user/.cache/lavajax")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/mine")
    importlib.reload(threads)
    assert threads.os.environ["JAX_COMPILATION_CACHE_DIR"] == "/mine"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    importlib.reload(threads)
    assert threads.os.environ["JAX_COMPILATION_CACHE_DIR"] == "/home/user/.cache/lavajax/xla"


@pytest.mark.parametrize(
    ("seeds", "rows", "counts"),
    [
        (None, [], 0),
        (None, [{}, {"skipped": [[6, 0], [6, 3]]}, {"skipped": [[12, 1]]}], 3),
        (3, [{"skipped": [[2, 0, 1], [2, 1, 1], [3, 1, 0]]}], [1, 2, 0]),
    ],
)
def test_what_was_left_out_before_a_pause_is_counted_for_each_seed(seeds, rows, counts):
    import run

    job = SimpleNamespace(
        settings=SimpleNamespace(run=SimpleNamespace(stacked=seeds)),
        folder=SimpleNamespace(metrics=lambda: rows),
        peers=Peers(),
    )
    assert run.skipped_before(job) == counts


@pytest.mark.parametrize(
    ("message", "misses"),
    [
        ("UNKNOWN: Gloo all-reduce failed: Connection reset by peer", True),
        ("UNAVAILABLE: Failed to send RPC to coordination service", True),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes", False),
        ("meta_batch must be at least 1, got 0", False),
    ],
)
def test_the_death_of_another_process_is_told_from_other_errors(monkeypatch, message, misses):
    peers = Peers()
    assert not peers.misses(ValueError(message))  # alone, none can be missed
    monkeypatch.setattr(peers, "_joined", True)
    assert peers.misses(ValueError(message)) == misses


def test_a_dead_process_is_missed_within_half_a_minute():
    assert 0 < HEARTBEAT_SECONDS <= 30
