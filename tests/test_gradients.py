"""Reverse-mode gradients of the outer loss against central finite differences, in float64."""

import jax.numpy as jnp
import pytest

import lavajax as lj
from helpers import assert_gradient_is_finite_difference, make_labels, make_points

SMOOTH = lj.MLP(hidden=(4,), activation="tanh")  # no kinks
# A stationary kernel does not see the bias of a last linear layer.
CURVED = lj.MLP(hidden=(4,), activation="tanh", linear_features=False)
HEAD, CONTEXT, FULL = lj.Head(), lj.Context(2), lj.Full()
CLASSES = lj.CrossEntropy(3)
BARS = {"prior_correction": True, "noise": 0.4, "learn_noise": True, "outer": "nll"}


def lava(subspace=HEAD, steps=1, **settings):
    settings.setdefault("learn_epsilon", True)
    return lj.Lava(SMOOTH, subspace=subspace, inner_steps=steps, **settings)


def imaml(subspace):
    """The inner problem solved to rounding."""
    return lj.IMaml(
        SMOOTH,
        subspace=subspace,
        proximal=2.0,
        learn_proximal=True,
        inner_steps=400,
        cg_steps=60,
        curvature="hessian",
    )


SETTINGS = {
    "head-1": lava(),
    "head-3": lava(steps=3),
    "head-converged": lava(steps="converged"),
    "head-map": lava(steps="map"),
    "head-primal": lava(solver="primal"),
    "head-naive": lava(steps=2, solver="naive"),
    "head-hessian": lava(curvature="hessian"),
    "head-flat": lava(steps=2, curvature="flat", learn_epsilon=False),
    "head-classes": lava(steps=2, point_loss=CLASSES),
    "head-classes-hessian": lava(curvature="hessian", point_loss=CLASSES),
    "head-bars": lava(steps="map", **BARS),
    "context-bars": lava(CONTEXT, **BARS),
    "context-1": lava(CONTEXT),
    "context-3-prior": lava(CONTEXT, 3, curvature_at="prior"),
    "context-converged": lava(lj.Context(3), "converged"),
    "context-map": lava(CONTEXT, "map"),
    "context-hessian": lava(CONTEXT, 2, curvature="hessian"),
    "full-1": lava(FULL),
    "full-converged": lava(FULL, "converged"),
    "full-map": lava(FULL, "map"),
    "full-2-adapted": lava(FULL, 2, curvature_at="adapted"),
    "full-primal": lava(FULL, solver="primal"),
    "full-hessian": lava(FULL, curvature="hessian", epsilon=5.0),
    "full-classes": lava(FULL, point_loss=CLASSES),
    "maml": lj.Maml(SMOOTH, inner_steps=2),
    "anil": lj.Anil(SMOOTH, inner_steps=2),
    "cavia": lj.Cavia(SMOOTH, subspace=CONTEXT, inner_steps=2),
    "ridge": lj.Ridge(SMOOTH),
    "imaml-head": lj.IMaml(SMOOTH, subspace=HEAD, learn_proximal=True),
    "imaml-context": imaml(CONTEXT),
    "imaml-full": imaml(FULL),
    "dkt-linear": lj.Dkt(SMOOTH, kernel="linear"),
    "dkt-rbf": lj.Dkt(CURVED, noise=0.5, objective="predictive"),
    "dkt-spectral": lj.Dkt(CURVED, kernel="spectral_mixture", noise=0.5),
    "alpaca": lj.Alpaca(SMOOTH, noise=0.5, learn_noise=True),
    "alpaca-primal": lj.Alpaca(SMOOTH, noise=0.5, solver="primal"),
    "alpaca-mse": lj.Alpaca(SMOOTH, outer="mse"),
    "ridge-zero-primal": lj.Ridge(SMOOTH, centre=False, solver="primal"),
    "ridge-classes": lj.Ridge(SMOOTH, CLASSES),
    "maml-classes": lj.Maml(SMOOTH, CLASSES),
    "meta-sgd": lj.MetaSgd(SMOOTH, inner_steps=2),
    "vfml-storm": lj.Vfml(SMOOTH, variant="storm", first_order=False, inner_steps=2, gamma=0.3),
    "reptile": lj.Reptile(SMOOTH, inner_steps=2),
    "llama-head": lj.Llama(SMOOTH, eta=0.3),
    "llama-context": lj.Llama(SMOOTH, subspace=CONTEXT, eta=0.3),
    "llama-classes": lj.Llama(SMOOTH, CLASSES, eta=0.3),
    "hyper-head": lj.HyperNetwork(SMOOTH, encoder=(4,), encoding=3, activation="tanh"),
    "hyper-context": lj.HyperNetwork(SMOOTH, subspace=CONTEXT, decoder=(4,), activation="silu"),
    "hyper-classes": lj.HyperNetwork(SMOOTH, CLASSES, decoder=(4,), activation="tanh"),
    "cnp": lj.Cnp(encoder=(4,), encoding=3, decoder=(4,), activation="tanh"),
    "attentive-cnp": lj.AttentiveCnp(
        width=4, heads=2, key_encoder=(3,), encoder=(3,), decoder=(4,), activation="tanh"
    ),
    "tnp": lj.Tnp(width=4, embedding_layers=2, layers=2, heads=2, feedforward=4, activation="tanh"),
    "conditioned": lj.Conditioned(
        lj.Ridge(SMOOTH), encoder=(3,), encoding=2, activation="tanh", min_scale=0.1
    ),
    "platipus": lj.Platipus(SMOOTH, inner_steps=2, log_std=-1.0),
    "platipus-context": lj.Platipus(SMOOTH, subspace=CONTEXT, log_std=-1.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_outer_gradient_is_the_finite_difference_in_every_learned_leaf(x64, name):
    """LAVA-9, and the same for every method; with padding that holds NaN and infinity."""
    method = SETTINGS[name]
    if method.point_loss == CLASSES:
        support, query = make_labels(4, mask=[1, 1, 0, 1]), make_labels(5, seed=7)
    else:
        support, query = make_points(4, 2, mask=[1, 1, 0, 1]), make_points(5, 2, seed=7)
        support = lj.Points(support.x, support.y.at[2].set(jnp.inf), support.mask)
    support = lj.Points(support.x.at[2].set(jnp.nan), support.y, support.mask)
    assert_gradient_is_finite_difference(method, lj.Task(support, query))
