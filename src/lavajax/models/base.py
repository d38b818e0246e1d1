"""What a model is: a feature network on the points of one task. The library owns the head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeGuard

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


MODEL = ("init", "features")
"""What a ``Model`` must have."""


class StochasticModel(Model, Protocol):
    """A backbone that draws in training, as dropout does."""

    def drawn(self, fixed: PyTree, key: Array) -> PyTree:
        """The fixed leaves with which ``features`` draws, from the key of one task and outer step.

        With those that ``init`` gave it never draws.
        """


class TappedModel(Model, Protocol):
    """A backbone made of linear layers that it shows; adapting all weights is then much cheaper.

    Its weights are a list of layers ``{"weight": [out, in], "bias": [out]}``, and its points do not
    see each other.
    """

    def tapped(
        self, weights: PyTree, fixed: PyTree, x: Array, tap: Callable[[int, Array], Array]
    ) -> Array:
        """Features ``[N, D]``, with something added to the output of every layer.

        Args:
            weights: as ``init`` gave them.
            fixed: as ``init`` gave them.
            x: inputs ``[N, ...]``.
            tap: takes the index of a layer, from 0, and its input ``[N, in]``; what it returns,
                ``[N, out]``, is added to the layer's output, before any activation.
        """


class LayeredModel(Model, Protocol):
    """A backbone whose layers can be reached from outside, one after the other."""

    def layers(self, weights: PyTree) -> int:
        """How many layers with weights it has, the head not among them."""

    def layered(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        visit: Callable[[int, Array], Array],
        *,
        mask: Array | None = None,
    ) -> Array:
        """Features ``[N, D]``, with ``visit(index, h)`` in place of the input h of every layer.

        Args:
            weights: as ``init`` gave them.
            fixed: as ``init`` gave them.
            x: inputs ``[N, ...]``.
            visit: takes the index of a layer, from 0, and its input ``[N, ...]``: for layer 0, x.
            mask: as in ``features``.
        """


def is_stochastic(model: Model | None) -> TypeGuard[StochasticModel]:
    """Whether a backbone draws in training."""
    return callable(getattr(model, "drawn", None))


def is_layered(model: Model) -> TypeGuard[LayeredModel]:
    """Whether the layers of a backbone can be reached."""
    return callable(getattr(model, "layered", None)) and callable(getattr(model, "layers", None))
