"""Data sets read from tiny files in the published formats, prepared once, and refused by name."""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from helpers import REAL_OMNIGLOT
from lavajax.datasets import base, builders, load_mini_imagenet, load_omniglot, omniglot
from lavajax.datasets import mini_imagenet as mini

ROOT = Path(__file__).resolve().parents[1]


def write_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def image_bytes(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


# Omniglot


def stroke(column: int, width: int = 105, height: int = 105) -> bytes:
    """A black vertical stroke on white, one bit a pixel, at a column of the reduced drawing."""
    pixels = np.full((height, width), 255, np.uint8)
    pixels[:, column * width // 28 : (column + 1) * width // 28] = 0
    return image_bytes(Image.fromarray(pixels).convert("1"), "PNG")


def drawings(alphabet: str, characters: int, *, top: str = "images_background") -> dict[str, bytes]:
    """Twenty drawings of each character, the stroke further right with each of both."""
    return {
        f"{top}/{alphabet}/character{c:02d}/{c:04d}_{d:02d}.png": stroke((c + d) % 28)
        for c in range(1, characters + 1)
        for d in range(1, 21)
    }


@pytest.fixture(scope="module")
def omniglot_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("omniglot")
    extra = {"images_background/": b"", "__MACOSX/images_background/._0001_01.png": b"x"}
    greek, futhorc = drawings("Greek", 2), drawings("Anglo-Saxon_Futhorc_(old)", 1)
    write_zip(folder / "images_background.zip", {**extra, **greek})
    write_zip(folder / "images_background_small1.zip", greek | futhorc)
    return folder


def test_omniglot_merges_the_zips_of_a_folder(omniglot_folder, tmp_path):
    found = load_omniglot(omniglot_folder, tmp_path)
    assert found.names == (
        "Anglo-Saxon_Futhorc_(old)/character01",
        "Greek/character01",
        "Greek/character02",
    )
    assert found.images.shape == (60, 28, 28, 1)
    assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
    np.testing.assert_array_equal(found.labels, np.repeat([0, 1, 2], 20))
    ink = found.images[:, 14, :, 0]
    expected = [(c + d) % 28 for c in (1, 1, 2) for d in range(1, 21)]
    np.testing.assert_array_equal(ink.argmax(axis=1), expected)
    assert ink.max(axis=1).min() > 150  # ink is bright
    assert np.median(ink) == 0


def test_omniglot_reads_a_single_zip(omniglot_folder, tmp_path):
    found = load_omniglot(omniglot_folder / "images_background.zip", tmp_path)
    assert found.names == ("Greek/character01", "Greek/character02")


def changed_drawing(change) -> dict[str, bytes]:
    return drawings("Greek", 1) | {"images_background/Greek/character01/0001_07.png": change}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"readme.txt": b""}, "has none"),
        ({"images_background/../../x.png": b""}, r"got 'images_background/\.\./\.\./x\.png'"),
        (dict(list(drawings("Greek", 1).items())[:-1]), "Greek/character01 has none by drawer 20"),
        (
            drawings("Greek", 1) | {"images_background/Greek/character01/0001_21.png": stroke(1)},
            "20 drawings of each character, got more: .*0001_21",
        ),
        (changed_drawing(stroke(1, width=104)), "0001_07.png must be .* 105 x 105 pixels, got 104"),
        (changed_drawing(stroke(1, width=60_000)), "105 x 105 pixels, got 60000 x 105"),
        (changed_drawing(b"no image"), "0001_07.png must be a whole PNG image"),
        (changed_drawing(stroke(1)[:60]), "0001_07.png must be a whole PNG image"),
        (changed_drawing(image_bytes(Image.new("L", (105, 105)), "BMP")), "a whole PNG image"),
        (changed_drawing(bytes(2**16 + 1)), "0001_07.png unpacks to 65537 bytes or more"),
    ],
)
def test_changed_omniglot_is_refused_by_name(members, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        list(omniglot.examples(write_zip(tmp_path / "a.zip", members)))


def test_a_wrong_file_says_where_the_right_one_is_published(tmp_path):
    members = drawings("Greek", 1) | {"images_background/Greek/character01/0001_07.png": b""}
    (tmp_path / "data").mkdir()
    with pytest.raises(
        ValueError, match=r"whole PNG.*\. They are published at .*MIT.*nothing is d"
    ):
        load_omniglot(write_zip(tmp_path / "a.zip", members), tmp_path / "data")


def test_a_smaller_zip_than_the_published_one_is_told(tmp_path):
    zip_ = write_zip(tmp_path / "images_evaluation.zip", drawings("Greek", 2))
    for _ in range(2):  # prepared, and read
        with pytest.warns(UserWarning, match=r"on\.zip is not .* has 659 characters: it has 2"):
            assert len(load_omniglot(zip_, tmp_path).images) == 40
    other = zip_.rename(tmp_path / "mine.zip")
    with pytest.warns(UserWarning, match=r"mine\.zip has the name of none of the published files"):
        assert len(load_omniglot(other, tmp_path).images) == 40


def test_omniglot_zips_that_disagree_are_refused(tmp_path):
    write_zip(tmp_path / "images_background.zip", drawings("Greek", 1))
    write_zip(tmp_path / "images_evaluation.zip", changed_drawing(stroke(1)))
    with pytest.raises(ValueError, match=r"background\.zip: .*0001_07.*evaluation\.zip: .*differ"):
        list(omniglot.examples(tmp_path))


def test_missing_omniglot_says_where_it_is_published(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not there\. .*brendenlake/omniglot.*MIT"):
        load_omniglot(tmp_path / "none", tmp_path)
    (tmp_path / "images_background").mkdir()
    with pytest.raises(FileNotFoundError, match="a folder with images_background"):
        load_omniglot(tmp_path, tmp_path)


@pytest.mark.skipif(not REAL_OMNIGLOT.is_dir(), reason="Omniglot's small sets are not here")
def test_real_omniglot_has_the_published_counts(tmp_path):
    found = load_omniglot(REAL_OMNIGLOT, tmp_path)
    assert found.images.shape == (4840, 28, 28, 1)
    assert len(found.names) == 242
    assert len({name.split("/")[0] for name in found.names}) == 8
    assert 10 < found.images.mean() < 40  # strokes are thin


# mini-ImageNet


def rows_of(split: str, each: int = 2) -> list[tuple[str, str]]:
    labels = [f"n{split[:2]}{c:05d}" for c in range(mini.CLASSES[split])]
    return [(f"{label}{i:08d}.jpg", label) for label in labels for i in range(each)]


def as_csv(rows: list[tuple[str, str]]) -> str:
    return "filename,label\n" + "".join(f"{name},{label}\n" for name, label in rows)


@pytest.fixture(scope="module")
def mini_folder(tmp_path_factory) -> Path:
    """The published lists with two images of each class, wider than high, of one colour each."""
    folder = tmp_path_factory.mktemp("mini")
    (folder / "images").mkdir()
    for split, stem in mini.SPLITS.items():
        rows = rows_of(split)
        (folder / f"{stem}.csv").write_text(as_csv(rows))
        for i, (name, _) in enumerate(rows):
            colour = (i, 255 - i, 128)
            Image.new("RGB", (96, 90), colour).save(folder / "images" / name, quality=95)
    return folder


@pytest.mark.filterwarnings("ignore:.*not the published list")
def test_mini_imagenet_from_lists_and_images(mini_folder, tmp_path):
    found = load_mini_imagenet(mini_folder, tmp_path)
    assert found.images.shape == (200, 84, 84, 3)
    assert (found.images.dtype, found.labels.dtype) == (np.uint8, np.int32)
    assert (found.names[0], found.names[64], found.names[80], len(found.names)) == (
        *("train/ntr00000", "validation/nva00000", "test/nte00000"),
        100,
    )
    np.testing.assert_array_equal(found.labels, np.repeat(np.arange(100), 2))
    colour = found.images[10].mean(axis=(0, 1))
    np.testing.assert_allclose(colour, [10, 245, 128], atol=3)  # JPEG is not exact


def test_mini_imagenet_lists_of_another_split_are_told(mini_folder):
    with pytest.warns(UserWarning, match="not the published list") as told:
        mini.files(mini_folder)
    for warning, (split, stem) in zip(told, mini.SPLITS.items(), strict=True):
        assert f"{stem}.csv is not the published list" in str(warning.message)
        assert f"not {mini.MD5[split]}" in str(warning.message)


def write_arrays(folder: Path, **changed) -> Path:
    """The three archives; what is ``changed`` is so in each."""
    for split, stem in mini.SPLITS.items():
        labels = np.array([label for _, label in rows_of(split, 1)])
        images = np.zeros((len(labels), 84, 84, 3), np.uint8)
        images += np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
        arrays = {"images": images, "labels": labels} | changed
        np.savez(folder / f"{stem}.npz", **{k: v for k, v in arrays.items() if v is not None})
    return folder


def test_mini_imagenet_splits_of_the_same_classes_are_refused(tmp_path):
    labels = {split: [f"n{i}" for i in range(n)] for split, n in mini.CLASSES.items()}
    for split, stem in mini.SPLITS.items():
        np.savez(tmp_path / f"{stem}.npz", images=[0], labels=labels[split])
    with pytest.raises(ValueError, match="train and val have 16 in common: n0, n1, n10"):
        mini.files(tmp_path)
    for split, stem in mini.SPLITS.items():  # integers, which each split counts from 0
        np.savez(tmp_path / f"{stem}.npz", images=[0], labels=np.arange(mini.CLASSES[split]))
    assert len(mini.files(tmp_path)) == 3


@pytest.mark.filterwarnings("ignore:.*not the published list")
def test_mini_imagenet_lists_that_repeat_are_refused(tmp_path):
    rows = {split: rows_of(split) for split in mini.SPLITS}
    rows["test"][1] = (rows["train"][0][0], rows["test"][1][1])
    for split, stem in mini.SPLITS.items():
        (tmp_path / f"{stem}.csv").write_text(as_csv(rows[split]))
    with pytest.raises(ValueError, match=f"every image once, {rows['train'][0][0]} is there twice"):
        mini.files(tmp_path)
    same = [(f"x{name}", label) for name, label in rows["train"]][:32]
    (tmp_path / "val.csv").write_text(as_csv(same))
    with pytest.raises(ValueError, match="train and val have 16 in common"):
        mini.files(tmp_path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\x01\x00\x28\x23" + b"-" * 9000, "must hold plain arrays"),
        (b"\x01\x00\x28\x23" + b"(" * 9000, "must hold plain arrays"),
        (b"\x02\x00\xff\xff\xff\xff{", r"version \(2, 0\) of NumPy's format"),
    ],
)
def test_headers_that_are_none_are_refused(header, message, tmp_path):
    with zipfile.ZipFile(tmp_path / "train.npz", "w") as archive:
        archive.writestr("images.npy", b"")
        archive.writestr("labels.npy", b"\x93NUMPY" + header)
    with pytest.raises(ValueError, match=f"train.npz {message}|train.npz must.*{message}"):
        next(mini.examples(tmp_path, "train"))


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_zips_of_other_methods_are_refused_unread(method, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w", method) as archive:
        archive.writestr("x.png", b"0" * 99)
    with (
        pytest.raises(ValueError, match=f"a.zip has x.png, compressed by method {method}"),
        base.open_zip(tmp_path / "a.zip", "a.zip"),
    ):
        pass


def test_mini_imagenet_from_arrays(tmp_path):
    found = load_mini_imagenet(write_arrays(tmp_path), tmp_path / "data")
    assert found.images.shape == (100, 84, 84, 3)
    assert found.names[79] == "validation/nva00015"
    np.testing.assert_array_equal(found.images[:, 0, 0, 0], [*range(64), *range(16), *range(20)])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": None}, "must hold the arrays images and labels, got images.npy"),
        ({"images": np.zeros((64, 84, 84, 3))}, "images must be .64, 84, 84, 3. uint8"),
        ({"images": np.zeros((63, 84, 84, 3), np.uint8)}, r"got shape \(63, 84, 84, 3\)"),
        ({"labels": np.arange(10)}, "64 classes of one size .*, got 10 classes of 1 to 1"),
        ({"labels": np.arange(64) % 5}, "64 classes of one size .*, got 5 classes of 12 to 13"),
        ({"labels": np.array([{}, []], object)}, "labels must be .* integers or strings"),
        ({"labels": np.array(["../up"] * 64)}, "labels must be such as n01532829, got '../up'"),
        ({"labels": np.zeros(10**6, np.int8)}, "n at most 76800"),
    ],
)
def test_changed_arrays_are_refused_by_name(changed, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        list(mini.examples(write_arrays(tmp_path, **changed), "train"))
    assert "train.npz" in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have the header filename,label, got nothing"),
        ("name,label\n", "must have the header filename,label, got name,label"),
        (as_csv([("../x.jpg", "n1")]), r"must have rows such as .* got '\.\./x\.jpg,n1'"),
        (as_csv(rows_of("train")[:-1]), f"classes of 1 to 2 images; .*{mini.MD5['train']}"),
        (as_csv(rows_of("test")), "must have 64 classes .* got 20 classes"),
        ("filename,label\n" + "a" * 2**24, "must be a list of images, and has 16777"),
    ],
)
def test_changed_lists_are_refused_by_name(text, message, tmp_path):
    for stem in mini.SPLITS.values():
        (tmp_path / f"{stem}.csv").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        mini.files(tmp_path)
    assert "train.csv" in str(error.value)


@pytest.mark.filterwarnings("ignore:.*not the published list")
def test_images_that_are_none_are_refused_by_name(mini_folder, tmp_path):
    for file in mini_folder.glob("*.csv"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "images").mkdir()
    name = rows_of("train")[0][0]
    with pytest.raises(FileNotFoundError, match=f"{name}, which is not there.*ImageNet"):
        mini.files(tmp_path)
    (tmp_path / "images" / name).write_bytes(stroke(1))
    with pytest.raises(ValueError, match=f"{name} must be a whole JPEG image"):
        next(mini.examples(tmp_path, "train"))


def test_mini_imagenet_pickles_are_refused_and_the_way_out_is_told(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"an empty folder\. .*meta-learning-lstm"):
        mini.files(tmp_path)
    pickled = tmp_path / "mini-imagenet-cache-train.pkl"
    pickled.write_bytes(b"")
    for path in (pickled, tmp_path):
        with pytest.raises(ValueError, match=r"can run any code.*np\.savez\('train\.npz'"):
            mini.files(path)


# What all share


def test_prepared_once_for_each_content_of_the_source(omniglot_folder, tmp_path, monkeypatch):
    source, data = tmp_path / "images_background.zip", tmp_path / "data"
    source.write_bytes((omniglot_folder / "images_background.zip").read_bytes())
    first = load_omniglot(source, data)

    def read_again(*_):
        raise AssertionError("the source is read again")

    with monkeypatch.context() as patch:
        patch.setattr(omniglot, "examples", read_again)
        again = load_omniglot(source, data)
    np.testing.assert_array_equal(first.images, again.images)
    assert first.names == again.names

    write_zip(source, drawings("Latin", 1))
    assert load_omniglot(source, data).names == ("Latin/character01",)
    assert len([p for p in data.glob("omniglot_drawings/*") if p.is_dir()]) == 2


def test_interrupted_preparation_is_taken_up_anew(omniglot_folder, tmp_path, monkeypatch):
    """By an error, and by a kill, of which the half-written folder stays behind."""
    whole = omniglot.examples

    def interrupted(path):
        yield next(whole(path))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(omniglot, "examples", interrupted)
        with pytest.raises(KeyboardInterrupt):
            load_omniglot(omniglot_folder, tmp_path)
        kill = "import os; from lavajax.datasets import omniglot, load_omniglot\n"
        kill += "whole = omniglot.examples\n"
        kill += "def cut(path):\n    yield next(whole(path))\n    os.kill(os.getpid(), 9)\n"
        kill += "omniglot.examples = cut\n"
        kill += f"load_omniglot({str(omniglot_folder)!r}, {str(tmp_path)!r})"
        done = subprocess.run([sys.executable, "-c", kill], check=False, capture_output=True)
        assert done.returncode == -9, done.stderr
    assert list(tmp_path.glob("omniglot_drawings/*/incomplete.*"))
    assert len(load_omniglot(omniglot_folder, tmp_path).images) == 60
    assert not list(tmp_path.glob("omniglot_drawings/*/incomplete.*"))


def test_two_processes_prepare_the_same_data_once(omniglot_folder, tmp_path):
    """Each with the same state of ``random``, which names the folders of what is incomplete."""
    code = "import random; from lavajax.datasets import load_omniglot, omniglot\n"
    code += "whole = omniglot.examples\n"
    code += "def told(path):\n    print('prepares')\n    return whole(path)\n"
    code += "omniglot.examples = told\nrandom.seed(0)\n"
    code += f"print(len(load_omniglot({str(omniglot_folder)!r}, {str(tmp_path)!r}).images))"
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(out.split() for out in outputs) == [["60"], ["prepares", "60"]]


def test_builder_is_one_of_tfds(omniglot_folder, tmp_path):
    import pickle

    import tensorflow_datasets as tfds

    made = tfds.builder("omniglot_drawings", source=omniglot_folder, data_dir=tmp_path)
    assert isinstance(made, builders.OmniglotDrawings)
    made.download_and_prepare()
    assert made.info.splits["drawings"].num_examples == 60
    drawing = made.as_data_source("drawings")[21]
    assert (drawing["label"], drawing["alphabet"]) == (1, b"Greek")
    # What is prepared is read without the source, as by a worker of a data loader.
    back = pickle.loads(pickle.dumps(made))
    np.testing.assert_array_equal(back.as_data_source("drawings")[21]["image"], drawing["image"])
    with pytest.raises(ValueError, match=r"OmniglotDrawings needs source="):
        builders.OmniglotDrawings(data_dir=tmp_path)


def test_fingerprint_of_a_large_file_reads_little_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "_WHOLE", 1000)
    monkeypatch.setattr(base, "_BLOCK", 16)
    monkeypatch.setattr(base, "_BLOCKS", 8)
    content = random.Random(0).randbytes(5000)
    files = [tmp_path / "a", tmp_path / "b", tmp_path / "c"]

    def written(content: bytes) -> str:
        """The content over three files, one of them empty; without what their times tell."""
        for file, (start, end) in zip(files, [(0, 16), (16, 16), (16, None)], strict=True):
            file.write_bytes(content[start:end])
            os.utime(file, ns=(0, 0))
        return base.fingerprint(files)

    found = written(content)
    assert written(content) == found
    for at in (0, 15, 712, 4984, 4999):
        assert written(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]) != found
    assert written(content + b"x") != found
    assert written(content[:100] + b"x" + content[101:]) == found  # between two blocks
    os.utime(files[2], ns=(0, 1))
    assert base.fingerprint(files) != found


def test_encrypted_and_truncated_zips_are_refused(omniglot_folder, tmp_path):
    whole = (omniglot_folder / "images_background.zip").read_bytes()
    cut = tmp_path / "cut.zip"
    cut.write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match=r"must be a whole, plain zip file, got .*cut\.zip"):
        list(omniglot.examples(cut))
    # Bit 0 of the flags, in each member's own header and in the directory.
    locked = bytearray(whole)
    for magic, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = whole.find(magic)
        while at >= 0:
            locked[at + offset] |= 1
            at = whole.find(magic, at + 1)
    cut.write_bytes(locked)
    with pytest.raises(ValueError, match=r"must be a whole, plain zip file.*encrypted"):
        list(omniglot.examples(cut))
