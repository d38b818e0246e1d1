"""The pytrees that travel through the library.

All of them are frozen dataclasses registered with JAX, so they pass through ``jit``, ``vmap`` and
``grad``. None validates in ``__post_init__``: JAX rebuilds them with tracers, and with placeholders
that are not arrays at all. Users' input is checked once, in ``lavajax.arguments``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from lavajax.methods.base import Method
    from lavajax.units import Units

Array = jax.Array
PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Points:
    """Labelled points of one task.

    Attributes:
        x: inputs, ``[N, ...]``.
        y: targets, ``[N, k]`` for regression, integer ``[N]`` for classification.
        mask: ``[N]`` booleans, True where the point is real; None when all are. What stands under
            a False entry has no effect on any value or gradient, whatever it holds.
    """

    x: Array
    y: Array
    mask: Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Task:
    """One task: the support adapts the model, the query judges the result."""

    support: Points
    query: Points


@dataclasses.dataclass(frozen=True)
class PointSpec:
    """Shapes and dtypes of a single point, as the method saw them at ``init``.

    Attributes:
        x_shape: shape of one input, without the leading axis of points.
        x_dtype: name of the inputs' dtype.
        y_shape: shape of one target.
        y_dtype: name of the targets' dtype.
    """

    x_shape: tuple[int, ...]
    x_dtype: str
    y_shape: tuple[int, ...]
    y_dtype: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MetaParams:
    """What meta-learning produces: everything that ``adapt`` needs beside the support.

    Attributes:
        learned: the leaves that the outer optimiser sees: shared weights, the prior of the
            adapted block, and rates where they are learned.
        fixed: leaves that nothing differentiates: batch statistics, an unlearned start.
        method: the method, with its hyperparameters; static.
        spec: what one point looks like; static.
        units: of the user's data, in which ``lavajax.adapt`` and ``lavajax.predict`` take and give
            numbers; None where these are the model's own. Methods never see them; static.
    """

    learned: dict[str, PyTree]
    fixed: dict[str, PyTree]
    method: Method = dataclasses.field(metadata={"static": True})
    spec: PointSpec = dataclasses.field(metadata={"static": True})
    units: Units | None = dataclasses.field(default=None, metadata={"static": True})

    def __getitem__(self, name: str) -> PyTree:
        """The entry ``name``, learned or fixed."""
        return self.learned[name] if name in self.learned else self.fixed[name]

    @property
    def standardised(self) -> MetaParams:
        """The same parameters for points that are standardised already, as a source samples."""
        return dataclasses.replace(self, units=None)

    def replace_learned(self, learned: dict[str, PyTree]) -> MetaParams:
        """The same parameters with other learned leaves: what an outer gradient varies."""
        return dataclasses.replace(self, learned=learned)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """The outcome of adapting to one task.

    Attributes:
        block: the adapted parameters, with the structure of their prior: for a head ``[P, k]``,
            for a context ``[C]``, for all weights the network's own pytree. Stochastic methods that
            were given a key, and ensembles, have a leading axis of samples on every leaf. Neural
            processes, which adapt no parameters, have the encoded support here.
        posterior: what ``predict`` needs beside the block for error bars; None for methods
            without.
    """

    block: PyTree
    posterior: PyTree = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """A prediction at M inputs of one task.

    Attributes:
        mean: ``[M, k]``, in the units of the targets; class probabilities for classification.
        epistemic: ``[M, k]`` variance of the mean due to what the support left open, or None.
        noise: ``[M, k]`` variance of the observations around the mean (aleatoric), or None.
    """

    mean: Array
    epistemic: Array | None = None
    noise: Array | None = None

    @property
    def variance(self) -> Array | None:
        """``[M, k]``, epistemic and noise together; None where neither is known."""
        known = [v for v in (self.epistemic, self.noise) if v is not None]
        return functools.reduce(jnp.add, known) if known else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The whole state of the outer loop; a run goes on from it bit for bit.

    Attributes:
        params: the current meta-parameters.
        opt: the state of the optax optimiser over ``params.learned``.
        memory: what the method itself carries from step to step; ``()`` for most.
        key: the typed PRNG key of the run; step t uses ``fold_in(key, t)``.
        step: int32 scalar, the number of outer steps taken.
    """

    params: MetaParams
    opt: PyTree
    memory: PyTree
    key: Array
    step: Array
