"""Tasks from a user's table: its rows, its groups, and a plain word for whatever is wrong."""

from __future__ import annotations

import gzip
import tracemalloc
from decimal import Decimal
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest

import lavajax as lj
from lavajax import frame as reading
from lavajax.tasks.base import SPLITS, distinct

SIZES = {"a": 30, "b": 25, "c": 40, "d": 22, "e": 35, "f": 3, "g": 2, "h": 7}
TABLE = lj.Table("machine", ("load", "temp"), "wear", shots=4, queries=5)


def frame(sizes=SIZES, seed=0) -> pd.DataFrame:
    """Every row is told apart by its load; rows of groups are mixed."""
    rng = np.random.default_rng(seed)
    rows = sum(sizes.values())
    found = pd.DataFrame(
        {
            "machine": np.repeat(list(sizes), list(sizes.values())),
            "load": 1e4 + np.arange(rows),
            "temp": rng.normal(size=rows),
            "wear": rng.normal(size=rows),
            "note": "text",
        }
    )
    return found.sample(frac=1, random_state=seed).reset_index(drop=True)


def draw(source, number, split="train", seed=0):
    keys = jax.random.split(jax.random.key(seed), number)
    return jax.jit(jax.vmap(lambda key: source.sample(key, split)))(keys)


def real(points):
    """x, y of the real points of a batch, a list of tasks, in the user's units."""
    mask = np.ones(points.x.shape[:2], bool) if points.mask is None else np.asarray(points.mask)
    return [
        (np.asarray(x)[m], np.asarray(y)[m])
        for x, y, m in zip(points.x, points.y, mask, strict=True)
    ]


# Tasks


def test_points_are_different_rows_of_one_group_of_the_split():
    rows = frame()
    source = TABLE.tasks(rows)
    units = source.units
    by_load = rows.set_index("load")
    seen = {}
    for split in SPLITS:
        tasks = draw(source, 200, split)
        shown = set()
        for support, query in zip(real(tasks.support), real(tasks.query), strict=True):
            x = np.concatenate([support[0], query[0]])
            y = np.concatenate([support[1], query[1]])
            found = by_load.loc[np.round(x[:, 0] * units.x.std[0] + units.x.mean[0])]
            assert found.index.is_unique
            assert found["machine"].nunique() == 1
            machine = found["machine"].iloc[0]
            np.testing.assert_allclose(
                x[:, 1] * units.x.std[1] + units.x.mean[1], found["temp"], atol=1e-5
            )
            np.testing.assert_allclose(
                y[:, 0] * units.y.std[0] + units.y.mean[0], found["wear"], atol=1e-5
            )
            size = min(SIZES[machine], 9)
            assert len(x) == size
            assert len(support[0]) == {9: 4, 3: 1, 2: 1, 7: 3}[size]
            shown.add(machine)
        assert shown == set(source.groups(split))
        seen[split] = shown
    assert set.union(*seen.values()) == set(SIZES)
    assert sum(map(len, seen.values())) == len(SIZES)


def test_large_groups_need_no_mask():
    source = TABLE.tasks(frame(dict.fromkeys("abcd", 20)))
    assert not source.masked
    task = jax.jit(source.sample, static_argnums=1)(jax.random.key(0), "test")
    assert task.support.mask is None
    assert task.query.mask is None
    assert (task.support.x.shape, task.query.y.shape) == ((4, 2), (5, 1))
    assert task.support.x.dtype == jnp.float32


def test_training_groups_have_mean_0_and_deviation_1():
    rows = frame()
    rows.loc[rows["machine"] == "c", "wear"] += 1000.0
    source = TABLE.tasks(rows)
    train = np.isin(np.repeat(np.arange(8), source.sizes), source.splits["train"])
    for values in (source.x, source.y):
        np.testing.assert_allclose(np.asarray(values)[train].mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(np.asarray(values)[train].std(axis=0), 1, atol=1e-5)
    mine = rows[rows["machine"].isin(source.groups("train"))]
    assert source.units.y.mean[0] == pytest.approx(mine["wear"].mean())
    assert source.units.y.names == ("wear",)
    # as a model's own training data was
    again = TABLE.tasks(rows, units=lj.Units(lj.Columns((0, 0), (2, 2), TABLE.x), source.units.y))
    np.testing.assert_allclose(np.sort(again.x[:, 0]), (1e4 + np.arange(len(rows))) / 2)


def test_split_depends_on_names_and_seed_alone():
    sizes = {f"g{i}": 12 for i in range(20)}
    one = TABLE.tasks(frame(sizes))
    other = TABLE.tasks(frame(sizes, seed=1))
    assert one.labels == other.labels == tuple(sorted(sizes))
    assert [one.groups(s) for s in SPLITS] == [other.groups(s) for s in SPLITS]
    assert [len(one.groups(s)) for s in SPLITS] == [14, 3, 3]
    settings = lj.Table("machine", "temp", "wear", split_seed=1, test_share=0.5)
    third = settings.tasks(frame(sizes))
    assert [len(third.groups(s)) for s in SPLITS] == [7, 3, 10]
    assert third.groups("validation") != one.groups("validation")
    few = TABLE.tasks(frame({"a": 9, "b": 9, "c": 9}))
    assert [len(few.groups(s)) for s in SPLITS] == [1, 1, 1]


def test_several_columns_make_a_group_and_text_numbers_and_dates_may():
    rows = frame().assign(year=np.arange(164) % 2 + 2019, day=pd.Timestamp("2020-01-01"))
    source = lj.Table(("machine", "year", "day"), "temp", "wear").tasks(rows)
    assert source.labels[:2] == ("a,2019,2020-01-01", "a,2020,2020-01-01")
    expected = rows.groupby(["machine", "year"]).size()
    # names with commas are not taken for one another
    apart = {"p": ["a,b", "a"] * 6, "q": ["c", "b,c"] * 6, "x": np.arange(12), "y": np.arange(12)}
    with pytest.raises(ValueError, match=r'got 2 by .*: "a,b",c, a,"b,c"'):
        lj.Table(("q", "p"), "x", "y").tasks({**apart, "p": apart["q"], "q": apart["p"]})
    assert sorted(np.asarray(source.sizes)) == sorted(expected[expected > 1])


def test_incomplete_rows_are_left_out_once_and_counted():
    rows = frame()
    rows.loc[[0, 1], "temp"] = np.nan
    rows.loc[[1, 2, 3], "wear"] = np.nan
    rows.loc[4, "machine"] = None
    rows = pd.concat([rows, pd.DataFrame([{"machine": "z", "load": 0.5, "temp": 1, "wear": 2}])])
    source = TABLE.tasks(rows)
    assert dict(source.dropped) == {
        "without machine": 1,
        "without temp": 2,
        "without wear": 2,
        "alone in their group": 1,
    }
    assert source.x.shape == (164 - 5, 2)
    assert "2 without temp" in str(source)
    assert "159 rows in 8 groups of 2 to 38; train" in str(source)


def test_rows_are_distinct_and_every_choice_and_order_is_as_likely():
    keys = jax.random.split(jax.random.key(0), 12_000)
    for size in (3, 4):
        found = np.asarray(jax.jit(jax.vmap(lambda key, n=size: distinct(key, n, 3)))(keys))
        assert found.min() == 0
        assert found.max() == size - 1
        rows, counts = np.unique(found, axis=0, return_counts=True)
        assert len(rows) == 6 * len(list(combinations(range(size), 3)))
        assert all(len(set(row)) == 3 for row in rows)
        expected = len(keys) / len(rows)
        assert np.abs(counts - expected).max() < 4.5 * np.sqrt(expected)
    few = np.asarray(jax.jit(jax.vmap(lambda key: distinct(key, 2, 4)))(keys[:100]))
    assert set(map(tuple, few[:, :2])) == {(0, 1), (1, 0)}
    assert (few[:, 2:] == 0).all()
    many = np.asarray(jax.jit(distinct, static_argnums=2)(keys[0], 10**9, 500))
    assert len(np.unique(many)) == 500


def test_training_learns_what_groups_share():
    """One feature matters, by a slope of the group: adapting finds it, and nothing pooled can."""
    rng = np.random.default_rng(0)
    group = np.repeat(np.arange(40), 15)
    x = rng.normal(size=600)
    table = {"id": group, "x": 50 + x, "y": 1e6 + 1e3 * rng.normal(size=40)[group] * x}
    source = lj.Table("id", "x", "y", shots=4, queries=8).tasks(table)
    method = lj.lava_converged(model=lj.MLP((16, 16)))
    params = lj.train(method, source, steps=300, meta_batch=8).params
    assert lj.evaluate(params, source, num_tasks=200).mean < 0.1
    mine = {name: values[group == int(source.groups("test")[0])] for name, values in table.items()}
    adapted = lj.adapt(params, {name: values[:6] for name, values in mine.items()})
    found = np.asarray(lj.predict(params, adapted, mine).mean)[:, 0]
    assert np.mean((found - mine["y"]) ** 2) < 0.1 * np.var(mine["y"])


# Files


def test_file_of_any_kind_is_the_table_in_memory(tmp_path):
    rows = frame()
    rows.to_csv(tmp_path / "t.csv", index=False, encoding="utf-8-sig")  # as Excel writes it
    rows.to_csv(tmp_path / "t.csv.gz", index=False)
    rows.to_parquet(tmp_path / "t.parquet")
    expected = TABLE.tasks(rows)
    for name in ("t.csv", "t.csv.gz", "t.parquet"):
        settings = lj.Table(
            *(TABLE.group, TABLE.x, TABLE.y), data=tmp_path / name, shots=4, queries=5
        )
        found = settings.load()
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    assert lj.Table("machine", "temp", "wear", data=tmp_path / "t.csv").data == str(
        tmp_path / "t.csv"
    )


def test_a_long_name_of_a_group_costs_its_own_length_alone():
    """Not as much for every row."""
    rows = pd.DataFrame({"g": np.repeat(list("abcdef"), 400), "x": np.arange(2400.0), "y": 1.0})
    rows["y"] += np.arange(2400) % 7
    rows.loc[:399, "g"] = "long " * 20_000
    tracemalloc.start()
    found = lj.Table("g", "x", "y").tasks(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sorted(found.labels)[-1].startswith("long long")
    assert peak < 50e6


def test_names_of_groups_stay_as_they_are_written(tmp_path):
    rows = frame().replace({"machine": {"a": "007", "b": "7"}})
    rows.to_csv(tmp_path / "t.csv", index=False)
    source = lj.Table("machine", "temp", "wear", data=tmp_path / "t.csv").load()
    assert source.labels[:2] == ("007", "7")


CSV = frame().to_csv(index=False).encode()
FILES = {
    "missing": ("none.csv", None, FileNotFoundError, "table of your own.*which is not there"),
    "kind": ("t.xlsx", CSV, ValueError, r"data must end in \.csv.*t\.xlsx"),
    "empty": ("t.csv", b"", ValueError, "data must be a CSV file in UTF-8"),
    "encoding": (
        "t.csv",
        "machine,load,temp,wear\nä,1,2,3\n".encode("latin-1") * 9,
        ValueError,
        "data must be a CSV file in UTF-8",
    ),
    "ragged": ("t.csv", CSV + b"a,1,2,3,4,5,6\n", ValueError, "commas between its columns"),
    "semicolons": (
        "t.csv",
        CSV.replace(b",", b";"),
        ValueError,
        "'machine', and the table has none.*its columns are 'machine;load",
    ),
    "twice": ("t.csv", CSV.replace(b"note", b"temp", 1), ValueError, "'temp' is there 2 times"),
    "gzip": ("t.csv.gz", CSV, ValueError, "whole, readable file"),
    "cut": ("t.csv.gz", gzip.compress(CSV)[:-200], ValueError, "whole, readable file"),
    "parquet": ("t.parquet", CSV, ValueError, "data must be a Parquet file"),
    "rows": ("t.csv", b"machine,load,temp,wear\n", ValueError, "it has no rows at all"),
    "shifted": ("t.csv", b"machine,load,temp,wear\n" + b"a,1,2,3,4\n" * 9, ValueError, "has more"),
    "comma": ("t.csv", CSV.replace(b"text", b"text,"), ValueError, "leave out a comma at the end"),
}


@pytest.mark.parametrize("name", FILES)
def test_file_that_is_no_table_is_refused(name, tmp_path):
    file, content, kind, message = FILES[name]
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(kind, match=message):
        lj.Table("machine", ("load", "temp"), "wear", data=tmp_path / file).load()


@pytest.mark.parametrize("name", ["t.csv.gz", "t.parquet"])
def test_what_unpacks_to_too_much_is_refused_before_it_is_read(name, tmp_path, monkeypatch):
    rows = pd.DataFrame({"machine": ["a"] * 5000, "temp": 1.5, "load": 2.0, "wear": 3.0})
    write = rows.to_csv if name.endswith(".csv.gz") else rows.to_parquet
    write(tmp_path / name, index=False)
    assert (tmp_path / name).stat().st_size < 5_000
    assert len(reading.read(tmp_path / name, ("temp",))) == 5000
    monkeypatch.setattr(reading, "MOST_BYTES", 15_000)
    for owner, reader in ((pd, "read_csv"), (pyarrow.parquet.ParquetFile, "iter_batches")):
        monkeypatch.setattr(owner, reader, lambda *args, **options: pytest.fail("it is read"))
    with pytest.raises(ValueError, match="data must unpack to at most 15,000 bytes"):
        reading.read(tmp_path / name, ("temp",))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_text_that_repeats_is_not_unpacked(kind, tmp_path, monkeypatch):
    """Ten thousand rows of one long word, 200 MB as text, are 30 kB in the file."""
    word, numbers = "x" * 20_000, np.zeros(10_000, np.int32)
    places = pa.array(numbers, mask=np.arange(10_000) == 1)
    words = pa.DictionaryArray.from_arrays(places, pa.array([word], kind))
    table = pa.table({"machine": words, "temp": np.arange(10_000.0)})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    monkeypatch.setattr(reading, "MOST_BYTES", 5_000_000)
    found = reading.read(tmp_path / "t.parquet", ("temp",), ("machine",))
    assert found["machine"].dtype == object
    assert found["machine"].iloc[[0, 2, -1]].eq(word).all()
    assert found["machine"].isna().sum() == 1
    text, missing = reading.take_text(found, ("machine",), "group")
    assert set(text[~missing]) == {word}


@pytest.mark.parametrize("rows", [100, 20_000])
def test_text_that_grows_from_row_to_row_is_watched(rows, tmp_path, monkeypatch):
    """Of each value the file has what differs from the one before, and says so of its size."""
    words = pa.array([f"{'y' * 2_000}{i:06d}" for i in range(rows)])
    table = pa.table({"machine": words, "temp": np.arange(float(rows))})
    encodings = {"machine": "DELTA_BYTE_ARRAY", "temp": "PLAIN"}
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(table, path, use_dictionary=False, column_encoding=encodings)
    monkeypatch.setattr(reading, "MOST_BYTES", 5_000_000)
    if rows == 100:
        assert reading.read(path, ("temp",))["machine"].tolist() == words.to_pylist()
        return
    with pytest.raises(ValueError, match="data must unpack to at most 5,000,000 bytes"):
        reading.read(path, ("temp",))


def test_columns_of_lists_are_refused_and_other_kinds_are_read(tmp_path):
    rows = pd.DataFrame(
        {
            "a": ["x", None],
            "when": pd.to_datetime(["2020-01-01", None]),
            "kind": pd.Categorical(["u", "v"]),
            "price": [Decimal("1.50"), Decimal(2)],
            "on": [True, False],
            "n": [1, 2],
        },
        index=pd.Index([5, 6], name="key"),
    )
    rows.to_parquet(tmp_path / "t.parquet")
    found = reading.read(tmp_path / "t.parquet", ("n",))
    assert found.index.tolist() == [5, 6]
    assert found["n"].tolist() == [1, 2]
    assert found["kind"].tolist() == ["u", "v"]
    assert found["a"].isna().tolist() == [False, True]
    assert list(found.columns) == list(rows.columns)
    rows.iloc[:0].to_parquet(tmp_path / "none.parquet")
    assert list(reading.read(tmp_path / "none.parquet", ("n",)).columns) == list(rows.columns)
    rows.assign(several=[[1], [2, 3]]).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"column 'several' of .* is of list.*leave it out"):
        reading.read(tmp_path / "t.parquet", ("n",))


def test_folder_and_no_file_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="which is a folder"):
        lj.Table("machine", "temp", "wear", data=tmp_path).load()
    with pytest.raises(ValueError, match=r"Table\.data must be the path.*got None.*tasks\(table\)"):
        TABLE.load()


# What is refused


BAD = {
    "name": ({}, {"x": "tmep"}, "x names the column 'tmep'.*did you mean 'temp'"),
    "group": ({}, {"group": "machines"}, "group names the column 'machines'.*'machine'"),
    "text": ({}, {"x": ("temp", "note")}, "x column 'note' must hold numbers.*'text'.*encode it"),
    "date": ({"temp": pd.Timestamp("2020-01-01")}, {}, "x column 'temp'.*holds dates"),
    "infinite": ({"wear": np.r_[np.zeros(9), np.inf, np.ones(154)]}, {}, "y column 'wear'.*row 9"),
    "constant x": ({"temp": 3.5}, {}, "x column 'temp' must vary, and is 3.5 .*leave it out"),
    "constant y": ({"wear": 2.0}, {}, "y column 'wear' must vary.*nothing to predict"),
    "missing": ({"wear": np.nan}, {}, "rows in which no entry.*164 without wear"),
    "groups": (
        {"machine": np.arange(164) % 2},
        {},
        "at least 3 groups.*got 2 by 'machine': 0, 1; give a column",
    ),
    "alone": ({"machine": np.arange(164)}, {}, "got 0 by .*: none.*164 alone in their group"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_table_is_refused_by_name(name):
    columns, fields, message = BAD[name]
    settings = lj.Table(**{"group": "machine", "x": ("load", "temp"), "y": "wear"} | fields)
    with pytest.raises(ValueError, match=message):
        settings.tasks(frame().assign(**columns))


def test_a_group_may_be_called_na_and_a_column_have_a_number(tmp_path):
    """Of the groups only an empty entry is a missing one."""
    rows = [f"{g},{i},{i * i % 7}" for g in ("NA", "None", "DE", "FR") for i in range(9)]
    file = tmp_path / "t.csv"
    file.write_text("\n".join(["country,1,2", *rows, ",3,4"]) + "\n")
    source = lj.Table("country", "1", "2", data=file).load()
    assert sum(len(groups) for groups in source.splits.values()) == 4
    numbered = pd.read_csv(file, keep_default_na=False).rename(columns={"1": 1, "2": 2})
    assert numbered.columns[1] == 1
    lj.Table("country", "1", "2").tasks(numbered)


def test_a_column_may_be_called_na(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("group,NA,y\n" + "".join(f"{g},{i},{i}\n" for g in "abc" for i in range(4)))
    assert lj.Table("group", "NA", "y", data=file).load().x.shape == (12, 1)


def test_what_the_mask_of_an_array_hides_is_missing():
    rows = {name: np.asarray(frame()[name]) for name in ("machine", "load", "temp", "wear")}
    for name in ("machine", "temp"):
        rows[name] = np.ma.masked_array(rows[name], np.arange(164) == 5)
    assert dict(TABLE.tasks(rows).dropped) == {"without machine": 1}
    rows["machine"] = rows["machine"].data
    assert dict(TABLE.tasks(rows).dropped) == {"without temp": 1}


def test_integers_have_one_name_whether_an_entry_is_missing_or_not():
    whole = frame().replace({"machine": {name: i for i, name in enumerate(SIZES)}})
    whole["machine"] = whole["machine"].astype(int)
    some = whole.assign(machine=whole["machine"].where(whole.index > 0))
    assert some["machine"].dtype == float
    assert TABLE.tasks(some).labels == TABLE.tasks(whole).labels == tuple("01234567")


def test_complex_columns_are_refused():
    with pytest.raises(ValueError, match="x column 'temp' must be real"):
        TABLE.tasks(frame().assign(temp=1j * np.arange(164)))


def test_columns_of_different_length_are_refused():
    table = {"machine": list("aabb"), "load": [1, 2, 3, 4], "temp": [1, 2, 3], "wear": [1, 2, 3, 4]}
    with pytest.raises(
        ValueError, match=r"x columns must have one length, got 'load': 4, 'temp': 3"
    ):
        TABLE.tasks(table)
    with pytest.raises(ValueError, match="columns must have one length, got group: 4, x: 4, y: 2"):
        TABLE.tasks({**table, "temp": [1, 2, 3, 5], "wear": [1, 2]})


def test_units_of_other_columns_are_refused():
    source = TABLE.tasks(frame())
    with pytest.raises(ValueError, match=r"units must be of x \('temp',\)"):
        lj.Table("machine", "temp", "wear").tasks(frame(), units=source.units)


def test_groups_that_are_known_keep_their_split_and_all_others_are_for_test():
    trained = TABLE.tasks(frame())
    later = frame({**SIZES, "i": 12, "j": 30}, seed=1)
    known = {"train": ("a", "c", "not there"), "validation": ["b"]}
    found = TABLE.tasks(later, units=trained.units, known=known)
    assert found.units == trained.units
    assert [found.groups(split) for split in SPLITS] == [
        ("a", "c"),
        ("b",),
        ("d", "e", "f", "g", "h", "i", "j"),
    ]
    none = TABLE.tasks(later, units=trained.units, known={})
    assert len(none.groups("test")) == 10
    assert "train 0; validation 0; test 10 (a, b, c, d, e, ...)" in str(none)
    assert draw(none, 2, "test").support.x.shape == (2, 4, 2)
    with pytest.raises(ValueError, match=r"split must be one that the table has groups for.*train"):
        none.sample(jax.random.key(0), "train")
    with pytest.warns(
        UserWarning, match=r"2 groups for train \('1', '2'\), and none of .*'a', 'b'"
    ):
        TABLE.tasks(later, units=trained.units, known={"train": ["1", "2"]})
    own = TABLE.tasks(later, known={"train": ["i", "j"]})  # standardised by these
    mean = later[later["machine"].isin(["i", "j"])]["load"].mean()
    assert own.units.x.mean[0] == pytest.approx(mean)


@pytest.mark.parametrize(
    ("known", "message"),
    [
        ({}, "units must be given"),
        (
            {"train": list(SIZES)},
            "every one of its 8 is known, and not for test: a, b, c, d, e, ...",
        ),
        ({"train": "ab"}, "known must have a list of names for each split, got 'ab'"),
        ({"training": ["a"]}, "known must have splits of train, validation, test, got 'training'"),
        ({"train": ["a"], "test": ["a"]}, "known must have each group in one split, got 'a'"),
    ],
)
def test_splits_that_cannot_be_are_refused(known, message):
    with pytest.raises(ValueError, match=message):
        TABLE.tasks(frame(), known=known)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": ()}, r"Table\.x must be a name"),
        ({"x": ("a", "a")}, r"Table\.x must be a name, or several different ones"),
        ({"y": 3}, r"Table\.y must be a name"),
        ({"y": ("a", "x2")}, "Table.x and Table.y must share no column, both have 'a'.*the answer"),
        ({"group": "a"}, "Table.group and Table.x must share no column, both have 'a'"),
        ({"group": ("y", "g")}, "Table.group and Table.y must share no column, both have 'y'"),
        ({"shots": 0}, r"Table\.shots must be an integer of at least 1"),
        ({"test_share": 0}, r"Table\.test_share must be a finite number above 0"),
        ({"test_share": 0.9}, "must be below 1, for training to have groups, got 0.15 \\+ 0.9"),
    ],
)
def test_settings_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        lj.Table(**{"group": "g", "x": "a", "y": "y"} | fields)
