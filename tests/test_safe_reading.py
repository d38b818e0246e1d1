"""Whatever is read: nothing of it is executed, nothing else is written, no size is believed."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import pickle
import shutil
import struct
import sys
import zipfile
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from PIL import Image

import lavajax
from helpers import RELU, make_params, make_points
from lavajax import frame, store, zarr
from lavajax.datasets import air_quality, images, load_mini_imagenet, omniglot
from lavajax.datasets import mini_imagenet as mini
from test_air_quality import STATIONS, name_of
from test_checkpoint import rewrite
from test_datasets import drawings, write_arrays, write_zip
from test_radio import write_radioml

ROOT = Path(__file__).resolve().parents[1]
PARAMS = make_params(lavajax.Anil(RELU), make_points(3))
EXECUTES = ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "socket.connect")
WATCHED: list[list[str]] = []


def _hook(event, args):
    if WATCHED and event in EXECUTES:
        WATCHED[-1].append(f"{event} {args}")


sys.addaudithook(_hook)  # cannot be taken away again, and does nothing but in the tests below


@contextlib.contextmanager
def nothing_is_executed():
    """Python itself tells of what an unpickler looks up, and of programs and connections."""
    WATCHED.append([])
    try:
        yield
    finally:
        seen = WATCHED.pop()
    assert seen == []


class Bomb:
    """Runs a command when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_the_test_would_see_a_pickle(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=r"pickle\.find_class"), nothing_is_executed():
        pickle.loads(pickle.dumps(Bomb()))
    assert (tmp_path / "pwned").exists()


def test_no_module_reads_a_pickle_or_runs_text():
    """dill, which TFDS imports, is only looked for."""
    forbidden = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
    calls = {"eval", "exec", "compile", "__import__"}
    for file in [*(ROOT / "src").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name.split(".")[0] for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            assert not forbidden & set(names), file
            if isinstance(node, ast.Call):
                assert getattr(node.func, "id", None) not in calls, f"{file}:{node.lineno}"
                attribute = ast.unparse(node.func)
                assert not attribute.endswith(("np.load", "read_pickle", "extractall")), file


def test_models_tables_and_data_sets_are_read_without_a_pickle(tmp_path):
    lavajax.save(PARAMS, tmp_path / "m")
    pd.DataFrame({"g": ["a"], "x": [1.0]}).to_parquet(tmp_path / "t.parquet")
    pd.DataFrame({"g": ["a"], "x": [1.0]}).to_csv(tmp_path / "t.csv.gz")
    source = write_zip(tmp_path / "images_background.zip", drawings("Greek", 1))
    hdf5 = write_radioml(tmp_path / "r.hdf5", frames=1)
    (tmp_path / "mini").mkdir()
    arrays = write_arrays(tmp_path / "mini")
    with nothing_is_executed():
        lavajax.load(tmp_path / "m")
        frame.read(tmp_path / "t.parquet", ("x",), ("g",))
        frame.read(tmp_path / "t.csv.gz", ("x",), ("g",))
        lavajax.datasets.load_omniglot(source, tmp_path / "data")
        lavajax.datasets.load_radio(hdf5, tmp_path / "data")
        load_mini_imagenet(arrays, tmp_path / "data")


@pytest.mark.parametrize("name", ["images", "labels"])
def test_arrays_of_objects_are_refused_unread(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    objects = np.array([Bomb()] * mini.CLASSES["train"], object)
    with nothing_is_executed(), pytest.raises(ValueError, match=f"train.npz: {name} must be "):
        list(mini.examples(write_arrays(tmp_path, **{name: objects}), "train"))
    assert not (tmp_path / "pwned").exists()


def test_members_of_a_zip_that_lead_out_of_it_write_nothing(tmp_path):
    inside = tmp_path / "in" / "side"
    inside.mkdir(parents=True)
    path = inside / "air.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for station in STATIONS:
            archive.writestr("../../" + name_of(station), b"no table")
    with pytest.raises(ValueError, match="must have the columns"):
        list(air_quality.examples(path))
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["air.zip", "in", "side"]
    write_zip(inside / "o.zip", {"../../x.png": b""})
    with pytest.raises(ValueError, match=r"got '\.\./\.\./x\.png'"):
        list(omniglot.examples(inside / "o.zip"))


def huge_png(side=60_000):
    """A PNG whose header claims so many pixels, and which has almost none."""

    def piece(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    body = piece(b"IHDR", header) + piece(b"IDAT", zlib.compress(b"\0" * 99)) + piece(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def huge_jpeg(side=60_000):
    """A JPEG likewise."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG")
    content = bytearray(buffer.getvalue())
    start = content.index(b"\xff\xc0") + 5  # SOF0: length, precision, height, width
    content[start : start + 4] = struct.pack(">HH", side, side)
    return bytes(content)


def test_images_that_claim_to_be_huge_are_refused_before_any_pixel(monkeypatch):
    def loaded(self):
        raise AssertionError("pixels are read")

    png, jpeg, larger = huge_png(), huge_jpeg(), huge_jpeg(9_500)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", loaded)
    with pytest.raises(ValueError, match=r"a.png must be a whole PNG .*decompression bomb"):
        images.decode(png, "PNG", "a.png", (105, 105))
    for content, kind in ((png, "PNG"), (jpeg, "JPEG"), (larger, "JPEG")):
        with pytest.raises(ValueError, match=r"must be a whole .* image: .*decompression bomb"):
            images.decode(content, kind, "a")


def test_arrays_that_the_record_does_not_say_are_refused_before_they_are_read(
    tmp_path, monkeypatch
):
    lavajax.save(PARAMS, tmp_path / "m")
    record = store.open_record(tmp_path / "m")
    shapes = {name: lavajax.leaves.stored(entry) for name, entry in record["leaves"].items()}
    arrays = store.read_arrays(tmp_path / "m", shapes)
    arrays["learned/head"] = np.zeros((2000, 2), np.float32)
    checkpointer = store._checkpointer()
    shutil.rmtree(tmp_path / "m" / "arrays")
    store._save_arrays(checkpointer, tmp_path / "m" / "arrays", arrays)
    rewrite(tmp_path / "m", lambda record: None)

    def restored(*_, **__):
        raise AssertionError("arrays are read")

    monkeypatch.setattr(checkpointer, "restore", restored)
    monkeypatch.setattr(store, "_checkpointer", lambda: checkpointer)
    with pytest.raises(store.DamagedError, match=r"learned/head is \(9, 1\).*holds \(2000, 2\)"):
        lavajax.load(tmp_path / "m")
    head = shapes.pop("learned/head")
    with pytest.raises(store.DamagedError, match="it also holds learned/head"):
        store.read_arrays(tmp_path / "m", shapes)
    with pytest.raises(store.DamagedError, match=r"other is .* it holds nothing"):
        store.read_arrays(
            tmp_path / "m", {**shapes, "learned/head": ((2000, 2), head[1])} | {"other": head}
        )
    shapes["learned/head"] = ((2000, 2), head[1])
    header = tmp_path / "m" / "arrays" / "learned" / "head" / ".zarray"
    whole = json.loads(header.read_text())
    for change, message in (
        ({"chunks": [10**9, 2]}, r"learned/head .* in pieces of \(1000000000, 2\)"),
        ({"chunks": [2000]}, r"zarray is damaged: it has pieces of another rank"),
        ({"dtype": "|O8"}, r"holds \(2000, 2\) object"),
        ({"dtype": "cucumber"}, r"zarray is damaged: .*cucumber"),
        ({"shape": None}, r"zarray is damaged"),
        ({"shape": [float("inf"), 1]}, r"zarray is damaged"),
        ({"compressor": {"id": "blosc"}}, r"packed by .*blosc"),
        ({"compressor": None}, r"zarray is damaged"),
    ):
        header.write_text(json.dumps(whole | change))
        with pytest.raises(store.DamagedError, match=message):
            store.read_arrays(tmp_path / "m", shapes)
    header.write_text(json.dumps(whole))
    piece = header.parent / "0.0"
    content = piece.read_bytes()
    repeated = (2**20 * 8 + 3).to_bytes(4, "little")[:3] + b"\0"  # a block of a byte, 2^20 times
    for change, message in (
        (b"\x28\xb5\x2f\xfd\x00\x58" + repeated, r"learned/head .* unpacks to 1,048,576 bytes"),
        (content[:-5], "a piece ends early"),
        (content + content, "no single frame"),
        (b"PK" + content, "no frame of Zstandard"),
    ):
        piece.write_bytes(change)
        with pytest.raises(store.DamagedError, match=message):
            store.read_arrays(tmp_path / "m", shapes)
    piece.write_bytes(content)
    (header.parent / "zarr.json").write_text("{}")  # the header of a layout that we do not read
    with pytest.raises(store.DamagedError, match=r"it also holds learned/head/zarr\.json"):
        store.read_arrays(tmp_path / "m", shapes)


@pytest.mark.parametrize("size", [1, 100, 40_000, 1_000_000])
@pytest.mark.parametrize("kind", ["zeros", "noise", "text"])
def test_what_a_stored_array_unpacks_to_is_known_from_its_blocks(kind, size, tmp_path):
    """No less than it does, and no more than a block above."""
    array = {
        "zeros": np.zeros(size, np.uint8),
        "noise": np.random.default_rng(0).integers(0, 256, size, np.uint8),
        "text": np.resize(np.frombuffer(b"never the same twice, ", np.uint8), size),
    }[kind]
    store._save_arrays(store._checkpointer(), tmp_path / "a", {"x": array})
    pieces = [f for f in (tmp_path / "a" / "x").iterdir() if f.name != ".zarray"]
    assert kind != "noise" or len(pieces) == 1
    for piece in pieces:  # zeros may have none
        assert size <= zarr.most_unpacked(piece.read_bytes()) <= size + 2**17


def test_arrays_of_next_to_no_bytes_are_refused_before_they_are_read(tmp_path, monkeypatch):
    """Zeros are packed to nothing, and a record may ask for any number of them."""
    params = make_params(lavajax.Lava(lavajax.MLP((500, 500))), make_points(2))
    lavajax.save(jax.tree.map(jnp.zeros_like, params), tmp_path / "m")
    record = store.open_record(tmp_path / "m")
    shapes = {name: lavajax.leaves.stored(entry) for name, entry in record["leaves"].items()}
    assert store.read_arrays(tmp_path / "m", shapes)["learned/head"].shape == (501, 1)
    monkeypatch.setattr(store, "SMALL_BYTES", 1000)
    monkeypatch.setattr(store, "MOST_PACKED", 5)
    with pytest.raises(store.DamagedError, match=r"would take 2,\d+,\d+ bytes, its files have"):
        store.read_arrays(tmp_path / "m", shapes)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": ' * 100_000, "{", "nul"])
def test_json_that_is_none_is_damage(text, tmp_path):
    from folder import read_json

    lavajax.save(PARAMS, tmp_path / "m")
    file = tmp_path / "m" / "config.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        read_json(file)
    (tmp_path / "m" / "manifest.json").unlink()
    (tmp_path / "m" / "manifest.json").write_text(store._manifest_text(tmp_path / "m"))
    with pytest.raises(store.DamagedError, match=r"config\.json is damaged"):
        lavajax.load(tmp_path / "m")
    (tmp_path / "m" / "manifest.json").write_text(text)
    with pytest.raises(store.DamagedError, match=r"manifest\.json is damaged"):
        lavajax.load(tmp_path / "m")


def test_a_class_that_prepared_data_name_is_not_imported(tmp_path):
    """The features are those of the builder's code, whatever stands beside the data."""
    source = write_zip(tmp_path / "images_background.zip", drawings("Greek", 1))
    lavajax.datasets.load_omniglot(source, tmp_path / "data")
    (file,) = (tmp_path / "data").rglob("features.json")
    features = json.loads(file.read_text()) | {"pythonClassName": "antigravity.Features"}
    file.write_text(json.dumps(features))
    assert len(lavajax.datasets.load_omniglot(source, tmp_path / "data").images) == 20
    assert "antigravity" not in sys.modules
