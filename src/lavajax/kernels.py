"""Kernels of a Gaussian process on the features of a network.

A kernel is a plain dataclass with pure functions; its hyperparameters are a dict of unconstrained
leaves, made positive by a softplus above a floor.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Protocol

import jax
import jax.numpy as jnp

from lavajax import linalg
from lavajax.network import augment
from lavajax.types import Array

_FLOOR = 1e-4


def positive(raw: Array, floor: float = _FLOOR) -> Array:
    """floor + softplus(raw)."""
    return floor + jax.nn.softplus(raw)


def unconstrained(value: float, floor: float = _FLOOR) -> float:
    """The inverse of ``positive``, for a value above the floor."""
    value -= floor
    return value + math.log(-math.expm1(-value))


class Kernel(Protocol):
    """A positive semi-definite function of two feature vectors."""

    def init(self, key: Array, dim: int) -> dict[str, Array]:
        """Draws hyperparameters for features ``[N, dim]``."""

    def matrix(self, hyper: dict[str, Array], a: Array, b: Array) -> Array:
        """k(a_n, b_m), ``[N, M]``, for features ``[N, D]`` and ``[M, D]``."""

    def diagonal(self, hyper: dict[str, Array], a: Array) -> Array:
        """k(a_n, a_n), ``[N]``."""


@dataclasses.dataclass(frozen=True)
class Linear:
    """k = s z . z' with z = [phi, 1]: Bayesian linear regression on the features."""

    def init(self, key: Array, dim: int) -> dict[str, Array]:
        """See ``Kernel``; s = 1."""
        del key, dim
        return {"raw_scale": _leaf(1.0)}

    def matrix(self, hyper: dict[str, Array], a: Array, b: Array) -> Array:
        """See ``Kernel``."""
        gram = linalg.matmul(augment(a), augment(b).T)
        return positive(hyper["raw_scale"]) * gram

    def diagonal(self, hyper: dict[str, Array], a: Array) -> Array:
        """See ``Kernel``."""
        return positive(hyper["raw_scale"]) * jnp.sum(augment(a) ** 2, axis=-1)


@dataclasses.dataclass(frozen=True)
class RBF:
    """k = s exp(-||phi - phi'||^2 / (2 l^2))."""

    def init(self, key: Array, dim: int) -> dict[str, Array]:
        """See ``Kernel``; s = l = 1."""
        del key, dim
        return {"raw_scale": _leaf(1.0), "raw_length": _leaf(1.0)}

    def matrix(self, hyper: dict[str, Array], a: Array, b: Array) -> Array:
        """See ``Kernel``."""
        squared = _squared_distances(a, b) / positive(hyper["raw_length"]) ** 2
        return positive(hyper["raw_scale"]) * jnp.exp(-0.5 * squared)

    def diagonal(self, hyper: dict[str, Array], a: Array) -> Array:
        """See ``Kernel``."""
        return jnp.broadcast_to(positive(hyper["raw_scale"]), a.shape[:1])


@dataclasses.dataclass(frozen=True)
class SpectralMixture:
    r"""k = sum_q w_q exp(-2 pi^2 ||v_q * tau||^2) cos(2 pi mu_q . tau), tau = phi - phi'.

    The spectral density is a mixture of Q normal densities (Wilson and Adams 2013), of means mu_q
    and standard deviations v_q ``[D]``. What it learns depends on where it starts.

    Attributes:
        mixtures: Q.
    """

    mixtures: int

    def init(self, key: Array, dim: int) -> dict[str, Array]:
        """See ``Kernel``; as an ``RBF`` of l = 1 with frequencies as wide as its spectrum."""
        width = 1 / (2 * math.pi)
        dtype = jnp.result_type(float)
        shape = (self.mixtures, dim)
        return {
            "raw_weights": jnp.full(self.mixtures, unconstrained(1 / self.mixtures), dtype),
            "frequencies": width * jax.random.normal(key, shape, dtype),
            "raw_widths": jnp.full(shape, unconstrained(width), dtype),
        }

    def matrix(self, hyper: dict[str, Array], a: Array, b: Array) -> Array:
        """See ``Kernel``."""

        def component(frequency: Array, raw_width: Array) -> Array:
            width = positive(raw_width)
            squared = _squared_distances(a * width, b * width)
            phase = (a @ frequency)[:, None] - (b @ frequency)[None, :]
            return jnp.exp(-2 * math.pi**2 * squared) * jnp.cos(2 * math.pi * phase)

        parts = jax.vmap(component)(hyper["frequencies"], hyper["raw_widths"])
        return linalg.einsum("q,qnm->nm", positive(hyper["raw_weights"]), parts)

    def diagonal(self, hyper: dict[str, Array], a: Array) -> Array:
        """See ``Kernel``."""
        return jnp.broadcast_to(jnp.sum(positive(hyper["raw_weights"])), a.shape[:1])


def _leaf(value: float) -> Array:
    return jnp.asarray(unconstrained(value), jnp.result_type(float))


def _squared_distances(a: Array, b: Array) -> Array:
    """||a_n - b_m||^2 by differences: the expanded square loses the small ones in float32."""
    return jnp.sum((a[:, None, :] - b[None, :, :]) ** 2, axis=-1)
