"""Few-shot classification of images: episodes of N classes with K images each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lavajax import validate
from lavajax.losses import CrossEntropy
from lavajax.models.conv import Conv4
from lavajax.tasks.base import SPLITS, Split
from lavajax.types import Array, Points, Task

EVALUATION = (
    *("Angelic", "Atemayar_Qelisayer", "Atlantean", "Aurek-Besh", "Avesta", "Ge_ez", "Glagolitic"),
    *("Gurmukhi", "Kannada", "Keble", "Malayalam", "Manipuri", "Mongolian"),
    *("Old_Church_Slavonic_(Cyrillic)", "Oriya", "Sylheti", "Syriac_(Serto)", "Tengwar"),
    *("Tibetan", "ULOG"),
)
"""The alphabets of Omniglot's evaluation set; the 30 others are its background set."""
ALPHABETS = 50
# Of the values from 0 to 1, as in the few-shot benchmarks of Deleu et al. (Torchmeta, jax-meta).
_MINI_IMAGENET_MEAN = (120.396 / 255, 115.594 / 255, 104.540 / 255)
_MINI_IMAGENET_STD = (70.682 / 255, 68.276 / 255, 72.545 / 255)


class Images(Protocol):
    """Labelled images, as ``lavajax.datasets`` reads them."""

    @property
    def images(self) -> np.ndarray:
        """uint8 ``[n, H, W, C]``."""

    @property
    def labels(self) -> np.ndarray:
        """Indices into ``names``, ``[n]``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the classes."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Omniglot:
    """Settings of the Omniglot tasks (Lake, Salakhutdinov and Tenenbaum 2015); ``load`` reads them.

    A class is a handwritten character, drawn by 20 people; images are 28x28x1 with ink at 1.

    Whole alphabets are held out, so that no test task has a character of an alphabet seen in
    training. They are ordered by name and counted from 0. With ``split="alphabet"``, those whose
    number leaves 3 when divided by 4 are for test, those that leave 1 when divided by 8 for
    validation, all others for training: of 8 alphabets 5, 1 and 2, of all 50 31, 7 and 12. With
    ``split="lake"``, test tasks come from the 20 alphabets of the evaluation set, and the 30 of the
    background set are divided by 8 alike, into 26 and 4.

    Attributes:
        data: what ``lavajax.datasets.load_omniglot`` reads.
        ways: N, classes of a task.
        shots: K, support images of each class.
        queries: query images of each class.
        split: how alphabets are held out.
        rotations: let characters turned by 90, 180 and 270 degrees be further classes of the
            training tasks. Validation and test tasks have characters as they were drawn.
    """

    model: ClassVar[Conv4] = Conv4()
    test_tasks: ClassVar[int] = 600

    data: str
    ways: int = 5
    shots: int = 1
    queries: int = 15
    split: Literal["alphabet", "lake"] = "alphabet"
    rotations: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", str(self.data))
        _check_episode(self)
        validate.choice(self, "split", ("alphabet", "lake"))
        validate.flag(self, "rotations")

    @property
    def point_loss(self) -> CrossEntropy:
        """The loss that a method needs for these tasks."""
        return CrossEntropy(self.ways)

    def load(self, data_dir: str | Path | None = None) -> Episodes:
        """Reads the drawings; the first time it prepares them, see ``lavajax.datasets``.

        Args:
            data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

        Raises:
            ValueError: the data is not what is published, or lacks what the split needs.
            FileNotFoundError: there is no such data; the message says where it is published.
            ModuleNotFoundError: a package is missing; the message has the command that installs it.
        """
        from lavajax import datasets  # heavy, and for this alone

        data = datasets.load_omniglot(self.data, data_dir)
        alphabets = [name.partition("/")[0] for name in data.names]
        split_of = split_alphabets(alphabets, self.split)
        classes = {s: [i for i, a in enumerate(alphabets) if split_of[a] == s] for s in SPLITS}
        return episodes(
            data,
            classes,
            ways=self.ways,
            shots=self.shots,
            queries=self.queries,
            rotations=self.rotations,
        )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class MiniImageNet:
    """Settings of the mini-ImageNet tasks (Vinyals et al. 2016); ``load`` reads the images.

    Images are 84x84x3; 64, 16 and 20 classes are for training, validation and test (Ravi and
    Larochelle 2017). Values are standardised by the data set's own mean and standard deviation.

    Attributes:
        data: what ``lavajax.datasets.load_mini_imagenet`` reads.
        ways: N, classes of a task.
        shots: K, support images of each class.
        queries: query images of each class.
    """

    model: ClassVar[Conv4] = Conv4()
    test_tasks: ClassVar[int] = 600

    data: str
    ways: int = 5
    shots: int = 1
    queries: int = 15

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", str(self.data))
        _check_episode(self)

    @property
    def point_loss(self) -> CrossEntropy:
        """The loss that a method needs for these tasks."""
        return CrossEntropy(self.ways)

    def load(self, data_dir: str | Path | None = None) -> Episodes:
        """Reads the images; the first time it prepares them, see ``lavajax.datasets``.

        Args:
            data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

        Raises:
            ValueError: the data is not what is published.
            FileNotFoundError: there is no such data; the message says where it is published.
            ModuleNotFoundError: a package is missing; the message has the command that installs it.
        """
        from lavajax import datasets  # heavy, and for this alone

        data = datasets.load_mini_imagenet(self.data, data_dir)
        split_of = [name.partition("/")[0] for name in data.names]
        return episodes(
            data,
            {split: [i for i, s in enumerate(split_of) if s == split] for split in SPLITS},
            ways=self.ways,
            shots=self.shots,
            queries=self.queries,
            mean=_MINI_IMAGENET_MEAN,
            std=_MINI_IMAGENET_STD,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Episodes:
    """Tasks that are drawn on the device from stored images.

    Attributes:
        images: uint8 ``[n, H, W, C]``, class after class.
        first: index of each class's first image, ``[classes]``.
        count: images of each class, ``[classes]``.
        classes: for each split, the classes of its tasks, as 4 times the class plus quarter turns.
        ways: N; static.
        shots: K; static.
        queries: query images of each class; static.
        most: images of the largest class; static.
        rotations: whether a class may be one of turned images; static.
        mean: of the values from 0 to 1, for each channel or one for all; static.
        std: standard deviation, likewise.
    """

    images: Array
    first: Array
    count: Array
    classes: dict[str, Array]
    ways: int = dataclasses.field(metadata={"static": True})
    shots: int = dataclasses.field(metadata={"static": True})
    queries: int = dataclasses.field(metadata={"static": True})
    most: int = dataclasses.field(metadata={"static": True})
    rotations: bool = dataclasses.field(metadata={"static": True})
    mean: tuple[float, ...] = dataclasses.field(metadata={"static": True})
    std: tuple[float, ...] = dataclasses.field(metadata={"static": True})

    def sample(self, key: Array, split: Split = "train") -> Task:
        """An episode: support x ``[N K, H, W, C]``, y ``[N K]``, and the query alike.

        Classes are drawn without replacement, and so are the images of each. Labels 0 to N - 1 go
        to the classes in the random order of their drawing; the support's points are shuffled.
        """
        class_key, image_key, order_key = jax.random.split(key, 3)
        drawn = jax.random.choice(class_key, self.classes[split], (self.ways,), replace=False)
        index, turns = drawn // 4, drawn % 4
        image_keys = jax.random.split(image_key, self.ways)
        images = self.first[index][:, None] + jax.vmap(self._draw)(image_keys, self.count[index])
        labels = jnp.arange(self.ways, dtype=jnp.int32)
        order = jax.random.permutation(order_key, self.ways * self.shots)
        # A mask or a cut of the support then leaves points of all classes, not of the first ones.
        support = self._points(images[:, : self.shots], turns, labels, order)
        return Task(support, self._points(images[:, self.shots :], turns, labels))

    def inputs(self, images: Array) -> Array:
        """Images uint8 ``[..., H, W, C]`` as a model takes them: (x/255 - mean) / std, float.

        The one place where images become numbers of a model; what is given to ``lavajax.adapt`` and
        ``lavajax.predict`` must have come through it too.
        """
        dtype = jnp.result_type(float)
        mean, std = jnp.asarray(self.mean, dtype), jnp.asarray(self.std, dtype)
        return (images.astype(dtype) / 255 - mean) / std

    def _draw(self, key: Array, count: Array) -> Array:
        """Different images of a class, ``[K + queries]``, as numbers below its count."""
        lots = jax.random.uniform(key, (self.most,))
        there = jnp.arange(self.most) < count
        return lax.top_k(jnp.where(there, lots, -1.0), self.shots + self.queries)[1]

    def _points(
        self, images: Array, turns: Array, labels: Array, order: Array | slice = slice(None)
    ) -> Points:
        """The points of image indices ``[N, m]``, class after class, or in another order."""
        per_class = images.shape[1]
        x = self.images[images.reshape(-1)[order]]
        if self.rotations:
            x = jax.vmap(_turn)(x, jnp.repeat(turns, per_class)[order])
        return Points(self.inputs(x), jnp.repeat(labels, per_class)[order])


def _turn(image: Array, turns: Array) -> Array:
    """A square image ``[H, H, C]``, turned counterclockwise by 0 to 3 quarters."""
    return jnp.stack([jnp.rot90(image, k) for k in range(4)])[turns]


def episodes(
    data: Images,
    classes: Mapping[Split, Sequence[int]],
    *,
    ways: int,
    shots: int,
    queries: int,
    rotations: bool = False,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
) -> Episodes:
    """Tasks from any labelled images.

    Args:
        data: ``images`` uint8 ``[n, H, W, C]``, ``labels`` ``[n]`` and ``names``, in any order.
        classes: the labels of each split.
        ways: N, classes of a task.
        shots: K, support images of each class.
        queries: query images of each class.
        rotations: let turned images be further classes of the training tasks.
        mean: of the values from 0 to 1, for each channel or one for all.
        std: standard deviation, likewise.

    Raises:
        ValueError: the images are no bytes, or not square where they are turned; a label is out of
            range, or in a split twice or in two; a split has less than N classes; a class has less
            than K + queries images.
    """
    images, labels = np.asarray(data.images), np.asarray(data.labels)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(
            f"data.images must be uint8 [n, H, W, C], got {images.dtype} {list(images.shape)}"
        )
    if rotations and images.shape[1] != images.shape[2]:
        raise ValueError(f"rotations need square images, got {images.shape[1]}x{images.shape[2]}")
    count = np.bincount(labels, minlength=len(data.names))
    every = [int(label) for split in SPLITS for label in classes[split]]
    used = sorted(set(every))
    if used and not (used[0] >= 0 and used[-1] < len(data.names)):
        raise ValueError(
            f"classes must be labels from 0 to {len(data.names) - 1}, got {used[0]} to {used[-1]}"
        )
    if len(used) < len(every):
        twice = next(label for label in used if every.count(label) > 1)
        raise ValueError(
            f"classes must name every label once, in one split, got {data.names[twice]} twice"
        )
    few = [label for label in used if count[label] < shots + queries]
    if few:
        raise ValueError(
            f"every class must have at least shots + queries = {shots} + {queries} images, "
            f"{data.names[few[0]]} has {count[few[0]]}, and so have less {len(few)} in all"
        )
    tables: dict[str, Array] = {}
    for split in SPLITS:
        turns = 4 if rotations and split == "train" else 1
        table = 4 * np.asarray(classes[split], np.int32)[:, None] + np.arange(turns, dtype=np.int32)
        if table.size < ways:
            raise ValueError(
                f"ways must be at most the number of classes, got {ways}, and the {split} split "
                f"has {table.size}"
            )
        tables[split] = jnp.asarray(table.reshape(-1))
    return Episodes(
        images=jnp.asarray(images[np.argsort(labels, kind="stable")]),
        first=jnp.asarray(np.cumsum(count) - count, jnp.int32),
        count=jnp.asarray(count, jnp.int32),
        classes=tables,
        ways=ways,
        shots=shots,
        queries=queries,
        most=int(count.max()),
        rotations=rotations,
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )


def split_alphabets(
    alphabets: Sequence[str], rule: Literal["alphabet", "lake"]
) -> dict[str, Split]:
    """The split of every alphabet of Omniglot, by one of the rules that ``Omniglot`` states.

    Raises:
        ValueError: the alphabets are too few for the rule.
    """
    names = sorted(set(alphabets))
    if rule == "lake":
        if len(names) != ALPHABETS or not set(EVALUATION) <= set(names):
            missing = [name for name in EVALUATION if name not in names]
            raise ValueError(
                f"split='lake' needs all {ALPHABETS} alphabets, those of images_background.zip and "
                f"of images_evaluation.zip; the data has {len(names)}, and of the evaluation set "
                f"lacks {', '.join(missing) or 'none'}; split='alphabet' takes any 4 or more"
            )
        background = [name for name in names if name not in EVALUATION]
        found: dict[str, Split] = dict.fromkeys(EVALUATION, "test")
        return found | {
            name: "validation" if i % 8 == 1 else "train" for i, name in enumerate(background)
        }
    if len(names) < 4:
        raise ValueError(
            "split='alphabet' needs at least 4 alphabets, to hold whole ones out for validation "
            f"and test; the data has {len(names)}: {', '.join(names)}"
        )
    return {
        name: "test" if i % 4 == 3 else "validation" if i % 8 == 1 else "train"
        for i, name in enumerate(names)
    }


def _check_episode(settings: Omniglot | MiniImageNet) -> None:
    validate.integer(settings, "ways", minimum=2)
    validate.integer(settings, "shots", minimum=1)
    validate.integer(settings, "queries", minimum=1)
