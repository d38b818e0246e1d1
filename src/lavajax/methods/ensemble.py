"""Predictions of several adapted networks: samples of a distribution, or particles."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from lavajax.losses import GaussianNll
from lavajax.methods.base import NetworkMethod, outputs
from lavajax.types import Adapted, Array, MetaParams, Prediction, PyTree


def ensemble_outputs(
    method: NetworkMethod, params: MetaParams, blocks: PyTree, x: Array, mask: Array | None = None
) -> Array:
    """The outputs ``[K, M, k]`` of K adapted networks, whose blocks have leaves ``[K, ...]``."""
    return jax.vmap(lambda block: outputs(method, params, Adapted(block), x, mask))(blocks)


def predict_ensemble(
    method: NetworkMethod,
    params: MetaParams,
    adapted: Adapted,
    x: Array,
    *,
    mask: Array | None = None,
) -> Prediction:
    """The mean of K adapted networks, with their variance as the epistemic one.

    Args:
        method: the method.
        params: meta-parameters.
        adapted: blocks with leaves ``[K, ...]``.
        x: inputs ``[M, ...]``.
        mask: ``[M]``, for backbones that couple points.

    Returns:
        ``mean`` ``[M, k]``, for classes that of the probabilities, and ``epistemic`` ``[M, k]``,
        mean_j (f_j - mean)^2; None for K = 1, which says nothing about it.
    """
    f = ensemble_outputs(method, params, adapted.block, x, mask)
    means = jax.vmap(jax.vmap(method.point_loss.mean))(f)
    spread = jnp.var(means, axis=0) if len(means) > 1 else None
    loss = method.point_loss
    noise = None
    if isinstance(loss, GaussianNll):
        noise = jnp.mean(jax.vmap(jax.vmap(loss.noise))(f), axis=0)
    return Prediction(jnp.mean(means, axis=0), spread, noise)
