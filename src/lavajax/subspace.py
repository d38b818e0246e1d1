"""Which part of a network adapts: its head, a context vector, or all of its weights.

A subspace takes the adapted block out of a net (see ``lavajax.network``) and puts another in.
``bind`` makes of it the one thing that adaptation needs: the outputs as a function of the block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lavajax import linalg, network, validate
from lavajax.models.base import Model
from lavajax.types import Array, MetaParams, PyTree


class Subspace(Protocol):
    """A choice of adapted block."""

    @property
    def shares_backbone(self) -> bool:
        """Whether the backbone is the same before and after: its features are computed once."""

    def init_context(self, key: Array) -> Array | None:
        """The initial context ``[C]`` of a new net, or None for a net without."""

    @property
    def learns_context(self) -> bool:
        """Whether the outer loop learns the initial context."""

    def block(self, net: dict[str, PyTree]) -> PyTree:
        """The block, taken out of a net."""

    def merge(self, net: dict[str, PyTree], block: PyTree) -> dict[str, PyTree]:
        """The net with another block in its place."""


@dataclasses.dataclass(frozen=True)
class Head:
    """The last linear layer W ``[P, k]`` adapts; the backbone is shared (as in ANIL)."""

    shares_backbone: ClassVar[bool] = True
    learns_context: ClassVar[bool] = False

    def init_context(self, key: Array) -> None:
        """None."""
        del key

    def block(self, net: dict[str, PyTree]) -> Array:
        """W, ``[P, k]``."""
        return net["head"]

    def merge(self, net: dict[str, PyTree], block: Array) -> dict[str, PyTree]:
        """The net with another W."""
        return {**net, "head": block}


@dataclasses.dataclass(frozen=True)
class Context:
    """A vector c ``[C]`` that the backbone takes beside x adapts; all weights are shared (CAVIA).

    Attributes:
        size: C.
        start: the context before adaptation. ``"zeros"``: 0, as in CAVIA's paper;
            ``"normal_learned"``: drawn from N(0, I) and learned by the outer loop, as in LAVA's
            experiments; ``"zeros_learned"``: starts at 0 and is learned.
    """

    shares_backbone: ClassVar[bool] = False

    size: int = 4
    start: Literal["zeros", "normal_learned", "zeros_learned"] = "normal_learned"

    def __post_init__(self) -> None:
        validate.integer(self, "size", minimum=1)
        validate.choice(self, "start", ("zeros", "normal_learned", "zeros_learned"))

    @property
    def learns_context(self) -> bool:
        """Whether the outer loop learns the initial context."""
        return self.start != "zeros"

    def init_context(self, key: Array) -> Array:
        """The initial context, ``[C]``."""
        dtype = jnp.result_type(float)
        if self.start == "normal_learned":
            return jax.random.normal(key, (self.size,), dtype)
        return jnp.zeros((self.size,), dtype)

    def block(self, net: dict[str, PyTree]) -> Array:
        """c, ``[C]``."""
        return net["context"]

    def merge(self, net: dict[str, PyTree], block: Array) -> dict[str, PyTree]:
        """The net with another c."""
        return {**net, "context": block}


@dataclasses.dataclass(frozen=True)
class Full:
    """All weights adapt, backbone and head (as in MAML)."""

    shares_backbone: ClassVar[bool] = False
    learns_context: ClassVar[bool] = False

    def init_context(self, key: Array) -> None:
        """None."""
        del key

    def block(self, net: dict[str, PyTree]) -> dict[str, PyTree]:
        """The whole net."""
        return net

    def merge(self, net: dict[str, PyTree], block: dict[str, PyTree]) -> dict[str, PyTree]:
        """The block itself."""
        del net
        return block


class Bound(NamedTuple):
    """The outputs on the points of a task as a function of the adapted block.

    Attributes:
        prior: the block before adaptation, theta_0.
        inputs: ``[N, ...]``: what ``apply`` takes: the features z for a head, else x itself.
        apply: ``(block, inputs [n, ...], mask [n] or None) -> outputs [n, k]``, for all inputs
            together, or, in a backbone that does not couple them, for any one; in float32 or
            better.
    """

    prior: PyTree
    inputs: Array
    apply: Callable[[PyTree, Array, Array | None], Array]


def net_of(params: MetaParams) -> dict[str, PyTree]:
    """The net before adaptation."""
    names = ("weights", "head", "context")
    return {n: params[n] for n in names if n in params.learned or n in params.fixed}


def bind(
    subspace: Subspace, model: Model, params: MetaParams, x: Array, mask: Array | None
) -> Bound:
    """The outputs at inputs x ``[N, ...]``, padding already made harmless, given the block."""
    net, fixed = net_of(params), params.fixed["backbone"]
    prior = subspace.block(net)
    if subspace.shares_backbone:
        z = linalg.lift(network.features(model, net, fixed, x, mask))
        return Bound(prior, z, lambda head, z, mask: z @ head)

    def apply(block: PyTree, x: Array, mask: Array | None) -> Array:
        return linalg.lift(network.outputs(model, subspace.merge(net, block), fixed, x, mask))

    return Bound(prior, x, apply)
