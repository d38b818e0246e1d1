"""Sine waves: shapes, ranges, splits, and the errors of predictors that learn nothing."""

import math

import jax
import numpy as np
import pytest

import lavajax as lj


def draw(source, number, seed=0, split="train"):
    keys = jax.random.split(jax.random.key(seed), number)
    return jax.jit(jax.vmap(lambda key: source.sample(key, split)))(keys)


def fit(task):
    """Amplitude, phase ``[tasks]`` and largest error of least squares on sin x and cos x."""
    x, y = (
        np.concatenate([getattr(task.support, n), getattr(task.query, n)], axis=1)[..., 0]
        for n in "xy"
    )
    basis = np.stack([np.sin(x), np.cos(x)], axis=-1).astype(float)
    weights = np.stack(
        [np.linalg.lstsq(b, v, rcond=None)[0] for b, v in zip(basis, y, strict=True)]
    )
    error = np.abs(np.einsum("tnb,tb->tn", basis, weights) - y).max()
    return np.hypot(*weights.T), np.arctan2(weights[:, 1], weights[:, 0]), error


def test_shapes_and_dtypes():
    task = lj.Sine(shots=3, queries=7).sample(jax.random.key(0))
    assert task.support.x.shape == task.support.y.shape == (3, 1)
    assert task.query.x.shape == task.query.y.shape == (7, 1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(task)} == {"float32"}
    assert task.support.mask is None


def test_tasks_are_sines_of_the_stated_ranges():
    """y = A sin(x + phase) on support and query alike, and the ranges are filled."""
    source = lj.Sine(shots=5, queries=5, amplitude=(1.0, 2.0), phase=(0.5, 1.0), x_range=(-2, 3))
    task = draw(source, 300)
    amplitude, phase, error = fit(task)
    assert error < 1e-5
    for values, (low, high) in (
        (amplitude, (1, 2)),
        (phase, (0.5, 1)),
        (np.asarray(task.support.x), (-2, 3)),
        (np.asarray(task.query.x), (-2, 3)),
    ):
        width = high - low
        assert low - 1e-4 < values.min() < low + 0.05 * width
        assert high - 0.05 * width < values.max() < high + 1e-4


def test_splits_never_coincide_and_seeds_are_fixed():
    """The same key gives another task in each split, and the same task again in its own."""
    source = lj.Sine(shots=2, queries=2)
    splits = {split: draw(source, 50, split=split) for split in ("train", "validation", "test")}
    points = np.concatenate([np.ravel(task.support.x) for task in splits.values()])
    assert len(np.unique(points)) == points.size
    for split, task in splits.items():
        again = draw(source, 50, split=split)
        np.testing.assert_array_equal(again.support.y, task.support.y)


@pytest.mark.parametrize(
    ("phase", "zero"),
    # E A^2 / 2 (1 - E cos 2(x + phase)): the second mean vanishes over a whole half turn of phase.
    [((0.0, math.pi), (0.1**2 + 0.1 * 5 + 5**2) / 6), ((-math.pi, math.pi), 25.51 / 6)],
)
def test_error_of_predicting_zero(phase, zero):
    """About 4.25: E A^2 / 2 for A from U[0.1, 5]."""
    task = draw(lj.Sine(phase=phase), 20_000)
    error = np.mean(np.asarray(task.query.y, float) ** 2, axis=(1, 2))
    assert abs(zero - 4.25) < 0.01
    assert abs(error.mean() - zero) < 5 * error.std() / math.sqrt(error.size)


def test_error_of_the_mean_function_is_lower_for_the_half_turn():
    """With phases in [0, pi] the best constant-in-task guess is (2/pi) E A cos x, not 0."""
    task = draw(lj.Sine(), 20_000)
    x, y = (np.asarray(v, float)[..., 0] for v in (task.query.x, task.query.y))
    guess = 2 / math.pi * 2.55 * np.cos(x)
    error = np.mean((y - guess) ** 2)
    expected = 25.51 / 6 - (2 / math.pi * 2.55) ** 2 * (0.5 + math.sin(10) / 20)
    assert abs(error - expected) < 0.1
