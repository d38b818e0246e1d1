"""Episodes of images: what they are made of, on images that say what they are."""

from __future__ import annotations

import collections

import jax
import numpy as np
import pytest

import lavajax
from helpers import REAL_OMNIGLOT
from lavajax import datasets
from lavajax.tasks import episodes, images

Arrays = collections.namedtuple("Arrays", "images labels names")
PER_CLASS, CLASSES, SIDE = 6, 10, 3
SPLITS = {"train": [0, 2, 4, 6], "validation": [1, 3], "test": [5, 7, 8]}
many = jax.jit(
    lambda source, keys, split: jax.vmap(lambda key: source.sample(key, split))(keys),
    static_argnums=2,
)


def numbered() -> Arrays:
    """Images whose pixel at the centre is the class, at a corner the image; in mixed order."""
    labels = np.repeat(np.arange(CLASSES), PER_CLASS)
    pixels = np.zeros((labels.size, SIDE, SIDE, 1), np.uint8)
    pixels[:, 1, 1, 0] = labels
    pixels[:, 0, 0, 0] = 100 + np.tile(np.arange(PER_CLASS), CLASSES)
    order = np.random.default_rng(0).permutation(labels.size)
    return Arrays(pixels[order], labels[order], tuple(f"class {i}" for i in range(CLASSES)))


def make(**changes) -> episodes.Episodes:
    settings = {"ways": 3, "shots": 2, "queries": 4, "rotations": ("train",)} | changes
    return episodes.episodes(numbered(), {**SPLITS, "validation": [1, 3, 9]}, **settings)


def read(x) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class, number and quarter turns of images ``[..., 3, 3, 1]``."""
    pixels = np.rint(255 * np.asarray(x)[..., 0]).astype(int)
    corners = np.stack([pixels[..., 0, 0], pixels[..., 2, 0], pixels[..., 2, 2], pixels[..., 0, 2]])
    return pixels[..., 1, 1], corners.max(axis=0) - 100, corners.argmax(axis=0)


@pytest.fixture(scope="module")
def drawn() -> dict[str, lavajax.Task]:
    source, keys = make(), jax.random.split(jax.random.key(0), 200)
    return {split: many(source, keys, split) for split in images.SPLITS}


def test_an_episode_has_each_image_once_and_labels_of_one_class_each(drawn):
    task = drawn["train"]
    assert task.support.x.shape == (200, 6, SIDE, SIDE, 1)
    assert task.query.x.shape == (200, 12, SIDE, SIDE, 1)
    assert task.support.x.dtype == np.float32
    x = np.concatenate([task.support.x, task.query.x], axis=1)
    y = np.concatenate([task.support.y, task.query.y], axis=1)
    assert y.dtype == np.int32
    for labels, *found in zip(y, *read(x), strict=True):
        assert np.bincount(labels[:6]).tolist() == [2, 2, 2]
        assert np.bincount(labels[6:]).tolist() == [4, 4, 4]
        points = set(zip(labels, *found, strict=True))
        assert len(points) == 18
        assert len({(label, which, turns) for label, which, _, turns in points}) == 3


def test_labels_go_to_classes_at_random_and_supports_are_shuffled(drawn):
    task = drawn["validation"]
    which, _, _ = read(task.support.x)
    y = np.asarray(task.support.y)
    # 200 episodes of all 3 classes: each label goes to each of them about 67 times.
    share = [[np.mean(which[y == label] == c) for c in (1, 3, 9)] for label in range(3)]
    np.testing.assert_allclose(share, 1 / 3, atol=0.12)
    assert len({tuple(row) for row in y}) > 50  # of the 90 orders


def test_splits_have_their_own_classes_and_only_training_turns_them(drawn):
    for split, classes in (SPLITS | {"validation": [1, 3, 9]}).items():
        which, number, turns = read(drawn[split].support.x)
        assert set(which.ravel()) == set(classes)
        assert set(number.ravel()) == set(range(PER_CLASS))
        assert set(turns.ravel()) == ({0, 1, 2, 3} if split == "train" else {0})


def test_a_turned_class_is_turned_counterclockwise_as_a_whole(drawn):
    task = drawn["train"]
    original = {int(c): p for c, p in zip(numbered().labels, numbered().images, strict=True)}
    which, number, turns = (a[0] for a in read(task.query.x))
    for x, c, i, k in zip(task.query.x[0], which, number, turns, strict=True):
        image = original[c].copy()
        image[0, 0, 0] = 100 + i
        np.testing.assert_array_equal(np.rint(255 * np.asarray(x)), np.rot90(image, k))


def test_values_are_standardised_in_one_place():
    source = make(mean=(0.25,), std=(0.5,))
    white = np.full((1, SIDE, SIDE, 1), 255, np.uint8)
    np.testing.assert_allclose(source.inputs(white), 1.5)
    keys = jax.random.split(jax.random.key(0), 200)
    plain = many(make(), keys, "test").support.x
    np.testing.assert_allclose(
        many(source, keys, "test").support.x, (plain - 0.25) / 0.5, atol=1e-6
    )


def test_classes_may_have_different_numbers_of_images():
    data = numbered()
    kept = (data.labels != 0) | (data.images[:, 0, 0, 0] < 103)  # class 0 keeps images 0 to 2
    data = Arrays(data.images[kept], data.labels[kept], data.names)
    source = episodes.episodes(
        data, {**SPLITS, "train": [0, 2]}, ways=2, shots=1, queries=2, rotations=()
    )
    task = many(source, jax.random.split(jax.random.key(0), 50), "train")
    which, number, _ = read(np.concatenate([task.support.x, task.query.x], axis=1))
    assert set(number[which == 0]) == {0, 1, 2}
    assert set(number[which == 2]) == set(range(PER_CLASS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ways": 5}, "ways must be at most .* got 5, and the validation split has 3"),
        ({"queries": 5}, r"shots \+ queries = 2 \+ 5 images, class 0 has 6.* 10 in all"),
    ],
)
def test_episodes_that_cannot_be_drawn_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        make(**changes)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([0, 1, 1], "classes must name every label once, in one split, got class 1 twice"),
        ([*range(3), 99], "classes must be labels from 0 to .*, got 0 to 99"),
        ([-1, 0, 1], "got -1 to"),
        ([0, 1.5, 2], "classes must be integers"),
    ],
)
def test_classes_that_are_named_twice_or_are_none_are_refused(train, message):
    with pytest.raises(ValueError, match=message):
        episodes.episodes(numbered(), {**SPLITS, "train": train}, ways=2, shots=1, queries=2)


def test_splits_that_share_a_class_are_refused():
    shared = {**SPLITS, "test": [*SPLITS["test"], SPLITS["train"][0]]}
    with pytest.raises(ValueError, match="once, in one split"):
        episodes.episodes(numbered(), shared, ways=2, shots=1, queries=2)


def test_images_that_are_not_bytes_or_not_square_are_refused():
    data, settings = numbered(), {"ways": 2, "shots": 1, "queries": 1}
    with pytest.raises(ValueError, match=r"must be uint8 \[n, H, W, C\], got float64"):
        episodes.episodes(data._replace(images=data.images / 255), SPLITS, **settings)
    flat = data._replace(images=data.images[:, :, :2])
    with pytest.raises(ValueError, match="rotations need square images, got 3x2"):
        episodes.episodes(flat, SPLITS, **settings, rotations=("test",))


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda labels: labels - 1, r"int\d+ .* from -1 to"),
        (lambda labels: labels + 1, r"int\d+ .* from 1 to"),
        (lambda labels: labels + 0.5, "float64"),
        (lambda labels: labels[1:], r"int\d+ \["),
    ],
)
def test_labels_that_are_none_are_refused(change, got):
    data, settings = numbered(), {"ways": 2, "shots": 1, "queries": 1}
    labels = change(np.asarray(data.labels))
    with pytest.raises(ValueError, match=rf"data\.labels must be .* integers from 0 .*, got {got}"):
        episodes.episodes(data._replace(labels=labels), SPLITS, **settings)


def test_whole_alphabets_are_held_out():
    eight = [f"{letter}/x" for letter in "HGFEDCBA"]
    found = images.split_alphabets(eight, "alphabet")
    by_split = {s: sorted(n[0] for n in found if found[n] == s) for s in images.SPLITS}
    assert by_split == {"train": list("ACEFG"), "validation": ["B"], "test": ["D", "H"]}
    fifty = [f"A{i:02d}" for i in range(50)]
    counts = collections.Counter(images.split_alphabets(fifty, "alphabet").values())
    assert counts == {"train": 31, "validation": 7, "test": 12}
    with pytest.raises(ValueError, match=r"at least 4 alphabets.*has 3: A, B, C"):
        images.split_alphabets(["A", "B", "C"], "alphabet")


def test_lakes_split_tests_on_the_evaluation_set():
    background = [f"B{i:02d}" for i in range(30)]
    found = images.split_alphabets([*images.EVALUATION, *background], "lake")
    assert len(set(images.EVALUATION)) == 20
    assert {found[name] for name in images.EVALUATION} == {"test"}
    counts = collections.Counter(found[name] for name in background)
    assert counts == {"train": 26, "validation": 4}
    with pytest.raises(ValueError, match=r"needs all 50 alphabets.*has 30.*lacks Angelic"):
        images.split_alphabets(background, "lake")


def test_finns_split_holds_out_characters():
    names = [f"A{i // 33}/{i}" for i in range(images.CHARACTERS)]
    found = images.split_characters(names, "finn")
    assert {split: len(of) for split, of in found.items()} == {
        "train": 1100,
        "validation": 100,
        "test": 423,
    }
    assert sorted(i for of in found.values() for i in of) == list(range(images.CHARACTERS))
    assert found == images.split_characters(names, "finn")
    assert len({names[i].partition("/")[0] for i in found["test"]}) == 50  # some of every alphabet
    fewer = images.split_characters(names[:242], "finn")
    assert {split: len(of) for split, of in fewer.items()} == {
        "train": 164,
        "validation": 15,
        "test": 63,
    }


def test_turned_characters_are_classes_of_the_splits_that_are_named():
    every = make(rotations=images.SPLITS)
    for source, splits in ((make(), ("train",)), (every, images.SPLITS), (make(rotations=()), ())):
        for split in images.SPLITS:
            _, turns = divmod(np.asarray(source.classes[split]), 4)
            assert set(turns.tolist()) == (set(range(4)) if split in splits else {0})
    keys = jax.random.split(jax.random.key(0), 50)
    _, _, turns = read(many(every, keys, "test").support.x)
    assert len(set(turns.ravel().tolist())) == 4


def test_settings_are_checked_and_name_their_loss():
    assert lavajax.Omniglot("x", ways=7).point_loss == lavajax.CrossEntropy(7)
    assert lavajax.MiniImageNet("x").point_loss == lavajax.CrossEntropy(5)
    assert lavajax.Omniglot("x", rotations=True) == lavajax.Omniglot("x", rotations="train")
    assert lavajax.Omniglot("x", rotations=False) == lavajax.Omniglot("x", rotations="none")
    with pytest.raises(ValueError, match=r"Omniglot\.ways must be an integer of at least 2, got 1"):
        lavajax.Omniglot("x", ways=1)
    with pytest.raises(
        ValueError, match=r"Omniglot\.split must be one of 'alphabet', 'lake', 'finn'"
    ):
        lavajax.Omniglot("x", split="vinyals")
    with pytest.raises(FileNotFoundError, match="brendenlake/omniglot"):
        lavajax.Omniglot("nowhere").load()
    with pytest.raises(FileNotFoundError, match="meta-learning-lstm"):
        lavajax.MiniImageNet("nowhere").load()


@pytest.mark.parametrize(
    ("settings", "reader", "tops"),
    [
        (lavajax.Omniglot("x", ways=2), "load_omniglot", "ABCD"),
        (lavajax.MiniImageNet("x", ways=2), "load_mini_imagenet", SPLITS),
    ],
    ids=["omniglot", "mini-imagenet"],
)
def test_prepared_images_lie_where_they_are_told_to(settings, reader, tops, tmp_path, monkeypatch):
    """As those of all data sets may."""
    names, asked = [f"{top}/{i}" for top in tops for i in range(2)], []
    labels = np.repeat(np.arange(len(names)), 16)

    def read(path, data_dir):
        asked.append((path, data_dir))
        return Arrays(np.zeros((len(labels), 2, 2, 1), np.uint8), labels, names)

    monkeypatch.setattr(datasets, reader, read)
    settings.load(tmp_path)
    settings.load()
    assert asked == [("x", tmp_path), ("x", None)]


@pytest.mark.skipif(not REAL_OMNIGLOT.is_dir(), reason="Omniglot's small sets are not here")
def test_real_characters_are_split_by_alphabet(tmp_path):
    source = lavajax.Omniglot(str(REAL_OMNIGLOT)).load(tmp_path)
    assert {s: table.shape[0] for s, table in source.classes.items()} == {
        "train": 4 * 156,
        "validation": 22,
        "test": 64,
    }
    assert source.most == 20
    task = source.sample(jax.random.key(0), "test")
    assert task.support.x.shape == (5, 28, 28, 1)
    assert 0.9 < float(task.support.x.max()) <= 1.0  # ink is 1
