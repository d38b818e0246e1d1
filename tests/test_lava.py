"""LAVA: agreement of all solvers, limits, and equality with simpler methods."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import lavajax as lj
from helpers import (
    RELU,
    TANH,
    Circle,
    adapt,
    assert_affine_in_labels,
    assert_close,
    assert_different,
    at,
    equations,
    flat,
    make_labels,
    make_params,
    make_points,
    numpy_features,
    prior_block,
    with_method,
)
from lavajax import precision

HEAD, CONTEXT, FULL = lj.Head(), lj.Context(2), lj.Full()
# The gradient method that moves the same block.
AVERAGING = {
    "head": (HEAD, lj.Anil(model=RELU)),
    "context": (CONTEXT, lj.Cavia(model=RELU, subspace=CONTEXT)),
    "full": (FULL, lj.Maml(model=RELU)),
}
SUBSPACES = pytest.mark.parametrize("name", AVERAGING)
SMALL = lj.MLP(hidden=(3,))  # P = 4: N = 7 lies above it


def c_of(loss, k):
    return 2 / k if loss.reduction == "mean" else 2.0


def literal_head(z, y, prior, *, hessian, gradient, rate, epsilon, steps):
    """Steps 1 to 4 of the method's definition, point by point, with nothing but NumPy."""
    thetas, precisions = [], []
    identity = np.eye(prior.size)
    for point, target in zip(z, y, strict=True):
        w = prior.copy()
        for _ in range(steps):
            w = w - rate * gradient(point, target, w)
        thetas.append(w.ravel())
        precisions.append((hessian(point, w) + epsilon * identity) / (1 + epsilon))
    total = np.sum(precisions, axis=0)
    weighted = np.sum([h @ t for h, t in zip(precisions, thetas, strict=True)], axis=0)
    return np.linalg.solve(total, weighted).reshape(prior.shape)


def literal_squared(z, y, prior, c, **settings):
    return literal_head(
        z,
        y,
        prior,
        gradient=lambda z, y, w: c * np.outer(z, z @ w - y),
        hessian=lambda z, w: np.kron(c * np.outer(z, z), np.eye(w.shape[1])),
        **settings,
    )


def ridge(z, y, prior, strength):
    gram = z.T @ z + strength * np.eye(z.shape[1])
    return prior + np.linalg.solve(gram, z.T @ (y - z @ prior))


@jax.jit
def diagnose(params, support):
    return params.method.diagnose(params, support)


def check_routes(method, routes, support, tolerance):
    """All ``routes`` against the naive solver, for a support whole and in part."""
    params = make_params(method, support)
    everything = jnp.ones(support.x.shape[0], bool)
    masks = jnp.stack([everything, everything.at[1].set(False)])
    methods = [dataclasses.replace(method, **r) for r in ({"solver": "naive"}, *routes)]

    @jax.jit
    def run(params, support, masks):
        def one(mask):
            points = dataclasses.replace(support, mask=mask)
            return [m.adapt(params, points).block for m in methods]

        return jax.vmap(one)(masks)

    expected, *actual = run(params, support, masks)
    prior = prior_block(params)
    for index in range(len(masks)):
        reference, *blocks = (at(tree, index) for tree in (expected, *actual))
        assert_different(reference, prior)
        for block in blocks:
            assert_close(block, reference, tolerance)


GGN_ROUTES = [{"solver": s} for s in ("auto", "primal", "dual")]
EXACT = {"curvature": "hessian"}
LOSSES = {
    "1": (1, lj.SquaredError()),
    "3-mean": (3, lj.SquaredError("mean")),
    "3-sum": (3, lj.SquaredError("sum")),
}
STEPS = (1, 3, "converged", "map")
EVERY_STEPS = pytest.mark.parametrize(
    ("precise", "tolerance", "steps"),
    [*((True, 1e-10, steps) for steps in STEPS), (False, 1e-4, 1), (False, 1e-4, "map")],
)
DTYPES = pytest.mark.parametrize(("precise", "tolerance"), [(True, 1e-10), (False, 1e-4)])


@DTYPES
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("loss", LOSSES)
def test_head_solvers_agree_with_the_literal_steps(precise, tolerance, steps, loss):
    """LAVA-3, for N below and above P, with and without a mask."""
    k, point_loss = LOSSES[loss]
    routes = [*GGN_ROUTES, EXACT] if precise and loss == "3-mean" else GGN_ROUTES
    with jax.enable_x64(precise):
        for n in (3, 7):
            method = lj.Lava(SMALL, point_loss, HEAD, inner_steps=steps)
            check_routes(method, routes, make_points(n, k), tolerance)


@EVERY_STEPS
@pytest.mark.parametrize("at", ["adapted", "prior"])
def test_context_solvers_agree_with_the_literal_steps(precise, tolerance, steps, at):
    """LAVA-3 and, for a ReLU network, LAVA-11: N k lies above and below C."""
    with jax.enable_x64(precise):
        # One wide layer: no point is without an effect of the context, which has its own test.
        model = lj.MLP(hidden=(16,))
        method = lj.Lava(model, subspace=lj.Context(3), inner_steps=steps, curvature_at=at)
        check_routes(method, [*GGN_ROUTES, EXACT], make_points(3, 1), tolerance)
        if at == "adapted":
            method = dataclasses.replace(method, point_loss=lj.SquaredError("sum"))
            check_routes(method, GGN_ROUTES, make_points(2, 2), tolerance)


@EVERY_STEPS
@pytest.mark.parametrize("at", ["adapted", "prior"])
def test_full_solvers_agree_with_the_literal_steps(precise, tolerance, steps, at):
    """LAVA-3, where the solver in the space of the outputs never writes a step out."""
    with jax.enable_x64(precise):
        loss = lj.SquaredError("sum")
        method = lj.Lava(SMALL, loss, FULL, inner_steps=steps, curvature_at=at)
        check_routes(method, GGN_ROUTES, make_points(4, 2), tolerance)


@pytest.mark.parametrize("at", ["adapted", "prior"])
@pytest.mark.parametrize("subspace", [CONTEXT, FULL], ids=["context", "full"])
def test_exact_curvature_agrees_with_the_literal_steps(x64, subspace, at):
    """Exact Hessians of a smooth network, where they differ from Gauss-Newton's.

    At an epsilon that makes their sum definite: else there is no estimate.
    """
    model = lj.MLP(hidden=(3,), activation="tanh")
    method = lj.Lava(model, subspace=subspace, curvature="hessian", curvature_at=at, epsilon=5.0)
    check_routes(method, [{}], make_points(4, 2), 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("n", "steps"), [(3, 1), (3, 3), (7, 3)])
def test_head_is_the_literal_definition_in_numpy(x64, reduction, n, steps):
    """LAVA-3 against steps 1 to 4 of the definition, written without this library."""
    k, loss = 3, lj.SquaredError(reduction)
    method = lj.Lava(SMALL, loss, inner_steps=steps, inner_rate=0.3, epsilon=0.2)
    support = make_points(n, k)
    params = make_params(method, support)
    expected = literal_squared(
        numpy_features(params, support.x),
        np.asarray(support.y),
        np.asarray(params["head"]),
        c_of(loss, k),
        rate=0.3,
        epsilon=0.2,
        steps=steps,
    )
    assert_close(adapt(params, support), expected, 1e-10)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_map_steps_of_a_head_are_ridge_regression(x64, reduction):
    """``inner_steps="map"`` is ridge regression around W_0 of strength N eps/c."""
    loss = lj.SquaredError(reduction)
    method = lj.Lava(RELU, loss, inner_steps="map", epsilon=0.3)
    support = make_points(4, 3)
    params = make_params(method, support)
    z, y = numpy_features(params, support.x), np.asarray(support.y)
    expected = ridge(z, y, np.asarray(params["head"]), 4 * 0.3 / c_of(loss, 3))
    assert_close(adapt(params, support), expected, 1e-10)


def test_many_small_steps_of_a_head_are_the_converged_ones(x64):
    """The limit S -> infinity of the per-point descent."""
    support = make_points(4, 2)
    converged = lj.Lava(RELU, inner_steps="converged")
    many = lj.Lava(RELU, inner_steps=4000, inner_rate=0.1, learn_inner_rate=False)
    params = make_params(converged, support)
    assert_close(adapt(with_method(params, many), support), adapt(params, support), 1e-9)


@pytest.mark.parametrize(
    "subspace", [lj.Context(3), FULL, lj.Context(1)], ids=["context", "full", "small-context"]
)
def test_converged_steps_are_the_smallest_that_fit_each_linearised_point(x64, subspace):
    """Seen through the flat average; also where C < k, and J_i J_i^T is singular."""
    method = lj.Lava(TANH, subspace=subspace, inner_steps="converged", curvature="flat")
    support = make_points(3, 2)
    params = make_params(method, support)
    prior, unravel = ravel_pytree(prior_block(params))

    @jax.jit
    def outputs(block):
        return method.predict(params, lj.Adapted(unravel(block)), support.x).mean

    f, jacobian = np.asarray(outputs(prior)), np.asarray(jax.jit(jax.jacobian(outputs))(prior))
    residual = f - np.asarray(support.y)
    # A context is damped by a share of each point's own scale; all weights: -pinv(J_i) r_i.
    damping = 0.0 if subspace == FULL else 1e-4
    grams = [j @ j.T for j in jacobian]
    steps = [
        -j.T @ np.linalg.solve(gram + damping * np.trace(gram) / 2 * np.eye(2), r)
        for j, gram, r in zip(jacobian, grams, residual, strict=True)
    ]
    expected = np.asarray(prior) + np.mean(steps, axis=0)
    assert_close(ravel_pytree(adapt(params, support))[0], expected, 1e-6)


@pytest.mark.parametrize("steps", ["converged", "map"])
def test_a_context_without_effect_is_left_alone(steps):
    """Context weights of 0 make J_i = 0: the block stays, and nothing is NaN."""
    method = lj.Lava(RELU, subspace=CONTEXT, inner_steps=steps)
    support = make_points(3)
    params = make_params(method, support)
    first, *rest = params["weights"]
    blind = [{**first, "weight": first["weight"].at[:, 1:].set(0)}, *rest]
    params = params.replace_learned({**params.learned, "weights": blind})
    assert_close(adapt(params, support), params["context"], 1e-7)


@pytest.mark.parametrize("steps", [1, "converged", "map"])
@SUBSPACES
def test_learned_epsilon_stands_above_its_floor(x64, name, steps):
    """eps is exp(log_eps) + floor * mean_i tr(H_i)/k, by every route."""
    subspace, _ = AVERAGING[name]
    support = make_points(4, 2, mask=[1, 1, 0, 1])
    learns = lj.Lava(
        SMALL, subspace=subspace, inner_steps=steps, learn_epsilon=True, epsilon_floor=5.0
    )
    params = make_params(learns, support)
    traces = np.trace(diagnose(params, support).hessians, axis1=1, axis2=2)
    used = 0.1 + 5 * np.sum(traces) / (3 * 2)
    assert used > 0.11
    if name == "head":
        real = numpy_features(params, support.x)[np.asarray(support.mask)]
        np.testing.assert_allclose(used, 0.1 + 5 * np.mean(np.sum(real**2, axis=1)))
    fixed = dataclasses.replace(learns, learn_epsilon=False, epsilon=float(used))
    learned = {n: v for n, v in params.learned.items() if n != "log_epsilon"}
    expected = adapt(with_method(params.replace_learned(learned), fixed), support)
    for solver in ("auto", "naive"):
        method = dataclasses.replace(learns, solver=solver)
        assert_close(adapt(with_method(params, method), support), expected, 1e-10)
    np.testing.assert_allclose(diagnose(params, support).epsilon, used)


@pytest.mark.parametrize("steps", [1, 3])
@SUBSPACES
def test_one_point_gives_its_own_steps(x64, name, steps):
    """LAVA-1: with N = 1 the curvature has nothing to weigh, whatever epsilon is."""
    subspace, averaging = AVERAGING[name]
    support = make_points(1, 2)
    params = make_params(lj.Lava(RELU, subspace=subspace), support)
    averaging = dataclasses.replace(averaging, inner_steps=steps)
    expected = adapt(with_method(params, averaging), support)
    for epsilon in (1e-4, 10.0):
        method = lj.Lava(RELU, subspace=subspace, inner_steps=steps, epsilon=epsilon)
        assert_close(adapt(with_method(params, method), support), expected, 1e-9)


@pytest.mark.parametrize("steps", [1, 3])
@SUBSPACES
def test_identical_points_count_as_one(x64, name, steps):
    """LAVA-2."""
    subspace, _ = AVERAGING[name]
    one = make_points(1, 2)
    params = make_params(lj.Lava(RELU, subspace=subspace, inner_steps=steps), one)
    five = lj.Points(jnp.repeat(one.x, 5, axis=0), jnp.repeat(one.y, 5, axis=0))
    assert_close(adapt(params, five), adapt(params, one), 1e-9)


@SUBSPACES
def test_infinite_epsilon_is_the_average(x64, name):
    """LAVA-4: epsilon drowns the curvature, and one step of the mean loss is left."""
    subspace, averaging = AVERAGING[name]
    support = make_points(4, 2)
    params = make_params(lj.Lava(RELU, subspace=subspace, epsilon=1e9), support)
    assert_close(adapt(params, support), adapt(with_method(params, averaging), support), 1e-6)


@SUBSPACES
def test_flat_curvature_is_the_average_for_one_step_only(x64, name):
    """For S = 1 the gradient of the mean is the mean of the gradients; for S = 3 it is not."""
    subspace, averaging = AVERAGING[name]
    support = make_points(4, 2)
    rate = 30.0 if name == "context" else 0.1  # a context feels little of one step
    params = make_params(lj.Lava(RELU, subspace=subspace, inner_rate=rate), support)

    def close(a, b):
        assert_close(a, b, 1e-12)

    for steps, check in ((1, close), (3, assert_different)):
        flat_lava = lj.Lava(RELU, subspace=subspace, curvature="flat", inner_steps=steps)
        plain = dataclasses.replace(averaging, inner_steps=steps)
        check(*(adapt(with_method(params, m), support) for m in (flat_lava, plain)))


def test_the_epsilon_of_each_points_own_map_is_learned_under_flat_curvature_too(x64):
    """Where points are weighed alike, it damps what each moves by."""
    support = make_points(4, 2)
    method = lj.Lava(RELU, inner_steps="map", curvature="flat", learn_epsilon=True)
    params = make_params(method, support)

    def loss(learned):
        task = lj.Task(support, make_points(5, 2, seed=3))
        return method.loss(params.replace_learned(learned), task, None)

    gradient = jax.jit(jax.grad(loss))(params.learned)["log_epsilon"]
    assert abs(float(gradient)) > 1e-4
    with pytest.raises(ValueError, match="epsilon has no effect with curvature='flat'"):
        dataclasses.replace(method, inner_steps=1)


def test_equal_norms_and_a_matching_rate_are_ridge_regression(x64):
    """LAVA-5: alpha (c s + eps) = 1 makes the pseudo-targets the labels."""
    c, epsilon = 2 / 3, 0.2
    method = lj.Lava(Circle(), inner_rate=1 / (c * 2 + epsilon), epsilon=epsilon)
    support = make_points(5, 3)
    params = make_params(method, support)
    x = np.asarray(support.x)
    z = np.concatenate([np.cos(x), np.sin(x), np.ones_like(x)], axis=1)
    expected = ridge(z, np.asarray(support.y), np.asarray(params["head"]), 5 * epsilon / c)
    assert_close(adapt(params, support), expected, 1e-10)


@SUBSPACES
def test_order_and_padding_have_no_effect(x64, name):
    """LAVA-6."""
    subspace, _ = AVERAGING[name]
    support = make_points(4, 2)
    params = make_params(lj.Lava(RELU, subspace=subspace), support)
    expected = adapt(params, support)
    order = np.array([2, 0, 3, 1])
    assert_close(adapt(params, lj.Points(support.x[order], support.y[order])), expected, 1e-10)
    padded = lj.Points(
        jnp.concatenate([support.x, jnp.full((2, 1), jnp.nan)]),
        jnp.concatenate([support.y, jnp.full((2, 2), 1e6)]),
        jnp.arange(6) < 4,
    )
    assert_close(adapt(params, padded), expected, 1e-10)


@pytest.mark.parametrize("steps", STEPS)
def test_head_predictions_are_affine_in_the_labels(x64, steps):
    """LAVA-7."""
    assert_affine_in_labels(lj.Lava(RELU, inner_steps=steps), 1e-10)


def test_label_noise_costs_what_the_smoother_says(x64):
    """LAVA-7: noise of deviation sigma adds sigma^2 ||A_q||^2 to the squared error at q."""
    rate, epsilon, sigma = 0.2, 0.1, 0.5
    method = lj.Lava(RELU, inner_rate=rate, epsilon=epsilon)
    support, query = make_points(5), make_points(1, seed=9)
    params = make_params(method, support)
    z, zq = numpy_features(params, support.x), numpy_features(params, query.x)
    cs = 2 * np.sum(z**2, axis=1)
    gram = 2 * z.T @ z + 5 * epsilon * np.eye(z.shape[1])
    smoother = (zq @ np.linalg.solve(gram, 2 * z.T * (rate * (cs + epsilon))))[0]

    def predict(y):
        return lj.predict(params, lj.adapt(params, (support.x, y)), query.x).mean[0, 0]

    assert_close(jax.jit(jax.grad(predict))(support.y)[:, 0], smoother, 1e-10)
    noise = sigma * jax.random.normal(jax.random.key(0), (20_000, 5, 1))
    noisy = jax.vmap(lambda e: predict(support.y + e))(noise)
    expected = sigma**2 * np.sum(smoother**2)
    np.testing.assert_allclose(np.var(noisy), expected, rtol=0.05)  # five standard errors
    np.testing.assert_allclose(np.mean(noisy), predict(support.y), atol=5 * np.sqrt(expected / 2e4))


@SUBSPACES
def test_equal_curvatures_give_the_average(x64, name):
    """LAVA-8: one input with different labels; at the prior for blocks where H_i moves with it."""
    subspace, averaging = AVERAGING[name]
    points = make_points(4, 2)
    support = dataclasses.replace(points, x=jnp.repeat(points.x[:1], 4, axis=0))
    params = make_params(lj.Lava(RELU, subspace=subspace, curvature_at="prior"), support)
    assert_close(adapt(params, support), adapt(with_method(params, averaging), support), 1e-9)


@pytest.mark.parametrize("n", [2, 3, 7])
def test_condition_number_and_rank_of_a_heads_precision(x64, n):
    """LAVA-10, P = 4."""
    method = lj.Lava(lj.MLP(hidden=(3,), activation="tanh"), epsilon=0.2)
    support = make_points(n, d=5)
    params = make_params(method, support)
    found = diagnose(params, support)
    total = np.sum(found.hessians, axis=0)
    assert np.linalg.matrix_rank(total) == min(n, 4)
    eigenvalues = np.asarray(found.eigenvalues)
    np.testing.assert_allclose(eigenvalues, np.linalg.eigvalsh(total) + n * 0.2, rtol=1e-9)
    if n < 4:
        largest = np.linalg.eigvalsh(total)[-1]
        np.testing.assert_allclose(eigenvalues[-1] / eigenvalues[0], 1 + largest / (n * 0.2))


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("at", ["adapted", "prior"])
def test_gauss_newton_is_the_hessian_of_a_relu_context_only(x64, at, steps):
    """LAVA-11."""
    support = make_points(4, 2)
    for model, check in ((RELU, lambda a, b: assert_close(a, b, 1e-9)), (TANH, assert_different)):
        # Curvatures themselves: through the estimate a smooth network's difference is faint.
        ggn = lj.Lava(model, subspace=CONTEXT, curvature_at=at, inner_steps=steps, inner_rate=1.0)
        params = make_params(ggn, support)
        exact = dataclasses.replace(ggn, curvature="hessian")
        check(*(diagnose(with_method(params, m), support).hessians for m in (ggn, exact)))


def test_weights_of_the_points_sum_to_the_identity(x64):
    """LAVA-12, for the literal estimate and for average plus correction, which agree."""
    low_rank = precision.LowRank(jax.random.normal(jax.random.key(0), (4, 2, 3)))
    dense = precision.Dense(low_rank.matrices())
    prior, weight, epsilon = jnp.arange(3.0), jnp.ones(4), 0.3

    def literal(steps):
        return precision.literal(prior + steps, dense, weight, epsilon)

    steps = jax.random.normal(jax.random.key(1), (4, 3))
    expected = jax.jit(jax.jacobian(literal))(steps)  # [3, 4, 3]: W_i along the middle axis
    assert_close(jnp.sum(expected, axis=1), jnp.eye(3), 1e-12)
    assert_different(expected[:, 0], expected[:, 1])
    routes = [dense, *(dataclasses.replace(low_rank, route=r) for r in ("primal", "dual"))]
    for curvature in routes:

        def combined(steps, curvature=curvature):
            return precision.aggregate(prior, steps, curvature, weight, epsilon)

        assert_close(combined(steps), literal(steps), 1e-12)
        assert_close(jax.jit(jax.jacobian(combined))(steps), expected, 1e-12)


def test_outputs_are_independent_problems(x64):
    """LAVA-13, for the sum over outputs."""
    method = lj.Lava(RELU, lj.SquaredError("sum"), inner_steps=3)
    support = make_points(4, 3)
    params = make_params(method, support)
    columns = []
    for o in range(3):
        single = lj.Points(support.x, support.y[:, o : o + 1])
        learned = {**params.learned, "head": params["head"][:, o : o + 1]}
        alone = dataclasses.replace(make_params(method, single), learned=learned)
        columns.append(adapt(alone, single))
    assert_close(adapt(params, support), jnp.concatenate(columns, axis=1), 1e-10)


@pytest.mark.parametrize("steps", [1, 3])
def test_cross_entropy_head_is_the_literal_definition_in_numpy(x64, steps):
    """Gauss-Newton and exact curvature of a softmax head are one, whatever the solver."""
    support = make_labels(4)
    method = lj.Lava(SMALL, lj.CrossEntropy(3), inner_steps=steps, inner_rate=0.5)
    params = make_params(method, support)

    def softmax(logits):
        e = np.exp(logits - logits.max())
        return e / e.sum()

    def hessian(z, w):
        p = softmax(z @ w)
        return np.kron(np.outer(z, z), np.diag(p) - np.outer(p, p))

    expected = literal_head(
        numpy_features(params, support.x),
        np.asarray(support.y),
        np.asarray(params["head"]),
        gradient=lambda z, y, w: np.outer(z, softmax(z @ w) - np.eye(3)[y]),
        hessian=hessian,
        rate=0.5,
        epsilon=0.1,
        steps=steps,
    )
    for route in ({"solver": "naive"}, *GGN_ROUTES, EXACT, {**EXACT, "solver": "naive"}):
        other = dataclasses.replace(method, **route)
        assert_close(adapt(with_method(params, other), support), expected, 1e-10)


@dataclasses.dataclass(frozen=True)
class Raw:
    """The inputs themselves as features."""

    def init(self, key, x, context=None):
        """Nothing to draw."""
        return {}, {}

    def features(self, weights, fixed, x, *, context=None, mask=None):
        """``[N, d]``."""
        return x


def sizes(jaxpr):
    """Of every array that is computed, in inner functions too."""
    for equation in equations(jaxpr):
        yield from (variable.aval.size for variable in equation.outvars)


@pytest.mark.parametrize(
    ("steps", "curvature_at", "learns"),
    [(1, "adapted", False), (3, "adapted", True), (3, "prior", False)],
)
def test_head_of_classes_by_its_features_is_the_literal_definition(
    x64, steps, curvature_at, learns
):
    """Estimate and outer gradient of the cheap route, for fewer points than features."""
    setting = {"inner_steps": steps, "curvature_at": curvature_at, "learn_epsilon": learns}
    naive = lj.Lava(RELU, lj.CrossEntropy(3), solver="naive", epsilon=0.01, **setting)
    support = make_labels(6, 3, d=2, mask=[1, 1, 0, 1, 1, 1])
    task = lj.Task(support, make_labels(7, 3, d=2, seed=4))
    params = make_params(naive, support)

    def both(method):
        own = with_method(params, method)
        loss = lambda learned: method.loss(own.replace_learned(learned), task, None)  # noqa: E731
        return adapt(own, support), jax.jit(jax.grad(loss))(params.learned)

    found, expected = both(dataclasses.replace(naive, solver="auto")), both(naive)
    assert_close(found, expected, 1e-10)
    assert_different(found[0], prior_block(params))


def test_head_of_classes_never_writes_out_a_jacobian():
    """Of N k rows with P k entries each; a system of P k x P k would be larger still."""
    support = make_labels(4, 3, d=40)
    rows, columns = 4 * 3, 41 * 3
    largest = {}
    for solver in ("auto", "dual", "primal"):
        params = make_params(lj.Lava(Raw(), lj.CrossEntropy(3), solver=solver), support)
        traced = jax.make_jaxpr(lambda p: p.method.adapt(p, support).block)(params)
        largest[solver] = max(sizes(traced.jaxpr))
    assert largest["auto"] == largest["dual"] < rows * columns <= largest["primal"]


def test_head_of_classes_is_stable_in_float32_at_the_size_of_images():
    """1,600 features of 25 points in 5 classes, eps from large to tiny, against float64."""
    support = make_labels(25, 5, d=1600)
    for epsilon in (0.1, 1e-4):
        method = lj.Lava(Raw(), lj.CrossEntropy(5), epsilon=epsilon, inner_rate=0.01)
        params = make_params(method, support)
        found = adapt(params, support)
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), float), params)
            exact = adapt(
                wide, dataclasses.replace(support, x=jnp.asarray(np.asarray(support.x), float))
            )
        assert found.dtype == jnp.float32
        assert_close(found, exact, 2e-4)


@dataclasses.dataclass(frozen=True)
class Untapped:
    """A model that hides the layers of another."""

    inner: lj.MLP

    def init(self, key, x, context=None):
        return self.inner.init(key, x, context)

    def features(self, weights, fixed, x, *, context=None, mask=None):
        return self.inner.features(weights, fixed, x, context=context, mask=mask)


@pytest.mark.parametrize("steps", [1, "converged", "map"])
@pytest.mark.parametrize("loss", ["squared", "cross-entropy"])
@pytest.mark.parametrize("where", ["prior", "adapted"])
def test_taps_and_explicit_rows_agree(x64, steps, loss, where):
    """All weights: the tangent kernel by layers is that of the whole Jacobian."""
    if loss == "cross-entropy":
        support, point_loss, steps = make_labels(4, mask=[1, 0, 1, 1]), lj.CrossEntropy(3), 1
    else:
        support, point_loss = make_points(4, 3, mask=[1, 0, 1, 1]), lj.SquaredError()
    tapped = lj.Lava(TANH, point_loss, FULL, inner_steps=steps, curvature_at=where)
    params = make_params(tapped, support)
    for other in (
        dataclasses.replace(tapped, model=Untapped(TANH)),
        dataclasses.replace(tapped, solver="primal"),
        dataclasses.replace(tapped, solver="naive"),
    ):
        assert_close(adapt(params, support), adapt(with_method(params, other), support), 1e-9)


@pytest.mark.parametrize(("number", "where"), [(3, "prior"), (3, "adapted"), (9, "prior")])
def test_loss_of_moves_of_low_rank_is_that_of_the_adapted_weights(x64, number, where):
    """All weights, of layers of 8 units, more than the points and fewer: loss and gradient."""
    mask = jnp.arange(number) != 1
    support, query = make_points(number, 2, mask=mask), make_points(4, 2, mask=[1, 1, 0, 1], seed=1)
    method = lj.Lava(TANH, subspace=FULL, learn_epsilon=True, curvature_at=where)
    hidden = dataclasses.replace(method, model=Untapped(TANH))
    params = make_params(method, support)

    def loss(learned, by):
        now = with_method(params.replace_learned(learned), by)
        return by.loss(now, lj.Task(support, query), None)

    run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    found = run(params.learned, method)
    assert_close(found, run(params.learned, hidden), 1e-9)
    assert jnp.linalg.norm(found[1]["weights"][0]["weight"]) > 1e-3


@pytest.mark.parametrize("curvature", ["ggn", "hessian", "flat"])
@SUBSPACES
def test_diagnose_shows_the_parts_of_the_estimate(x64, name, curvature):
    """Put together as equations 8 and 9 say, they are the adapted block; padding weighs nothing."""
    subspace, averaging = AVERAGING[name]
    support = make_points(3, 2, mask=[1, 0, 1])
    epsilon = 5.0 if curvature == "hessian" else 0.1  # exact Hessians need more to be definite
    method = lj.Lava(
        SMALL, subspace=subspace, curvature=curvature, curvature_at="adapted", epsilon=epsilon
    )
    params = make_params(method, support)
    found = diagnose(params, support)
    assert float(found.epsilon) == epsilon
    assert_close(found.hessians[1], np.zeros_like(found.hessians[1]), 0)

    prior = flat(prior_block(params))
    one_step = dataclasses.replace(averaging, model=SMALL)
    steps = np.zeros((3, prior.size))
    for i in (0, 2):  # theta_i: the gradient method on the point alone
        alone = lj.Points(support.x[i : i + 1], support.y[i : i + 1])
        theta = at(found.theta, i)
        assert_close(theta, adapt(with_method(params, one_step), alone), 1e-10)
        steps[i] = flat(theta) - prior
    total = np.sum(found.hessians, axis=0) + 2 * epsilon * np.eye(prior.size)
    weighted = np.einsum("iab,ib->a", found.hessians, steps) + epsilon * np.sum(steps, axis=0)
    expected = prior + np.linalg.solve(total, weighted)
    assert_close(flat(adapt(params, support)), expected, 1e-9)
    np.testing.assert_allclose(found.eigenvalues, np.linalg.eigvalsh(total), rtol=1e-8)


def test_diagnose_finds_an_indefinite_precision(x64):
    """Exact Hessians of a smooth network need not be positive; Gauss-Newton's are."""
    support = make_points(2)
    wild = dataclasses.replace(support, y=100 * support.y)
    exact = lj.Lava(TANH, subspace=FULL, curvature="hessian", epsilon=1e-3)
    params = make_params(exact, wild)
    assert float(diagnose(params, wild).eigenvalues[0]) < 0
    ggn = dataclasses.replace(exact, curvature="ggn")
    assert float(diagnose(with_method(params, ggn), wild).eigenvalues[0]) >= 2e-3 * (1 - 1e-6)


def test_recommended_setting_is_converged_with_a_learned_epsilon():
    """``lava_converged`` takes every other field."""
    method = lj.lava_converged(epsilon=0.3, model=RELU)
    assert method == lj.Lava(RELU, inner_steps="converged", learn_epsilon=True, epsilon=0.3)
    params = make_params(method, make_points(3))
    assert set(params.learned) == {"weights", "head", "log_epsilon"}
    np.testing.assert_allclose(params["log_epsilon"], np.log(0.3), rtol=1e-6)
