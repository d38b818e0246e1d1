"""Hyperparameters: checked, coerced, hashable, and exact as JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import flax.linen as nn
import numpy as np
import pytest
from flax import nnx

import lavajax
from lavajax.config import classes, from_json, to_json


class Net(nnx.Module):
    """Something that is not a constructor."""


class Hinge:
    """A loss that is neither squared error nor cross-entropy."""

    def value(self, outputs, y):
        return 0.0

    def factor(self, outputs, y):
        return 0.0

    def constant_curvature(self, k):
        return None


REFUSED = [
    (
        lambda: lavajax.Tnp(embedding_layers=10**10),
        r"Tnp\.embedding_layers must be at most 1000, got 10000000000",
    ),
    (lambda: lavajax.MLP(hidden=(4,) * 1001), r"MLP\.hidden must have at most 1000 entries"),
    (lambda: lavajax.Correlated(model=5), r"Correlated\.model must be an instance such as"),
    (
        lambda: lavajax.FixedTasks(lavajax.Sine(), seed=2**32),
        r"FixedTasks\.seed must be at most 4294967295",
    ),
    (lambda: lavajax.Columns((0.0, 0.0), (1.0, 1.0), names=5), r"Columns\.names must be a name"),
    (lambda: lavajax.Columns((0.0, 0.0), (1.0, 1.0), names="ab"), r"Columns\.names must be 2 diff"),
    (
        lambda: lavajax.Lava(inner_steps=0),
        r"Lava\.inner_steps must be an integer of at least 1, got 0",
    ),
    (lambda: lavajax.Lava(inner_steps=1.5), r"Lava\.inner_steps must be an integer .* got 1\.5"),
    (lambda: lavajax.Lava(inner_steps=True), r"Lava\.inner_steps must be an integer .* got True"),
    (
        lambda: lavajax.Lava(inner_steps="convergd"),
        r"Lava\.inner_steps must be one of 'converged', 'map', got 'convergd'",
    ),
    (
        lambda: lavajax.Lava(inner_rate=-0.1),
        r"Lava\.inner_rate must be a finite number of at least 0, got -0\.1",
    ),
    (lambda: lavajax.Lava(inner_rate=math.nan), r"Lava\.inner_rate must be a finite number"),
    (lambda: lavajax.Lava(inner_rate="0.1"), r"Lava\.inner_rate must be a number, got '0\.1'"),
    (lambda: lavajax.Lava(epsilon=0.0), r"Lava\.epsilon must be a finite number above 0, got 0\.0"),
    (
        lambda: lavajax.Lava(epsilon_floor=-1),
        r"Lava\.epsilon_floor must be a finite number above 0",
    ),
    (lambda: lavajax.Lava(epsilon=np.ones(2)), r"Lava\.epsilon must be a number"),
    (lambda: lavajax.Lava(learn_epsilon=1), r"Lava\.learn_epsilon must be True or False, got 1"),
    (
        lambda: lavajax.Lava(curvature="ggm"),
        r"Lava\.curvature must be one of 'ggn', 'hessian', 'flat', got 'ggm'",
    ),
    (lambda: lavajax.Lava(curvature_at="posterior"), r"Lava\.curvature_at must be one of"),
    (lambda: lavajax.Lava(solver="cg"), r"Lava\.solver must be one of .* got 'cg'"),
    (
        lambda: lavajax.Lava(solver="dual", curvature="hessian"),
        r"Lava\.solver='dual' is a form of the system for curvature='ggn'",
    ),
    (
        lambda: lavajax.Lava(subspace="head"),
        r"Lava\.subspace must be an instance such as Head\(\).* got 'head'",
    ),
    (lambda: lavajax.Lava(subspace=lavajax.Head), r"Lava\.subspace must be an instance"),
    (lambda: lavajax.Lava(model=lavajax.MLP), r"Lava\.model must be an instance such as MLP\(\)"),
    (
        lambda: lavajax.Lava(model=nn.Dense(3)),
        r"Lava\.model must be an instance such as MLP\(\), Linen",
    ),
    (
        lambda: lavajax.Lava(point_loss="mse"),
        r"Lava\.point_loss must be an instance such as SquaredError",
    ),
    (
        lambda: lavajax.Lava(inner_steps="converged", point_loss=lavajax.CrossEntropy(3)),
        r"'converged' needs a loss of constant curvature",
    ),
    (
        lambda: lavajax.Lava(inner_steps="map", point_loss=lavajax.CrossEntropy(3)),
        r"'map' needs a loss of constant curvature",
    ),
    (
        lambda: lavajax.Maml(inner_steps=-1),
        r"Maml\.inner_steps must be an integer of at least 0, got -1",
    ),
    (lambda: lavajax.Maml(inner_rate=math.inf), r"Maml\.inner_rate must be a finite number"),
    (
        lambda: lavajax.Anil(first_order="yes"),
        r"Anil\.first_order must be True or False, got 'yes'",
    ),
    (
        lambda: lavajax.Cavia(subspace=lavajax.Head()),
        r"Cavia\.subspace must be a Context, got Head\(\); .* Anil",
    ),
    (
        lambda: lavajax.MetaSgd(rate_init="normal"),
        r"MetaSgd\.rate_init must be one of 'uniform', 'constant', got 'normal'",
    ),
    (
        lambda: lavajax.Reptile(inner_steps=0),
        r"Reptile\.inner_steps must be an integer of at least 1, got 0",
    ),
    (
        lambda: lavajax.Reptile(inner_rate=0.0),
        r"Reptile\.inner_rate must be a finite number above 0, got 0\.0",
    ),
    (
        lambda: lavajax.Vfml(gamma=1.1),
        r"Vfml\.gamma must be a finite number of at least 0 and at most 1, got 1\.1",
    ),
    (lambda: lavajax.Vfml(variant="svrg"), r"Vfml\.variant must be one of 'released', 'storm'"),
    (lambda: lavajax.Vfml(first_order=2), r"Vfml\.first_order must be True or False, got 2"),
    (
        lambda: lavajax.VrMaml(gamma=0.0),
        r"VrMaml\.gamma must be a finite number above 0 and at most 1, got 0\.0",
    ),
    (lambda: lavajax.Llama(tau=0), r"Llama\.tau must be a finite number above 0, got 0"),
    (
        lambda: lavajax.Llama(subspace=lavajax.Full()),
        r"Llama\.subspace=Full\(\) has no log determinant .* Use Head\(\) or Context",
    ),
    (
        lambda: lavajax.MetaMix(concentration=0),
        r"MetaMix\.concentration must be a finite number above 0, got 0",
    ),
    (
        lambda: lavajax.MetaMix(mix_inner=True),
        r"MetaMix\.mix_inner=True needs variant='query_pairs', got 'support_query'",
    ),
    (lambda: lavajax.Ridge(ridge=0), r"Ridge\.ridge must be a finite number above 0, got 0"),
    (
        lambda: lavajax.Ridge(point_loss=Hinge()),
        r"Ridge\.point_loss must have a constant curvature, as SquaredError\(\)",
    ),
    (
        lambda: lavajax.Alpaca(learn_noise=True, outer="mse"),
        r"Alpaca\.learn_noise=True needs outer='nll'",
    ),
    (
        lambda: lavajax.Alpaca(point_loss=lavajax.CrossEntropy(3)),
        r"Alpaca\.point_loss must be SquaredError\(\): Alpaca predicts a normal density",
    ),
    (lambda: lavajax.Dkt(noise=0.01), r"Dkt\.noise must start above its floor, got .* = 0\.0001"),
    (lambda: lavajax.Dkt(kernel="matern"), r"Dkt\.kernel must be one of 'linear', 'rbf'"),
    (
        lambda: lavajax.Dkt(point_loss=lavajax.CrossEntropy(3)),
        r"Dkt\.point_loss must be SquaredError\(\): Dkt predicts a normal density",
    ),
    (lambda: lavajax.IMaml(proximal=0), r"IMaml\.proximal must be a finite number above 0, got 0"),
    (
        lambda: lavajax.IMaml(solver="closed"),
        r"IMaml\.solver='closed' needs subspace=Head\(\) .* got Full\(\)",
    ),
    (lambda: lavajax.Context(size=0), r"Context\.size must be an integer of at least 1, got 0"),
    (lambda: lavajax.Context(start="one"), r"Context\.start must be one of"),
    (
        lambda: lavajax.MLP(hidden=(8, 0)),
        r"MLP\.hidden must be a sequence of integers of at least 1, got \(8, 0\)",
    ),
    (lambda: lavajax.MLP(hidden=64), r"MLP\.hidden must be a sequence of integers .* got 64"),
    (lambda: lavajax.MLP(hidden=()), r"MLP\.hidden is empty"),
    (lambda: lavajax.MLP(activation="rleu"), r"MLP\.activation must be one of 'relu'"),
    (
        lambda: lavajax.MLP(linear_features=False, feature_dim=3),
        r"linear_features=False leaves out; got feature_dim=3",
    ),
    (lambda: lavajax.Linen(nn.Dense), r"Linen\.module must be an instance of flax\.linen\.Module"),
    (lambda: lavajax.NNX(Net()), r"NNX\.constructor must be a function that builds the module"),
    (
        lambda: lavajax.SquaredError("total"),
        r"SquaredError\.reduction must be one of 'mean', 'sum', got 'total'",
    ),
    (
        lambda: lavajax.CrossEntropy(1),
        r"CrossEntropy\.classes must be an integer of at least 2, got 1",
    ),
    (lambda: lavajax.Sine(shots=0), r"Sine\.shots must be an integer of at least 1, got 0"),
    (
        lambda: lavajax.Sine(phase=(1.0, 0.0)),
        r"Sine\.phase must be a pair \(low, high\) .* got \(1\.0, 0\.0\)",
    ),
    (lambda: lavajax.Sine(amplitude=(0.1,)), r"Sine\.amplitude must be a pair"),
]


@pytest.mark.parametrize(("build", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_impossible_settings_name_the_field_the_value_and_the_need(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_unknown_fields_are_python_errors():
    with pytest.raises(TypeError, match="inner_stepz"):
        lavajax.Lava(inner_stepz=1)


def test_values_are_coerced_to_plain_python():
    """jit compares static metadata and never hashes it: a list or an array would go stale."""
    method = lavajax.Lava(
        model=lavajax.MLP(hidden=[8, np.int64(4)]),
        epsilon=np.float32(0.5),
        inner_rate=1,
        inner_steps=np.int32(3),
    )
    assert method.model.hidden == (8, 4)
    assert {type(w) for w in method.model.hidden} == {int}
    assert type(method.epsilon) is type(method.inner_rate) is float
    assert type(method.inner_steps) is int
    assert lavajax.Sine(phase=[0, 1]).phase == (0.0, 1.0)
    assert hash(method) == hash(
        lavajax.Lava(model=lavajax.MLP(hidden=(8, 4)), epsilon=0.5, inner_rate=1.0, inner_steps=3)
    )


def test_a_model_that_cannot_be_hashed_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Listed:
        widths: list

        def init(self, key, x, context=None):
            return {}, {}

        def features(self, weights, fixed, x, *, context=None, mask=None):
            return x

    with pytest.raises(ValueError, match=r"Anil needs hashable fields.*not hashable: model"):
        lavajax.Anil(model=Listed([1]))


EXAMPLES = {
    "Lava": lavajax.lava_converged(
        subspace=lavajax.Context(3, "zeros"), model=lavajax.MLP((5, 6), activation="tanh")
    ),
    "Maml": lavajax.Maml(inner_rate=0.1 + 0.2, first_order=True),
    "Anil": lavajax.Anil(point_loss=lavajax.CrossEntropy(7)),
    "Cavia": lavajax.Cavia(inner_steps=4),
    "MetaSgd": lavajax.MetaSgd(rate_init="constant", inner_rate=-0.1),
    "Reptile": lavajax.Reptile(pseudo_gradient="difference"),
    "Llama": lavajax.Llama(eta=0.1 + 0.2, subspace=lavajax.Context(3)),
    "MetaMix": lavajax.MetaMix(variant="query_pairs", concentration=0.1 + 0.2, mix_inner=True),
    "Vfml": lavajax.Vfml(variant="storm", gamma=0.1 + 0.2, first_order=False),
    "VrMaml": lavajax.vr_maml_released(),
    "Bmaml": lavajax.Bmaml(particles=3, outer="chaser", subspace=lavajax.Full()),
    "HyperNetwork": lavajax.HyperNetwork(encoder=(3, 4), encoding=2, activation="tanh"),
    "Cnp": lavajax.Cnp(encoder=(3,), sigma_min=0.1, activation="gelu"),
    "AttentiveCnp": lavajax.AttentiveCnp(width=6, heads=3, key_encoder=(2, 2)),
    "Conditioned": lavajax.Conditioned(
        lavajax.Anil(inner_steps=2), encoder=(3,), encoding=2, min_scale=0.1 + 0.2
    ),
    "Tnp": lavajax.Tnp(layers=2, decoder=(4, 4), point_loss=lavajax.SquaredError("sum")),
    "Platipus": lavajax.Platipus(samples=3, log_std=-2.0, subspace=lavajax.Head()),
    "Alpaca": lavajax.Alpaca(noise=0.5, learn_noise=True),
    "Dkt": lavajax.Dkt(kernel="spectral_mixture", mixtures=3, objective="predictive"),
    "IMaml": lavajax.IMaml(subspace=lavajax.Context(2), solver="gradient", proximal=2.0),
    "Ridge": lavajax.Ridge(ridge=0.2, centre=False, solver="dual"),
    "MLP": lavajax.MLP(hidden=(3,), feature_dim=2),
    "Correlated": lavajax.Correlated(lavajax.MLP(hidden=(3,)), speed=2.0),
    "Conv4": lavajax.Conv4(3, "layer", linear_features=True, feature_dim=5),
    "Head": lavajax.Head(),
    "Context": lavajax.Context(9, "zeros_learned"),
    "Full": lavajax.Full(),
    "SquaredError": lavajax.SquaredError("sum"),
    "DirectionError": lavajax.DirectionError("sum"),
    "Huber": lavajax.Huber(0.3, "sum"),
    "GaussianNll": lavajax.GaussianNll(min_std=0.2),
    "CrossEntropy": lavajax.CrossEntropy(4),
    "Sine": lavajax.Sine(shots=2, phase=(-math.pi, math.pi)),
    "FitzHughNagumo": lavajax.FitzHughNagumo(shots=3, c=(0.5, 0.1 + 0.9)),
    "MassSpring": lavajax.MassSpring.shifted(),
    "Pendulum": lavajax.Pendulum.shifted(queries=7),
    "VanDerPol": lavajax.VanDerPol(mu=(1, 2)),
    "Cartpole": lavajax.Cartpole(actuated="both", length=(0.4, 0.5)),
    "AirQuality": lavajax.AirQuality("here.zip", column="O3", inputs="all", split="station"),
    "Radio": lavajax.Radio("here.hdf5", shots=20),
    "SyntheticFm": lavajax.SyntheticFm(snr=(5, 0.1 + 0.2 + 5), clean_query=True),
    "Omniglot": lavajax.Omniglot("here", ways=3, shots=2, rotations="none"),
    "MiniImageNet": lavajax.MiniImageNet("there", ways=4, queries=3),
    "NoisyLabels": lavajax.NoisyLabels(lavajax.Sine(shots=4), 0.1 + 0.2, "both"),
    "FixedTasks": lavajax.FixedTasks(lavajax.Cartpole(), number=7, seed=2),
    "VaryingShots": lavajax.VaryingShots(lavajax.Sine(), (1, 5)),
    "Table": lavajax.Table(("a", "b"), "x", ("y,1", "z"), data="t.csv", test_share=0.1 + 0.2),
    "Units": lavajax.Units(
        lavajax.Columns((0.1 + 0.2, -1e9), (1e-9, 3), ("a", "b,c")), lavajax.Columns((1,), (2,))
    ),
    "Columns": lavajax.Columns((0.1,), (0.3,), ("a",)),
}


@pytest.mark.parametrize("name", list(classes()))
def test_json_round_trip_is_exact(name):
    """Every class of the table, other than by its defaults."""
    value = EXAMPLES[name]
    back = from_json(json.loads(json.dumps(to_json(value), allow_nan=False)))
    assert back == value
    assert type(back) is type(value)
    assert hash(back) == hash(value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"class": "Lavva"}, r"class must be one of .* got 'Lavva'; did you mean 'Lava'\?"),
        ({"class": "os.system"}, "class must be one of"),
        ({"class": ["Lava"]}, "class must be one of"),
        ({"epsilon": 1}, "a record must name its class, got the keys epsilon"),
        (
            {"class": "Lava", "epsilonn": 1},
            r"Lava has no field 'epsilonn'; did you mean 'epsilon'\?",
        ),
        (
            {"class": "Lava", "epsilon": -1},
            r"Lava\.epsilon must be a finite number above 0, got -1",
        ),
        ({"class": "Lava", "model": {"class": "Head"}}, r"Lava\.model must be an instance"),
    ],
)
def test_records_that_are_not_ours_are_refused(data, message):
    with pytest.raises(ValueError, match=message):
        from_json(data)


def test_a_users_own_module_has_no_record():
    method = lavajax.Anil(model=lavajax.Linen(nn.Dense(3)))
    with pytest.raises(ValueError, match="cannot write Linen as JSON"):
        to_json(method)
