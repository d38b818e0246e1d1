"""Stein variational gradient descent: particles that follow a density, and keep apart."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from lavajax import linalg
from lavajax.types import Array, PyTree


def kernel(particles: Array) -> tuple[Array, Array]:
    r"""k(a, b) = exp(-||a - b||^2 / h) of all pairs, and the repulsion that comes of it.

    A single particle has k = 1 and no repulsion.

    Args:
        particles: theta, ``[K, n]``.

    Returns:
        k ``[K, K]``, and ``[K, n]`` with sum_j grad_{theta_j} k(theta_j, theta_m)
        = (2/h) sum_j k(theta_j, theta_m) (theta_m - theta_j) for every m: away from the others.
    """
    squares = jnp.sum((particles[:, None] - particles[None]) ** 2, axis=-1)
    h = bandwidth(squares)
    k = jnp.exp(-squares / h)
    # Differences alone matter, and keep more digits around the mean than around 0.
    centred = particles - jnp.mean(particles, axis=0)
    pull = linalg.matmul(k, centred)
    return k, 2 / h * (jnp.sum(k, axis=1)[:, None] * centred - pull)


def bandwidth(squares: Array) -> Array:
    """h: the median of the squared distances ``[K, K]``, diagonal included, over log K.

    It is a constant to derivatives; 1 where the median is 0.
    """
    h = lax.stop_gradient(jnp.median(squares)) / math.log(max(len(squares), 2))
    return jnp.where(h > 0, h, 1.0)


def stein_descend(
    objective: Callable[[PyTree], Array],
    particles: PyTree,
    rate: Array | float,
    steps: int,
    temperature: float,
) -> PyTree:
    """Takes Stein steps on particles of exp(-objective / temperature).

    theta_m <- theta_m - (rate / K) sum_j [k(theta_j, theta_m) grad objective(theta_j)
                                           - temperature grad_{theta_j} k(theta_j, theta_m)]

    (Liu and Wang 2016, equation 8.)

    Args:
        objective: scalar loss of one particle.
        particles: a pytree with leaves ``[K, ...]``.
        rate: step size, a scalar; may be traced and differentiated.
        steps: number of steps, static, 0 or more.
        temperature: weight of the repulsion.
    """
    _, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], particles))
    slopes = jax.vmap(jax.grad(lambda flat: objective(unravel(flat))))

    def step(flat: Array, _: None) -> tuple[Array, None]:
        k, repulsion = kernel(flat)
        follow = linalg.matmul(k, slopes(flat))
        move = rate / len(flat) * (follow - temperature * repulsion)
        return flat - move.astype(flat.dtype), None

    flat = jax.vmap(lambda particle: ravel_pytree(particle)[0])(particles)
    flat = step(flat, None)[0] if steps == 1 else lax.scan(step, flat, length=steps)[0]
    return jax.vmap(unravel)(flat)
