"""Losses of classes."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import validate
from lavajax.types import Array


@dataclasses.dataclass(frozen=True)
class CrossEntropy:
    """Cross-entropy of integer labels under a softmax of the outputs (logits).

    Attributes:
        classes: number of classes C; labels are 0 to C - 1 and k = C.
    """

    classes: int = 5

    def __post_init__(self) -> None:
        validate.integer(self, "classes", minimum=2)

    @property
    def metric_name(self) -> str:
        """``accuracy``, between 0 and 1."""
        return "accuracy"

    def out_dim(self, y_shape: tuple[int, ...]) -> int:
        """C, for scalar labels.

        Raises:
            ValueError: a label is not a scalar.
        """
        if y_shape != ():
            raise ValueError(
                f"y must have shape [N], integer labels, for cross-entropy, got one label of "
                f"shape {y_shape}"
            )
        return self.classes

    def cast(self, y: Array, dtype: jnp.dtype) -> Array:
        """Labels as int32.

        Raises:
            ValueError: the labels are not integers.
        """
        if not jnp.issubdtype(y.dtype, jnp.integer):
            raise ValueError(f"y must hold integer labels for cross-entropy, got dtype {y.dtype}")
        return y.astype(jnp.int32)

    def check(self, y: np.ndarray) -> None:
        """Labels must lie in 0 to C - 1.

        Raises:
            ValueError: one does not; the message names the first.
        """
        bad = (y < 0) | (y >= self.classes)
        if bad.any():
            raise ValueError(f"y must hold labels from 0 to {self.classes - 1}, got {y[bad][0]}")

    def value(self, outputs: Array, y: Array) -> Array:
        """-log softmax(f)[y], a scalar; NaN for a label out of range."""
        valid = (y >= 0) & (y < self.classes)
        loss = jax.nn.logsumexp(outputs) - outputs[jnp.where(valid, y, 0)]
        # A factor, so that the gradient is NaN too: adaptation sees nothing else of the loss.
        return loss * jnp.where(valid, 1.0, jnp.nan)

    def one_hot(self, y: Array, dtype: jnp.dtype) -> Array:
        """Labels ``[N]`` as indicators ``[N, C]``, for methods that regress onto them.

        NaN for a label out of range.
        """
        valid = (y >= 0) & (y < self.classes)
        return jnp.where(valid[:, None], jax.nn.one_hot(y, self.classes, dtype=dtype), jnp.nan)

    def mean(self, outputs: Array) -> Array:
        """Class probabilities, ``[C]``."""
        return jax.nn.softmax(outputs)

    def metric(self, mean: Array, y: Array) -> Array:
        """1 where the most probable class is the label, else 0; NaN without probabilities."""
        right = (jnp.argmax(mean) == y).astype(mean.dtype)
        return jnp.where(jnp.any(jnp.isnan(mean)), jnp.nan, right)

    def factor(self, outputs: Array, y: Array) -> Array:
        """S = diag(sqrt p) - p sqrt(p)^T, ``[C, C]``, with S S^T = diag(p) - p p^T."""
        del y
        p = jax.nn.softmax(outputs)
        # sqrt(softmax) written so that its gradient stays finite where p underflows.
        root = jnp.exp(0.5 * jax.nn.log_softmax(outputs))
        return jnp.diag(root) - p[:, None] * root[None, :]

    def constant_curvature(self, k: int) -> None:
        """None: the curvature depends on the outputs."""
        del k
