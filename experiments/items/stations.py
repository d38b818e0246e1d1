"""A user's own table: new stations, against a pooled network and models of the support alone."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import lavajax
from items.air_table import WINDOW
from lavajax.config import to_json
from lavajax.extras import require
from protocols import Scale
from tables import listed, over_seeds, section
from works import Folders, Work

if TYPE_CHECKING:
    from pandas import DataFrame

TITLE = "a user's table: stations that were left out"
NAME = "stations"
NEW_STATIONS = ("Dongsi", "Huairou")
TARGET = "PM2.5"
GROUP = ("station", "year", "month")
SHOTS = (10, 20)
DRAWS = 3  # supports of each group that is scored
MOST_ROWS = 744  # hours of a month
# Steps of rate 0 leave the network as it is: trained on the rows of all groups alike.
POOLED = "pooled network"
METHODS: dict[str, Any] = {
    "LAVA, converged": lavajax.lava_converged(),
    "LAVA, Bayesian": lavajax.lava_bayesian(),
    POOLED: lavajax.Anil(inner_rate=0.0, learn_inner_rate=False),
}
# Rows of a training task: 40 for each method, of which the pooled network learns from the query.
ROWS = {name: (1, 39) if name == POOLED else (20, 20) for name in METHODS}
TEST_SHARE = 0.01  # of the groups, which are scored on new stations
_KEY = {"stations": NEW_STATIONS, "shots": SHOTS, "draws": DRAWS, "group": GROUP, "y": TARGET}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How it is trained.

    Attributes:
        steps: outer steps of 10 groups, of each 40 rows.
        seeds: trained for each method.
        outer_rates: peaks of the schedule, of which the best on validation groups is taken.
    """

    steps: int = 10_000
    seeds: int = 3
    outer_rates: tuple[float, ...] = (1e-3, 5e-3)


def _training(chosen: Setting) -> dict[str, Any]:
    """What the training of one seed depends on."""
    return {"steps": chosen.steps, "outer_rates": chosen.outer_rates}


def setting(scale: Scale) -> Setting:
    """That of a scale."""
    return Setting(steps=20, seeds=1) if scale.quick else Setting()


def works(scale: Scale) -> list[Work]:
    """A cell for each method and seed, and one for what is fitted to the support alone."""
    cells = [_trained(scale, name, i) for name in METHODS for i in range(setting(scale).seeds)]
    return [*cells, _support_alone()]


def _trained(scale: Scale, name: str, seed: int) -> Work:
    chosen = setting(scale)
    key = {**_KEY, "method": to_json(METHODS[name]), "seed": seed, **_training(chosen)}
    key |= {"rows": ROWS[name], "test_share": TEST_SHARE}
    compute = partial(_train_and_score, name, seed, chosen)
    return Work(NAME, f"{name} {seed}", key, compute, seconds=40.0, data=WINDOW.data)


def _support_alone() -> Work:
    return Work(NAME, "support alone", _KEY, _score_support_alone, seconds=60.0, data=WINDOW.data)


def read(folders: Folders) -> tuple[DataFrame, DataFrame]:
    """Two tables as a user has them, a row for each hour: of the past, and of the new stations.

    The past are the other stations before March 2016, and the new ones from then on, so that
    neither a station nor an hour is in both.
    """
    from lavajax.datasets import load_air_quality
    from lavajax.datasets.air_quality import MEASUREMENTS, STATIONS

    pandas = require("pandas", "data", "the table of stations")
    assert folders.data is not None
    measured = load_air_quality(folders.data / WINDOW.data)
    when = pandas.date_range("2013-03-01", periods=measured.shape[1], freq="h")
    angle = 2 * np.pi * when.hour / 24
    parts = []
    for station, columns in zip(STATIONS, measured, strict=True):
        part = pandas.DataFrame(columns, columns=MEASUREMENTS)
        part = part.assign(hour_sin=np.sin(angle), hour_cos=np.cos(angle))
        parts.append(part.assign(station=station, year=when.year, month=when.month, when=when))
    table = pandas.concat(parts, ignore_index=True).dropna()
    new = table["station"].isin(NEW_STATIONS)
    later = table["when"] >= "2016-03-01"
    return table[~new & ~later], table[new & later]


def inputs(table: DataFrame) -> tuple[str, ...]:
    """All that is measured beside the target, and the hour of the day."""
    return tuple(c for c in table.columns if c not in (TARGET, *GROUP, "when"))


def _train_and_score(
    name: str, seed: int, chosen: Setting, folders: Folders
) -> dict[str, dict[str, float]]:
    """RMSE in ug/m3 by number of labels: of the method, and moved by the support's residual."""
    past, new = read(folders)
    shots, queries = ROWS[name]
    table = lavajax.Table(
        *(GROUP, inputs(past), (TARGET,)), shots=shots, queries=queries, test_share=TEST_SHARE
    )
    tasks = table.tasks(past)

    def train(rate: float) -> lavajax.MetaParams:
        optimizer = lavajax.outer_optimizer(chosen.steps, rate=rate)
        options: dict[str, Any] = {"steps": chosen.steps, "optimizer": optimizer, "seed": seed}
        return lavajax.train(METHODS[name], tasks, **options).params

    def error(params: lavajax.MetaParams) -> float:
        return lavajax.evaluate(params, tasks, num_tasks=500, split="validation").mean

    params = min((train(rate) for rate in chosen.outer_rates), key=error)

    def predict(support: DataFrame, query: DataFrame) -> np.ndarray:
        # One shape for all, so that one compilation does.
        rows = np.resize(np.arange(len(query)), MOST_ROWS)
        adapted = lavajax.adapt(params, support)
        return np.asarray(lavajax.predict(params, adapted, query.iloc[rows]).mean)[: len(query), 0]

    def moved(support: DataFrame, query: DataFrame) -> np.ndarray:
        residual = support[TARGET].to_numpy() - predict(support, support)
        return predict(support, query) + residual.mean()

    found = {"plain": _scores(new, predict)}
    if name == POOLED:
        found["moved"] = _scores(new, moved)
    return found


def _score_support_alone(folders: Folders) -> dict[str, dict[str, float]]:
    """RMSE in ug/m3 by number of labels, of models that have seen nothing but the support."""
    require("sklearn", "data", "the table of stations")
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.linear_model import RidgeCV
    from sklearn.preprocessing import StandardScaler

    past, new = read(folders)
    names = list(inputs(past))
    scaler = StandardScaler().fit(past[names])

    def fitted(make: Callable[[], Any]) -> Callable[[DataFrame, DataFrame], np.ndarray]:
        def predict(support: DataFrame, query: DataFrame) -> np.ndarray:
            model = make().fit(scaler.transform(support[names]), support[TARGET])
            return model.predict(scaler.transform(query[names]))

        return predict

    def ridge() -> Any:
        return RidgeCV(np.logspace(-2, 3, 11))  # by leaving one out

    def process() -> Any:
        kernel = ConstantKernel() * RBF(3.0) + WhiteKernel(0.1)
        return GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)

    def mean(support: DataFrame, query: DataFrame) -> np.ndarray:
        return np.full(len(query), support[TARGET].mean())

    models = {"ridge": fitted(ridge), "Gaussian process": fitted(process), "mean": mean}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # of noise at its least
        return {name: _scores(new, predict) for name, predict in models.items()}


def _scores(
    new: DataFrame, predict: Callable[[DataFrame, DataFrame], np.ndarray]
) -> dict[str, float]:
    """RMSE over all months of the new stations, each counting alike, by number of labels.

    Beside it its standard error over months: that of the mean square, by the derivative of a root.
    """
    scores = {}
    for shots in SHOTS:
        errors = [
            np.mean((predict(support, query) - query[TARGET].to_numpy()) ** 2)
            for support, query in _splits(new, shots)
        ]
        rmse = float(np.sqrt(np.mean(errors)))
        months = np.reshape(errors, (-1, DRAWS)).mean(axis=1)
        scores[str(shots)] = rmse
        scores[f"{shots} error"] = float(months.std(ddof=1) / np.sqrt(len(months)) / (2 * rmse))
    return scores


def _splits(new: DataFrame, shots: int) -> Iterator[tuple[DataFrame, DataFrame]]:
    """Some rows of a month at a station, and all its others; the same for every method."""
    rng = np.random.default_rng(0)
    for _, rows in new.groupby(list(GROUP)):
        for _ in range(DRAWS):
            order = rng.permutation(len(rows))
            yield rows.iloc[order[:shots]], rows.iloc[order[shots:]]


def render(scale: Scale, folders: Folders) -> str:
    """The section of RESULTS.md."""
    alone = _support_alone().result(folders)
    found: dict[str, list[dict[str, float]]] = {}
    for name in METHODS:
        for seed in range(setting(scale).seeds):
            result = _trained(scale, name, seed).result(folders)
            if result is not None:
                found.setdefault(name, []).append(result["plain"])
                if "moved" in result:
                    moved = f"{name}, moved by the mean residual of the support"
                    found.setdefault(moved, []).append(result["moved"])
    if alone is None or len(found) <= len(METHODS):
        return ""
    found |= {f"{name} of the support alone": [scores] for name, scores in alone.items()}
    lines = [
        f"| {name} | "
        + " | ".join(_spread([each[str(shots)] for each in results]) for shots in SHOTS)
        + " |"
        for name, results in found.items()
    ]
    head = ["RMSE of PM2.5, ug/m3", *(f"{shots} labels" for shots in SHOTS)]
    return section(
        "## A user's table",
        "One table of all stations, a row for each hour, as in "
        f"`run.py --task=table --group={','.join(GROUP)} --y={TARGET} --x=...`: PM2.5 from the "
        "other pollutants, the weather and the hour of the day. Models are trained on all other "
        f"stations before March 2016; months from then on at {' and '.join(NEW_STATIONS)} are new "
        "to them, in place and in time. A few rows of a month are labelled, all others are scored, "
        f"{DRAWS} draws for each month. The pooled network is the same one, trained on the same "
        f"rows by the same protocol, without adaptation: {sum(ROWS[POOLED])} rows of each of 10 "
        f"groups a step, of which its loss sees {ROWS[POOLED][1]}, the best of the outer rates "
        f"{listed(setting(scale).outer_rates)} on groups held out for validation. The root of the "
        f"mean over months, {over_seeds(setting(scale).seeds)}.",
        "\n".join([f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *lines]),
        _sampling(found),
    )


def _sampling(found: dict[str, list[dict[str, float]]]) -> str:
    """The standard error over months of each column's best row, where its cells have it."""
    parts = []
    for shots in map(str, SHOTS):
        best = min(found, key=lambda name: np.mean([each[shots] for each in found[name]]))
        known = [each[f"{shots} error"] for each in found[best] if f"{shots} error" in each]
        if known:
            parts.append(f"{np.median(known):.2g} at {shots} labels ({best})")
    if not parts:
        return ""
    return (
        "± is the spread over seeds alone: all rows and seeds are scored on the same months. The "
        f"standard error over these months, for each column's best row: {'; '.join(parts)}."
    )


def _spread(errors: list[float]) -> str:
    spread = f" ± {np.std(errors, ddof=1):.2f}" if len(errors) > 1 else ""
    return f"{np.mean(errors):.2f}{spread}"
