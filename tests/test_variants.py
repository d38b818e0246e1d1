"""Sources made of other sources: label noise, and a fixed set of tasks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from lavajax.config import from_json, to_json

BASE = lj.Sine(shots=3, queries=5)


def draw(source, number, split="train", seed=0):
    keys = jax.random.split(jax.random.key(seed), number)
    return jax.jit(jax.vmap(lambda key: source.sample(key, split)))(keys)


def test_noise_has_its_standard_deviation_and_stays_where_it_belongs():
    """3 is the standard deviation, not its square; inputs, and by default queries, have none."""
    clean = draw(BASE, 3000, "test")
    for on in ("support", "both"):
        noisy = draw(lj.NoisyLabels(BASE, std=3.0, on=on), 3000, "test")
        for name in ("support", "query"):
            points, before = getattr(noisy, name), getattr(clean, name)
            np.testing.assert_array_equal(points.x, before.x)
            noise = np.asarray(points.y - before.y, float)
            if name == "query" and on == "support":
                assert np.abs(noise).max() < 1e-5  # rounding: the two are compiled apart
            else:
                assert abs(noise.std() - 3.0) < 0.1
                assert abs(noise.mean()) < 0.1
                assert abs(np.corrcoef(noise[:, 0, 0], noise[:, 1, 0])[0, 1]) < 0.1


def test_support_and_query_have_noise_of_their_own():
    noisy, clean = draw(lj.NoisyLabels(BASE, 1.0, "both"), 500), draw(BASE, 500)
    a = np.asarray(noisy.support.y - clean.support.y)[:, 0, 0]
    b = np.asarray(noisy.query.y - clean.query.y)[:, 0, 0]
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.15


@jax.tree_util.register_static
class Labels:
    def sample(self, key, split="train"):
        points = lj.Points(jnp.zeros((2, 1)), jnp.zeros((2,), jnp.int32))
        return lj.Task(points, points)


def test_classes_take_no_noise():
    with pytest.raises(ValueError, match=r"NoisyLabels.tasks must have real targets, got targets"):
        lj.NoisyLabels(Labels(), 1.0).sample(jax.random.key(0))


def test_fixed_tasks_are_few_and_their_points_are_split_anew():
    source = lj.FixedTasks(BASE, number=4, seed=7)
    task = draw(source, 400)
    points = np.concatenate([task.support.x, task.query.x], axis=1)[..., 0]
    found = {tuple(row) for row in np.sort(points, axis=1)}
    assert len(found) == 4  # the same eight points in each, whatever their order
    supports = {tuple(row) for row in np.sort(np.asarray(task.support.x)[..., 0], axis=1)}
    assert len(supports) > 100  # of 4 * (8 choose 3) = 224
    other = draw(lj.FixedTasks(BASE, number=4, seed=8), 400)
    assert not np.isin(other.support.x, task.support.x).any()


def test_a_fixed_task_keeps_its_points_together():
    """Targets move with their inputs when the points are split anew."""
    task = draw(lj.FixedTasks(BASE, number=2), 50)
    x = np.concatenate([task.support.x, task.query.x], axis=1)[..., 0]
    y = np.concatenate([task.support.y, task.query.y], axis=1)[..., 0]
    order = np.argsort(x, axis=1)
    sorted_y = np.take_along_axis(y, order, axis=1)
    assert len({tuple(row) for row in sorted_y}) == 2


def test_what_would_move_between_support_and_query_is_refused():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match=r"give VaryingShots\(FixedTasks\(...\), sizes\)"):
        lj.FixedTasks(lj.VaryingShots(BASE, (1,))).sample(key)
    with pytest.raises(ValueError, match=r"give NoisyLabels\(FixedTasks\(...\), std\)"):
        lj.FixedTasks(lj.NoisyLabels(BASE, 1.0)).sample(key)
    with pytest.raises(ValueError, match=r"FixedTasks.tasks must have clean_query=False, got True"):
        lj.FixedTasks(lj.SyntheticFm(clean_query=True)).sample(key)
    lj.FixedTasks(lj.SyntheticFm()).sample(key)
    with pytest.raises(ValueError, match=r"FixedTasks.tasks must have real targets, got int32"):
        lj.FixedTasks(Labels()).sample(key)
    with pytest.raises(ValueError, match=r"NoisyLabels.tasks must not be NoisyLabels"):
        lj.NoisyLabels(lj.NoisyLabels(BASE, 1.0), 1.0).sample(key)
    with pytest.raises(ValueError, match=r"NoisyLabels.tasks must not be NoisyLabels"):
        lj.NoisyLabels(lj.VaryingShots(lj.NoisyLabels(BASE, 1.0), (1,)), 1.0).sample(key)


def test_noise_differs_between_splits():
    noise = [
        np.asarray(draw(lj.NoisyLabels(BASE, 1.0), 5, s).support.y - draw(BASE, 5, s).support.y)
        for s in ("validation", "test")
    ]
    assert not np.allclose(*noise, atol=0.1)


def test_a_seed_of_numpy_has_a_record():
    source = lj.FixedTasks(BASE, 2, seed=np.int64(3))
    assert from_json(to_json(source)) == source
    assert type(source.seed) is int


def test_validation_and_test_tasks_are_fresh():
    for split in ("validation", "test"):
        fixed, plain = draw(lj.FixedTasks(BASE, 2), 50, split), draw(BASE, 50, split)
        np.testing.assert_array_equal(fixed.query.y, plain.query.y)


def test_supports_have_each_size_as_often_and_are_otherwise_the_same():
    source = lj.VaryingShots(BASE, (1, 3))
    task, plain = draw(source, 400), draw(BASE, 400)
    np.testing.assert_array_equal(task.support.y, plain.support.y)
    np.testing.assert_array_equal(task.query.y, plain.query.y)
    sizes = np.asarray(task.support.mask).sum(axis=1)
    assert set(sizes) == {1, 3}
    assert 150 < np.sum(sizes == 1) < 250
    assert np.asarray(task.support.mask)[:, 0].all()
    with pytest.raises(ValueError, match="supports of at least 4 points, without a mask, got 3"):
        lj.VaryingShots(BASE, (2, 4)).sample(jax.random.key(0))
    with pytest.raises(ValueError, match="got 3 points with a mask"):
        lj.VaryingShots(source, (2,)).sample(jax.random.key(0))


def test_a_source_is_required():
    for source in (
        *(lj.FixedTasks(lj.Sine), lj.NoisyLabels("sine", 1.0), lj.VaryingShots(None, (1,))),
    ):
        with pytest.raises(ValueError, match="tasks must be a source with sample"):
            source.sample(jax.random.key(0))


def test_they_train_compose_and_have_a_record():
    source = lj.NoisyLabels(lj.VaryingShots(lj.FixedTasks(BASE, 3), (1, 2)), 0.5)
    assert from_json(to_json(source)) == source
    trained = lj.train(lj.Anil(lj.MLP(hidden=(8,))), source, steps=2, meta_batch=2)
    assert lj.evaluate(trained.params, source, num_tasks=4).mean > 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: lj.NoisyLabels(BASE, -1.0),
            "NoisyLabels.std must be a finite number of at least 0",
        ),
        (lambda: lj.NoisyLabels(BASE, 1.0, "query"), "NoisyLabels.on must be one of 'support'"),
        (lambda: lj.VaryingShots(BASE, ()), "VaryingShots.sizes must have at least one number"),
        (lambda: lj.FixedTasks(BASE, 0), "FixedTasks.number must be an integer of at least 1"),
    ],
)
def test_impossible_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
