"""Units: a user's numbers in, a user's numbers out, and standardised ones between."""

from __future__ import annotations

import dataclasses
import datetime

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest

import lavajax as lj
from helpers import RELU, assert_close, make_params, make_points
from lavajax import api, checkpoint, store
from lavajax.start import start_state

X = lj.Columns((1000.0, -3.0), (20.0, 0.5), ("load", "temp"))
Y = lj.Columns((5.0, -70.0), (0.1, 400.0), ("wear", "heat"))
UNITS = lj.Units(X, Y)
METHOD = lj.Alpaca(RELU)  # it has error bars, and is affine in labels
POINTS, OTHERS = make_points(6, 2, 2), make_points(5, 2, 2, seed=1)
PARAMS = dataclasses.replace(make_params(METHOD, POINTS), units=UNITS)


def own(points):
    """Points in the user's units, by hand and in float64."""
    x, y = np.asarray(points.x, np.float64), np.asarray(points.y, np.float64)
    return x * np.array(X.std) + np.array(X.mean), y * np.array(Y.std) + np.array(Y.mean)


def table(points):
    """The same as a DataFrame, with another column among them, in another order."""
    x, y = own(points)
    columns = {"heat": y[:, 1], "load": x[:, 0], "note": "text", "wear": y[:, 0], "temp": x[:, 1]}
    return pd.DataFrame(columns, index=range(10, 10 + len(x)))


def predicted(params, support, x):
    return lj.predict(params, lj.adapt(params, support), x)


# Conversion


def test_prediction_is_that_of_standardised_points_scaled_back():
    bare = PARAMS.standardised
    expected = predicted(bare, POINTS, OTHERS.x)
    x, y = own(POINTS)
    found = predicted(PARAMS, (x, y), own(OTHERS)[0])
    assert_close(found.mean, np.asarray(expected.mean) * Y.std + Y.mean, 1e-5)
    assert_close(found.epistemic, np.asarray(expected.epistemic) * np.square(Y.std), 1e-4)
    assert_close(found.noise, np.asarray(expected.noise) * np.square(Y.std), 1e-5)
    assert_close(found.variance, found.epistemic + found.noise, 1e-6)
    # a method without error bars has none in any units
    plain = dataclasses.replace(make_params(lj.Ridge(RELU), POINTS), units=UNITS)
    assert predicted(plain, (x, y), x).variance is None


def test_mask_hides_what_stands_under_it():
    x, y = own(POINTS)
    mask = np.arange(6) < 4
    y[4:] = np.nan
    expected = predicted(PARAMS, (x[:4], y[:4]), x)
    assert_close(predicted(PARAMS, lj.Points(x, y, mask), x), expected, 1e-4)


def test_large_offsets_cost_no_digits():
    """Seconds since 1970 differ by less than float32 can tell apart."""
    seconds = 1.7e9 + np.arange(5.0)
    columns = lj.Columns((seconds.mean(),), (seconds.std(),), ("time",))
    expected = (np.arange(5.0) - 2) / np.std(np.arange(5.0))
    for values in (seconds[:, None], seconds[:, None].astype(np.int64), seconds[:, None].tolist()):
        np.testing.assert_allclose(columns.standardise(values)[:, 0], expected, rtol=1e-6)


def test_restoring_is_the_inverse_of_standardising():
    x, y = own(POINTS)
    back = UNITS.restore_points(lj.Points(X.standardise(x), Y.standardise(jnp.asarray(y))))
    np.testing.assert_allclose(back.x, x, rtol=1e-6)
    np.testing.assert_allclose(back.y, y, rtol=1e-5, atol=1e-3)


def test_works_under_jit_vmap_and_grad():
    x, y = (jnp.asarray(v, jnp.float32) for v in own(POINTS))
    query = jnp.asarray(own(OTHERS)[0], jnp.float32)
    expected = predicted(PARAMS, (x, y), query).mean

    def mean(params, y):
        return predicted(params, (x, y), query).mean

    assert_close(jax.jit(mean)(PARAMS, y), expected, 1e-5)
    assert_close(jax.vmap(mean, (None, 0))(PARAMS, y[None])[0], expected, 1e-5)
    # Affine in labels: the slope is the difference, over any step.
    slope = jax.jit(jax.grad(lambda y: mean(PARAMS, y)[0, 1]))(y)
    step = jnp.zeros_like(y).at[2, 1].set(300.0)
    difference = mean(PARAMS, y + step)[0, 1] - mean(PARAMS, y)[0, 1]
    assert float(difference) == pytest.approx(300.0 * float(slope[2, 1]), rel=1e-3, abs=1e-2)
    gradient = jax.jit(jax.grad(lambda p: jnp.sum(mean(p, y) ** 2)))(PARAMS)
    assert jax.tree.structure(gradient) == jax.tree.structure(PARAMS)


def test_data_of_other_units_compile_nothing_anew():
    x, y = own(POINTS)
    predicted(PARAMS, (x, y), x)
    before = api._adapt._cache_size(), api._predict._cache_size()
    other = lj.Units(dataclasses.replace(X, mean=(0.0, 0.0)), dataclasses.replace(Y, names=None))
    predicted(dataclasses.replace(PARAMS, units=other), (x, y), x)
    assert (api._adapt._cache_size(), api._predict._cache_size()) == before


# Tables


@pytest.mark.parametrize("form", ["frame", "dict", "pair", "points"])
def test_columns_are_taken_by_name(form):
    rows, others = table(POINTS), table(OTHERS)
    support = {
        "frame": rows,
        "dict": {name: rows[name].to_numpy() for name in rows.columns},
        "pair": (rows[["temp", "load"]], rows[["heat", "wear"]]),
        "points": lj.Points(rows, rows, np.ones(6, bool)),
    }[form]
    expected = predicted(PARAMS, own(POINTS), own(OTHERS)[0])
    assert_close(predicted(PARAMS, support, others), expected, 1e-6)


def test_numbers_of_any_type_are_taken_and_nullable_ones():
    rows = table(POINTS)
    rows["load"], rows["temp"] = [1, 2, 3, 4, 5, 6], [True, False] * 3
    expected = lj.adapt(PARAMS, rows.astype({"load": float, "temp": float}))
    assert_close(lj.adapt(PARAMS, rows.astype({"load": "Int64"})), expected, 1e-6)
    assert_close(lj.adapt(PARAMS, rows.astype({"load": object})), expected, 1e-6)


BAD = {
    "missing": (
        lambda t: t.rename(columns={"load": "laod"}),
        r"'load'.*did you mean 'laod'.*'heat'",
    ),
    "twice": (lambda t: pd.concat([t, t[["temp"]]], axis=1), "'temp' is there 2 times"),
    "text": (
        lambda t: t.assign(load=["1", "2", "high", "3", "4", "5"]),
        "'load'.*row 12 of its index.*'high'",
    ),
    "date": (lambda t: t.assign(load=pd.Timestamp("2020-01-01")), "'load' .*holds dates"),
    "day": (lambda t: t.assign(load=datetime.date(2020, 1, 1)), r"'load'.*row 10 .*date\(2020"),
    "nan": (lambda t: t.assign(temp=[1, 2, 3, np.nan, 5, np.nan]), "'temp'.*row 13 .*2 entries"),
    "na": (lambda t: t.assign(temp=[1, pd.NA, 3, 4, 5, 6]), "'temp'.*row 11 .*1 entries"),
    "inf": (lambda t: t.assign(wear=[1, 2, 3, 4, np.inf, 6]), "support.y.*'wear'.*row 14 .*inf"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_column_is_named_with_its_row(name):
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        lj.adapt(PARAMS, change(table(POINTS)))


def test_rows_of_a_dict_are_counted_from_0():
    rows = {name: np.array(column) for name, column in table(POINTS).items()}
    rows["temp"][4] = np.nan
    with pytest.raises(ValueError, match=r"'temp' .*row 4 \(counted from 0\) has none"):
        lj.adapt(PARAMS, rows)


def test_model_without_names_takes_no_table():
    rows = table(POINTS)
    nameless = lj.Units(dataclasses.replace(X, names=None), dataclasses.replace(Y, names=None))
    for units in (None, nameless):
        params = dataclasses.replace(PARAMS, units=units)
        with pytest.raises(ValueError, match="got DataFrame; this model knows no names"):
            lj.adapt(params, rows)
        with pytest.raises(ValueError, match=r"x must be an array: .* not trained on a table"):
            lj.predict(params, lj.adapt(params, own(POINTS)), rows)


def test_shapes_are_checked_before_they_are_scaled():
    x, y = own(POINTS)
    with pytest.raises(ValueError, match=r"support\.x must have shape \(N, 2\).*got \(6, 1\)"):
        lj.adapt(PARAMS, (x[:, :1], y))
    with pytest.raises(ValueError, match=r"support\.y must have shape \(N, 2\).*got \(6, 1\)"):
        lj.adapt(PARAMS, (x, y[:, :1]))
    y[1, 0] = np.nan
    with pytest.raises(ValueError, match=r"support\.y must be finite .* at point 1"):
        lj.adapt(PARAMS, (x, y))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (((0, np.nan), (1, 1)), r"Columns\.mean must be finite"),
        (((0, 1), (1, 0)), r"Columns\.std must be above 0"),
        (((0, 1), (1,)), r"Columns\.std must be .* one for each of 2 means"),
        (((0, 1), (1, 1), ("a", "a")), r"Columns\.names must be .* several different ones"),
        (((0, 1), (1, 1), ("a",)), r"Columns\.names must be 2 different names"),
        ((0.0, (1,)), r"Columns\.mean must be a number for each entry, such as \(0.0,\), got 0.0"),
    ],
)
def test_impossible_columns_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        lj.Columns(*fields)


def test_units_are_of_columns():
    with pytest.raises(ValueError, match=r"Units\.x must be Columns, got 1"):
        lj.Units(1, UNITS.y)


# Training and files


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Source:
    """Standardised tasks with units."""

    units: lj.Units = UNITS

    def sample(self, key, split="train"):
        points = lj.Points(*(jax.random.normal(k, (4, 2)) for k in jax.random.split(key)))
        return lj.Task(points, points)


def test_training_hands_units_on_and_every_seed_has_them(tmp_path):
    # through a variant, which has those of its source
    source = lj.NoisyLabels(Source(), 0.1)
    trained = lj.train(lj.Anil(RELU), source, steps=2, meta_batch=2, seeds=2)
    assert trained.params.units == trained.seed(1).units == UNITS
    assert lj.evaluate(trained.seed(0), source, num_tasks=4).mean > 0
    support = source.sample(jax.random.key(1)).support
    inside, outside = trained.seed(1).standardised, UNITS.restore_points(support)
    expected = lj.predict(inside, lj.adapt(inside, support), support.x).mean
    found = predicted(trained.seed(1), outside, outside.x).mean
    assert_close(found, UNITS.y.restore(expected), 1e-4)

    lj.save(trained.params, tmp_path / "both")
    assert lj.load(tmp_path / "both").units == UNITS
    lj.save(trained.seed(0), tmp_path / "one")
    back = lj.load(tmp_path / "one")
    assert jax.tree.structure(back) == jax.tree.structure(trained.seed(0))


def test_units_that_do_not_fit_are_refused():
    for units in ("ug/m3", dataclasses.replace(UNITS, x=lj.Columns((0,), (1,)))):
        with pytest.raises(ValueError, match=r"tasks\.units must be Units of inputs \(2,\)"):
            lj.train(METHOD, Source(units), steps=1)
    other = Source(dataclasses.replace(UNITS, x=Y))
    with pytest.raises(ValueError, match="standardised as the data that the model was trained on"):
        lj.evaluate(PARAMS, other, num_tasks=4)


def test_directions_that_were_standardised_are_refused():
    method, tx = lj.Anil(RELU, lj.DirectionError()), lj.outer_optimizer(20)
    with pytest.raises(ValueError, match="tasks must give directions as they are"):
        start_state(method, Source(), tx)
    as_they_are = dataclasses.replace(UNITS, y=lj.Columns((0, 0), (1, 1)))
    assert start_state(method, Source(as_they_are), tx).params.units == as_they_are


def test_state_goes_on_with_the_same_units_alone(tmp_path):
    tx = lj.outer_optimizer(20)
    method = lj.Anil(RELU)
    state = start_state(method, Source(), tx)
    checkpoint.save_state(state, tmp_path)
    assert checkpoint.restore_state(tmp_path, state).params.units == UNITS
    other = dataclasses.replace(UNITS, y=dataclasses.replace(Y, mean=(5.5, -70.0)))
    with pytest.raises(
        ValueError, match=r"units of the data.*y\.mean is saved as \[5\.0, -70\.0\]"
    ):
        checkpoint.restore_state(tmp_path, start_state(method, Source(other), tx))


def test_model_of_an_earlier_version_has_none(tmp_path, monkeypatch):
    write = store.write

    def earlier(path, arrays, record, **options):
        assert record.pop("units", ...) is None
        write(path, arrays, record, **options)

    monkeypatch.setattr(store, "write", earlier)
    lj.save(PARAMS.standardised, tmp_path / "m")
    assert lj.load(tmp_path / "m").units is None


def test_record_with_other_units_is_damaged(tmp_path, monkeypatch):
    write = store.write
    monkeypatch.setattr(
        store, "write", lambda p, a, record, **o: write(p, a, record | {"units": 3}, **o)
    )
    lj.save(PARAMS, tmp_path / "m")
    with pytest.raises(checkpoint.DamagedError, match="is not the record of a model"):
        lj.load(tmp_path / "m")
