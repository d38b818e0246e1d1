"""A user's table on the command line: run.py trains on it, adapt.py predicts a group of it."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LinearRegression, Ridge

import lavajax as lj
import options
import targets
from helpers import REAL_AIR, call_script, small_files
from lavajax.tasks.base import SPLITS

# As many test tasks as a report takes: one compilation.
TINY = ["--hidden", "8", "--steps=30", "--report-every=30", "--test-tasks=200", "--meta-batch=2"]
SIZES = {**{f"m{i}": 12 for i in range(8)}, "m8": 4, "m9": 1}


def frame() -> pd.DataFrame:
    """Wear grows with the load at a rate of the machine; some entries are missing."""
    rng = np.random.default_rng(0)
    machine = np.repeat(list(SIZES), list(SIZES.values()))
    rate = np.repeat(rng.normal(size=len(SIZES)), list(SIZES.values()))
    load, temp = rng.normal(size=(2, len(machine)))
    columns = {"machine": machine, "load, kN": 500 + 20 * load, "temp": temp}
    rows = pd.DataFrame({**columns, "wear": 3e4 + 1e3 * rate * load, "heat": rate + temp})
    rows.loc[2, "temp"] = np.nan
    return rows


def tasks():
    settings = lj.Table("machine", ("load, kN", "temp"), ("wear", "heat"), shots=4, queries=4)
    return settings.tasks(frame())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A table, and the folder ``run`` of two seeds that were trained on it."""
    import run as script

    folder = tmp_path_factory.mktemp("table")
    frame().to_csv(folder / "t.csv", index=False)
    code, text = call_script(
        *(script, "--task=table", f"--data={folder / 't.csv'}", "--group=machine"),
        *("--x='load, kN',temp".replace("'", '"'), "--y=wear,heat", "--shots=4", "--queries=4"),
        *(*TINY, "--seeds=2", "--method=alpaca", f"--out={folder / 'run'}"),
    )
    assert code == 0, text
    (folder / "printed.txt").write_text(text)
    return folder


def test_run_says_what_was_left_out_and_gives_errors_in_units(folder):
    text = (folder / "printed.txt").read_text()
    assert "table: 99 rows in 9 groups of 4 to 12; train 7 (" in text
    assert "rows left out: 1 without temp, 1 alone in their group" in text
    results = json.loads((folder / "run" / "results.json").read_text())
    found = results["targets"]
    assert found["names"] == ["wear", "heat"]
    for seed in range(2):
        standardised = np.array(found["seeds"][seed]) / tasks().units.y.std
        assert np.mean(standardised**2) == pytest.approx(results["seeds"][seed]["mean"], rel=1e-3)
    row = rf"support mean .* {found['references']['support mean'][0]:.4g} "
    assert re.search(row, text)
    assert list(found["references"]) == list(results["references"])
    assert (folder / "run" / "tasks.png").stat().st_size > 1000


def test_saved_run_is_scored_again_with_its_own_table(folder):
    import run as script

    code, text = call_script(script, f"--eval={folder / 'run'}", "--test-tasks=200")
    assert code == 0, text
    before = (folder / "printed.txt").read_text()
    assert text.split("RMSE in the units of the data")[1] in before
    # a table of other rows is standardised as the training data was
    (frame() * [1, 1, 1, 2, 1]).to_csv(folder / "other.csv", index=False)
    settings = lj.Table("machine", ("load, kN", "temp"), ("wear", "heat"), folder / "other.csv")
    units = lj.load(folder / "run").units
    assert script.load_source(settings, units).units == units != script.load_source(settings).units


def groups_of(text: str, split: str) -> set[str]:
    """Names that a line ``table: ...`` lists in full."""
    return set(re.search(rf"{split} \d+ \(([^)]*)\)", text)[1].split(", "))


def with_new_groups(folder: Path, path: Path) -> pd.DataFrame:
    """A later table: some groups that the run was trained on, those held out, and two new ones."""
    splits = json.loads((folder / "run" / "groups.json").read_text())
    held_out = {*splits["validation"], *splits["test"]}
    rows = frame()
    rows = rows[rows["machine"].isin({*splits["train"][:3], *held_out})]
    new = rows[rows["machine"].isin(held_out)].replace({"machine": {m: f"new {m}" for m in SIZES}})
    rows = pd.concat([rows, new])
    rows.to_csv(path, index=False)
    return rows


def test_run_remembers_the_groups_of_each_split(folder):
    found = json.loads((folder / "run" / "groups.json").read_text())
    assert found == {split: list(tasks().groups(split)) for split in SPLITS}
    assert [len(found[split]) for split in SPLITS] == [7, 1, 1]


def test_groups_of_another_table_that_were_trained_on_are_never_scored(folder, tmp_path):
    import run as script

    rows = with_new_groups(folder, tmp_path / "later.csv")
    train = set(tasks().groups("train"))
    data = f"--data={tmp_path / 'later.csv'}"
    code, text = call_script(script, f"--eval={folder / 'run'}", data, "--test-tasks=200")
    assert code == 0, text
    said = " ".join(text.split())
    assert "scored: 4 groups; left out: 3 that the model was trained on (" in said
    assert groups_of(said, "train") < train
    assert groups_of(said, "test") == set(rows["machine"]) - train
    settings = lj.Table("machine", ("load, kN", "temp"), ("wear", "heat"), shots=4, queries=4)
    params = jax.tree.map(lambda leaf: leaf[0], lj.load(folder / "run"))
    source = settings.tasks(rows, units=params.units, known={"train": sorted(train)})
    found = targets.target_errors([params], source, 200)
    assert f"{found['references']['support mean'][0]:.4g} " in text
    assert list(found["references"])[-1] == "pooled linear regression"

    new = rows[rows["machine"].str.startswith("new")]
    new.to_csv(tmp_path / "new.csv", index=False)
    code, text = call_script(
        script, f"--eval={folder / 'run'}", f"--data={tmp_path / 'new.csv'}", "--test-tasks=200"
    )
    assert code == 0, text
    assert "scored: 2 groups; left out: 0" in text
    assert "the best here" in text  # there is nothing to choose on
    assert "pooled linear regression" not in text  # nor to fit to


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--group=temp",), "--group must be left as it is, ('machine',)"),
        (("--split-seed=1",), "--split-seed must be left as it is, 0"),
        ((), "every one of its 3 is known, and not for test"),
    ],
)
def test_a_table_without_an_unseen_group_is_not_scored(folder, tmp_path, args, reason):
    import run as script

    rows = with_new_groups(folder, tmp_path / "later.csv")
    seen = rows[rows["machine"].isin(tasks().groups("train"))]
    seen.to_csv(tmp_path / "seen.csv", index=False)
    data = f"--data={tmp_path / 'seen.csv'}"
    columns = ('--x="load, kN"',) if "--group=temp" in args else ()
    code, text = call_script(script, f"--eval={folder / 'run'}", data, *columns, *args)
    assert code == 2, text
    assert reason in " ".join(text.split())


def test_a_saved_model_says_that_it_remembers_no_groups(folder, tmp_path):
    import unseen

    params = jax.tree.map(lambda leaf: leaf[0], lj.load(folder / "run"))
    lj.save(params, tmp_path / "model")
    table = lj.Table("machine", ("load, kN", "temp"), ("wear", "heat"), data=folder / "t.csv")
    assert unseen.known_groups(tmp_path / "model", table) is None
    assert "does not remember" in unseen.left_out(tasks(), known=False)
    # in the run's own table every group keeps its split
    assert unseen.known_groups(folder / "run", table) == unseen.groups_of(tasks())
    assert unseen.left_out(tasks(), known=True) == (
        f"scored: 1 groups; left out: 7 that the model was trained on "
        f"({', '.join(tasks().groups('train')[:5])}, ...), 1 held out for validation"
    )


def test_names_with_commas_are_quoted():
    for names in (("a", "b"), ("a, b", "c"), ('say "x"', "y,z")):
        assert options.split_names(options.join_names(names)) == names
    assert options.split_names("PM10, wind speed ,TEMP") == ("PM10", "wind speed", "TEMP")
    for names in ((" TEMP",), ("a ", "b"), (" a, b ", 'say "x"')):
        assert options.split_names(options.join_names(names)) == names
    for text in ("a\nb", 'a, "b'):
        with pytest.raises(ValueError, match="names must be a line of CSV, got"):
            options.split_names(text)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["--x=temp", "--y=wear"], "--group"),
        (["--group=machine", "--x=temp", "--y=wear"], "Table.data must be the path"),
        (["--group=machine", "--x=temp", "--y=temp", "--data=t.csv"], "must share no column"),
        (["--group=machine", "--x=temp", "--y=wear", "--data=none.csv"], "which is not there"),
    ],
)
def test_impossible_tables_are_refused_by_run(args, reason):
    import run as script

    code, text = call_script(script, "--task=table", *args)
    assert code == 2
    assert reason in " ".join(text.split())


# References


def test_references_are_those_of_scikit_learn():
    source = tasks()
    sample = jax.jit(source.sample, static_argnums=1)
    weights = targets.pooled_regression(source)
    errors = jax.jit(targets.reference_errors)
    train = np.isin(np.repeat(np.arange(9), source.sizes), source.splits["train"])
    rows = np.repeat(1 / np.asarray(source.sizes), source.sizes)
    pooled = LinearRegression().fit(
        np.asarray(source.x)[train], np.asarray(source.y)[train], sample_weight=rows[train]
    )
    for seed in range(4):  # among them, groups with padding
        key = jax.random.key(seed)
        task = sample(key, "train")
        (x, y), (qx, qy) = (
            (np.asarray(p.x)[p.mask], np.asarray(p.y)[p.mask]) for p in (task.support, task.query)
        )

        def error(predicted, qy=qy):
            return np.mean((predicted - qy) ** 2, axis=0)

        found = errors(weights, task, key)
        np.testing.assert_allclose(found["mean"], error(y.mean(axis=0)), rtol=1e-4)
        np.testing.assert_allclose(found["linear"], error(pooled.predict(qx)), rtol=1e-3)
        for strength, ridge in zip(targets.RIDGES, found["ridge"], strict=True):
            predicted = Ridge(strength).fit(x, y).predict(qx)
            np.testing.assert_allclose(ridge, error(predicted), rtol=2e-2, atol=1e-5)


# adapt.py


def adapt(folder: Path, *args: str) -> tuple[int, str]:
    import adapt as script

    given = [f"--checkpoint={folder / 'run'}", f"--data={folder / 't.csv'}", *args]
    names = {each.split("=")[0] for each in args}
    return call_script(
        script, *(each for each in given if each in args or each.split("=")[0] not in names)
    )


def test_unlabelled_rows_are_predicted_from_the_labelled_ones(folder, tmp_path):
    rows = frame().assign(mark=[i % 4 == 0 for i in range(101)])
    mine = rows["machine"] == "m3"
    rows.loc[mine & (np.arange(101) % 3 > 0), "wear"] = np.nan
    rows.to_parquet(tmp_path / "new.parquet")
    data = f"--data={tmp_path / 'new.parquet'}"
    out = tmp_path / "p.csv"
    code, text = adapt(folder, data, "--group-value=m3", f"--out={out}", "--model-seed=1")
    assert code == 0, text
    assert "adapted to 4 rows of m3, 8 predicted in" in text
    found = pd.read_csv(out, index_col="row")
    asked = rows[mine & rows["wear"].isna()]
    assert list(found.index) == list(asked.index)
    np.testing.assert_allclose(found["load, kN"], asked["load, kN"])

    params = jax.tree.map(lambda leaf: leaf[1], lj.load(folder / "run"))
    adapted = lj.adapt(params, rows[mine & rows["wear"].notna()])
    expected = lj.predict(params, adapted, asked)
    for index, name in enumerate(("wear", "heat")):
        np.testing.assert_allclose(found[f"{name} predicted"], expected.mean[:, index], rtol=1e-4)
        std = np.sqrt(expected.variance[:, index])
        np.testing.assert_allclose(found[f"{name} std"], std, rtol=1e-3)

    # a file that is there stays, unless it may be replaced
    code, text = adapt(folder, data, "--group-value=m3", f"--out={out}")
    assert code == 2
    assert "must be a new file" in text
    assert pd.read_csv(out, index_col="row").equals(found)
    code, text = adapt(
        folder, data, "--group-value=m3", f"--out={out}", "--overwrite", "--every-row"
    )
    assert code == 0, text
    assert len(pd.read_csv(out)) == 12


def test_support_is_a_number_or_a_column_and_the_rest_is_scored(folder, tmp_path):
    rows = frame().assign(mark=[i % 4 == 0 for i in range(101)])
    rows.to_csv(tmp_path / "new.csv", index=False)
    data = f"--data={tmp_path / 'new.csv'}"
    out = tmp_path / "p.csv"
    code, text = adapt(folder, data, "--group-value=m1", "--support=mark", f"--out={out}")
    assert code == 0, text
    assert "adapted to 3 rows of m1, 9 predicted in" in text
    found = pd.read_csv(out)
    error = np.sqrt(np.mean((found["wear predicted"] - found["wear"]) ** 2))
    assert "on the 9 of them that are labelled" in text
    assert f"wear {error:.4g}" in text
    code, text = adapt(
        folder, data, "--group-value=m0", "--support=5", f"--out={out}", "--overwrite"
    )
    assert code == 0, text
    assert "adapted to 5 rows of m0, 6 predicted" in text
    assert "left out, 1: rows in which one of load, kN, temp is missing" in text


@pytest.mark.skipif(not REAL_AIR.is_file(), reason="the Beijing air-quality zip is not here")
def test_real_stations_in_one_file_are_adapted_to_better_than_without_the_others(tmp_path):
    """A winter month at 12 stations: PM2.5 from the weather and other pollutants."""
    import run as script

    x = ["TEMP", "PRES", "DEWP", "CO", "NO2", "PM10"]
    rows = stations_in_one_table(["station", *x, "PM2.5"])
    rows.to_csv(tmp_path / "air.csv", index=False)
    code, text = call_script(
        *(script, "--task=table", f"--data={tmp_path / 'air.csv'}", "--group=station"),
        *(
            f"--x={','.join(x)}",
            "--y=PM2.5",
            "--shots=10",
            "--queries=50",
            "--hidden",
            "32",
            "32",
            "--no-figures",
        ),
        *("--method=lava-bayesian", "--steps=400", "--report-every=400", "--test-tasks=200"),
        f"--out={tmp_path / 'run'}",
    )
    assert code == 0, text
    unseen = json.loads((tmp_path / "run" / "groups.json").read_text())["test"]
    train = rows[~rows["station"].isin(unseen)].dropna()
    pooled = LinearRegression().fit(train[x], train["PM2.5"])
    errors: dict[str, list[float]] = {"adapted": [], "pooled": [], "alone": []}
    for name in unseen:
        own = rows[rows["station"] == name].dropna()
        few, rest = own.iloc[::70][:10], own.drop(own.index[::70][:10])
        pd.concat([few, rest.assign(**{"PM2.5": np.nan})]).to_csv(tmp_path / "new.csv")
        data, out = f"--data={tmp_path / 'new.csv'}", tmp_path / f"{name}.csv"
        code, text = adapt(tmp_path, data, f"--group-value={name}", f"--out={out}")
        assert code == 0, text
        predicted = {
            "adapted": pd.read_csv(out)["PM2.5 predicted"],
            "pooled": pooled.predict(rest[x]),
            "alone": Ridge(1.0).fit(few[x], few["PM2.5"]).predict(rest[x]),
        }
        for which, values in predicted.items():
            errors[which].append(np.sqrt(np.mean((np.asarray(values) - rest["PM2.5"]) ** 2)))
    adapted, others = np.mean(errors["adapted"]), (np.mean(errors[k]) for k in ("pooled", "alone"))
    assert adapted < min(others)


def stations_in_one_table(columns: list[str]) -> pd.DataFrame:
    """The rows of February 2016 of every station's file."""
    with zipfile.ZipFile(REAL_AIR) as archive:
        parts = [
            pd.read_csv(archive.open(name)) for name in archive.namelist() if name.endswith(".csv")
        ]
    rows = pd.concat(parts, ignore_index=True)
    return rows[(rows["year"] == 2016) & (rows["month"] == 2)][columns]


def test_a_group_that_was_trained_on_is_said_to_be_no_new_one(folder, tmp_path):
    splits = json.loads((folder / "run" / "groups.json").read_text())
    for split, told in (("train", True), ("test", False)):
        name = splits[split][0]
        args = (f"--group-value={name}", f"--out={tmp_path / split}.csv", "--support=2")
        code, text = adapt(folder, *args)
        assert code == 0, text
        assert ("the model was trained on this group" in text) == told


def test_rows_without_a_group_are_of_no_group():
    """Whatever a missing entry is called as text."""
    import adapt as script

    table = pd.DataFrame({"machine": ["None", None, "a", "None"]})
    assert script.rows_of_group(table, ("machine",), ("None",)).tolist() == [
        True,
        False,
        False,
        True,
    ]
    with pytest.raises(ValueError, match=r"never holds 'nan'; it holds None, a$"):
        script.rows_of_group(table, ("machine",), ("nan",))


def test_saved_model_needs_the_column_of_the_groups(folder, tmp_path):
    lj.save(lj.load(folder / "run"), tmp_path / "model")
    model = f"--checkpoint={tmp_path / 'model'}"
    args = ("--group-value=m1", "--support=5", f"--out={tmp_path / 'p.csv'}")
    code, text = adapt(folder, model, *args)
    assert code == 2
    assert "--group must name the column of the groups" in text
    code, text = adapt(folder, model, *args, "--group=machine")
    assert code == 0, text


def test_model_of_no_table_is_refused(folder, tmp_path):
    points = lj.Points(np.zeros((3, 1)), np.zeros((3, 1)))
    method = lj.Anil(lj.MLP((4,)))
    lj.save(method.init(jax.random.key(0), points.x, points.y), tmp_path / "m")
    out = f"--out={tmp_path / 'p.csv'}"
    code, text = adapt(folder, f"--checkpoint={tmp_path / 'm'}", "--group-value=m1", out)
    assert code == 2
    assert "must be a model of a table" in text


BAD = {
    "value": (["--group-value=m77"], "column 'machine' never holds 'm77'; it holds m0, m1, "),
    "values": (
        ["--group-value=m1,m2"],
        "--group-value must have a value for each of machine, got 2",
    ),
    "ending": (["--out=p.txt"], "--out must end in .csv, got p.txt"),
    "nowhere": (["--out=none/p.csv"], "--out must be in a folder that is there"),
    "seed": (["--seed=-1"], "--seed must be between 0"),
    "model": (["--model-seed=2"], "--model-seed must be below 2"),
    "many": (
        ["--support=40"],
        "--support must be from 1 to 12, the labelled rows of the group, got 40",
    ),
    "none": (["--support=0"], "--support must be from 1 to 12"),
    "column": (["--support=mrak"], "--support names the column 'mrak'"),
    "text": (["--support=machine"], "--support column 'machine' must hold numbers"),
    "rest": ([], "must have a row to predict besides the 12 that the model adapts to"),
    "data": (["--data=none.csv"], "which is not there"),
    "checkpoint": (["--checkpoint=none"], "none"),
    "groups": (["--group=machin"], "data names the column 'machin'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_adapted_is_said_plainly(name, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, message = BAD[name]
    defaults = {"--group-value": "m1", "--out": str(tmp_path / "p.csv")}
    given = {each.split("=")[0] for each in args}
    more = [f"{option}={value}" for option, value in defaults.items() if option not in given]
    code, text = adapt(folder, *args, *more)
    assert code == 2
    assert message in text
    assert not (tmp_path / "p.csv").exists()


def test_labels_that_are_marked_must_be_there(folder, tmp_path):
    rows = frame().assign(mark=1, none=0)
    rows.loc[[14, 15], "wear"] = np.nan
    rows.to_csv(tmp_path / "new.csv", index=False)
    data = f"--data={tmp_path / 'new.csv'}"
    out = f"--out={tmp_path / 'p.csv'}"
    for column, message in (("mark", "and marks row 14"), ("none", "must mark a row")):
        code, text = adapt(folder, data, "--group-value=m1", f"--support={column}", out)
        assert code == 2
        assert message in text
    rows.assign(row=0).to_csv(tmp_path / "new.csv", index=False)
    code, text = adapt(folder, data, "--group-value=m1", out)
    assert code == 2
    assert "must not have a column 'row'" in text
    rows.assign(wear=np.nan).to_csv(tmp_path / "new.csv", index=False)
    code, text = adapt(folder, data, "--group-value=m1", out)
    assert code == 2
    assert "must have a labelled row to adapt to" in text


def test_a_prediction_that_cannot_be_written_says_so_and_leaves_the_older_file(folder, tmp_path):
    import adapt as script

    out = tmp_path / "out.csv"
    out.write_text("older")
    options = (f"--checkpoint={folder / 'run'}", f"--data={folder / 't.csv'}")
    options += ("--group-value=m8", f"--out={out}", "--overwrite", "--support=1")
    with small_files(10):
        code, text = call_script(script, *options)
    assert code == 2
    assert "out.csv cannot be written: File too large; write elsewhere" in text
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("out.csv", "older")]
    code, text = call_script(script, *options)
    assert code == 0, text
