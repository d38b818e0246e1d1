"""Saved models and states: exact, verified, and never lost."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
import sys
import warnings
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import lavajax
from helpers import METHODS, RELU, make_params, make_points, points_for
from lavajax import checkpoint, store
from lavajax.checkpoint import DamagedError, restore_state, save_state
from lavajax.start import start_state

SOURCE = lavajax.Sine(shots=3, queries=4)
METHOD = lavajax.lava_converged(model=RELU)
TX = lavajax.outer_optimizer(20)


def params_of(method=METHOD, seed=0):
    return make_params(method, points_for(method, 4), seed)


def assert_same(actual, expected):
    """Equal to the last bit, in value, dtype, structure and static parts."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == e.dtype
        same = jax.random.key_data if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else np.asarray
        np.testing.assert_array_equal(same(a), same(e))


def files_of(folder):
    return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("name", ["lava-head-hessian", "anil-classes"])
def test_a_model_comes_back_to_the_bit(name, tmp_path):
    """See ``test_contract.py`` for every method."""
    params = params_of(METHODS[name])
    assert lavajax.save(params, tmp_path / "deep" / "model") == tmp_path / "deep" / "model"
    assert_same(lavajax.load(str(tmp_path / "deep" / "model")), params)


def test_float64_and_several_seeds(tmp_path, x64):
    params = params_of()
    lavajax.save(params, tmp_path / "one")
    assert_same(lavajax.load(tmp_path / "one"), params)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), params, params_of(seed=1))
    lavajax.save(stacked, tmp_path / "two")
    assert_same(lavajax.load(tmp_path / "two"), stacked)
    with (
        jax.enable_x64(False),
        pytest.raises(ValueError, match=r"learned/head is \(9, 2\) float64.*jax_enable_x64"),
    ):
        lavajax.load(tmp_path / "one")
    with jax.enable_x64(False):
        lavajax.save(params_of(), tmp_path / "low")
    with pytest.raises(ValueError, match=r"float32, and .* float64 \(load it where .* is off"):
        lavajax.load(tmp_path / "low")


def test_state_of_a_run_comes_back_with_key_optimiser_and_step(tmp_path):
    state = start_state(METHOD, SOURCE, TX, seed=3)
    assert restore_state(tmp_path, state) is None
    save_state(dataclasses.replace(state, step=jnp.int32(7)), tmp_path)
    like = jax.eval_shape(lambda: start_state(METHOD, SOURCE, TX))
    assert_same(restore_state(tmp_path, like), dataclasses.replace(state, step=jnp.int32(7)))
    assert_same(lavajax.load(tmp_path), state.params)


@pytest.mark.parametrize(
    "method",
    [
        lavajax.Vfml(RELU),
        lavajax.vr_maml_tuned(model=RELU),
        lavajax.Reptile(RELU),
        lavajax.Platipus(RELU, subspace=lavajax.Head()),
    ],
    ids=lambda method: type(method).__name__,
)
def test_what_a_method_carries_from_step_to_step_is_resumed_to_the_bit(method, tmp_path):
    options = {"steps": 6, "meta_batch": 2, "optimizer": TX, "chunk": 3}
    whole = lavajax.train(
        method, SOURCE, **options, callback=lambda p: save_state(p.state, tmp_path)
    )
    shutil.rmtree(tmp_path / "checkpoints" / "000000006")
    state = restore_state(tmp_path, jax.eval_shape(lambda: start_state(method, SOURCE, TX)))
    assert state.step == 3
    assert_same(lavajax.train(method, SOURCE, **options, state=state).state, whole.state)


def test_states_of_several_seeds(tmp_path):
    state = start_state(METHOD, SOURCE, TX, seeds=2)
    save_state(state, tmp_path)
    assert_same(restore_state(tmp_path, state), state)
    assert_same(lavajax.load(tmp_path), state.params)


class Net(nn.Module):
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(nn.relu(nn.Dense(3)(x)))


class Leaky(nn.Module):
    slope: float

    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.leaky_relu(nn.Dense(3)(x), self.slope))


class Other(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(1, 3, rngs=rngs), nnx.Linear(3, 4, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x)))


def test_own_linen_module_is_asked_for_and_checked_leaf_by_leaf(tmp_path):
    params = params_of(lavajax.Anil(lavajax.Linen(Net())))
    lavajax.save(params, tmp_path / "m")
    with pytest.raises(ValueError, match=r"model must be given .*Net.*load\(path, model=\.\.\.\)"):
        lavajax.load(tmp_path / "m")
    with (
        pytest.warns(UserWarning, match=r"width = 4 .* and is now .* width = 7"),
        pytest.raises(ValueError, match=r"learned/head is \(5, 2\) float32, and .* \(8, 2\)"),
    ):
        lavajax.load(tmp_path / "m", model=lavajax.Linen(Net(width=7)))
    with pytest.raises(ValueError, match=r"model is saved as .*Linen, got MLP"):
        lavajax.load(tmp_path / "m", model=RELU)
    assert_same(lavajax.load(tmp_path / "m", model=lavajax.Linen(Net())), params)
    other = lavajax.Linen(nn.Sequential([nn.Dense(4)]))
    with (
        pytest.warns(UserWarning, match="model is saved as .*Net.* and is now .*Sequential"),
        pytest.raises(ValueError, match="must hold the leaves"),
    ):
        lavajax.load(tmp_path / "m", model=other)


def test_own_module_within_another_is_given_alone_or_in_it(tmp_path):
    own = lavajax.Linen(Net())
    whole = lavajax.Correlated(own)
    params = params_of(lavajax.Anil(whole))
    lavajax.save(params, tmp_path / "m")
    with pytest.raises(ValueError, match=r"load\(path, model=\.\.\.\)"):
        lavajax.load(tmp_path / "m")
    for given in ({"model": own}, {"model": whole}, {"method": lavajax.Anil(whole)}):
        assert_same(lavajax.load(tmp_path / "m", **given), params)
    with pytest.raises(ValueError, match=r"(?s)model is saved as Correlated.*speed=30.*got Correl"):
        lavajax.load(tmp_path / "m", model=lavajax.Correlated(own, speed=3.0))
    with pytest.raises(ValueError, match=r"model is saved as .*Linen, got MLP"):
        lavajax.load(tmp_path / "m", model=lavajax.Correlated(RELU))


def test_own_nnx_module(tmp_path):
    params = params_of(lavajax.Anil(lavajax.NNX(Other)))
    lavajax.save(params, tmp_path / "m")
    assert_same(lavajax.load(tmp_path / "m", model=lavajax.NNX(Other)), params)


@dataclasses.dataclass(frozen=True)
class Half(lavajax.SquaredError):
    """A user's own loss."""


@dataclasses.dataclass(frozen=True)
class Mine(lavajax.Anil):
    """A user's own method."""


def test_own_loss_and_own_method(tmp_path):
    params = params_of(lavajax.Anil(RELU, Half()))
    lavajax.save(params, tmp_path / "loss")
    with pytest.raises(ValueError, match=r"loss must be given .*load\(path, loss=\.\.\.\)"):
        lavajax.load(tmp_path / "loss")
    assert_same(lavajax.load(tmp_path / "loss", loss=Half()), params)
    with pytest.raises(ValueError, match=r"point_loss is saved as .*Half, got SquaredError"):
        lavajax.load(tmp_path / "loss", loss=lavajax.SquaredError())

    params = params_of(Mine(RELU))
    lavajax.save(params, tmp_path / "method")
    with pytest.raises(ValueError, match="method must be given"):
        lavajax.load(tmp_path / "method")
    with pytest.raises(ValueError, match="the method must be the saved one"):
        lavajax.load(tmp_path / "method", method=lavajax.Anil(RELU))
    assert_same(lavajax.load(tmp_path / "method", method=Mine(RELU)), params)


def test_part_that_was_saved_need_not_be_given_and_cannot_be_changed(tmp_path):
    params = params_of()
    lavajax.save(params, tmp_path / "m")
    assert_same(lavajax.load(tmp_path / "m", model=RELU), params)
    wider = lavajax.MLP(hidden=(9, 9))
    with pytest.raises(ValueError, match=r"model is saved as MLP\(hidden=\(8, 8\).*got MLP"):
        lavajax.load(tmp_path / "m", model=wider)
    with pytest.raises(ValueError, match=r"method\.epsilon is saved as 0\.1, got 0\.5"):
        lavajax.load(tmp_path / "m", method=dataclasses.replace(METHOD, epsilon=0.5))


@pytest.mark.parametrize("damage", ["cut", "flip", "grow", "remove"])
def test_damage_to_any_file_is_named(damage, tmp_path):
    lavajax.save(params_of(), tmp_path / "m")
    names = files_of(tmp_path / "m")
    assert len(names) > 5
    for name in names:
        copy = tmp_path / "copy"
        shutil.copytree(tmp_path / "m", copy)
        file = copy / name
        content = bytearray(file.read_bytes())
        if damage == "remove":
            file.unlink()
        elif damage == "cut":
            file.write_bytes(content[: len(content) // 2])
        elif damage == "grow":
            file.write_bytes(bytes(content) + b"\n")
        else:
            content[len(content) // 2] ^= 0x10
            file.write_bytes(content)
        with pytest.raises(DamagedError) as caught:
            lavajax.load(copy)
        assert str(file) in str(caught.value)
        shutil.rmtree(copy)


def test_no_byte_of_the_manifest_can_change_unseen(tmp_path):
    lavajax.save(params_of(), tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    for place in range(0, len(whole), 5):
        content = bytearray(whole)
        content[place] ^= int(random.integers(1, 256))
        file.write_bytes(content)
        with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
            store.open_record(tmp_path / "m")
    file.write_bytes(whole.replace(b"\n", b"\r\n"))
    with pytest.raises(DamagedError, match=r"manifest\.json is damaged"):
        store.open_record(tmp_path / "m")


def test_file_that_does_not_belong_is_named(tmp_path):
    lavajax.save(params_of(), tmp_path / "m")
    (tmp_path / "m" / "arrays" / "extra").write_text("x")
    with pytest.raises(DamagedError, match=r"extra is damaged: it does not belong"):
        lavajax.load(tmp_path / "m")


def rewrite(folder, change):
    """Changes the record of a saved model as whoever has the code could, with a right manifest."""
    record = json.loads((folder / "config.json").read_text())
    change(record)
    (folder / "config.json").write_text(json.dumps(record))
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(store._manifest_text(folder))


def test_records_that_do_not_fit_are_refused(tmp_path):
    def altered(change):
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        lavajax.save(params_of(), tmp_path / "m")
        rewrite(tmp_path / "m", change)
        lavajax.load(tmp_path / "m")

    def leaf(**entry):
        return lambda record: record["leaves"]["learned/head"].update(entry)

    altered(lambda record: None)
    for broken in (
        {"seeds": "x"},
        {"method": None},
        {"kind": "models"},
        {"leaves": []},
        {"spec": {}},
    ):
        with pytest.raises(DamagedError, match=r"config\.json is damaged: it is not the record"):
            altered(lambda record, broken=broken: record.update(broken))
    with pytest.raises(ValueError, match=r"learned/head is \(8, 2\) float32, and .* \(9, 2\)"):
        altered(leaf(shape=[8, 2]))
    with pytest.raises(ValueError, match=r"learned/head is \(9, 2\) bfloat16"):
        altered(leaf(dtype="bfloat16"))
    with pytest.raises(ValueError, match="learned/log_epsilon is missing"):
        altered(lambda record: record["leaves"].pop("learned/log_epsilon"))
    with pytest.raises(ValueError, match=r"class must be one of .* got 'os\.system'"):
        altered(lambda record: record["method"].update({"class": "os.system"}))
    with pytest.raises(ValueError, match="Lava has no field 'epsilom'; did you mean 'epsilon'"):
        altered(lambda record: record["method"].update(epsilom=1))

    def narrower(record):
        record["method"]["model"]["hidden"] = [8, 7]
        record["leaves"]["learned/weights/1/weight"]["shape"] = [7, 8]
        record["leaves"]["learned/weights/1/bias"]["shape"] = [7]
        record["leaves"]["learned/weights/2/weight"]["shape"] = [7, 7]
        record["leaves"]["learned/weights/2/bias"]["shape"] = [7]
        record["leaves"]["learned/head"]["shape"] = [8, 2]

    with pytest.raises(DamagedError, match=r"is \(8, 2\) float32, it holds \(9, 2\) float32"):
        altered(narrower)


def test_manifest_of_another_version_or_outside_the_folder_is_refused(tmp_path):
    lavajax.save(params_of(), tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest.pop("digest")
    file.write_text(store._sign({**manifest, "version": 1}))
    with pytest.raises(ValueError, match="version 3, got 'lavajax', version 1"):
        lavajax.load(tmp_path / "m")
    entry = manifest["files"].pop("config.json")
    for name in ("../config.json", "/etc/passwd", "a/../../b"):
        file.write_text(store._sign({**manifest, "files": {**manifest["files"], name: entry}}))
        with pytest.raises(DamagedError, match="outside the folder"):
            lavajax.load(tmp_path / "m")


def test_manifest_without_its_parts_is_damaged(tmp_path):
    lavajax.save(params_of(), tmp_path / "m")
    file = tmp_path / "m" / "manifest.json"
    plain = {"format": "lavajax", "version": store.VERSION}
    for change in ({}, {"files": []}, {"files": {}}, {"files": {"config.json": 3}}):
        file.write_text(store._sign({**plain, **change}))
        with pytest.raises(
            DamagedError, match=r"manifest\.json is damaged: it (is not the list|does)"
        ):
            lavajax.load(tmp_path / "m")
    for text in (store._sign({"version": store.VERSION}), "[]"):
        file.write_text(text)
        with pytest.raises(DamagedError, match=r"manifest\.json is damaged: it is not the text"):
            lavajax.load(tmp_path / "m")


def test_huge_json_is_not_read(tmp_path, monkeypatch):
    lavajax.save(params_of(), tmp_path / "m")
    monkeypatch.setattr(store, "_MOST_JSON", 100)
    with pytest.raises(DamagedError, match="more than can be meant"):
        lavajax.load(tmp_path / "m")


def test_saved_model_is_replaced_only_when_asked_and_nothing_else_ever(tmp_path):
    first, second = params_of(), params_of(seed=1)
    lavajax.save(first, tmp_path / "m")
    with pytest.raises(ValueError, match="is in use; overwrite=True replaces"):
        lavajax.save(second, tmp_path / "m")
    lavajax.save(second, tmp_path / "m", overwrite=True)
    assert_same(lavajax.load(tmp_path / "m"), second)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    for name in ("run", "file"):
        with pytest.raises(ValueError, match="is something else"):
            lavajax.save(first, tmp_path / name, overwrite=True)
    assert (tmp_path / "run" / "config.json").read_text() == "{}"


def test_a_model_that_another_process_has_saved_meanwhile_stays(tmp_path, monkeypatch):
    first = params_of()
    manifest_text = store._manifest_text

    def late(path):
        """Of the second model, when the first one appears."""
        monkeypatch.setattr(store, "_manifest_text", manifest_text)
        lavajax.save(first, tmp_path / "m")
        return manifest_text(path)

    monkeypatch.setattr(store, "_manifest_text", late)
    with pytest.raises(ValueError, match="m is in use: it was written by another process"):
        lavajax.save(params_of(seed=1), tmp_path / "m")
    assert_same(lavajax.load(tmp_path / "m"), first)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_saved_folder_has_the_permissions_of_any_new_one(tmp_path):
    (tmp_path / "new").mkdir()
    lavajax.save(params_of(), tmp_path / "m")
    assert (tmp_path / "m").stat().st_mode == (tmp_path / "new").stat().st_mode


def test_full_disk_leaves_the_older_model_and_no_rubbish(tmp_path, monkeypatch):
    params = params_of()
    lavajax.save(params, tmp_path / "m")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    def full_to_orbax(*_):
        raise ValueError("OUT_OF_RANGE: File too large")

    checkpointer = store._checkpointer()
    monkeypatch.setattr(store, "_checkpointer", lambda: checkpointer)
    for owner, name, fails in (
        (store, "_manifest_text", full),
        (checkpointer, "save", full_to_orbax),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fails)
            with pytest.raises(OSError, match=r"cannot be written: (No space left|File too large)"):
                lavajax.save(params_of(seed=1), tmp_path / "m", overwrite=True)
    assert_same(lavajax.load(tmp_path / "m"), params)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_interrupted_overwrite_tells_where_the_older_model_is(tmp_path):
    params = params_of()
    lavajax.save(params, tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / ".previous-m")  # the moment between the two renames
    with pytest.raises(FileNotFoundError, match=r"the older one is .*\.previous-m"):
        lavajax.load(tmp_path / "m")
    assert_same(lavajax.load(tmp_path / ".previous-m"), params)


def test_failure_between_the_two_renames_puts_the_older_model_back(tmp_path, monkeypatch):
    params = params_of()
    lavajax.save(params, tmp_path / "m")
    rename = Path.rename

    def fails(self, target):
        if self.name.startswith(".unfinished"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="Input/output"):
        lavajax.save(params_of(seed=1), tmp_path / "m", overwrite=True)
    monkeypatch.undo()
    assert_same(lavajax.load(tmp_path / "m"), params)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_overwrite_keeps_what_is_not_the_models(tmp_path):
    params = params_of()
    lavajax.save(params, tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    (tmp_path / "m.previous").mkdir()
    with pytest.raises(ValueError, match=r"a saved model alone .* also has notes\.txt"):
        lavajax.save(params, tmp_path / "m", overwrite=True)
    (tmp_path / "m" / "notes.txt").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "m")
    for seed in (1, 2):
        lavajax.save(params_of(seed=seed), tmp_path / "link", overwrite=True)
        assert_same(lavajax.load(tmp_path / "m"), params_of(seed=seed))
    assert {p.name for p in tmp_path.iterdir()} == {"m", "link", "m.previous"}


def test_newest_whole_state_is_used_and_the_damaged_one_named(tmp_path):
    state = start_state(METHOD, SOURCE, TX)
    for step in (5, 10, 15):
        newest = dataclasses.replace(state, step=jnp.int32(step))
        save_state(newest, tmp_path, keep=2)
    folder = tmp_path / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["000000010", "000000015"]
    assert restore_state(tmp_path, state).step == 15

    (folder / "000000015" / "config.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"000000015/config\.json is damaged.*before it"):
        assert restore_state(tmp_path, state).step == 10
    with pytest.warns(UserWarning, match=r"000000015/config\.json is damaged"):
        assert_same(lavajax.load(tmp_path), state.params)

    shutil.rmtree(folder / "000000010" / "arrays")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(DamagedError, match=r"every checkpoint .* damaged: .*15/.*10/"),
    ):
        restore_state(tmp_path, state)

    aside = checkpoint.set_aside_after(tmp_path, 10)
    assert [p.name for p in aside] == ["000000015.damaged"]
    save_state(newest, tmp_path)
    assert restore_state(tmp_path, state).step == 15


def test_the_state_just_saved_stays_whatever_its_step(tmp_path):
    state = start_state(METHOD, SOURCE, TX)
    for step in (20, 30, 5):
        save_state(dataclasses.replace(state, step=jnp.int32(step)), tmp_path, keep=2)
    assert checkpoint.saved_steps(tmp_path) == [30, 5]


def test_of_a_state_the_parameters_alone_are_read(tmp_path, monkeypatch):
    state = start_state(METHOD, SOURCE, TX)
    save_state(state, tmp_path)
    read, found = store.read_arrays, []
    monkeypatch.setattr(store, "read_arrays", lambda *args: found.append(read(*args)) or found[-1])
    assert_same(lavajax.load(tmp_path), state.params)
    assert found[0]
    assert all(name.startswith("params/") for name in found[0])


def test_state_of_other_hyperparameters_is_refused(tmp_path, monkeypatch):
    save_state(start_state(METHOD, SOURCE, TX), tmp_path)
    other = start_state(dataclasses.replace(METHOD, epsilon=0.5), SOURCE, TX)
    with pytest.raises(ValueError, match=r"method\.epsilon is saved as 0\.1, got 0\.5"):
        restore_state(tmp_path, other)
    deeper = lavajax.lava_converged(model=lavajax.MLP(hidden=(8, 8, 8)))
    with pytest.raises(ValueError, match=r"method\.model\.hidden is saved as \[8, 8\]"):
        restore_state(tmp_path, start_state(deeper, SOURCE, TX))
    with pytest.raises(ValueError, match=r"learned/head is \(9, 1\) float32, and .* \(2, 9, 1\)"):
        restore_state(tmp_path, start_state(METHOD, SOURCE, TX, seeds=2))
    monkeypatch.setattr(jax, "__version__", "0.9.9")
    state = start_state(METHOD, SOURCE, TX)
    with pytest.warns(UserWarning, match=r"written with JAX .*, and this is 0\.9\.9"):
        assert_same(restore_state(tmp_path, state), state)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        save_state(other, tmp_path, keep=0)
    with pytest.raises(ValueError, match="must be of a step that is not saved yet"):
        save_state(other, tmp_path)
    with pytest.raises(ValueError, match="opt/1/0/count is there, and the method has none"):
        restore_state(tmp_path, start_state(METHOD, SOURCE, optax.sgd(0.1)))


def test_own_parts_that_describe_themselves_otherwise_are_told(tmp_path):
    """Where a run goes on, and where a method is given to load."""

    def method(slope):
        return Mine(lavajax.Linen(Leaky(slope)))

    state = start_state(method(0.1), SOURCE, TX)
    save_state(state, tmp_path)
    other = start_state(method(0.9), SOURCE, TX)
    with pytest.warns(UserWarning, match=r"method is saved as .*0\.1.*, and is now .*0\.9"):
        restore_state(tmp_path, other)
    with pytest.warns(UserWarning, match=r"method is saved as .*0\.1.*, and is now .*0\.9"):
        lavajax.load(tmp_path, method=method(0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        restore_state(tmp_path, state)


def test_what_cannot_be_saved_says_why(tmp_path):
    params = params_of()
    halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    with pytest.raises(ValueError, match=r"learned/head is \(9, 2\) bfloat16, and the method has"):
        lavajax.save(halves, tmp_path / "m")
    with pytest.raises(ValueError, match=r"params must be MetaParams, got dict"):
        lavajax.save(params.learned, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_is_not_there_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="path must be a saved model or a run folder"):
        lavajax.load(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DamagedError, match=r"manifest\.json is missing: .* no saved model"):
        lavajax.load(tmp_path / "empty")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match="without any checkpoint"):
        lavajax.load(tmp_path / "run")
    lavajax.save(params_of(), tmp_path / "m")
    shutil.rmtree(tmp_path / "m" / "arrays")
    with pytest.raises(DamagedError, match=r"m/arrays/.* is damaged: it is missing"):
        lavajax.load(tmp_path / "m")


def test_without_orbax_the_error_has_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "\.\[experiments\]", from'):
        lavajax.save(params_of(), tmp_path / "m")
    assert not any(tmp_path.iterdir())


def test_leaves_of_size_zero(tmp_path):
    class Empty(nn.Module):
        @nn.compact
        def __call__(self, x):
            nothing = self.param("nothing", nn.initializers.zeros, (0, 3))
            return nn.Dense(4)(x) + jnp.sum(nothing)

    params = make_params(lavajax.Anil(lavajax.Linen(Empty())), make_points(3))
    lavajax.save(params, tmp_path / "m")
    assert_same(lavajax.load(tmp_path / "m", model=params.method.model), params)
