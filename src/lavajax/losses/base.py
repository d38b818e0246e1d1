"""What a loss of a single point is, with the curvature that Gauss-Newton needs.

Every function here takes one point; callers ``vmap``. Reductions over points are the methods'
business (the mean), reductions over outputs are the loss's own.
"""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
import numpy as np

from lavajax.types import Array


class Loss(Protocol):
    """The loss of one point, as a function of the model's k outputs there."""

    @property
    def metric_name(self) -> str:
        """What ``metric`` reports, in lower case: ``mse``, ``accuracy``."""

    def out_dim(self, y_shape: tuple[int, ...]) -> int:
        """k, the outputs that a model needs for targets of shape ``y_shape`` per point.

        Raises:
            ValueError: targets of this shape do not fit the loss.
        """

    def cast(self, y: Array, dtype: jnp.dtype) -> Array:
        """Targets in the dtype that ``value`` computes with, for outputs of dtype ``dtype``.

        Raises:
            ValueError: the targets are of a kind that the loss cannot use.
        """

    def check(self, y: np.ndarray) -> None:
        """Looks at concrete targets ``[N, ...]``; padding has been removed.

        Raises:
            ValueError: a target is impossible, such as a label out of range.
        """

    def value(self, outputs: Array, y: Array) -> Array:
        """The loss of outputs ``[k]`` at target ``y``, a scalar.

        Reverse mode must differentiate it twice, three times for exact Hessians in training; it may
        have a rule of its own, ``jax.custom_vjp``, whose backward pass then must. Nothing takes it
        forward.
        """

    def mean(self, outputs: Array) -> Array:
        """The predicted mean ``[k]`` of the targets, given outputs ``[k]``."""

    def metric(self, mean: Array, y: Array) -> Array:
        """What is reported for a predicted mean ``[k]`` at target ``y``, a scalar."""

    def factor(self, outputs: Array, y: Array) -> Array:
        """S ``[k, r]``, with S S^T the curvature in the outputs ``[k]`` at target ``y``.

        It is d2 value / d outputs2 where that is never negative; elsewhere its mean over targets
        that follow the prediction, the Fisher information.
        """

    def constant_curvature(self, k: int) -> float | None:
        """c where d2 value / d outputs2 = c I everywhere, which closed forms need; else None."""


def constant_curvature(loss: Loss, k: int) -> float:
    """c of a loss that has a constant curvature.

    Raises:
        ValueError: it has none.
    """
    c = loss.constant_curvature(k)
    if c is None:
        raise ValueError(f"point_loss must have a constant curvature here, got {loss!r}")
    return c
