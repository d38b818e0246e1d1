"""What several test files share: small models, points, and comparisons of pytrees."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import lavajax as lj
from lavajax.subspace import net_of

ROOT = Path(__file__).resolve().parents[1]
# Published files, where there are any; tests that want them skip by name where they are not.
PUBLISHED = Path(os.environ.get("LAVAJAX_DATA", ROOT.parent / "shared" / "data"))
REAL_OMNIGLOT = PUBLISHED / "omniglot"
REAL_AIR = PUBLISHED / "beijing_air_quality" / "PRSA2017_Data_20130301-20170228.zip"

RELU = lj.MLP(hidden=(8, 8))
TANH = lj.MLP(hidden=(8, 8), activation="tanh")  # for finite differences: no kinks


@dataclasses.dataclass(frozen=True)
class Circle:
    """Features (cos x, sin x): every augmented feature has squared norm 2."""

    def init(self, key, x, context=None):
        """Nothing to draw."""
        return {}, {}

    def features(self, weights, fixed, x, *, context=None, mask=None):
        """``[N, 2]``."""
        return jnp.concatenate([jnp.cos(x), jnp.sin(x)], axis=1)


def make_points(n, k=1, d=1, seed=0, mask=None):
    """Regression points in the default float dtype."""
    x_key, y_key = jax.random.split(jax.random.key(seed))
    dtype = jnp.result_type(float)
    mask = None if mask is None else jnp.asarray(mask, bool)
    x = jax.random.normal(x_key, (n, d), dtype)
    return lj.Points(x, jax.random.normal(y_key, (n, k), dtype), mask)


def make_labels(n, classes=3, d=1, seed=0, mask=None):
    """Points with integer labels."""
    labels = jax.random.randint(jax.random.key(seed + 1), (n,), 0, classes)
    return dataclasses.replace(make_points(n, 1, d, seed, mask), y=labels)


def make_params(method, points, seed=0):
    """Meta-parameters for points like these."""
    return method.init(jax.random.key(seed), points.x, points.y)


def with_method(params, method):
    """The same leaves under another method: what two methods are compared by."""
    return dataclasses.replace(params, method=method)


def prior_block(params):
    """The block before adaptation."""
    return params.method.subspace.block(net_of(params))


def adapt(params, support):
    """The adapted block, compiled."""
    return lj.adapt(params, support).block


def stack(trees):
    """A batch of equal pytrees."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def at(tree, index):
    """One entry of a batch."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def flat(tree):
    """All leaves as one NumPy vector."""
    leaves = [np.ravel(np.asarray(leaf)) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves) if leaves else np.zeros(0)


def error(actual, expected):
    """The largest difference of two pytrees of one structure, relative to the largest entry."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    assert [np.shape(a) for a in jax.tree.leaves(actual)] == [
        np.shape(e) for e in jax.tree.leaves(expected)
    ]
    a, e = flat(actual), flat(expected)
    return np.max(np.abs(a - e)) / max(np.max(np.abs(e)), 1e-30) if e.size else 0.0


def assert_close(actual, expected, tolerance):
    """Equal within ``tolerance`` of the largest entry; NaN is never equal."""
    assert error(actual, expected) <= tolerance


def assert_different(actual, expected, by=1e-4):
    """Apart by more than rounding: guards against comparisons that hold for a trivial reason."""
    assert error(actual, expected) > by


def assert_finite(tree):
    """No NaN and no infinity in any leaf."""
    assert np.all(np.isfinite(flat(tree)))


def assert_gradient_is_finite_difference(method, task):
    """Reverse mode against central differences, in each leaf that is learned; needs float64."""
    params = make_params(method, task.support)
    start, unravel = ravel_pytree(params.learned)
    key = jax.random.key(3)  # the same noise at every shift

    def loss(vector):
        return method.loss(params.replace_learned(unravel(vector)), task, key)

    # Two random directions in each leaf.
    leaves = jax.tree.leaves(params.learned)
    owner = np.repeat(np.arange(len(leaves)), [leaf.size for leaf in leaves])
    rng = np.random.default_rng(0)
    directions = np.stack(
        [rng.standard_normal(start.size) * (owner == i) for i in range(len(leaves)) for _ in "ab"]
    )
    h = 1e-5
    shifted = jnp.concatenate([start + h * directions, start - h * directions])
    values, gradient = jax.jit(lambda v, many: (jax.vmap(loss)(many), jax.grad(loss)(v)))(
        start, shifted
    )
    up, down = np.split(np.asarray(values), 2)
    gradient = np.asarray(gradient)
    for leaf in range(len(leaves)):
        assert np.linalg.norm(gradient[owner == leaf]) > 0
    expected = (up - down) / (2 * h)
    # A direction may be nearly level: rounding then counts against the size of the leaf's gradient.
    size = np.array([np.linalg.norm(gradient * (d != 0)) for d in directions])
    np.testing.assert_array_less(np.abs(directions @ gradient - expected), 1e-5 * size + 1e-10)


def assert_affine_in_labels(method, tolerance):
    """Predictions at fixed inputs are affine in the labels of the support, and depend on them."""
    support, other = make_points(4, 2), make_points(4, 2, seed=5)
    params = make_params(method, support)

    def predict(y):
        return lj.predict(params, lj.adapt(params, (support.x, y)), other.x).mean

    between = 0.3 * predict(support.y) + 0.7 * predict(other.y)
    assert_close(predict(0.3 * support.y + 0.7 * other.y), between, tolerance)
    assert_different(predict(other.y), predict(support.y))


def numpy_features(params, x):
    """Augmented features [phi(x), 1] of a ReLU MLP, by NumPy alone."""
    h = np.asarray(x)
    layers = params["weights"]
    for index, layer in enumerate(layers):
        h = h @ np.asarray(layer["weight"]).T + np.asarray(layer["bias"])
        if index < len(layers) - 1:
            h = np.maximum(h, 0)
    return np.concatenate([h, np.ones((len(h), 1))], axis=1)


def equations(jaxpr):
    """All equations of a traced function, those of the functions inside it too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for each in value if isinstance(value, (tuple, list)) else [value]:
                inner = getattr(each, "jaxpr", each)  # of a closed one
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


# Every method in every subspace, for what must hold of all of them.
METHODS = {
    "lava-head": lj.Lava(RELU),
    "lava-head-recommended": lj.lava_converged(model=RELU),
    "lava-head-hessian": lj.Lava(RELU, curvature="hessian"),
    "lava-context": lj.Lava(RELU, subspace=lj.Context(2)),
    "lava-full": lj.Lava(RELU, subspace=lj.Full()),
    "lava-full-adapted": lj.Lava(RELU, subspace=lj.Full(), inner_steps=2, curvature_at="adapted"),
    "maml": lj.Maml(RELU),
    "anil": lj.Anil(RELU, inner_steps=2),
    "cavia": lj.Cavia(RELU, subspace=lj.Context(2), inner_rate=1.0),
    "ridge": lj.Ridge(RELU),
    "imaml": lj.IMaml(RELU),
    "alpaca": lj.Alpaca(RELU),
    "anil-classes": lj.Anil(RELU, lj.CrossEntropy(3)),
    "lava-head-classes": lj.Lava(RELU, lj.CrossEntropy(3)),
}


def points_for(method, n, seed=0, mask=None):
    """Points that fit a method of ``METHODS``: two outputs, or labels."""
    if isinstance(method.point_loss, lj.CrossEntropy):
        return make_labels(n, 3, seed=seed, mask=mask)
    return make_points(n, 2, seed=seed, mask=mask)


def call_script(script, *args, columns=120):
    """Calls a script's main in this process; its exit code, and what it printed."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script.__name__}.py", *map(str, args)])
        patch.setenv("COLUMNS", str(columns))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                code = script.main()
            except SystemExit as stop:  # the command-line parser's own way to refuse
                code = stop.code
    return code, out.getvalue()


@contextlib.contextmanager
def small_files(size):
    """No file can grow beyond ``size`` bytes: the system refuses to write, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would keep a part of what is imported first meanwhile
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # Python ignores the signal of it
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = bytecode
