"""Episodes: classification tasks of N classes with K examples each, drawn from stored images."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lavajax.tasks.base import SPLITS, Split
from lavajax.types import Array, Points, Task


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
    rotations: Sequence[Split] = (),
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
        rotations: the splits in which turned images are further classes.
        mean: of the values from 0 to 1, for each channel or one for all.
        std: standard deviation, likewise.

    Raises:
        ValueError: the images are no bytes, or not square where they are turned; a label is no
            integer, out of range, or in a split twice or in two; a split has less than N classes; a
            class has less than K + queries images.
    """
    images, labels = np.asarray(data.images), np.asarray(data.labels)
    if images.ndim != 4 or images.dtype != np.uint8:
        raise ValueError(
            f"data.images must be uint8 [n, H, W, C], got {images.dtype} {list(images.shape)}"
        )
    if rotations and images.shape[1] != images.shape[2]:
        raise ValueError(f"rotations need square images, got {images.shape[1]}x{images.shape[2]}")
    whole = labels.shape == images.shape[:1] and labels.dtype.kind in "iu"
    if not whole or np.any((labels < 0) | (labels >= len(data.names))):
        raise ValueError(
            f"data.labels must be [{len(images)}] integers from 0 to {len(data.names) - 1}, got "
            f"{labels.dtype} {list(labels.shape)}"
            + (f" from {labels.min()} to {labels.max()}" if whole else "")
        )
    count = np.bincount(labels.astype(np.int64), minlength=len(data.names))
    given = [label for split in SPLITS for label in classes[split]]
    if not all(isinstance(label, numbers.Integral) for label in given):
        raise ValueError(f"classes must be integers, got {given}")
    every = [int(label) for label in given]
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
        turns = 4 if split in rotations else 1
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
        rotations=bool(rotations),
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )
