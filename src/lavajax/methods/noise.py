"""The noise of observations, in methods that predict a density."""

from __future__ import annotations

import math
from typing import Literal, Protocol

import jax.numpy as jnp

from lavajax import linalg
from lavajax.methods.base import NetworkMethod
from lavajax.methods.on_features import on_features
from lavajax.methods.task_loss import density_loss, query_loss
from lavajax.types import Array, MetaParams, Task


class NoisyMethod(NetworkMethod, Protocol):
    """A method with a Gaussian noise of its own in every output."""

    @property
    def noise(self) -> float | None:
        """sigma, or where it starts; None without error bars."""

    @property
    def learn_noise(self) -> bool:
        """Whether log sigma is learned."""

    @property
    def outer(self) -> Literal["mse", "nll"]:
        """What the outer loop minimises."""


def learned_noise(method: NoisyMethod, outputs: int) -> dict[str, Array]:
    """The leaf ``log_noise`` ``[k]``, where it is learned."""
    if not method.learn_noise:
        return {}
    assert method.noise is not None
    return {"log_noise": jnp.full(outputs, math.log(method.noise), jnp.result_type(float))}


def noise_variance(method: NoisyMethod, params: MetaParams) -> Array:
    """sigma^2 of every output, ``[k]``."""
    if method.learn_noise:
        return linalg.lift(jnp.exp(2 * params["log_noise"]))
    assert method.noise is not None
    return jnp.full_like(linalg.lift(params["head"][0]), method.noise**2)


def outer_loss(method: NoisyMethod, params: MetaParams, task: Task, key: Array | None) -> Array:
    """The loss of the query's mean, or the negative log density of its targets.

    Of a method that sees inputs through its backbone alone.
    """
    loss = density_loss if method.outer == "nll" else query_loss
    return loss(*on_features(method, params, task), key)
