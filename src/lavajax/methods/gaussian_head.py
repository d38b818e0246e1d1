"""A head with a Gaussian posterior: what it predicts, and functions drawn from it."""

from __future__ import annotations

import jax.numpy as jnp

from lavajax import linalg, network
from lavajax.linalg import Route
from lavajax.methods.noise import NoisyMethod, noise_variance
from lavajax.subspace import net_of
from lavajax.types import Adapted, Array, MetaParams, Prediction


def head_features(
    method: NoisyMethod, params: MetaParams, x: Array, mask: Array | None = None
) -> Array:
    """The features of x ``[M, ...]``, ``[M, P]``, in float32 or better."""
    fixed = params.fixed["backbone"]
    return linalg.lift(network.features(method.model, net_of(params), fixed, x, mask))


def predict_head(
    method: NoisyMethod,
    params: MetaParams,
    adapted: Adapted,
    z: Array,
    *,
    at: Array,
    route: Route,
) -> Prediction:
    """The predictive density for features z ``[M, P]``.

    Args:
        method: its noise is that of the outputs.
        params: its meta-parameters.
        adapted: ``block`` ``[P, k]``, and the ``posterior`` of any one output's weights.
        z: features, ``[M, P]``.
        at: what the posterior takes for z, ``[M, P]``.
        route: of its solve.
    """
    noise = noise_variance(method, params)
    mean = z @ adapted.block
    variance = adapted.posterior.variance(at, route)[:, None]
    return Prediction(mean, variance * noise, jnp.broadcast_to(noise, mean.shape))


def sample_head(
    method: NoisyMethod,
    params: MetaParams,
    adapted: Adapted,
    z: Array,
    *,
    at: Array,
    route: Route,
    key: Array,
    number: int,
) -> Array:
    """Functions drawn from the posterior, ``[number, M, k]``; see ``predict_head``."""
    sigma = jnp.sqrt(noise_variance(method, params))
    moves = adapted.posterior.draw(key, (number, sigma.shape[0]), route)
    return z @ adapted.block + sigma * jnp.einsum("skp,mp->smk", moves, at)
