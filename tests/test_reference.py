"""Errors that need no meta-learning: the Gaussian process, and what a run prints beside it."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gaussian_process
import lavajax
import reference
from report import table

LENGTH, NOISE = 0.4, 0.05


def matern(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(1 + d) exp(-d), d = sqrt(3) |a - b| / length (Rasmussen & Williams, 4.17)."""
    d = np.sqrt(3) * np.abs(a[:, None] - b[None, :]) / LENGTH
    return (1 + d) * np.exp(-d)


def drawn(tasks: int, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and two outputs of each task, from the process itself; 4 is its variance."""
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, (tasks, points, 1))
    y = []
    for at in x[..., 0]:
        covariance = 4 * matern(at, at) + NOISE * np.eye(points)
        y.append(rng.multivariate_normal(np.zeros(points), covariance, size=2).T)
    return x, np.stack(y)


def test_kernel_of_the_tasks_is_found():
    kernel = gaussian_process.fit_kernel(*drawn(40, 12))
    variance, length, noise = np.exp(kernel.theta)
    assert variance == pytest.approx(4, rel=0.4)
    assert length == pytest.approx(LENGTH, rel=0.3)
    assert noise == pytest.approx(NOISE, rel=0.3)


def test_error_is_that_of_the_posterior_mean(monkeypatch):
    """k(x*, x) (K + noise I)^-1 y (Rasmussen & Williams, 2.23), by NumPy, on the tasks scored."""
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel(4.0) * Matern(LENGTH, nu=1.5) + WhiteKernel(NOISE)
    monkeypatch.setattr(gaussian_process, "fit_kernel", lambda x, y: kernel)
    source = lavajax.SyntheticFm(shots=6, queries=9)
    found = gaussian_process.gaussian_process_error(source, 20)

    def error(task, key):
        del key
        x, y, at = task.support.x[:, 0], task.support.y, task.query.x[:, 0]
        d = jnp.sqrt(3) * jnp.abs(x[:, None] - x) / LENGTH
        k = 4 * (1 + d) * jnp.exp(-d) + NOISE * jnp.eye(6)
        d = jnp.sqrt(3) * jnp.abs(at[:, None] - x) / LENGTH
        mean = 4 * (1 + d) * jnp.exp(-d) @ jnp.linalg.solve(k, y)
        return jnp.mean((mean - task.query.y) ** 2)

    assert found == pytest.approx(lavajax.score(error, source, num_tasks=20).mean(), rel=1e-3)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of 6 hours of a Gaussian series of unequal variances."""

    shots: int = 3
    queries: int = 3

    hours = np.linspace(-1, 1, 6)
    covariance = matern(hours, hours) * np.outer(1 + hours**2, 1 + hours**2)

    def sample(self, key, split="train"):
        series_key, order_key = jax.random.split(key)
        covariance = jnp.asarray(self.covariance)
        y = jax.random.multivariate_normal(series_key, jnp.zeros(6), covariance, (2,)).T
        order, n = jax.random.permutation(order_key, 6), self.shots
        x, y = jnp.asarray(self.hours)[order][:, None], y[order]
        end = n + self.queries
        return lavajax.Task(lavajax.Points(x[:n], y[:n]), lavajax.Points(x[n:end], y[n:end]))


def test_the_best_linear_predictor_is_that_of_the_covariance():
    """Its error is the trace of the conditional covariance, here over all splits into 3 and 3."""
    k = Windows.covariance
    expected = []
    for s in map(list, itertools.combinations(range(6), 3)):
        q = [i for i in range(6) if i not in s]
        left = k[np.ix_(q, q)] - k[np.ix_(q, s)] @ np.linalg.solve(k[np.ix_(s, s)], k[np.ix_(s, q)])
        expected.append(np.trace(left) / 3)
    for queries in (3, 2):  # all of the other hours, and not all
        found = reference.linear_error(Windows(queries=queries), 6, 20_000)
        assert found == pytest.approx(np.mean(expected), rel=0.05)


def test_radio_has_its_references_and_is_called_synthetic(monkeypatch):
    monkeypatch.setattr(gaussian_process, "TRAIN_TASKS", 5)
    task = lavajax.NoisyLabels(lavajax.Radio(), 0.0)
    errors = reference.reference_errors(task, task.load(), 20)
    assert list(errors) == [
        *("predict 0", "linear interpolation", "Gaussian process, Matern 3/2", "noise"),
    ]
    assert errors["predict 0"] == pytest.approx(0.5, abs=0.03)
    assert errors["noise"] == pytest.approx(0.00195, abs=1e-5)
    assert errors["noise"] < errors["Gaussian process, Matern 3/2"] < 0.5

    seed = {"seed": 0, "mean": 1.0, "interval": (0.9, 1.1), "median": 1.0}
    results = {"metric": "mse", "test_tasks": 20, "seeds": [seed], "method": "Lava"}
    results |= {"paper": None, "references": errors}
    assert "lava on radio (synthetic), 10" in table("lava", "radio", task, results).title
    plain = reference.reference_errors(lavajax.Radio(), lavajax.Radio().load(), 100)
    assert plain["noise"] < plain["best linear predictor"] < plain["linear interpolation"]
    stored = lavajax.Radio("file.hdf5")
    assert "lava on radio, 10" in table("lava", "radio", stored, results).title


def test_noise_on_the_query_adds_to_every_reference():
    sine = reference.reference_errors(lavajax.NoisyLabels(lavajax.Sine(), 3.0, "both"), None, 20)
    assert sine["predict 0"] == pytest.approx(4.25 + 9)
    plain = reference.reference_errors(lavajax.Pendulum(), None, 20)
    clean = reference.reference_errors(lavajax.NoisyLabels(lavajax.Pendulum(), 3.0), None, 20)
    noisy = reference.reference_errors(
        lavajax.NoisyLabels(lavajax.Pendulum(), 3.0, "both"), None, 20
    )
    assert clean == plain
    assert noisy == {name: pytest.approx(value + 9) for name, value in plain.items()}


def test_papers_numbers_are_for_its_own_data_alone():
    lava = lavajax.Lava()
    assert reference.paper_value(lavajax.Radio(), lava) is None
    assert reference.paper_value(lavajax.Radio("file.hdf5"), lava) == 0.0038
    assert reference.paper_value(lavajax.AirQuality("a.zip"), lava) == 0.0465
    for other in ({"inputs": "weather"}, {"split": "station"}, {"queries": 50}, {"column": "O3"}):
        assert reference.paper_value(lavajax.AirQuality("a.zip", **other), lava) is None


def test_interpolation_of_two_outputs_is_that_of_each():
    task = jax.jit(lavajax.SyntheticFm().sample)(jax.random.key(0))
    x, y = np.asarray(task.support.x[:, 0]), np.asarray(task.support.y)
    at, order = np.asarray(task.query.x[:, 0]), np.argsort(x)
    expected = np.stack([np.interp(at, x[order], y[order, i]) for i in range(2)], axis=1)
    error = jax.jit(reference.interpolation_error)(task, jax.random.key(0))
    assert float(error) == pytest.approx(
        np.mean((expected - np.asarray(task.query.y)) ** 2), rel=1e-4
    )


def test_interpolation_sees_no_padding():
    full = jax.jit(lavajax.Sine(shots=6, queries=5).sample)(jax.random.key(0))
    keep = np.array([True, False, True, True, False, False])
    alone = lavajax.Points(full.support.x[keep], full.support.y[keep])
    x, y = (jnp.where(keep[:, None], part, jnp.nan) for part in (full.support.x, full.support.y))
    masked = lavajax.Points(x, y, jnp.asarray(keep))
    asked = np.array([True, True, False, True, True])
    query = lavajax.Points(full.query.x[asked], full.query.y[asked])
    padded = lavajax.Points(full.query.x, full.query.y, jnp.asarray(asked))
    expected = reference.interpolation_error(lavajax.Task(alone, query), jax.random.key(0))
    actual = reference.interpolation_error(lavajax.Task(masked, padded), jax.random.key(0))
    assert float(actual) == pytest.approx(float(expected), rel=1e-6)


def test_missing_scikit_learn_is_told_before_a_run(monkeypatch):
    import run as script

    monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
    settings = types.SimpleNamespace(
        task=lavajax.Radio(), run=types.SimpleNamespace(tensorboard=False, figures=False)
    )
    with pytest.raises(
        ModuleNotFoundError, match=r"to compare with needs sklearn.*pip install \"\.\[data\]\""
    ):
        script.check_extras(settings)
    settings.task = lavajax.Sine()
    script.check_extras(settings)
