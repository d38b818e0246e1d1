"""experiments/paper.py: cells that are computed once, and what is made of them."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import gaussian_process
import lavajax

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def paper(monkeypatch, tmp_path):
    """Calls the script in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    import paper as script

    def run(*args: str) -> int:
        monkeypatch.setattr(sys, "argv", ["paper.py", "--results", "results", *args])
        return script.main()

    return run


@pytest.mark.timeout(900)
def test_quick_run_of_everything_is_computed_once_and_rendered(
    paper, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gaussian_process, "TRAIN_TASKS", 4)
    assert paper("--all", "--quick") == 0
    assert_every_item_is_there(tmp_path)
    text = (tmp_path / "RESULTS.md").read_text()
    beside = {"ANIL": "(0.4605)", "LAVA, the paper's setting": "(0.0701)", "ridge head": None}
    for name, value in beside.items():  # the paper's value stands beside ours, where there is one
        line = next(each for each in text.splitlines() if each.startswith(f"| {name} |"))
        assert value in line if value else "(" not in line
    assert "N = 2: LAVA in the paper's setting" in text
    assert "no adaptation, at best: 3.01" in text
    files = sorted(p.name for p in (tmp_path / "results" / "sine").iterdir())
    names = ("anil", "lava-the-paper-s-setting", "ridge-head")
    assert files == [f"{name}-n-2{end}.json" for name in names for end in ("-time", "")]
    times = json.loads((tmp_path / "results" / "sine" / files[0]).read_text())["result"]
    assert times["step_ms"] > 0
    assert times["task_us"] > 0
    record = json.loads((tmp_path / "results" / "sine" / files[1]).read_text())
    (seed,) = record["result"]["seeds"]
    assert seed["mse"] > 0
    assert [step for step, _ in seed["curve"]] == list(range(1, 21))
    assert record["result"]["chosen"] == {"inner_steps": 1, "outer_rate": 5e-3}
    (model,) = (tmp_path / "runs" / "paper_quick" / "sine" / "models").glob("ANIL N=2 0 *")
    model = lavajax.load(model)
    assert model.method == lavajax.Anil()
    assert lavajax.evaluate(model, lavajax.Sine(shots=2), num_tasks=20).mean == pytest.approx(
        seed["mse"]
    )

    def again(*_, **__):
        raise AssertionError("computed again")

    monkeypatch.setattr(lavajax, "train", again)
    assert paper("--all", "--quick") == 0
    import paper as script

    monkeypatch.setattr(script, "ITEMS", {"sine": script.ITEMS["sine"]})  # each renders all of them
    (tmp_path / "results" / "sine" / files[1]).unlink()
    assert paper("sine", "--quick") == 0  # from its pieces
    assert json.loads((tmp_path / "results" / "sine" / files[1]).read_text()) == record
    capsys.readouterr()
    assert paper("sine", "--only", "ANIL N=2", "--workers", "1") == 1  # another protocol
    assert "sine: ANIL N=2  failed: AssertionError: computed again" in capsys.readouterr().out


def assert_every_item_is_there(folder):
    """Its section of RESULTS.md without a NaN, and its figure, which is no empty frame."""
    from matplotlib.image import imread

    text = (folder / "RESULTS.md").read_text()
    assert "nan" not in text
    for title in (
        *("## Sine waves", "## The paper's own protocols", "## Dynamical systems"),
        *("### Trajectories", "## Task overlap"),
        *("## The space of contexts", "## Variance of the estimate", "## Error against time"),
        *("## Radio signals", "| against the signal itself |"),
        *("## Label noise", "## Condition numbers", "## Curves"),
        *("## Error bars", "## Points that arrive"),
    ):
        assert title in text
    figures = sorted((folder / "results").glob("*.png"))
    assert [f"results/{file.name}" in text for file in figures] == [True] * 12
    assert all(imread(file).std() > 0.02 for file in figures)


def test_a_failed_cell_is_named_and_the_others_go_on(paper, tmp_path, capsys, monkeypatch):
    """In processes of their own and in this one; what reads a failed cell is not started."""
    from works import Work

    def compute(folders, *, good):
        if not good:
            raise OSError("the disk is full")
        return {"good": good}

    works = {
        name: Work("sine", name, {}, functools.partial(compute, good=name != "bad"))
        for name in ("bad", "good")
    }
    works["reader"] = Work("sine", "reader", {}, None, after=(works["bad"],))
    monkeypatch.setattr("items.sine_table.works", lambda scale: list(works.values()))
    for workers in ("1", "2"):
        assert paper("sine", "--workers", workers, "--results", f"results{workers}") == 1
        said = capsys.readouterr().out
        assert "sine: reader  failed: not started, for want of sine: bad" in said
        if workers == "1":
            assert "sine: bad  failed: OSError: the disk is full" in said
            assert (tmp_path / "results1" / "sine" / "good.json").is_file()


def test_what_is_computed_from_files_is_computed_again_where_their_content_has_changed(tmp_path):
    """Wherever they lie; without them, what was computed is shown."""
    from works import Folders, Work

    def folders(name: str | None, content: str = "") -> Folders:
        data = None if name is None else tmp_path / name
        if data is not None:
            (data / "air").mkdir(parents=True)
            (data / "air" / "a.csv").write_text(content)
        return Folders(tmp_path / "results", tmp_path / "work", data)

    def compute(folders):
        return (folders.data / "air" / "a.csv").read_text()

    first, copy, other = folders("first", "1"), folders("copy", "1"), folders("other", "2")
    (copy.data / "air" / ".index").write_text("of the system")
    for data in ("air", "air/a.csv"):
        work = Work("item", data, {"steps": 3}, compute, data=data)
        first.cells("item").put(work.name, work.key, "of no known content")
        assert work.result(folders(None)) == "of no known content"
        assert work.result(first) is None
        assert work.do(first) == "1"
        assert [work.result(each) for each in (first, copy, folders(None))] == ["1"] * 3
        assert work.result(Folders(first.results, first.work, tmp_path / "empty")) == "1"
        assert work.result(other) is None
        assert work.do(other) == "2"
        assert work.result(first) is None
    settings = Work("item", "of settings", {"steps": 3}, lambda _: 4)
    assert settings.do(first) == 4
    record = json.loads((first.results / "item" / "of-settings.json").read_text())
    assert record == {"key": {"steps": 3}, "result": 4}


def test_a_training_on_files_is_that_of_their_content(tmp_path):
    """Its pieces and its model too; one on no files is that of its settings."""
    import comparison
    from protocols import PAPER_ROWS, QUICK, Candidate
    from works import Folders

    for name in ("a", "b"):
        (tmp_path / name / "air").mkdir(parents=True)
        (tmp_path / name / "air" / "file.csv").write_text(name)
    every = [Folders(tmp_path, tmp_path, tmp_path / name) for name in ("a", "b")]

    def keys(task):
        job = comparison.Job("item", PAPER_ROWS[0], "column", task, QUICK)
        candidate = Candidate(job.row.method, 1e-3)
        return [comparison._seed_key(job, folders, candidate, 0) for folders in every]

    one, other = keys(lavajax.AirQuality("air"))
    assert one != other
    assert one | {"content": other["content"]} == other
    one, other = keys(lavajax.Sine())
    assert one == other
    assert "content" not in one


def test_every_result_in_the_repository_is_one_that_would_not_be_computed_again(tmp_path):
    from paper import ITEMS, with_needed
    from protocols import Scale
    from works import Folders

    folders = Folders(ROOT / "results", tmp_path)
    kept = {file.relative_to(folders.results) for file in folders.results.glob("*/*.json")}
    assert kept
    scale, found = Scale(extended=True, times=True), set()
    for item in ITEMS.values():
        for work in with_needed(item.works(scale)):
            if work.result(folders) is not None:
                found.add(folders.cells(work.item)._file(work.name).relative_to(folders.results))
    assert kept == found


def test_notes_on_sine_waves_are_of_the_results_in_the_repository(tmp_path):
    """Beside other errors their numbers would be false: whoever changes results reads them."""
    from items import sine_table
    from protocols import Scale
    from works import Folders

    cells = sine_table.table(Scale(extended=True, times=True), Folders(ROOT / "results", tmp_path))
    assert sine_table.digest(cells) == sine_table.NOTES_ARE_OF
    assert sine_table.NOTES.strip() in (ROOT / "RESULTS.md").read_text()
    name, column = next(iter(cells.found))
    cells.found[name, column]["seeds"][0]["mse"] *= 1.1
    assert sine_table.digest(cells) != sine_table.NOTES_ARE_OF
    for row in sine_table.PAPER_ROWS:
        assert sine_table._panel(row.name) in sine_table.PANELS


def test_what_makes_no_sense_is_refused(paper, capsys):
    for args, reason in (
        (["sines"], "item must be of sine, "),
        ([], "give --all, or items of sine, "),
        (["sine", "--workers", "0"], "--workers must be at least 1, got 0"),
        (["sine", "--only-time", "--no-time"], "leave nothing to do"),
    ):
        with pytest.raises(SystemExit) as stopped:
            paper(*args)
        assert stopped.value.code == 2
        assert reason in capsys.readouterr().err
    assert paper("sine", "--only", "N = 2") == 2  # cells write it N=2
    assert "--only must be of the names of cells, which ['N = 2'] is not" in capsys.readouterr().out


def test_nothing_of_others_is_replaced_and_what_is_damaged_is_named(paper, tmp_path, capsys):
    page = tmp_path / "RESULTS.md"
    page.write_text("mine")
    assert paper("sine", "--quick", "--render") == 1
    assert "RESULTS.md is not one of ours, and would be replaced" in capsys.readouterr().out
    assert page.read_text() == "mine"
    page.unlink()
    assert paper("sine", "--quick", "--render") == 0
    before = page.read_text()
    file = tmp_path / "results" / "noise" / "anil.json"
    file.parent.mkdir(parents=True)
    file.write_text("<<<<<<<")
    assert paper("sine", "--quick", "--render") == 1
    assert f"{file} is damaged, and is no result" in capsys.readouterr().out
    assert page.read_text() == before
    file.unlink()
    for args, reason in (
        (["air", "--data", "nowhere"], "--data must be a folder of published files, nowhere is"),
        (["sine", "--results", str(ROOT / "other")], "must not be beside the RESULTS.md of"),
    ):
        with pytest.raises(SystemExit):
            paper(*args)
        assert reason in capsys.readouterr().err
    assert paper("air", "--quick") == 1
    assert "left out: air, for want of" in capsys.readouterr().out


def test_what_was_lost_is_told_as_what_it_was():
    from protocols import QUICK, Row
    from tables import Table

    row = Row("one", lavajax.Anil(), True)
    table = Table("sine", {"N = 2": lavajax.Sine(shots=2)}, QUICK, (row,))
    for flags, told in (((True, True), "diverged"), ((False, None), "not finite")):
        seeds = [{"mse": 1.0 if f is None else None, "diverged": f} for f in flags]
        chosen = {"inner_steps": 1, "outer_rate": 0.005}
        table.__dict__["found"] = {
            ("one", "N = 2"): {"seeds": seeds, "validation": {"S=1": None}, "chosen": chosen}
        }
        assert f"{told} in {sum(f is not None for f in flags)} of 2 seeds" in table.show_errors()
        assert "| one | none trained |" in table.show_settings()


def test_every_row_is_a_method_with_candidates_and_a_name_of_its_own(paper):
    from figures import line
    from protocols import EXTENDED_ROWS, HEADLINE, PAPER_ROWS

    rows = PAPER_ROWS + EXTENDED_ROWS
    assert len({row.name for row in rows}) == len(rows)
    looks = set()
    for row in rows:
        candidates = row.candidates(HEADLINE)
        assert len(set(candidates)) == len(candidates) >= 1
        assert all(hash(each.method) and each.rate > 0 for each in candidates)
        looks.add(tuple(line(row.name).values()))
    assert len(looks) == len(rows), "two methods look alike in the figure"


def test_the_better_candidate_is_chosen_on_validation_and_divergence_is_the_worst(
    paper, tmp_path, monkeypatch
):
    import comparison
    from protocols import QUICK, Row
    from works import Folders

    tiny = lavajax.MLP(hidden=(4,))
    row = Row("anil", lavajax.Anil(tiny), True)
    protocol = dataclasses.replace(QUICK, rates=(1e-3, 5e-3), inner_steps=(1, 2), seeds=2)
    job = comparison.Job("sine", row, "N=2", lavajax.Sine(shots=2), protocol)
    real = lavajax.train

    def train(method, *args, **options):
        if method.inner_steps == 2:
            raise FloatingPointError
        return real(method, *args, **options)

    monkeypatch.setattr(lavajax, "train", train)
    folders = Folders(tmp_path / "results", tmp_path / "work")
    found = job.work.do(folders)
    validation = found["validation"]
    assert [validation[f"S=2, rate {rate}"] for rate in ("0.001", "0.005")] == [None, None]
    best = min((0.001, 0.005), key=lambda rate: validation[f"S=1, rate {rate:g}"])
    assert found["chosen"] == {"inner_steps": 1, "outer_rate": best}
    assert len(found["seeds"]) == 2
    assert found["seeds"][0]["mse"] != found["seeds"][1]["mse"]
    saved = job.params(folders, 1)
    assert saved.method.inner_steps == 1
    error = lavajax.evaluate(saved, job.task, num_tasks=protocol.test_tasks).mean
    assert error == pytest.approx(found["seeds"][1]["mse"])
    (tmp_path / "work").rename(tmp_path / "elsewhere")  # a model that is gone is trained again
    chex.assert_trees_all_close(job.params(folders, 1).learned, saved.learned)
    longer = dataclasses.replace(protocol, steps=30)
    monkeypatch.setattr(lavajax, "train", real)
    other = dataclasses.replace(job, protocol=longer)
    other.work.do(folders)  # in the same place, and not taken for the first
    assert jax.numpy.any(other.params(folders, 1)["head"] != saved["head"])


def test_settings_are_chosen_without_a_look_at_test_tasks(tmp_path):
    import comparison
    from protocols import PAPER_ROWS, QUICK
    from works import Folders

    @jax.tree_util.register_static
    @dataclasses.dataclass(frozen=True)
    class Hidden:
        def sample(self, key, split="train"):
            assert split != "test"
            return lavajax.Sine(shots=2).sample(key, split)

    protocol = dataclasses.replace(QUICK, rates=(0.001, 0.005))
    job = comparison.Job("sine", PAPER_ROWS[0], "N=2", lavajax.Sine(shots=2), protocol)
    folders = Folders(tmp_path / "results", tmp_path / "work")
    order, errors = comparison._ranked(job, folders, Hidden())
    assert len(order) == len(errors) >= 2
    assert all(error > 0 for error in errors.values())


def test_quick_runs_replace_no_results_of_whole_ones(paper, tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "cell.json").write_text("{}")
    assert paper("sine", "--quick", "--results", "mine") == 1
    assert "has results of whole runs, which the tiny ones of --quick" in capsys.readouterr().out


def test_bounds_on_the_meta_gradient_are_chosen_where_a_table_gives_any(tmp_path):
    from protocols import HEADLINE, PAPER_ROWS, QUICK
    from tables import Table
    from works import Folders

    folders = Folders(tmp_path / "results", tmp_path)
    columns = {"near": lavajax.Sine(shots=2), "far": lavajax.Sine(shots=3)}
    clips = {"far": (10.0, 1e-3)}
    cells = Table("some", columns, QUICK, PAPER_ROWS[:1], folders, clips)
    near, far = (cells.job(PAPER_ROWS[0], column) for column in columns)
    assert "clips" not in near.key["protocol"]
    assert far.key["protocol"]["clips"] == (10.0, 1e-3)
    assert [each.clip for each in PAPER_ROWS[0].candidates(far.protocol)] == [10.0, 1e-3]
    for job in (near, far):
        job.work.do(folders)
    assert "clip" not in near.result(folders)["chosen"]
    result = far.result(folders)
    best = min(result["validation"], key=result["validation"].get)
    assert sorted(result["validation"]) == ["S=1, rate 0.005", "S=1, rate 0.005, clip 0.001"]
    assert result["chosen"]["clip"] == (1e-3 if "clip" in best else 10.0)
    assert far.chosen(folders).clip == result["chosen"]["clip"]
    assert f"clip {result['chosen']['clip']:g}" in cells.show_settings()
    assert all(each.clip == 10.0 for each in PAPER_ROWS[0].candidates(HEADLINE))
    sgd = next(row for row in PAPER_ROWS if row.optimizer == "sgd")  # which clips nothing
    assert [each.clip for each in sgd.candidates(far.protocol)] == [10.0]


def test_an_inner_rate_that_is_not_learned_is_chosen_too(paper, tmp_path, monkeypatch):
    import comparison
    from protocols import QUICK, Row
    from tables import Table
    from works import Folders

    tiny = lavajax.MLP(hidden=(4,))
    protocol = dataclasses.replace(QUICK, rates=(1e-3, 5e-3))
    plain = Row("Reptile", lavajax.Reptile(tiny, inner_steps=1))
    row = dataclasses.replace(plain, also=("inner_rate", (0.02, 0.01)))
    monkeypatch.setattr(
        comparison, "_score", lambda _, params, *rest: _Score(params.method.inner_rate)
    )
    folders = Folders(tmp_path / "results", tmp_path / "work")
    table = Table("sine", {"N = 2": lavajax.Sine(shots=2)}, protocol, (row,), folders)
    found = table.works()[0].do(folders)
    assert found["validation"] == {
        f"S=1, inner rate {inner}, rate {outer}": float(inner)
        for inner in ("0.02", "0.01")
        for outer in ("0.001", "0.005")
    }
    assert found["chosen"] == {"inner_steps": 1, "inner_rate": 0.01, "outer_rate": 0.001}
    assert table.job(row, "N = 2").params(folders, 0).method.inner_rate == 0.01
    assert "| Reptile | inner rate 0.01, rate 0.001 |" in table.show_settings()
    assert "Reptile has inner rates of 0.02, 0.01" in table.exceptions()
    # A row without it is of the same key as before there were any.
    assert "also" not in table.job(plain, "N = 2").key["row"]


def test_error_bars_are_chosen_by_their_density(paper, tmp_path, monkeypatch):
    import comparison
    from comparison import Job
    from protocols import QUICK, Row
    from works import Folders

    method = lavajax.lava_bayesian(model=lavajax.MLP(hidden=(4,)))
    row = Row("LAVA", method, also=("noise", (0.1, 0.2)))
    job = Job("sine", row, "N = 2", lavajax.Sine(shots=2), dataclasses.replace(QUICK, seeds=1))
    score = comparison._score

    def opposed(source, params, *rest):  # what has the lower error has the lower density too
        noise, found = params.method.noise, score(source, params, *rest)
        return dataclasses.replace(found, nll=np.full(20, noise), values=np.full(20, 1 / noise))

    monkeypatch.setattr(comparison, "_score", opposed)
    folders = Folders(tmp_path / "results", tmp_path / "work")
    assert job.work.do(folders)["chosen"]["noise"] == 0.2
    by_density = dataclasses.replace(job, by_density=True)
    assert by_density.key != job.key
    found = by_density.work.do(folders)
    assert found["chosen"]["noise"] == 0.1
    assert list(found["validation"].values()) == pytest.approx([0.1, 0.2])


def test_a_density_that_overflows_in_one_seed_is_not_averaged_over_the_others(
    paper, tmp_path, monkeypatch
):
    import comparison
    from protocols import QUICK, Row
    from tables import Table
    from works import Folders

    row = Row("LAVA", lavajax.lava_bayesian(model=lavajax.MLP(hidden=(4,))))
    folders = Folders(tmp_path / "results", tmp_path / "work")
    protocol = dataclasses.replace(QUICK, seeds=2)
    table = Table("sine", {"N = 2": lavajax.Sine(shots=2)}, protocol, (row,), folders)
    score, ends = comparison._score, []

    def overflow(*given):
        found = score(*given)
        if given[2:] == ("test", 20):
            ends.append(found)
        return dataclasses.replace(found, crps=found.crps * np.inf) if len(ends) == 2 else found

    monkeypatch.setattr(comparison, "_score", overflow)
    seeds = table.works()[0].do(folders)["seeds"]
    assert [seed["crps"] is None for seed in seeds] == [False, True]
    nll = np.mean([end.nll.mean() for end in ends])
    assert f"| LAVA | {nll:.3g}, not finite, " in table.show_densities()


def test_a_choice_that_diverges_in_training_gives_way_to_the_next(paper, tmp_path, monkeypatch):
    """But for the last, which is reported as it is."""
    import comparison
    from protocols import QUICK, Row
    from tables import Table
    from works import Folders

    row = Row("ANIL", lavajax.Anil(lavajax.MLP(hidden=(4,))), True)
    protocol = dataclasses.replace(QUICK, inner_steps=(1, 2, 3), seeds=2)
    trained, diverging, exploding, real = [], set(), set(), lavajax.train

    def score(_, params, *rest):
        """S = 3 is the best in the search, then 2, then 1; which go on to diverge is below."""
        steps = params.method.inner_steps
        return _Score(1e9 if trained and steps in exploding else 1 / steps)

    monkeypatch.setattr(comparison, "_score", score)

    def train(method, *args, steps, seed=0, **options):
        if steps == protocol.steps:
            trained.append((method.inner_steps, seed))
            if method.inner_steps in diverging and seed == 1:
                raise FloatingPointError
        return real(method, *args, steps=steps, seed=seed, **options)

    monkeypatch.setattr(lavajax, "train", train)
    for name, bad, large, chosen, order in (
        ("exploded", set(), {3}, 2, [(3, 0), (2, 0), (2, 1)]),
        ("some", {3}, set(), 2, [(3, 0), (3, 1), (2, 0), (2, 1)]),
        ("all", {1, 2, 3}, set(), 1, [(s, seed) for s in (3, 2, 1) for seed in (0, 1)]),
    ):
        trained.clear()
        diverging.update(bad)
        exploding.clear()
        exploding.update(large)
        folders = Folders(tmp_path / name, tmp_path / name)
        columns = {"N = 2": lavajax.Sine(shots=2)}
        table = Table("sine", columns, protocol, (row,), folders)
        found = table.works()[0].do(folders)
        assert found["chosen"]["inner_steps"] == chosen
        assert trained == order
        assert f"ANIL at N = 2 ({' and '.join(found['given_up'])})" in table.given_up()
        # A row of which a seed has diverged is not the best of its column.
        assert table.sampling().endswith(": 0.5 at N = 2 (ANIL)." if name != "all" else "")
        assert (table.sampling() == "") == (name == "all")
    assert [seed["mse"] is None for seed in found["seeds"]] == [False, True]
    assert "| ANIL | diverged in 1 of 2 seeds |" in table.show_errors()
    assert len(table.job(row, "N = 2").trained(folders)) == 1
    with pytest.raises(FloatingPointError, match="seed 1 of ANIL N=2 has diverged"):
        table.job(row, "N = 2").params(folders, 1)


def test_comparisons_leave_out_what_was_chosen_by_hand_and_tell_the_spread(tmp_path):
    from protocols import QUICK, Row
    from tables import Table

    method = lavajax.Ridge()
    rows = (
        *(Row("LAVA", method), Row("LAVA, firm", method, by_hand=True)),
        *(Row("near", method), Row("far", method)),
    )
    seeds = {"LAVA": (1.0, 1.2), "LAVA, firm": (0.1, 0.1), "near": (1.1, 1.3), "far": (3.0, 3.1)}
    table = Table("sine", {"N = 2": lavajax.Sine(shots=2)}, QUICK, rows)
    table.__dict__["found"] = {
        (name, "N = 2"): {"seeds": [{"mse": mse} for mse in errors]}
        for name, errors in seeds.items()
    }
    text = table.compare()
    assert (
        "the best form of LAVA 1.1 ± 0.1 (LAVA), the best of the other rows 1.2 ± 0.1 (near)"
        in text
    )
    left_out = "left out, as chosen by hand: LAVA, firm."
    assert text.endswith(f"1.09 times as much, within the spread over seeds; {left_out}")
    del table.found["near", "N = 2"]
    assert "3.05 ± 0.07 (far), 2.77 times as much; left out, as" in table.compare()
    # A column whose best cell is of an earlier version is named.
    assert table.sampling() == ""
    table.columns["N = 10"] = lavajax.Sine(shots=10)
    table.found["far", "N = 10"] = {"seeds": [{"mse": 1.0, "standard_error": 0.2}]}
    end = "best row: 0.2 at N = 10 (far); not known at N = 2 (LAVA, firm)."
    assert table.sampling().endswith(end)


class _Score:
    """An evaluation by its mean."""

    nll = crps = sharpness = coverage = coverage_90 = coverage_50 = None

    def __init__(self, mean):
        self.mean = self.median = self.standard_error = mean
