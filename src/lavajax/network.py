"""The network: a backbone that the user brings, and the linear head that the library owns.

Its parameters are one dict, the *net*: ``weights`` of the backbone, ``head`` W ``[P, k]`` (the
weights over the bias row, P = D + 1), and ``context`` ``[C]`` where the backbone takes one.
The outputs are f(x) = [phi(x), 1] W.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from lavajax.models.base import Model, is_layered
from lavajax.models.mlp import uniform_layer
from lavajax.types import Array, PyTree


def init_net(
    model: Model, key: Array, x: Array, out_dim: int, context: Array | None
) -> tuple[dict[str, PyTree], PyTree]:
    """Draws a net and the backbone's fixed leaves.

    Raises:
        ValueError: the model's features are not one vector per point.
    """
    model_key, head_key = jax.random.split(key)
    weights, fixed = model.init(model_key, x, context)
    shape = jax.eval_shape(lambda: model.features(weights, fixed, x, context=context)).shape
    if len(shape) != 2 or shape[0] != x.shape[0]:
        raise ValueError(
            f"model must map x of shape {x.shape} to features [N, D] with N = {x.shape[0]}, "
            f"got {shape}"
        )
    layer = uniform_layer(head_key, shape[1], out_dim)
    head = jnp.concatenate([layer["weight"].T, layer["bias"][None]])
    net = {"weights": weights, "head": head}
    return net if context is None else {**net, "context": context}, fixed


def features(
    model: Model, net: dict[str, PyTree], fixed: PyTree, x: Array, mask: Array | None = None
) -> Array:
    """Augmented features z = [phi(x), 1], ``[N, P]``."""
    return augment(model.features(net["weights"], fixed, x, context=net.get("context"), mask=mask))


def augment(phi: Array) -> Array:
    """[phi, 1], ``[N, D + 1]``: the bias of the head is a row of W."""
    return jnp.concatenate([phi, jnp.ones((*phi.shape[:-1], 1), phi.dtype)], axis=-1)


def outputs(
    model: Model, net: dict[str, PyTree], fixed: PyTree, x: Array, mask: Array | None = None
) -> Array:
    """f(x), ``[N, k]``."""
    return features(model, net, fixed, x, mask) @ net["head"]


def layers(model: Model, net: dict[str, PyTree]) -> int:
    """How many layers ``layered_outputs`` visits: the backbone's, and the head.

    A backbone that does not show its layers counts as one.
    """
    return (model.layers(net["weights"]) if is_layered(model) else 1) + 1


def layered_outputs(
    model: Model,
    net: dict[str, PyTree],
    fixed: PyTree,
    x: Array,
    visit: Callable[[int, Array], Array],
    *,
    mask: Array | None = None,
) -> Array:
    """f(x), ``[N, k]``, with ``visit(index, h)`` in place of the input h of every layer.

    For a net without a context. The head, whose input is the features, is the last layer.
    """
    if is_layered(model):
        phi = model.layered(net["weights"], fixed, x, visit, mask=mask)
    else:
        phi = model.features(net["weights"], fixed, visit(0, x), mask=mask)
    return augment(visit(layers(model, net) - 1, phi)) @ net["head"]
