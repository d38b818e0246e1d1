"""Adapters that make a backbone of any Flax module, Linen or NNX.

The module maps inputs ``[N, ...]`` of one task to features ``[N, D]``; leave out its last linear
layer, the library owns the head. It should end in a linear layer (see ``MLP.linear_features``).

Dropout draws in training alone, one mask for each task of each outer step: the same thinned network
for all of the task's points, support and query, in every inner step. Adaptation is then that of a
network, and what holds of it holds with dropout: order and padding have no effect. (Beside batch
normalisation, which needs the points together, each point of a batch has a mask of its own.)
``adapt``, ``predict`` and ``evaluate`` never draw. The ``__call__`` of a Linen module takes an
argument ``deterministic``, a bool, and passes it to its Dropout layers; of an NNX module it is set.

Batch normalisation normalises with the statistics of the batch at hand, the support's or the
query's, in both loops: give its layers ``use_running_average=False`` (of an NNX module it is set),
since no average is ever kept. Give the module's ``__call__`` a ``mask`` argument to keep padding
out. Of a batch of one vector all normalised features are 0, whatever it is: it is refused, and
where a mask leaves one, which is known only as the program runs, its features are NaN.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import errors

from lavajax import validate
from lavajax.types import Array, PyTree

if TYPE_CHECKING:  # an eighth of what it takes to import lavajax, for those who use it
    from flax import nnx

# The entry of ``fixed`` that holds the key of a task in training.
_DROPOUT = "dropout"


@dataclasses.dataclass(frozen=True)
class Linen:
    """A Linen module as backbone: ``Linen(nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64)]))``.

    For context adaptation its ``__call__`` takes an argument ``context``, a vector ``[C]``.

    Attributes:
        module: an unbound module. Fields that are lists are stored as tuples, to be hashable.
    """

    module: nn.Module

    def __post_init__(self) -> None:
        if not isinstance(self.module, nn.Module):
            raise ValueError(
                f"Linen.module must be an instance of flax.linen.Module, got {self.module!r}"
            )
        lists: dict[str, Any] = {
            f.name: tuple(getattr(self.module, f.name))
            for f in dataclasses.fields(self.module)
            if isinstance(getattr(self.module, f.name, None), list)
        }
        if lists:
            object.__setattr__(self, "module", self.module.clone(**lists))
        try:
            hash(self)
        except (TypeError, ValueError) as error:
            raise ValueError(
                "Linen.module must be hashable, since it is compiled in as a constant; give tuples "
                f"and not arrays, lists or dicts in its fields ({str(error).splitlines()[0]})"
            ) from None

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """The ``params`` collection as weights, every other collection as fixed.

        Raises:
            ValueError: the module wants a random key in its forward pass, takes no context, or
                normalises a batch by a running average, which nothing would ever update.
        """
        self._check_modes()
        try:
            variables = dict(
                self.module.init(key, x, **_given(type(self.module), context), **self._mode(None))
            )
            weights = variables.pop("params", {})
            self.features(weights, variables, x, context=context)
        except (errors.InvalidRngError, ValueError) as error:
            if not isinstance(error, errors.InvalidRngError) and "deterministic" not in str(error):
                raise
            raise ValueError(
                "model must be deterministic: give its __call__ an argument deterministic and pass "
                "it to its Dropout layers, or set deterministic=True in them "
                f"({str(error).splitlines()[0]})"
            ) from None
        self._check_averages(weights, variables, x, context)
        return weights, variables

    def _check_modes(self) -> None:
        for name in ("train", "training", "is_training"):
            if name in inspect.signature(type(self.module).__call__).parameters:
                raise ValueError(
                    f"{type(self.module).__name__}.__call__ must not take {name!r}, which would "
                    "always be what it is by default: give it an argument deterministic for its "
                    "Dropout layers, and use_running_average=False to its BatchNorm layers"
                )

    def _check_averages(
        self, weights: PyTree, variables: PyTree, x: Array, context: Array | None
    ) -> None:
        """Looks whether a forward pass takes the statistics of the batch, and so moves them."""
        if "batch_stats" not in variables:
            return
        given = {**_given(type(self.module), context), **self._mode(None)}
        _, moved = self.module.apply(
            {"params": weights, **variables}, x, mutable=["batch_stats"], **given
        )
        before, after = (jax.tree.leaves(each["batch_stats"]) for each in (variables, moved))
        if any(one is other for one, other in zip(before, after, strict=True)):
            raise ValueError(
                "Linen.module must normalise by the batch at hand, and has a layer that takes its "
                "running average, which nothing updates: give use_running_average=False to its "
                "BatchNorm layers"
            )

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """``module.apply`` on the points of one task, ``[N, ...]`` to ``[N, D]``.

        Raises:
            ValueError: padding would enter the batch statistics.
        """
        masked = _mask_argument(type(self.module), "batch_stats" in fixed, mask)
        state = {name: leaf for name, leaf in fixed.items() if name != _DROPOUT}
        key = fixed.get(_DROPOUT)

        def apply(x: Array) -> Array:
            out, _ = self.module.apply(
                {"params": weights, **state},
                x,
                mutable=list(state),
                rngs={} if key is None else {"dropout": key},
                **_given(type(self.module), context),
                **masked,
                **self._mode(key),
            )
            return out

        if "batch_stats" in fixed:
            return _of_many(apply(x), x, mask)
        return apply(x) if key is None else _one_by_one(apply, x)

    def drawn(self, fixed: PyTree, key: Array) -> PyTree:
        """See ``StochasticModel``."""
        return {**fixed, _DROPOUT: key} if self._mode(key) else fixed

    def _mode(self, key: Array | None) -> dict[str, Any]:
        """The argument ``deterministic``, where the module takes one."""
        takes = "deterministic" in inspect.signature(type(self.module).__call__).parameters
        return {"deterministic": key is None} if takes else {}


@dataclasses.dataclass(frozen=True)
class NNX:
    """An NNX module as backbone: ``NNX(lambda rngs: Net(rngs=rngs))``.

    For context adaptation its ``__call__`` takes an argument ``context``, a vector ``[C]``.

    Attributes:
        constructor: builds the module from an ``nnx.Rngs``. Two adapters are equal, and share
            compiled code, when they hold the same function object.
    """

    constructor: Callable[[nnx.Rngs], nnx.Module]

    def __post_init__(self) -> None:
        from flax import nnx

        if isinstance(self.constructor, nnx.Module) or not callable(self.constructor):
            raise ValueError(
                "NNX.constructor must be a function that builds the module from an nnx.Rngs, "
                f"such as lambda rngs: Net(rngs=rngs); got {type(self.constructor).__name__}"
            )
        validate.hashable(self)

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """The module's ``nnx.Param`` as weights, its other variables as fixed.

        Raises:
            ValueError: as ``features``.
        """
        del x, context
        _, (weights, batch_stats, _, rest) = _split(_build(self.constructor, key))
        states = {"batch_stats": batch_stats, "rest": rest}
        return weights, {name: state for name, state in states.items() if state}

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """The module on the points of one task, ``[N, ...]`` to ``[N, D]``.

        Raises:
            ValueError: padding would enter the batch statistics.
        """
        from flax import nnx

        key = fixed.get(_DROPOUT)
        graphdef, module_type, rngs = _structure(self.constructor, key is None)
        masked = _mask_argument(module_type, "batch_stats" in fixed, mask)
        streams = _streams(rngs, key)
        batch_stats, rest = fixed.get("batch_stats", {}), fixed.get("rest", {})

        def apply(x: Array) -> Array:
            module = nnx.merge(graphdef, weights, batch_stats, streams, rest)
            return module(x, **_given(module_type, context), **masked)

        if "batch_stats" in fixed:
            return _of_many(apply(x), x, mask)
        return apply(x) if key is None else _one_by_one(apply, x)

    def drawn(self, fixed: PyTree, key: Array) -> PyTree:
        """See ``StochasticModel``."""
        _, _, rngs = _structure(self.constructor, True)
        return {**fixed, _DROPOUT: key} if jax.tree.leaves(rngs) else fixed


def _given(module_type: type, context: Array | None) -> dict[str, Any]:
    """The context as keyword argument, where there is one."""
    if context is None:
        return {}
    parameters = inspect.signature(module_type.__call__).parameters
    if "context" not in parameters and not any(
        each.kind is each.VAR_KEYWORD for each in parameters.values()
    ):
        raise ValueError(
            f"model must take a context to adapt one: give {module_type.__name__}.__call__ an "
            "argument context, a vector [C], or adapt another part, such as Head()"
        )
    return {"context": context}


def _mask_argument(module_type: type, coupled: bool, mask: Array | None) -> dict[str, Any]:
    """The mask as keyword argument, where the module takes one."""
    if mask is None or not coupled:
        return {}
    if "mask" in inspect.signature(module_type.__call__).parameters:
        return {"mask": mask}
    raise ValueError(
        "support has a mask, but the model computes batch statistics and would count the padding: "
        f"give {module_type.__name__}.__call__ a mask argument and pass it to the BatchNorm layers"
    )


def _of_many(features: Array, x: Array, mask: Array | None) -> Array:
    """Features of inputs x, NaN where batch normalisation is left a single vector."""
    if mask is None or x.ndim > 2:
        return features
    return jnp.where(jnp.sum(mask) == 1, jnp.nan, features)


def _one_by_one(apply: Callable[[Array], Array], x: Array) -> Array:
    """A module on each point alone, so that all of them get the draws of a batch of one."""
    return jax.vmap(lambda point: apply(point[None])[0])(x)


def _build(
    constructor: Callable[[nnx.Rngs], nnx.Module], key: Array, deterministic: bool = True
) -> nnx.Module:
    from flax import nnx

    module = constructor(nnx.Rngs(key))
    module.set_attributes(
        deterministic=deterministic, use_running_average=False, raise_if_not_found=False
    )
    return module


def _split(module: nnx.Module) -> tuple[nnx.GraphDef, tuple[PyTree, ...]]:
    """The static half, and pure dicts of weights, batch statistics, streams and the rest."""
    from flax import nnx

    graphdef, *states = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState, ...)
    return graphdef, tuple(nnx.to_pure_dict(state) for state in states)


@functools.lru_cache(maxsize=64)
def _structure(
    constructor: Callable[[nnx.Rngs], nnx.Module], deterministic: bool
) -> tuple[nnx.GraphDef, type, PyTree]:
    """The static half of the module, its type, and the shapes of its random streams."""
    found = []

    def record(key: Array) -> PyTree:
        module = _build(constructor, key, deterministic)
        graphdef, states = _split(module)
        found.append((graphdef, type(module)))
        return states

    _, _, rngs, _ = jax.eval_shape(record, jax.random.key(0))
    return (*found[0], rngs)


def _streams(like: PyTree, key: Array | None) -> PyTree:
    """Random streams at their start, each with a key of its own; of any, where none will draw."""
    leaves, treedef = jax.tree.flatten(like)
    key = jax.random.key(0) if key is None else key

    def start(index: int, leaf: jax.ShapeDtypeStruct) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            own = jax.random.fold_in(key, index)
            return jax.random.split(own, leaf.shape) if leaf.shape else own
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.unflatten(treedef, [start(i, leaf) for i, leaf in enumerate(leaves)])
