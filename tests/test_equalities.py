"""Methods that are the same method, where their settings say so."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lavajax as lj
from helpers import (
    RELU,
    Circle,
    adapt,
    assert_close,
    assert_different,
    make_params,
    make_points,
    with_method,
)

N, NOISE, RIDGE = 4, 0.3, 0.2


def points():
    return make_points(N, 3), make_points(5, 3, seed=6)


def inverse_softplus(value):
    return np.log(np.expm1(value))


def ridge_params(support, **settings):
    method = lj.Ridge(RELU, ridge=RIDGE, learn_ridge=False, **settings)
    return make_params(method, support)


def alpaca_params(params, precision):
    """The network and head of ``params`` under ALPaCA with Lambda0 = precision I."""
    size = params["head"].shape[0]
    factor = inverse_softplus(1 / np.sqrt(precision)) * jnp.eye(size)
    learned = {n: params[n] for n in ("weights", "head")} | {"prior_factor": factor}
    method = lj.Alpaca(RELU, noise=NOISE)
    return with_method(params.replace_learned(learned), method)


def test_lava_of_equal_norms_and_a_matching_rate_is_ridge(x64):
    """alpha (c s + eps) = 1 for every point, and lambda = eps/c."""
    support, _ = points()
    c, epsilon = 2 / 3, 0.2
    lava = make_params(
        lj.Lava(Circle(), inner_rate=1 / (c * 2 + epsilon), epsilon=epsilon), support
    )
    ridge = lj.Ridge(Circle(), ridge=epsilon / c, learn_ridge=False)
    assert_close(adapt(with_method(lava, ridge), support), adapt(lava, support), 1e-10)
    faster = lava.replace_learned({**lava.learned, "inner_rate": jnp.asarray(1.0)})
    assert_different(adapt(faster, support), adapt(lava, support))


def test_ridge_is_the_mean_of_alpaca(x64):
    """Lambda0 = N lambda I."""
    support, query = points()
    ridge = ridge_params(support)
    alpaca = alpaca_params(ridge, N * RIDGE)
    assert_close(adapt(alpaca, support), adapt(ridge, support), 1e-9)
    means = [lj.predict(p, lj.adapt(p, support), query.x).mean for p in (alpaca, ridge)]
    assert_close(*means, 1e-9)


@pytest.mark.parametrize("n", [0, N])
def test_alpaca_of_a_flat_prior_is_a_linear_deep_kernel(x64, n):
    """K0 = 0 and Lambda0 = (sigma^2/s) I: the same density, whatever the support."""
    support, query = points()
    support = lj.Points(support.x[:n], support.y[:n])
    scale = 0.7
    deep = make_params(lj.Dkt(RELU, kernel="linear", noise=NOISE), query)
    hyper = {"raw_scale": jnp.asarray(inverse_softplus(scale - 1e-4))}
    deep = deep.replace_learned({**deep.learned, "kernel": hyper})
    zero = {"weights": deep["weights"], "head": jnp.zeros((9, 3))}
    alpaca = alpaca_params(deep.replace_learned(zero), NOISE**2 / scale)
    first, second = (lj.predict(p, lj.adapt(p, support), query.x) for p in (deep, alpaca))
    assert_close(first, second, 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_imaml_of_a_head_is_ridge(x64, reduction):
    """N lambda_ridge = N lambda/c: the adapted head, and the outer gradient."""
    support, query = points()
    c = {"mean": 2 / 3, "sum": 2.0}[reduction]
    loss = lj.SquaredError(reduction)
    ridge = make_params(lj.Ridge(RELU, loss, ridge=RIDGE, learn_ridge=False), support)
    imaml = with_method(ridge, lj.IMaml(RELU, loss, subspace=lj.Head(), proximal=c * RIDGE))
    assert_close(adapt(imaml, support), adapt(ridge, support), 1e-10)
    task = lj.Task(support, query)
    gradients = [
        jax.jit(jax.grad(lambda v, p=p: p.method.loss(p.replace_learned(v), task, None)))(p.learned)
        for p in (imaml, ridge)
    ]
    assert_close(*gradients, 1e-9)
