"""A backbone whose head has a learned prior covariance."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from lavajax import validate
from lavajax.models.base import MODEL, Model
from lavajax.models.mlp import MLP
from lavajax.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Correlated:
    """The features of another backbone, seen through a learned prior covariance.

    The features are [phi(x), 1] C for phi ``[D]`` of the backbone within and C lower triangular,
    ``[D + 1, D + 1]``. On them, a prior v I over the weights of a head, which is what ``Lava``
    has, is one of covariance v (C C^T + e e^T) over the weights of [phi(x), 1], e the last unit
    vector, since the head has a bias of its own: that of the constant is at least v. ``Alpaca``
    learns any.
    Worth trying where densities count: a prior that is the same in all directions has to be matched
    by the scale of every feature, which takes long to learn.

    C = I + ``speed`` L, where L starts at 0 and is learned. Adam moves every parameter by about its
    rate in a step; a prior may have to change by orders of magnitude, and a weight may not.

    Attributes:
        model: the backbone within.
        speed: how many times faster than L, and so than any weight, C moves.
    """

    model: Model = MLP()
    speed: float = 30.0

    def __post_init__(self) -> None:
        validate.part(self, "model", MODEL, "MLP() or Linen(module)")
        validate.number(self, "speed", minimum=0.0, strict=True)
        validate.hashable(self)

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """Draws the weights of the backbone within, and starts at C = I.

        Returns:
            ``(weights, fixed)``: ``{"model": its weights, "factor": L}``, and what it fixes.

        Raises:
            ValueError: the backbone within cannot take such inputs.
        """
        weights, fixed = self.model.init(key, x, context)
        phi = self.model.features(weights, fixed, x, context=context)
        size = phi.shape[-1] + 1
        return {"model": weights, "factor": jnp.zeros((size, size), phi.dtype)}, fixed

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """Features ``[N, D + 1]`` of inputs ``[N, ...]``."""
        phi = self.model.features(weights["model"], fixed, x, context=context, mask=mask)
        move = self.speed * jnp.tril(weights["factor"])
        z = jnp.concatenate([phi, jnp.ones((*phi.shape[:-1], 1), phi.dtype)], axis=-1)
        return z + z @ move.astype(z.dtype)

    @property
    def drawn(self) -> Any:
        """See ``StochasticModel``; there where the backbone within draws."""
        model: Any = self.model
        return model.drawn
