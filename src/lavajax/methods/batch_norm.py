"""Where batch normalisation, which couples the points of a batch, can take part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lavajax.types import Array, MetaParams

if TYPE_CHECKING:
    from lavajax.methods.base import NetworkMethod


def check_apart(method: NetworkMethod, params: MetaParams) -> None:
    """Requires a backbone that does not couple points, of a method that takes points apart.

    Raises:
        ValueError: it does, and the block reaches into it.
    """
    if "batch_stats" in params.fixed["backbone"] and not method.subspace.shares_backbone:
        raise ValueError(
            f"model couples the points of a batch (batch normalisation), but "
            f"{type(method).__name__} with subspace={method.subspace!r} takes the loss of each "
            "point alone: use Head(), or a model with layer or group normalisation"
        )


def check_batch(params: MetaParams, x: Array, real: int, name: str = "support") -> None:
    """Requires vectors x ``[N, d]`` of which more than one is real, for batch normalisation.

    Raises:
        ValueError: one is, all of whose normalised features are 0.
    """
    if real == 1 and x.ndim == 2 and "batch_stats" in params.fixed.get("backbone", ()):
        raise ValueError(
            f"{name} must have at least 2 points for a model with batch normalisation, which makes "
            "the features of a single one 0 whatever it is, got 1; use layer or group normalisation"
        )
