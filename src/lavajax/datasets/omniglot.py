"""Omniglot: 1,623 handwritten characters of 50 alphabets, each drawn by 20 people.

Published at github.com/brendenlake/omniglot, folder ``python`` (Lake, Salakhutdinov, Tenenbaum,
"Human-level concept learning through probabilistic program induction", Science 2015; MIT licence).
"""

from __future__ import annotations

import contextlib
import re
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lavajax.datasets.base import not_found, open_zip, read_member, warn_of_other
from lavajax.datasets.images import ImageArrays, decode
from lavajax.extras import require

PUBLISHED = (
    "They are published at github.com/brendenlake/omniglot, in the folder python (MIT licence)"
)
ZIPS = {
    **{"images_background.zip": 964, "images_evaluation.zip": 659},
    **{"images_background_small1.zip": 136, "images_background_small2.zip": 156},
}
"""The published files, and the characters of each; some are in several."""
DRAWERS = 20
SIDE = 28
_PUBLISHED_SIDE = 105
_MEMBER = re.compile(
    r"(?:images_[a-z0-9_]+/)?([A-Za-z][A-Za-z0-9_()-]*)/character([0-9]{2})/[0-9]{4}_([0-9]{2})\.png"
)
_MOST_BYTES = 2**16  # a drawing has some 250 bytes

Key = tuple[str, str, str]


def load_omniglot(path: str | Path, data_dir: str | Path | None = None) -> ImageArrays:
    """All drawings that the published zips hold, 28 x 28, ink 255 on 0.

    The first call prepares them, once for each content of the zips, where TFDS keeps its data.

    Args:
        path: a folder with any of ``images_background.zip``, ``images_evaluation.zip`` and the
            two small background sets, or one of these zips. A drawing that is in several, the same
            in all, counts once.
        data_dir: where prepared data lie; None: ``TFDS_DATA_DIR``, or TFDS's default.

    Returns:
        Images ``[n, 28, 28, 1]``; names ``<Alphabet>/character<NN>``, sorted, 20 drawings of each.

    Raises:
        ValueError: a zip is not the published one; the message says what was found.
        FileNotFoundError: there is none; the message says where they are published.
        ModuleNotFoundError: a package is missing; the message has the command that installs it.
    """
    from lavajax.datasets import builders

    drawings = builders.prepared(builders.OmniglotDrawings, path, data_dir)["drawings"]
    images = np.empty((len(drawings), SIDE, SIDE, 1), np.uint8)
    labels = np.empty(len(drawings), np.int32)
    names: dict[str, None] = {}
    for i, drawing in enumerate(drawings):
        images[i], labels[i] = drawing["image"], drawing["label"]
        names[f"{drawing['alphabet'].decode()}/{drawing['character'].decode()}"] = None
    return ImageArrays(images, labels, tuple(names))


def files(path: str | Path) -> list[Path]:
    """The zips that ``path`` stands for; warns of those that are not whole.

    Raises:
        FileNotFoundError: there is none.
        ValueError: one is no zip, or holds something else than drawings.
    """
    found = _zips(Path(path))
    for zip_ in found:
        if zip_.name not in ZIPS:
            warnings.warn(
                f"{zip_} has the name of none of the published files, {', '.join(ZIPS)}; results "
                "may not be those of the published data",
                stacklevel=2,
            )
            continue
        with open_zip(zip_, zip_) as archive:
            count = len({key[:2] for key, _ in _drawings(archive, zip_)})
        warn_of_other(zip_, count, ZIPS[zip_.name], "characters")
    return found


def _zips(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [path / name for name in ZIPS if (path / name).is_file()]
    if not found:
        raise not_found(
            path,
            f"a folder with any of {', '.join(ZIPS)}, or one of these files",
            PUBLISHED,
        )
    return found


def examples(path: str | Path) -> Iterator[dict[str, Any]]:
    """The drawings, sorted by alphabet, character and drawer.

    Yields:
        ``image`` ``[28, 28, 1]`` uint8, reduced by Lanczos's filter and inverted, so that ink is
        255; ``label`` int, counting characters; ``alphabet`` and ``character`` str.

    Raises:
        ValueError: as ``load_omniglot``.
    """
    zips = _zips(Path(path))
    with contextlib.ExitStack() as stack:
        archives = {zip_: stack.enter_context(open_zip(zip_, zip_)) for zip_ in zips}
        places: dict[Key, list[tuple[Path, str]]] = {}
        for zip_, archive in archives.items():
            for key, member in _drawings(archive, zip_):
                places.setdefault(key, []).append((zip_, member))
        characters = sorted({key[:2] for key in places})
        if not characters:
            raise ValueError(
                f"data must hold drawings <Alphabet>/character<NN>/<id>_<drawer>.png, "
                f"{', '.join(map(str, zips))} has none"
            )
        for label, (alphabet, number) in enumerate(characters):
            for drawer in range(1, DRAWERS + 1):
                at = places.pop((alphabet, number, f"{drawer:02d}"), [])
                name = f"{alphabet}/character{number}"
                if not at:
                    raise ValueError(
                        f"data must hold {DRAWERS} drawings of each character, {name} has none by "
                        f"drawer {drawer} in {', '.join(map(str, zips))}"
                    )
                yield {
                    "image": _reduce(_same(archives, at)),
                    "label": label,
                    "alphabet": alphabet,
                    "character": f"character{number}",
                }
        if places:
            raise ValueError(
                f"data must hold {DRAWERS} drawings of each character, got more: "
                f"{', '.join(member for at in places.values() for _, member in at[:1])}"
            )


def _drawings(archive: zipfile.ZipFile, path: Path) -> Iterator[tuple[Key, str]]:
    """The drawings of an archive, by alphabet, character and drawer."""
    for member in archive.namelist():
        # What macOS adds to a zip is no drawing, whatever its name ends in.
        if not member.endswith(".png") or member.startswith("__MACOSX/"):
            continue
        match = _MEMBER.fullmatch(member)
        if match is None:
            raise ValueError(
                f"{path} must hold drawings <Alphabet>/character<NN>/<id>_<drawer>.png, got "
                f"{member!r}"
            )
        yield (match[1], match[2], match[3]), member


def _same(archives: dict[Path, zipfile.ZipFile], at: list[tuple[Path, str]]) -> Any:
    """The drawing that stands at several places, black on white, as a Pillow image.

    Raises:
        ValueError: they differ.
    """
    first = None
    for zip_, member in at:
        content = read_member(archives[zip_], member, _MOST_BYTES, zip_)
        size = (_PUBLISHED_SIDE, _PUBLISHED_SIDE)
        image = decode(content, "PNG", f"{zip_}: {member}", size).convert("L")
        if first is not None and image.tobytes() != first.tobytes():
            raise ValueError(
                f"data must hold one drawing by each drawer of a character, {at[0][0]}: "
                f"{at[0][1]} and {zip_}: {member} differ"
            )
        first = image if first is None else first
    return first


def _reduce(image: Any) -> np.ndarray:
    pillow = require("PIL.Image", "data", "reading images")
    small = image.resize((SIDE, SIDE), pillow.Resampling.LANCZOS)
    return 255 - np.asarray(small, np.uint8)[:, :, None]
