"""The mathematics behind the paper's figures, on untrained models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import lavajax
from helpers import RELU, assert_close, make_params
from items import conditions, geometry, noise, overlap, rollouts, stations
from reference import field_errors


@pytest.mark.parametrize("method", [lavajax.Anil(RELU), lavajax.Lava(RELU)], ids=["anil", "lava"])
def test_noise_adds_to_the_error_of_a_head_what_the_closed_form_says(method):
    """sigma^2 mean_q ||A_q||^2, to the error of a mean over 4,000 draws of 50 tasks."""
    params = make_params(method, lavajax.Sine().sample(jax.random.key(0)).support)
    found = noise.change(params, 5, tasks=50, draws=4000)
    assert found["expected"] > 0
    assert found["change"] == pytest.approx(found["expected"], rel=0.03)
    assert "expected" not in noise.change(
        make_params(lavajax.HyperNetwork(RELU), lavajax.Sine().sample(jax.random.key(0)).support),
        5,
        tasks=4,
        draws=2,
    )


def test_condition_number_of_a_head_is_that_of_its_largest_eigenvalue():
    """sum_i H_i is singular, since 10 points have fewer directions than weights: its least is 0."""
    wide = lavajax.MLP(hidden=(16, 16))
    source = lavajax.Sine(shots=10)
    params = make_params(lavajax.Lava(wide), source.sample(jax.random.key(0)).support)
    found = conditions.conditions(params, 3)
    supports = [
        source.sample(key, "test").support for key in jax.random.split(jax.random.key(0), 3)
    ]
    largest, counted = [], []
    for support in supports:
        total = np.asarray(params.method.diagnose(params, support).hessians, float).sum(axis=0)
        values = np.linalg.eigvalsh(total)[::-1]
        largest.append(values[0])
        counted.append(values[0] / values[9])
    assert found["mean"] == pytest.approx(np.mean(1 + np.array(largest) / (10 * 0.1)), rel=1e-4)
    assert found["raw_median"] > 10  # of the 10 that are not 0


def test_trajectories_are_those_of_the_field():
    """Of a spring with m = k = 1: a rotation."""
    field = lambda state: lavajax.MassSpring.field(state, mass=1.0, stiffness=1.0)  # noqa: E731
    times = jnp.linspace(0.0, 2.0, 20)
    path, good = rollouts.integrate(field, times, jnp.array([0.6, -0.3]))
    turned = [0.6 * np.cos(times) - 0.3 * np.sin(times), -0.3 * np.cos(times) - 0.6 * np.sin(times)]
    assert good
    assert_close(path, np.stack(turned, axis=1), 1e-4)
    _, good = rollouts.integrate(lambda state: state**3 * 100, times, jnp.array([1.0, 1.0]))
    assert not good  # it is infinite before the time is over


def test_ellipse_is_one_standard_deviation():
    precision = np.array([[2.0, 0.5], [0.5, 1.0]])
    moved = geometry.ellipse([1.0, -1.0], precision) - np.array([[1.0], [-1.0]])
    np.testing.assert_allclose(np.einsum("it,ij,jt->t", moved, precision, moved), 1.0, rtol=1e-9)


def test_waves_pass_through_their_point():
    rng = np.random.default_rng(0)
    found = overlap.waves_through(1.0, -2.0, 5, rng)
    assert len(found) == 5
    for amplitude, phase in found:
        assert amplitude * np.sin(1.0 + phase) == pytest.approx(-2.0)
        assert 0.1 <= amplitude <= 5
    assert overlap.waves_through(1.0, 6.0, 5, rng) == []  # no wave is as high


@pytest.mark.parametrize(
    ("task", "zero", "mean"),
    [  # FitzHugh-Nagumo and Van der Pol are heavy-tailed
        (lavajax.FitzHughNagumo(), 17.9, 9.5),
        (lavajax.MassSpring(), 0.398, 0.0347),
        (lavajax.Pendulum(), 0.907, 0.294),
        (lavajax.VanDerPol(), 154, 36.3),
        (lavajax.Cartpole(), 17.4, 1.015),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "sample") else "",
)
def test_errors_without_learning_are_known(task, zero, mean):
    """They pin every range and box."""
    found = field_errors(task, 4000)
    assert found["predict 0"] == pytest.approx(zero, rel=0.12)
    assert found["mean over parameters"] == pytest.approx(mean, rel=0.12)


def test_months_of_new_stations_have_the_error_of_so_many_months():
    """However many supports are drawn from each; to first order, that of the root of a mean."""
    rng = np.random.default_rng(0)
    errors = rng.uniform(1, 2, 40)  # of each month
    table = pd.DataFrame(
        {"station": "A", "year": np.repeat(range(40), 30), "month": 1}
        | {"PM2.5": np.repeat(errors, 30)}
    )
    found = stations._scores(table, lambda _, query: np.zeros(len(query)))
    drawn = np.sqrt(np.mean(rng.choice(errors**2, (4000, 40)), axis=1))
    for shots in ("10", "20"):
        assert found[shots] == pytest.approx(np.sqrt(np.mean(errors**2)))
        assert found[f"{shots} error"] == pytest.approx(drawn.std(), rel=0.05)
    table["PM2.5"] = 1.0
    assert stations._scores(table, lambda _, query: np.zeros(len(query)))["10 error"] == 0
