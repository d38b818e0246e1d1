"""Compiled programs do what the library does, in a process that does not have it."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import RELU, make_labels, make_params, make_points

CALL = """
import sys
import numpy as np
from jax import export, numpy

numpy.linalg.cholesky(numpy.eye(1))
folder, given, out = sys.argv[1:]
adapt, predict = (
    export.deserialize(bytearray(open(f"{folder}/{name}.jax", "rb").read())).call
    for name in ("adapt", "predict")
)
given = np.load(given)
adapted = adapt({name: given[name] for name in ("x", "y", "mask")})
predictions = {}
for m in (2, 5):
    for name, values in predict(adapted, {"x": given["at"][:m]}).items():
        predictions[f"{name} {m}"] = values
assert not any(name.split(".")[0] in ("lavajax", "flax", "optax") for name in sys.modules)
np.savez(out, **predictions)
"""


UNITS = lj.Units(lj.Columns((1000.0,), (20.0,)), lj.Columns((3.0, -70.0), (2.0, 5.0)))


@pytest.mark.parametrize(
    ("method", "units"),
    [
        (lj.lava_bayesian(model=RELU), UNITS),
        (lj.Cavia(RELU, subspace=lj.Context(3), inner_steps=2), None),
        (lj.Dkt(RELU, kernel="linear"), None),
        (lj.Anil(RELU, lj.CrossEntropy(3)), None),
    ],
    ids=["lava, units", "cavia", "dkt", "labels"],
)
def test_another_process_adapts_and_predicts(method, units, tmp_path):
    """With fewer points than shots, for more than one number of queries; in the user's units."""
    labels = isinstance(method.point_loss, lj.CrossEntropy)
    support = make_labels(4) if labels else make_points(4, 2)
    at = make_points(5, seed=4).x
    params = dataclasses.replace(make_params(method, support), units=units)
    if units is not None:
        support, at = units.restore_points(support), units.x.restore(at)
    folder = lj.export(params, tmp_path / "model", shots=6)
    x, y = (np.concatenate([a, 0 * a[:2]]) for a in (support.x, support.y))
    x[4:] = np.nan
    np.savez(tmp_path / "given.npz", x=x, y=y, mask=np.arange(6) < 4, at=at)
    files = [str(tmp_path / name) for name in ("given.npz", "out.npz")]
    subprocess.run([sys.executable, "-c", CALL, str(folder), *files], check=True, timeout=120)
    found = np.load(tmp_path / "out.npz")
    adapted = lj.adapt(params, support)
    for m in (2, 5):
        expected = lj.predict(params, adapted, at[:m])
        known = {name: leaf for name, leaf in vars(expected).items() if leaf is not None}
        assert {f"{name} {m}" for name in known} <= set(found.files)
        for name, leaf in known.items():
            np.testing.assert_allclose(found[f"{name} {m}"], leaf, rtol=1e-4, atol=1e-5)


def test_nothing_is_overwritten_unless_it_is_an_export(tmp_path):
    support = make_points(3)
    first, second = (make_params(lj.Lava(RELU), support, seed) for seed in (0, 1))
    folder = lj.export(first, tmp_path / "model", shots=3)
    before = (folder / "adapt.jax").read_bytes()
    with pytest.raises(ValueError, match="is in use; overwrite=True replaces an export"):
        lj.export(second, folder, shots=3)
    assert (folder / "adapt.jax").read_bytes() == before
    lj.export(second, folder, shots=3, overwrite=True)
    assert (folder / "adapt.jax").read_bytes() != before
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"must hold an export alone to be overwritten, .* notes\.txt"
    ):
        lj.export(first, folder, shots=3, overwrite=True)
    assert {p.name for p in tmp_path.iterdir()} == {"model"}


def test_what_a_link_points_to_is_replaced(tmp_path):
    params = make_params(lj.Lava(RELU), make_points(3))
    folder = lj.export(params, tmp_path / "model", shots=3)
    (tmp_path / "link").symlink_to(folder)
    before = (folder / "adapt.jax").read_bytes()
    lj.export(params, tmp_path / "link", shots=2, overwrite=True)
    assert (folder / "adapt.jax").read_bytes() != before
    assert (tmp_path / "link").is_symlink()
    assert {p.name for p in tmp_path.iterdir()} == {"model", "link"}


def test_impossible_exports_are_refused(tmp_path):
    support = make_points(3)
    with pytest.raises(ValueError, match="shots must be an integer of at least 1"):
        lj.export(make_params(lj.Lava(RELU), support), tmp_path / "model", shots=0)
    for platforms in ("gpu", ["gpu"]):
        with pytest.raises(ValueError, match="platforms must be of cpu, cuda, rocm, tpu, got gpu"):
            lj.export(
                make_params(lj.Lava(RELU), support), tmp_path / "m", shots=1, platforms=platforms
            )
    seeds = jax.vmap(lambda key: lj.Lava(RELU).init(key, support.x, support.y))(
        jax.random.split(jax.random.key(0), 2)
    )
    with pytest.raises(ValueError, match="params must be those of one seed"):
        lj.export(seeds, tmp_path / "model", shots=3)
    assert not list(tmp_path.iterdir())


def test_units_that_float32_cannot_tell_apart_are_refused(tmp_path):
    support = make_points(3)
    units = lj.Units(lj.Columns((1.7e9,), (100.0,), ("time",)), lj.Columns((0,), (1,), ("y",)))
    params = dataclasses.replace(make_params(lj.Lava(RELU), support), units=units)
    with pytest.raises(ValueError, match="column time has a mean of 1"):
        lj.export(params, tmp_path / "model", shots=3)


def test_without_a_mask_the_program_says_what_it_wants(tmp_path):
    support = make_points(3)
    folder = lj.export(make_params(lj.Lava(RELU), support), tmp_path / "model", shots=3)
    program = jax.export.deserialize(bytearray((folder / "adapt.jax").read_bytes()))
    with pytest.raises(ValueError, match="mask"):
        program.call({"x": support.x, "y": support.y})
    adapted = program.call({"x": support.x, "y": support.y, "mask": jnp.ones(3, bool)})
    assert set(adapted) == {"block"}
