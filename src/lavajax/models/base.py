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
            x: inputs; zeros where ``mask`` is False.
            context: as in ``init``.
            mask: ``[N]`` booleans, for backbones that couple points; None when all are real.
        """
