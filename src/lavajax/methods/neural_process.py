"""What the neural processes share: vectors in, a Gaussian density out.

They adapt no network. ``adapt`` encodes the support, and a decoder reads the code beside x.
"""

from __future__ import annotations

from typing import Literal, Protocol

import jax
import jax.numpy as jnp

from lavajax import linalg, validate
from lavajax.methods.base import LOSS, Method, check_gaussian
from lavajax.models.mlp import MLP
from lavajax.types import Array, MetaParams, Prediction, PyTree

Activation = Literal["relu", "tanh", "gelu", "silu"]


class NeuralProcess(Method, Protocol):
    """A method that encodes the support and predicts a density."""

    @property
    def decoder(self) -> tuple[int, ...]:
        """Widths of the decoder's hidden layers."""

    @property
    def activation(self) -> Activation:
        """Of all hidden layers."""

    @property
    def sigma_min(self) -> float:
        """The least standard deviation."""


def check_process(method: NeuralProcess) -> None:
    """Validates what all neural processes have; part of their ``__post_init__``."""
    name = type(method).__name__
    validate.part(method, "point_loss", LOSS, "SquaredError()")
    check_gaussian(method)
    validate.integers(method, "decoder", minimum=1)
    validate.number(method, "sigma_min", minimum=0.0, strict=True)
    if method.sigma_min >= 1:
        raise ValueError(f"{name}.sigma_min must be below 1, got {method.sigma_min}")
    perceptron(method, (), 1)  # refuses an unknown activation
    validate.hashable(method)


def check_heads(method: Method, width: int, heads: int) -> None:
    """Requires that the width splits into the heads."""
    if width % heads:
        raise ValueError(
            f"{type(method).__name__}.width must be a multiple of heads = {heads}, got {width}"
        )


def perceptron(method: NeuralProcess, hidden: tuple[int, ...], out: int) -> MLP:
    """Hidden layers and a linear one."""
    return MLP(hidden, feature_dim=out, activation=method.activation)


def init_decoder(method: NeuralProcess, key: Array, fan_in: int, k: int) -> PyTree:
    """Weights of the decoder of codes ``[M, fan_in]`` to k means and deviations."""
    return perceptron(method, method.decoder, 2 * k).init(key, jnp.zeros((1, fan_in)))[0]


def decode(method: NeuralProcess, params: MetaParams, code: Array) -> Prediction:
    """The density at M inputs, from what is known about each, ``[M, fan_in]``.

    The decoder gives mean and raw, each ``[M, k]``; the standard deviation is
    sigma_min + (1 - sigma_min) softplus(raw), and ``noise`` its square: what the support left open
    and the noise of observations, which the model cannot tell apart.
    """
    k = params.spec.y_shape[0]
    weights = params["decoder"]
    raw = linalg.lift(perceptron(method, method.decoder, 2 * k).features(weights, {}, code))
    mean, raw = jnp.split(raw, 2, axis=-1)
    sigma = method.sigma_min + (1 - method.sigma_min) * jax.nn.softplus(raw)
    return Prediction(mean, noise=sigma**2)
