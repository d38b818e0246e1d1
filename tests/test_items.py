"""The mathematics behind the paper's figures, on untrained models."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import lavajax
from helpers import RELU, Circle, assert_close, make_params
from items import conditions, geometry, noise, overlap, published, rollouts, stations, variance
from protocols import Scale
from reference import field_errors
from works import Folders


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


@dataclasses.dataclass(frozen=True)
class Waves(Circle):
    """Features cos(kx) and sin(kx): points that are apart have features that are."""

    def features(self, weights, fixed, x, *, context=None, mask=None):
        """``[N, 16]``."""
        return jnp.concatenate([f(k * x) for k in range(1, 9) for f in (jnp.cos, jnp.sin)], axis=1)


def test_condition_number_of_a_head_is_that_of_its_features():
    """sum_i H_i is singular, since 10 points have fewer directions than weights: its least is 0."""
    source = lavajax.Sine(shots=10)
    params = make_params(lavajax.Lava(Waves()), source.sample(jax.random.key(0)).support)
    found = conditions.conditions(params, 3)
    largest, counted = [], []
    for key in jax.random.split(jax.random.key(0), 3):
        x = np.asarray(source.sample(key, "test").support.x, np.float64)
        z = [f(k * x) for k in range(1, 9) for f in (np.cos, np.sin)] + [np.ones_like(x)]
        values = 2 * np.linalg.svd(np.concatenate(z, axis=1), compute_uv=False) ** 2
        largest.append(values[0])
        counted.append(values[0] / values[9])  # of the 10 that are not 0
    assert found["raw_mean"] == pytest.approx(np.mean(counted), rel=1e-6)
    assert found["raw_median"] == pytest.approx(np.median(counted), rel=1e-6)
    regular = 1 + np.array(largest) / (10 * 0.1)
    assert found["mean"] == pytest.approx(np.mean(regular), rel=1e-6)
    assert found["median"] == pytest.approx(np.median(regular), rel=1e-6)


def test_figures_leave_out_what_has_diverged_in_every_seed(monkeypatch, tmp_path):
    folders = Folders(tmp_path, tmp_path)

    def results(module, name, made):
        """Every cell of a figure, with a result by its name."""
        works = module.works(Scale())
        for work in works:
            folders.cells(work.item).put(work.name, work.key, made(work.name == name))

    results(noise, "ANIL", lambda lost: {"sizes": [5, 10], "seeds": [] if lost else [CHANGE]})
    results(variance, "CAVIA N=10", lambda lost: {key: [] for key in SPREAD} if lost else SPREAD)
    results(conditions, "C = 2", lambda lost: {"early": 1, "seeds": [] if lost else [NUMBERS]})
    text = noise.render(Scale(), folders)
    assert "Diverged in every seed: ANIL." in text
    assert "| LAVA, the paper's setting, over the noise's variance | 1 | 0.5 |" in text
    text = variance.render(Scale(), folders)
    assert "Diverged in every seed: CAVIA at N = 10." in text
    assert "| LAVA, context | 10 | 2 (step 1) | 1 | 1 | 3 |" in text
    assert "| C = 2 |" not in conditions.render(Scale(), folders)


def test_the_protocol_of_the_code_is_held_against_an_earlier_implementation(tmp_path):
    table = published.tables(Scale(), Folders(tmp_path, tmp_path))["code"]
    errors = {(published.LAVA, 1): 1.40, (published.ANIL, 1): 1.42, (published.LAVA, 10): 0.001}
    table.__dict__["found"] = {
        (name, f"0 to pi, N = {n}"): {"seeds": [{"mse": mse}]} for (name, n), mse in errors.items()
    }
    text = published._within(table)
    assert "LAVA at N = 10 is between 0.0005 and 0.003" in text
    assert text.endswith("at N = 1 the two are within 3% of each other.")
    table.found[published.ANIL, "0 to pi, N = 10"] = {"seeds": [{"mse": None}, {"mse": 0.01}]}
    assert "8 steps at N = 10 is not between 0.003 and 0.03" in published._within(table)


CHANGE = {"clean": [1.0, 1.0], "change": [9.0, 4.5], "expected": [9.0, 4.5]}
SPREAD = {"step": [1, 2], "mse": [3.0], "scatter": [[0.0, 1.0], [1.0, 0.0]]}
SPREAD |= {name: [[2.0, 1.0]] for name in ("function", "parameter")}
NUMBERS = dict.fromkeys(
    ("early", "end"), dict.fromkeys(("raw_mean", "raw_median", "mean", "median"), 1.0)
)


def test_trajectories_are_those_of_the_field():
    """Of a spring with m = k = 1: a rotation."""
    field = lambda state: lavajax.MassSpring.field(state, mass=1.0, stiffness=1.0)  # noqa: E731
    times = jnp.linspace(0.0, 2.0, 20)
    path = rollouts.integrate(field, times, jnp.array([0.6, -0.3]))
    turned = [0.6 * np.cos(times) - 0.3 * np.sin(times), -0.3 * np.cos(times) - 0.6 * np.sin(times)]
    assert_close(path, np.stack(turned, axis=1), 1e-4)
    path = rollouts.integrate(lambda state: state**3 * 100, times, jnp.array([1.0, 1.0]))
    assert not np.isfinite(path).all()  # it is infinite before the time is over
    assert np.isfinite(path[0]).all()


def test_integrations_fail_where_they_do_while_the_true_state_is_in_the_box(monkeypatch):
    """A field that drifts out of the box, where it explodes."""

    def predict(params, adapted, x):
        drift = jnp.stack([jnp.full(x.shape[0], 0.4), jnp.zeros(x.shape[0])], axis=1)
        return SimpleNamespace(mean=jnp.where(jnp.abs(x[:, :1]) > 1, 1e3 * x**3, drift))

    monkeypatch.setattr(rollouts.lavajax, "adapt", lambda params, support: None)
    monkeypatch.setattr(rollouts.lavajax, "predict", predict)
    rolled = rollouts.roll_out(None, lavajax.MassSpring(), tasks=60, samples=20)
    true, learned = np.asarray(rolled["true"]), np.asarray(rolled["learned"])
    inside = np.cumprod((np.abs(true) <= 1).all(axis=-1), axis=-1).astype(bool)
    lost = ~np.isfinite(learned).all(axis=-1)
    failed = (lost & inside).any(axis=-1)
    np.testing.assert_array_equal(rolled["failed"], failed)
    assert failed.any()
    assert (lost.any(axis=-1) & ~failed).any()  # lost, after the true state has left
    np.testing.assert_array_equal(np.isinf(rolled["rmse"]), failed.any(axis=-1))
    task = np.flatnonzero(~failed.any(axis=-1))[0]
    gap = (learned - true)[task][inside[task]]
    np.testing.assert_allclose(rolled["rmse"][task], np.sqrt((gap**2).mean()), rtol=1e-4)


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
    other = field_errors(task, 4000, seed=1)  # of other tasks
    assert all(other[name] != value for name, value in found.items())


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
