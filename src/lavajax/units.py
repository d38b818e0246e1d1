"""The units of a user's data, beside a model that computes in standardised ones.

A method sees numbers of mean 0 and standard deviation 1 alone. ``lavajax.adapt`` and
``lavajax.predict`` convert what goes in and what comes out, where the parameters know the units.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lavajax import validate
from lavajax.types import Array, Points, Prediction


@dataclasses.dataclass(frozen=True)
class Columns:
    """Shift and scale of the entries of a vector: standardised = (value - mean) / std.

    Attributes:
        mean: of each entry, in the user's units.
        std: standard deviation of each, likewise; above 0.
        names: of the entries, by which they are taken from a table; None where they have none.

    Raises:
        ValueError: a number is not finite, or a deviation not above 0; there are not as many of
            all; or a name is none, or twice there.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("mean", "std"):
            try:
                values = tuple(float(value) for value in getattr(self, field))
            except (TypeError, ValueError):
                raise ValueError(
                    f"Columns.{field} must be a number for each entry, such as (0.0,), "
                    f"got {getattr(self, field)!r}"
                ) from None
            if not all(math.isfinite(value) for value in values):
                raise ValueError(f"Columns.{field} must be finite numbers, got {values}")
            object.__setattr__(self, field, values)
        if not min(self.std, default=1.0) > 0 or len(self.std) != len(self.mean):
            raise ValueError(
                f"Columns.std must be above 0, one for each of {len(self.mean)} means, "
                f"got {self.std}"
            )
        if self.names is not None:
            validate.names(self, "names")
            if len(self.names) != len(self.mean):
                raise ValueError(
                    f"Columns.names must be {len(self.mean)} different names, got {self.names}"
                )

    def standardise(self, values: Any) -> Array:
        """Values ``[..., d]`` in the user's units, standardised.

        What is not on the device yet is converted in float64, in which a large offset (a year, a
        time stamp) costs no digits.
        """
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(values)):
            array = jnp.asarray(values)
            array = array.astype(jnp.promote_types(array.dtype, jnp.result_type(float)))
            mean, std = (jnp.asarray(each, array.dtype) for each in (self.mean, self.std))
            return (array - mean) / std
        host = (np.asarray(values, np.float64) - np.array(self.mean)) / np.array(self.std)
        return jnp.asarray(host, jnp.result_type(float))

    def restore(self, values: Array) -> Array:
        """Standardised values ``[..., d]``, in the user's units."""
        return values * self._as(self.std, values) + self._as(self.mean, values)

    def restore_variance(self, variance: Array) -> Array:
        """Variances ``[..., d]`` of standardised values, in the user's units squared."""
        return variance * self._as(self.std, variance) ** 2

    @staticmethod
    def _as(numbers: tuple[float, ...], like: Array) -> Array:
        return jnp.asarray(numbers, like.dtype)


@dataclasses.dataclass(frozen=True)
class Units:
    """What the numbers of a model's inputs and targets mean to its user.

    Static: plain numbers that nothing differentiates, vmaps or optimises. A source of tasks that
    are standardised has them as its attribute ``units``; ``train`` hands them on to the
    parameters, with which they are saved and loaded.

    Attributes:
        x: of the d inputs.
        y: of the k targets.

    Raises:
        ValueError: these are no ``Columns``.
    """

    x: Columns
    y: Columns

    def __post_init__(self) -> None:
        for field in ("x", "y"):
            if not isinstance(getattr(self, field), Columns):
                raise ValueError(f"Units.{field} must be Columns, got {getattr(self, field)!r}")

    def restore_points(self, points: Points) -> Points:
        """Standardised points, as a source samples them, in the user's units."""
        return dataclasses.replace(points, x=self.x.restore(points.x), y=self.y.restore(points.y))

    def restore_prediction(self, prediction: Prediction) -> Prediction:
        """A prediction of standardised targets, in the user's units."""
        variances = {
            name: None if value is None else self.y.restore_variance(value)
            for name, value in (
                ("epistemic", prediction.epistemic),
                ("noise", prediction.noise),
            )
        }
        return Prediction(self.y.restore(prediction.mean), **variances)
