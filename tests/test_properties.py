"""What holds of LAVA's head at whatever points: any scale, number, mask, and repeated ones too."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lavajax as lj
from helpers import assert_finite, make_params, make_points

# Slots for points, with the number of inputs d and of outputs k: P = d + 1 is more than the points
# of the first, and fewer than those of the others.
SHAPES = {4: (4, 2), 12: (2, 3), 5: (1, 1)}
QUERIES = 3
SETTINGS = {
    "paper": lj.Lava(),
    "converged": lj.lava_converged(),
    "map": lj.lava_converged(inner_steps="map"),
    "bayesian": lj.lava_bayesian(),
}
# Largest scale of features: a single step of a fixed rate overshoots as their square, and beyond 10
# a floor of 1e-6 leaves a system of which float32 holds little.
LARGEST = {"paper": 2, "converged": 6, "map": 6, "bayesian": 1}


@dataclasses.dataclass(frozen=True)
class Raw:
    """The inputs themselves as features: a gradient in them is that of a backbone."""

    def init(self, key, x, context=None):
        return {}, {}

    def features(self, weights, fixed, x, *, context=None, mask=None):
        return x


@functools.cache
def compiled(name, slots):
    """The parameters, and ``run(x, y, mask, at)``, compiled once for each shape.

    It gives the gradients of the outer loss, and the prediction ``[M, k]``.
    """
    d, k = SHAPES[slots]
    method = dataclasses.replace(SETTINGS[name], model=Raw())
    params, key = make_params(method, make_points(2, k, d)), jax.random.key(0)

    @jax.jit
    def run(x, y, mask, at):
        def loss(learned, x, y, at):
            here = params.replace_learned(learned)
            support = lj.Points(x, y, mask)
            predicted = method.predict(here, method.adapt(here, support), at)
            task = lj.Task(support, lj.Points(at, jnp.zeros((QUERIES, k))))
            return method.loss(here, task, key), predicted

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(params.learned, x, y, at)

    return params, run


@st.composite
def tasks(draw, largest):
    """``(x [N, d], y [N, k], mask [N], queries)`` in float32, features up to 10^largest."""
    slots = draw(st.sampled_from(tuple(SHAPES)))
    d, k = SHAPES[slots]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((slots, d))
    kind = draw(st.sampled_from(["plain", "repeated", "collinear", "constant"]))
    if kind == "repeated":
        x = x[rng.integers(0, 2, slots)]
    elif kind == "collinear":
        x = rng.standard_normal((slots, 1)) * x[:1]
    elif kind == "constant":
        x = np.ones_like(x)
    x_scale = 10.0 ** draw(st.floats(-6, largest))
    y_scale = 10.0 ** draw(st.floats(-6, 6))
    y = y_scale * rng.standard_normal((slots, k))
    mask = rng.permutation(slots) < draw(st.integers(0, slots))
    at = x_scale * rng.standard_normal((QUERIES, d))
    return (*(a.astype(np.float32) for a in (x_scale * x, y, at)), mask)


def exact(name, params, x, y, at):
    """The head's equation in float64, by NumPy.

    Predictions, and z^T (Z^T Z + ridge I)^-1 z for each query; the condition number of the system,
    the largest sum of terms in a prediction, and ||z||^2 / ridge.
    """
    method = params.method
    w = np.asarray(params["head"], float)
    z, z_at = (np.concatenate([a, np.ones((len(a), 1))], axis=1).astype(float) for a in (x, at))
    c, n, s = 2 / w.shape[1], max(len(z), 1), np.sum(z**2, axis=1)
    share = n if method.prior_correction else 1
    epsilon = method.epsilon
    if method.learn_epsilon:
        floor = method.epsilon_floor * c * np.sum(s) / n * share
        epsilon = np.exp(float(params["log_epsilon"])) + floor
    epsilon = epsilon / share
    omega = {
        "paper": method.inner_rate * (c * s + epsilon),
        "converged": 1 + epsilon / (c * s),
    }.get(name, np.ones(len(z)))
    ridge = n * epsilon / c
    gram = z.T @ z
    system = gram + ridge * np.eye(len(w))
    moved = np.linalg.solve(system, z.T @ (omega[:, None] * (z @ w - y)))
    reach = np.max(np.abs(z_at) @ (np.abs(w) + np.abs(moved)))
    variance = np.sum(z_at * np.linalg.solve(system, z_at.T).T, axis=1)
    prior = np.sum(z_at**2, axis=1) / ridge
    return z_at @ (w - moved), variance, 1 + np.trace(gram) / ridge, reach, prior


@pytest.mark.parametrize("name", SETTINGS)
def test_head_is_its_equation_at_whatever_points(name):
    """In float32, to 1e-5 + 1e-6 kappa, kappa the condition number of the system.

    Relative to the terms that add up to the prediction. Error bars are, relative to those of the
    prior. Their order and what stands in padding have no effect, and no gradient is NaN.
    """

    @settings(max_examples=25, derandomize=True, deadline=None, database=None)
    @given(tasks(LARGEST[name]))
    def holds(task):
        x, y, at, mask = task
        params, run = compiled(name, len(x))
        gradients, predicted = run(x, y, mask, at)
        assert_finite(gradients)
        mean, variance, condition, reach, prior = exact(name, params, x[mask], y[mask], at)
        relative = 1e-5 + 1e-6 * condition
        tolerance = relative * reach
        np.testing.assert_allclose(predicted.mean, mean, rtol=0, atol=tolerance)
        if predicted.epistemic is not None:
            assert np.all(predicted.epistemic >= 0)
            error = np.abs(predicted.epistemic / predicted.noise - variance[:, None])
            assert np.all(error <= relative * prior[:, None])

        order = np.random.default_rng(0).permutation(len(x))
        _, shuffled = run(x[order], y[order], mask[order], at)
        np.testing.assert_allclose(shuffled.mean, predicted.mean, rtol=0, atol=tolerance)

        hole = np.where(mask, 0, np.nan).astype(np.float32)[:, None]
        again, padded = run(x + hole, y + hole, mask, at)
        jax.tree.map(np.testing.assert_array_equal, padded, predicted)
        assert_finite(again)

    holds()
