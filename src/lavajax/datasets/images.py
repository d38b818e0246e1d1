"""Labelled images: what the image data sets have in common."""

from __future__ import annotations

import io
import warnings
import zlib
from typing import Any, NamedTuple

import numpy as np

from lavajax.extras import require


class ImageArrays(NamedTuple):
    """A data set of labelled images, whole in memory.

    Attributes:
        images: ``[n, H, W, C]`` uint8, 0 to 255.
        labels: ``[n]`` int32, indices into ``names``.
        names: the classes. Omniglot: ``<Alphabet>/character<NN>``. mini-ImageNet:
            ``<split>/<wnid>``, the split one of train, validation and test.
    """

    images: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]


def decode(content: bytes, kind: str, name: str, size: tuple[int, int] | None = None) -> Any:
    """An image file as a Pillow image, its size checked before anything is allocated for it.

    Args:
        content: the file.
        kind: the one format that is read, as Pillow calls it.
        name: what to call it.
        size: width and height that it must have; None: whatever Pillow takes for no bomb.

    Raises:
        ValueError: it is no such image.
        ModuleNotFoundError: Pillow is missing; the message has the command that installs it.
    """
    pillow = require("PIL.Image", "data", "reading images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image = pillow.open(io.BytesIO(content), formats=[kind])
            if size is not None and image.size != size:
                raise ValueError(
                    f"{name} must be an image of {size[0]} x {size[1]} pixels, got "
                    f"{image.size[0]} x {image.size[1]}"
                )
            image.load()
    except (
        *(OSError, SyntaxError, EOFError, zlib.error),
        *(pillow.DecompressionBombError, pillow.DecompressionBombWarning),
    ) as error:
        raise ValueError(f"{name} must be a whole {kind} image: {error}") from None
    return image
