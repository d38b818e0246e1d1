"""LAVA's head on sine waves in plain JAX, as one writes it from the paper: for ``rivals.py``.

No line of the library's computes anything here: layers are ``x @ weight + bias``, and gradients and
Hessians are JAX's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import lavajax

EPSILON = lavajax.Lava().epsilon
Array = jax.Array


def weights_of(learned: Any) -> dict[str, Any]:
    """``params.learned`` of an MLP with linear features, in the layout of this module."""
    return {
        "layers": [(layer["weight"].T, layer["bias"]) for layer in learned["weights"]],
        "head": learned["head"][:, 0],
        "rate": learned["inner_rate"],
    }


def backbone(layers: list[tuple[Array, Array]], x: Array) -> Array:
    """Features ``[..., F]`` of inputs ``[..., 1]``; the last layer has no activation."""
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def full_hessians(weights: dict[str, Any], x: Array, y: Array, shots: int) -> Array:
    """Mean query loss of a meta-batch x, y ``[B, N + M, 1]`` after the paper's steps.

    A gradient step and a Hessian of the head for each support point, by ``vmap(jax.hessian)``.
    """
    phi = backbone(weights["layers"], x)
    z = jnp.concatenate([phi, jnp.ones_like(phi[..., :1])], -1)
    prior, identity = weights["head"], jnp.eye(len(weights["head"]))

    def point_loss(theta: Array, z: Array, y: Array) -> Array:
        return (z @ theta - y) ** 2

    def point(z: Array, y: Array) -> tuple[Array, Array]:
        theta = prior - weights["rate"] * jax.grad(point_loss)(prior, z, y)
        hessian = jax.hessian(point_loss)(theta, z, y)
        return theta, (hessian + EPSILON * identity) / (1 + EPSILON)

    def task(z: Array, y: Array) -> Array:
        theta, precision = jax.vmap(point)(z[:shots], y[:shots])
        weighted = jnp.einsum("nij,nj->i", precision, theta)
        return z[shots:] @ jnp.linalg.solve(precision.sum(0), weighted)

    f = jax.vmap(task)(z, y[..., 0])
    return jnp.mean((f - y[:, shots:, 0]) ** 2)


def value_and_grad(learned: Any, batch: lavajax.Task) -> tuple[Array, Any]:
    """Of the library's tasks ``[B]`` at its parameters, to be compared with its own."""
    points = jax.tree.map(lambda s, q: jnp.concatenate([s, q], 1), batch.support, batch.query)

    def loss(learned: Any) -> Array:
        return full_hessians(weights_of(learned), points.x, points.y, batch.support.x.shape[1])

    return jax.value_and_grad(loss)(learned)


def trainer(
    learned: Any, tasks: lavajax.Sine, meta_batch: int, rate: float, steps: int
) -> Callable[[], Array]:
    """A compiled call that draws its tasks, all at once, and takes steps with Adam in a scan."""
    adam = optax.adam(rate)
    points = tasks.shots + tasks.queries

    def sample(key: Array) -> tuple[Array, Array]:
        def uniform(key: Array, size: int, bounds: tuple[float, float]) -> Array:
            return jax.random.uniform(key, (steps, meta_batch, size, 1), None, *bounds)

        keys = jax.random.split(key, 3)
        x = uniform(keys[0], points, tasks.x_range)
        amplitude = uniform(keys[1], 1, tasks.amplitude)
        return x, amplitude * jnp.sin(x + uniform(keys[2], 1, tasks.phase))

    def step(carry: Any, batch: tuple[Array, Array]) -> tuple[Any, Array]:
        weights, state = carry
        loss, gradient = jax.value_and_grad(full_hessians)(weights, *batch, tasks.shots)
        updates, state = adam.update(gradient, state, weights)
        return (optax.apply_updates(weights, updates), state), loss

    @jax.jit
    def run(weights: Any) -> Array:
        batches = sample(jax.random.key(1))
        return jax.lax.scan(step, (weights, adam.init(weights)), batches)[1]

    weights = weights_of(learned)
    return lambda: run(weights)
