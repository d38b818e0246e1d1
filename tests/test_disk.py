"""A full disk, a folder that cannot be written: said plainly, nothing lost, nothing half done."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest

import lavajax
from helpers import RELU, call_script, make_params, make_points, small_files
from lavajax import disk
from lavajax.datasets import load_omniglot, omniglot
from test_datasets import drawings, write_zip
from works import Work

TINY = [
    *("--task=sine", "--shots=3", "--hidden", "8", "--meta-batch=2", "--test-tasks=200"),
    *("--steps=40", "--report-every=10", "--checkpoint-seconds=0"),
]
PARAMS = make_params(lavajax.Anil(RELU), make_points(3))


def nearly_full(monkeypatch, free):
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - free, free))


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Calls a script in this process, in an empty folder; its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    return lambda name, *args: call_script(__import__(name), *args)


def save(path):
    return lavajax.save(PARAMS, path, overwrite=True)


def export(path):
    return lavajax.export(PARAMS, path, shots=3, overwrite=True)


@pytest.mark.parametrize("write", [save, export])
@pytest.mark.parametrize("size", [0, 300])
def test_what_cannot_be_written_leaves_the_older_one_and_nothing_else(write, size, tmp_path):
    folder = write(tmp_path / "m")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    message = r"/m cannot be written: File too large; write elsewhere"
    with pytest.raises(OSError, match=message) as caught, small_files(size):
        write(tmp_path / "m")
    assert caught.value.errno == errno.EFBIG
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert os.listdir(tmp_path) == ["m"]


def test_a_full_disk_is_told_with_what_is_free_before_anything_is_written(tmp_path, monkeypatch):
    nearly_full(monkeypatch, 5000)
    message = (
        r"/m cannot be written: No space left.*; 3\d\d\.\d kB needed; 5\.0 kB free there: make room"
    )
    with pytest.raises(OSError, match=message) as caught:
        save(tmp_path / "m")
    assert caught.value.errno == errno.ENOSPC
    assert not any(tmp_path.iterdir())
    monkeypatch.undo()
    assert disk._free(tmp_path / "not" / "there") > 0


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "Permission denied; write where this process may"),
        (errno.EROFS, "Read-only file system; write where this process may"),
        (errno.EIO, "Input/output error; write elsewhere"),
    ],
)
def test_the_advice_is_that_for_the_reason(number, advice, tmp_path):
    with pytest.raises(OSError, match=advice), disk.writing(tmp_path):
        raise OSError(number, os.strerror(number))


@pytest.mark.parametrize("write", [save, export])
def test_a_path_below_a_file_is_told(write, tmp_path):
    (tmp_path / "file").write_text("mine")
    message = "file/deep/m cannot be written: .*file is a file|Not a directory"
    with pytest.raises(NotADirectoryError, match=message):
        write(tmp_path / "file" / "deep" / "m")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.fixture
def read_only():
    """A folder that this process may not write to, even where root started it; and ``run``."""
    script = __import__("run")
    with tempfile.TemporaryDirectory() as name:  # root's own folders are closed to all others
        # All is imported now that will be: others may not be able to read the environment.
        for write in (save, export):
            shutil.rmtree(write(Path(name, "m")))
        Path(name, "file").touch()
        assert call_script(script, *TINY, f"--out={name}/file/run")[0] == 2
        folder = Path(name, "a")
        folder.mkdir(0o555)
        Path(name).chmod(0o755)
        user = os.geteuid()
        if user == 0:
            try:
                os.seteuid(65534)  # nobody
            except OSError:
                pytest.skip("root may write to a read-only folder, and may not become another user")
        try:
            yield folder, script
        finally:
            os.seteuid(user)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the system has no such permissions")
def test_a_read_only_folder_is_told(read_only):
    folder, script = read_only
    for write in (save, export):
        with pytest.raises(PermissionError, match="/a/m cannot be written: Permission denied"):
            write(folder / "m")
    code, text = call_script(script, *TINY, f"--out={folder}/run")
    assert code == 2
    assert "a/run cannot be written: Permission denied" in text
    assert not any(folder.iterdir())


def test_a_run_that_cannot_write_says_so_before_it_trains(call, tmp_path, monkeypatch):
    def trained(*_, **__):
        raise AssertionError("trained")

    monkeypatch.setattr(lavajax, "train", trained)
    (tmp_path / "runs").write_text("a file")
    code, text = call("run", *TINY)
    assert code == 2
    assert "cannot be written: Not a directory; write elsewhere" in text
    code, text = call("run", *TINY, "--out=runs/a")
    assert code == 2
    assert "runs/a cannot be written: " in text
    with small_files(0):
        code, text = call("run", *TINY, "--out=b")
    assert code == 2
    assert "b cannot be written: File too large" in text
    assert not (tmp_path / "b" / "config.json").exists()


def test_a_run_whose_disk_fills_stops_and_goes_on_from_its_last_checkpoint(call, tmp_path):
    """The disk is full from the third checkpoint on; room is made, and the run ends as any."""
    saved = lavajax.checkpoint.save_state

    def until_full(state, *args, **options):
        with small_files(300) if state.step > 20 else contextlib.nullcontext():
            return saved(state, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lavajax.checkpoint, "save_state", until_full)
        code, text = call("run", *TINY, "--out=a", "--no-figures")
    assert code == 1
    assert "a/checkpoints/000000030 cannot be written: File too large" in text
    assert "the last checkpoint is of step 20; go on with: python run.py --resume=a" in text
    assert sorted(os.listdir(tmp_path / "a" / "checkpoints")) == ["000000010", "000000020"]
    with small_files(300):  # results cannot be written either
        code, text = call("run", "--resume=a")
    assert code == 1
    assert "cannot be written: File too large" in text
    assert "the last checkpoint is of step 20" in text
    code, text = call("run", "--resume=a")
    assert code == 0, text
    steps = [json.loads(line)["step"] for line in (tmp_path / "a" / "metrics.jsonl").open()]
    assert steps == [10, 20, 30, 40]
    assert not [p for p in (tmp_path / "a").rglob("*") if "unfinished" in p.name]
    assert np.isfinite(lavajax.load(tmp_path / "a").learned["head"]).all()


def test_preparing_data_on_a_full_disk_leaves_nothing_and_the_next_start_succeeds(
    tmp_path, monkeypatch
):
    source = write_zip(tmp_path / "images_background.zip", drawings("Greek", 2))
    data = tmp_path / "data"
    message = "data/omniglot_drawings/.* cannot be written: "
    with pytest.raises(OSError, match=message + "File too large"), small_files(1500):
        load_omniglot(source, data)
    assert not list(data.glob("*/*/*[0-9].*"))
    with monkeypatch.context() as patch:
        nearly_full(patch, 5000)
        with pytest.raises(OSError, match=message + "No space left"):
            load_omniglot(source, data)
    with pytest.raises(NotADirectoryError, match=r"zip/omniglot_drawings/.* cannot be written"):
        load_omniglot(source, source)
    assert len(load_omniglot(source, data).images) == 40

    def unreadable(path):
        raise PermissionError(errno.EACCES, "Permission denied", "the source")

    monkeypatch.setattr(omniglot, "examples", unreadable)
    with pytest.raises(PermissionError, match="Permission denied: 'the source'"):
        load_omniglot(source, tmp_path / "other")


def test_a_full_disk_stops_what_cells_would_compute_for_nothing(call, tmp_path, monkeypatch):
    """In processes of their own and in this one; what is there stays, and is gone on from."""
    computed = tmp_path / "computed"

    def compute(folders, *, name):
        with computed.open("a") as file:
            file.write(name)
        return {"long": "x" * 500 * (name == "b")}

    works = [Work("sine", n, {}, functools.partial(compute, name=n)) for n in "abc"]
    monkeypatch.setattr("items.sine_table.works", lambda scale: works)
    monkeypatch.setattr("items.sine_table.render", lambda scale, folders: "")
    monkeypatch.setattr(disk, "FULL", frozenset({errno.EFBIG}))
    options = ("sine", "--workers", "1", "--results", "results")
    with small_files(400):
        code, text = call("paper", *options)
    assert code == 1
    assert "results/sine/b.json cannot be written: File too large" in text
    assert "the same command goes on from here" in text
    assert computed.read_text() == "ab"
    assert os.listdir(tmp_path / "results" / "sine") == ["a.json"]
    code, text = call("paper", *options)
    assert computed.read_text() == "abbc"
    assert sorted(os.listdir(tmp_path / "results" / "sine")) == ["a.json", "b.json", "c.json"]


def test_the_process_of_a_cell_tells_of_a_full_disk(tmp_path):
    from paper import FULL_DISK, Running

    end = f"print('error: x cannot be written'); import sys; sys.exit({FULL_DISK})"
    process = subprocess.Popen([sys.executable, "-c", end], stdout=(tmp_path / "log").open("w"))
    process.wait()
    running = Running(Work("sine", "a", {}, None), process, tmp_path / "log", 0.0, None)
    with pytest.raises(OSError, match="sine: a: x cannot be written"):
        running.outcome()
