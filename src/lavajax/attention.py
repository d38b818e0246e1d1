"""Attention to the real points of a task."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from lavajax.models.mlp import linear, uniform_layer
from lavajax.types import Array, PyTree


def attend(queries: Array, keys: Array, values: Array, real: Array) -> Array:
    """Values averaged by softmax(q . k / sqrt(d)) over the real points; 0 where there are none.

    Args:
        queries: ``[M, H, d]``, for each of H heads.
        keys: ``[N, H, d]``.
        values: ``[N, H, d]``.
        real: ``[N]``, 0 at padding, else 1.

    Returns:
        ``[M, H, d]``.
    """
    logits = jnp.einsum("mhd,nhd->mhn", queries, keys) / math.sqrt(keys.shape[-1])
    lowest = jnp.finfo(logits.dtype).min
    logits = jnp.where(real > 0, logits, lowest)
    top = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True, initial=lowest))
    weights = jnp.where(real > 0, jnp.exp(logits - top), 0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return jnp.einsum("mhn,nhd->mhd", weights / jnp.where(total > 0, total, 1), values)


def init_attention(key: Array, width: int) -> dict[str, PyTree]:
    """Linear layers ``query``, ``key``, ``value`` and ``out`` of multi-head attention.

    Keys have no bias: it would add the same to the logits of all points, to no effect.
    """
    names = ("query", "key", "value", "out")
    keys = jax.random.split(key, len(names))
    layers = {n: uniform_layer(k, width, width) for n, k in zip(names, keys, strict=True)}
    del layers["key"]["bias"]
    return layers


def project(layer: dict[str, Array], h: Array, heads: int) -> Array:
    """A linear layer's output ``[N, H, width / H]``, split into heads, for h ``[N, width]``."""
    return linear(layer, h).reshape(*h.shape[:-1], heads, h.shape[-1] // heads)


def attend_multi_head(
    weights: dict[str, PyTree], queries: Array, keys: Array, values: Array, real: Array
) -> Array:
    """Multi-head attention ``[M, width]`` (Vaswani et al. 2017, section 3.2.2).

    Args:
        weights: as ``init_attention`` drew them.
        queries: ``[M, width]``.
        keys: of all heads, projected: ``[N, H, width / H]``.
        values: likewise.
        real: ``[N]``, 0 at padding, else 1.
    """
    q = project(weights["query"], queries, keys.shape[1])
    attended = attend(q, keys, values, real)
    return linear(weights["out"], attended.reshape(*queries.shape))
