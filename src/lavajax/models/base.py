"""What a model is: a feature network on the points of one task. The library owns the head."""

from __future__ import annotations

from typing import Protocol

from lavajax.types import Array, PyTree


class Model(Protocol):
    """A backbone. Any frozen, hashable object with these two methods will do.

    A backbone that couples the points of a batch, as batch normalisation does, says so by an entry
    ``"batch_stats"`` in ``fixed``: methods that need the points apart then refuse it.
    """

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """Draws ``(weights, fixed)``: what the outer loop learns, and what nothing differentiates.

        Args:
            key: PRNG key.
            x: example inputs of one task, ``[N, ...]``.
            context: a context vector ``[C]``, where the method adapts one.

        Raises:
            ValueError: the model cannot take such inputs.
        """

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """Features ``[N, D]`` of the inputs ``[N, ...]`` of one task.

        Args:
            weights: as ``init`` gave them.
            fixed: as ``init`` gave them.
            x: inputs; a copy of a real one where ``mask`` is False.
            context: as in ``init``.
            mask: ``[N]`` booleans, for backbones that couple points; None when all are real.
        """


class TappedModel(Model, Protocol):
    """A backbone made of linear layers that it shows; adapting all weights is then much cheaper.

    Its weights are a list of layers ``{"w": [in, out], "b": [out]}``, and its points do not see
    each other. A tap is added to the output of its layer, before any activation.
    """

    def taps(self, weights: PyTree, points: int) -> list[Array]:
        """Zeros to add to the outputs of the layers, each ``[N, out]``."""

    def tapped(
        self, weights: PyTree, fixed: PyTree, x: Array, taps: list[Array]
    ) -> tuple[Array, list[Array]]:
        """Features ``[N, D]`` under taps, and the input ``[N, in]`` of each layer."""
