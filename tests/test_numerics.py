"""What docs/numerics.md says of float32 and bfloat16; the whole table is benchmarks/numerics.py."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import equations, make_params, make_points

ROOT = Path(__file__).resolve().parents[1]
LAVA, CONVERGED = lj.Lava(), lj.lava_converged()
FIRM = lj.lava_bayesian(epsilon_floor=1e-4)


@pytest.mark.parametrize(
    ("method", "number", "stored"),
    [
        (LAVA, 10, "float32"),
        (CONVERGED, 10, "float32"),
        (CONVERGED, 100, "float32"),
        (FIRM, 100, "float32"),
        (CONVERGED, 10, "bfloat16"),
    ],
)
def test_a_head_in_float32_predicts_what_float64_does_at_large_features(method, number, stored):
    """The corner of the table that is worst conditioned."""
    import numerics

    error = numerics.error(method, number, 100.0, stored)
    assert 0 < error < 1e-3


def test_the_table_is_what_was_measured():
    found = json.loads((ROOT / "benchmarks" / "results" / "numerics.json").read_text())
    shown = re.findall(r"^\| (`.*) \|$", (ROOT / "docs" / "numerics.md").read_text(), re.M)
    assert shown == [
        " | ".join([f"`{row['setting']}`", row["stored"], str(row["N"]), *cells])
        for row in found["rows"]
        if (cells := [f"{error:.0e}" for error in row["errors"]])
    ]


def dtypes(jaxpr, names):
    """Of the floating operands of these primitives, in inner functions too."""
    for equation in equations(jaxpr):
        if equation.primitive.name in names:
            yield from (v.aval.dtype for v in equation.invars)


@pytest.mark.parametrize("points", [3, 9], ids=["dual", "primal"])
@pytest.mark.parametrize("method", [LAVA, CONVERGED], ids=["paper", "converged"])
def test_the_solve_of_bfloat16_parameters_is_in_float32(method, points):
    """Products of features and the factorisation; the backbone alone is in bfloat16."""
    support = make_points(points, d=4)  # layers of fewer inputs have no product
    params = make_params(dataclasses.replace(method, model=lj.MLP(hidden=(4,))), support)
    low = params.replace_learned(
        jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params.learned)
    )
    traced = jax.make_jaxpr(lambda p, x: p.method.adapt(p, lj.Points(x, support.y)).block)(
        low, support.x.astype(jnp.bfloat16)
    )
    assert traced.out_avals[0].dtype == jnp.float32
    solves = list(dtypes(traced.jaxpr, {"cholesky", "triangular_solve"}))
    assert solves
    assert set(solves) == {np.dtype("float32")}
    products = list(dtypes(traced.jaxpr, {"dot_general"}))
    backbone = 2 * 2  # its layers, two operands each
    assert products[:backbone] == [jnp.bfloat16] * backbone
    assert set(products[backbone:]) == {np.dtype("float32")}
