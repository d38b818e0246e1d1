"""What a source of tasks is."""

from __future__ import annotations

from typing import Literal, Protocol

from lavajax.types import Array, Task

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class TaskSource(Protocol):
    """Where tasks come from: a sampler on the device, or stored data on it.

    A source is a pytree: its arrays are arguments of the compiled training step, its settings are
    static. Tasks of one source have the same shapes; supports of different size have a mask.
    """

    def sample(self, key: Array, split: Split = "train") -> Task:
        """Draws one task. Pure; tasks of different splits never coincide.

        Args:
            key: PRNG key.
            split: ``"train"``, ``"validation"`` or ``"test"``; static.
        """
