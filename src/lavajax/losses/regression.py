"""Losses of real targets."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from lavajax import validate
from lavajax.losses.base import Loss
from lavajax.types import Array


def _vector_size(y_shape: tuple[int, ...], loss: str) -> int:
    """k of real targets ``[k]``."""
    if len(y_shape) != 1 or y_shape[0] < 1:
        raise ValueError(
            f"y must have shape [N, k] for {loss}, k >= 1, got one target of shape {y_shape}; a "
            "single output is y[:, None]"
        )
    return y_shape[0]


def _cast_real(self: Loss, y: Array, dtype: jnp.dtype) -> Array:
    """Targets in the outputs' dtype; integers and float64 are converted.

    Raises:
        ValueError: the targets are complex.
    """
    if jnp.issubdtype(y.dtype, jnp.complexfloating):
        raise ValueError(
            f"y must be real, got dtype {y.dtype}; give real and imaginary parts as two outputs"
        )
    return y.astype(dtype)


def _check_nothing(self: Loss, y: np.ndarray) -> None:
    """Every finite real target is possible."""


def _outputs_themselves(self: Loss, outputs: Array) -> Array:
    """The outputs, ``[k]``."""
    return outputs


def _mse(self: Loss) -> str:
    """``mse``, in squared units of the targets."""
    return "mse"


def _mean_square(self: Loss, mean: Array, y: Array) -> Array:
    """The squared error, averaged over outputs."""
    return jnp.mean((mean - y) ** 2)


@dataclasses.dataclass(frozen=True)
class SquaredError:
    r"""Squared error, l = (c/2) ||f - y||^2.

    Attributes:
        reduction: over the k outputs. ``"mean"``: c = 2/k, what the LAVA paper's tables report.
            ``"sum"``: c = 2, equation (1) of the paper. They agree for k = 1.

    The reported metric is the mean over outputs in both cases.
    """

    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        validate.choice(self, "reduction", ("mean", "sum"))

    metric_name = property(_mse)

    def out_dim(self, y_shape: tuple[int, ...]) -> int:
        """k for targets ``[k]``.

        Raises:
            ValueError: a target is not a vector.
        """
        return _vector_size(y_shape, "squared error")

    cast = _cast_real

    check = _check_nothing

    def value(self, outputs: Array, y: Array) -> Array:
        """(c/2) ||f - y||^2, a scalar, for ``[k]`` and ``[k]``."""
        return 0.5 * self.constant_curvature(outputs.shape[-1]) * jnp.sum((outputs - y) ** 2)

    mean = _outputs_themselves

    metric = _mean_square

    def factor(self, outputs: Array, y: Array) -> Array:
        """sqrt(c) I, ``[k, k]``."""
        del y
        k = outputs.shape[-1]
        return jnp.sqrt(self.constant_curvature(k)) * jnp.eye(k, dtype=outputs.dtype)

    def constant_curvature(self, k: int) -> float:
        """c: 2/k for ``"mean"``, 2 for ``"sum"``."""
        return 2.0 / k if self.reduction == "mean" else 2.0


@dataclasses.dataclass(frozen=True)
class DirectionError:
    r"""Squared error of directions: targets are vectors of length 1, but for noise.

    Angles and phases, as [cos, sin] of them; headings, orientations, signals of one amplitude. In
    adaptation and training the loss is the squared error of the outputs, l = (c/2) ||f - y||^2,
    whose closed forms a head keeps. What is predicted, and scored, is their direction, f / ||f||,
    which unlike f is not linear in the labels: what lay between two labels on the chord lies on
    the arc. That pays where the support says what the direction is: where it does not, a shorter
    vector would have the lower error. Means over samples or particles are such (``Platipus``,
    ``Bmaml``). Targets are not to be standardised, as those of a ``Table`` are.

    Attributes:
        reduction: over the k outputs, as in ``SquaredError``.

    The reported metric is the squared error of the predicted vectors of length 1.
    """

    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        validate.choice(self, "reduction", ("mean", "sum"))

    @property
    def _flat(self) -> SquaredError:
        return SquaredError(self.reduction)

    metric_name = property(_mse)

    def out_dim(self, y_shape: tuple[int, ...]) -> int:
        """k for targets ``[k]``.

        Raises:
            ValueError: a target is not a vector of at least two entries.
        """
        k = _vector_size(y_shape, "directions")
        if k < 2:
            raise ValueError(
                "y must have shape [N, k], k >= 2, for directions, got k = 1; an angle is two "
                "targets, its cos and its sin"
            )
        return k

    cast = _cast_real

    def check(self, y: np.ndarray) -> None:
        """Looks at concrete targets ``[N, k]``.

        Raises:
            ValueError: their root mean square length is not within a factor of 2 of 1, or, of less
                than 20, which noise may move by more, of 10.
        """
        if y.size == 0:
            return
        most = 2.0 if len(y) >= 20 else 10.0
        length = math.sqrt(float(np.mean(np.sum(np.asarray(y, np.float64) ** 2, axis=-1))))
        if not 1 / most <= length <= most and math.isfinite(length):
            raise ValueError(
                "y must hold vectors of length 1 for directions, but for noise; got a root mean "
                f"square length of {length:g}: divide by it"
            )

    def value(self, outputs: Array, y: Array) -> Array:
        """(c/2) ||f - y||^2, a scalar, for ``[k]`` and ``[k]``."""
        return self._flat.value(outputs, y)

    def mean(self, outputs: Array) -> Array:
        """f / ||f||, ``[k]``; 0 of 0."""
        # Squares of tiny outputs would be 0. The direction does not depend on the scale.
        largest = lax.stop_gradient(jnp.max(jnp.abs(outputs)))
        scaled = outputs / jnp.where(largest > 0, largest, 1.0)
        return scaled / jnp.sqrt(jnp.where(largest > 0, jnp.sum(scaled**2), 1.0))

    metric = _mean_square

    def factor(self, outputs: Array, y: Array) -> Array:
        """sqrt(c) I, ``[k, k]``."""
        return self._flat.factor(outputs, y)

    def constant_curvature(self, k: int) -> float:
        """c: 2/k for ``"mean"``, 2 for ``"sum"``."""
        return self._flat.constant_curvature(k)


@dataclasses.dataclass(frozen=True)
class Huber:
    r"""Huber's loss, which outliers pull at with a bounded force.

    With the residual r = f - y of an output, l = r^2 where |r| <= delta, and delta (2 |r| - delta)
    beyond, averaged over outputs or summed: squared error near the target. Its curvature beyond
    delta is 0: the steps of such a point count in LAVA's average alone.

    Attributes:
        delta: where the quadratic ends, in units of the targets.
        reduction: over the k outputs, as in ``SquaredError``.

    The reported metric is the squared error.
    """

    delta: float = 1.0
    reduction: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        validate.number(self, "delta", minimum=0.0, strict=True)
        validate.choice(self, "reduction", ("mean", "sum"))

    metric_name = property(_mse)

    def out_dim(self, y_shape: tuple[int, ...]) -> int:
        """k for targets ``[k]``.

        Raises:
            ValueError: a target is not a vector.
        """
        return _vector_size(y_shape, "Huber's loss")

    cast = _cast_real

    check = _check_nothing

    def value(self, outputs: Array, y: Array) -> Array:
        """The loss, a scalar, for ``[k]`` and ``[k]``."""
        size = jnp.abs(outputs - y)
        inside = jnp.minimum(size, self.delta)
        losses = inside * (2 * size - inside)
        return jnp.mean(losses) if self.reduction == "mean" else jnp.sum(losses)

    mean = _outputs_themselves

    metric = _mean_square

    def factor(self, outputs: Array, y: Array) -> Array:
        """``[k, k]``: sqrt(c) for outputs within delta of their target, else 0; c as squared error.

        Not differentiable at delta, as the curvature is not; its gradient is 0 elsewhere.
        """
        c = SquaredError(self.reduction).constant_curvature(outputs.shape[-1])
        inside = jnp.abs(outputs - y) <= self.delta
        return jnp.diag(jnp.where(inside, math.sqrt(c), 0.0).astype(outputs.dtype))

    def constant_curvature(self, k: int) -> None:
        """None: the curvature ends at delta."""
        del k


@dataclasses.dataclass(frozen=True)
class GaussianNll:
    r"""The negative log density of a normal distribution whose variance the model predicts too.

    For targets ``[k]`` the model has 2 k outputs, means m and logarithms s, and

        l = 1/2 mean_o [ log v_o + (y_o - m_o)^2 / v_o ],   v = exp(s) + min_std^2,

    in nats but for a constant. The curvature is the Fisher information, since the Hessian of a
    heteroscedastic density is indefinite far from the target (Kendall and Gal 2017, section 3).

    Attributes:
        min_std: bounds the predicted standard deviation from below, in units of the targets.

    The reported metric is the squared error of the means, and predictions carry v as ``noise``.
    """

    min_std: float = 0.01

    def __post_init__(self) -> None:
        validate.number(self, "min_std", minimum=0.0, strict=True)

    metric_name = property(_mse)

    def out_dim(self, y_shape: tuple[int, ...]) -> int:
        """2 k for targets ``[k]``.

        Raises:
            ValueError: a target is not a vector.
        """
        return 2 * _vector_size(y_shape, "a Gaussian density")

    cast = _cast_real

    check = _check_nothing

    def value(self, outputs: Array, y: Array) -> Array:
        """The loss, a scalar, for ``[2 k]`` and ``[k]``."""
        variance = self.noise(outputs)
        squares = (y - self.mean(outputs)) ** 2 / variance
        return 0.5 * jnp.mean(jnp.log(variance) + squares)

    def mean(self, outputs: Array) -> Array:
        """m, ``[k]``."""
        return outputs[: outputs.shape[0] // 2]

    def noise(self, outputs: Array) -> Array:
        """v, ``[k]``."""
        return jnp.exp(outputs[outputs.shape[0] // 2 :]) + self.min_std**2

    metric = _mean_square

    def factor(self, outputs: Array, y: Array) -> Array:
        """``[2 k, 2 k]``, diagonal: of the means 1/sqrt(k v), of s (exp(s)/v)/sqrt(2 k)."""
        k, variance = y.shape[0], self.noise(outputs)
        share = (variance - self.min_std**2) / variance
        return jnp.diag(jnp.concatenate([1 / jnp.sqrt(k * variance), share / math.sqrt(2 * k)]))

    def constant_curvature(self, k: int) -> None:
        """None: the curvature depends on the outputs."""
        del k
