"""Few-shot classification of published images."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Literal

import jax
import numpy as np

from lavajax import validate
from lavajax.losses import CrossEntropy
from lavajax.models.conv import Conv4
from lavajax.tasks.base import SPLITS, Split
from lavajax.tasks.episodes import Episodes, episodes

EVALUATION = (
    *("Angelic", "Atemayar_Qelisayer", "Atlantean", "Aurek-Besh", "Avesta", "Ge_ez", "Glagolitic"),
    *("Gurmukhi", "Kannada", "Keble", "Malayalam", "Manipuri", "Mongolian"),
    *("Old_Church_Slavonic_(Cyrillic)", "Oriya", "Sylheti", "Syriac_(Serto)", "Tengwar"),
    *("Tibetan", "ULOG"),
)
"""The alphabets of Omniglot's evaluation set; the 30 others are its background set."""
ALPHABETS, CHARACTERS = 50, 1623
# Of the values from 0 to 1, as in the few-shot benchmarks of Deleu et al. (Torchmeta, jax-meta).
_MINI_IMAGENET_MEAN = (120.396 / 255, 115.594 / 255, 104.540 / 255)
_MINI_IMAGENET_STD = (70.682 / 255, 68.276 / 255, 72.545 / 255)


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
    background set are divided by 8 alike, into 26 and 4. ``split="finn"`` holds out characters, not
    alphabets, as the code of MAML does (Finn, Abbeel and Levine 2017): of all 1,623 in random
    order, the same in every run, 423 are for test, 100 for validation and 1,100 for training, and
    of fewer as large a share. The split of Vinyals et al. (2016) is a list of names that this
    library does not have.

    Attributes:
        data: what ``lavajax.datasets.load_omniglot`` reads.
        ways: N, classes of a task.
        shots: K, support images of each class.
        queries: query images of each class.
        split: what is held out.
        rotations: the splits in which characters turned by 90, 180 and 270 degrees are further
            classes: ``"train"``, ``"all"`` of them, or ``"none"``.
    """

    model: ClassVar[Conv4] = Conv4()
    test_tasks: ClassVar[int] = 600

    data: str
    ways: int = 5
    shots: int = 1
    queries: int = 15
    split: Literal["alphabet", "lake", "finn"] = "alphabet"
    rotations: Literal["train", "all", "none"] = "train"

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", str(self.data))
        if isinstance(self.rotations, bool):  # as earlier versions have saved it
            object.__setattr__(self, "rotations", "train" if self.rotations else "none")
        _check_episode(self)
        validate.choice(self, "split", ("alphabet", "lake", "finn"))
        validate.choice(self, "rotations", ("train", "all", "none"))

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
        turned: dict[str, Sequence[Split]] = {"train": ("train",), "all": SPLITS, "none": ()}
        return episodes(
            data,
            split_characters(data.names, self.split),
            ways=self.ways,
            shots=self.shots,
            queries=self.queries,
            rotations=turned[self.rotations],
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


def split_characters(
    names: Sequence[str], rule: Literal["alphabet", "lake", "finn"]
) -> dict[Split, list[int]]:
    """The characters of every split, as indices into their names ``alphabet/character``.

    Raises:
        ValueError: the alphabets are too few for the rule.
    """
    if rule == "finn":
        shuffled = np.random.default_rng(0).permutation(len(names)).tolist()
        test, validation = (round(len(names) * share / CHARACTERS) for share in (423, 100))
        return {
            "train": shuffled[test + validation :],
            "validation": shuffled[test : test + validation],
            "test": shuffled[:test],
        }
    alphabets = [name.partition("/")[0] for name in names]
    split_of = split_alphabets(alphabets, rule)
    return {s: [i for i, a in enumerate(alphabets) if split_of[a] == s] for s in SPLITS}


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
