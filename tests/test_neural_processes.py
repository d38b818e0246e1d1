"""CNP, CANP and TNP-D: their formulas, their symmetries, and the density they learn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

import lavajax as lj
from helpers import (
    assert_close,
    assert_different,
    assert_finite,
    make_labels,
    make_params,
    make_points,
)
from lavajax.attention import attend, attend_multi_head, init_attention, project

METHODS = {
    "cnp": lj.Cnp(encoder=(8, 6), encoding=5, decoder=(7,)),
    "attentive": lj.AttentiveCnp(width=6, heads=3, key_encoder=(5,), encoder=(8,), decoder=(7,)),
    "tnp": lj.Tnp(width=8, embedding_layers=2, layers=2, heads=2, feedforward=6, decoder=(7,)),
}
EVERY = pytest.mark.parametrize("name", METHODS)


def predict(params, support, x):
    return lj.predict(params, lj.adapt(params, support), x)


def setting(name, n=4):
    support = make_points(n, 2, d=2)
    return make_params(METHODS[name], support), support, make_points(5, 2, d=2, seed=7)


def relu_net(layers, h):
    """ReLU but for the last layer, in NumPy."""
    for layer in layers[:-1]:
        h = np.maximum(h @ np.asarray(layer["weight"]).T + np.asarray(layer["bias"]), 0)
    return h @ np.asarray(layers[-1]["weight"]).T + np.asarray(layers[-1]["bias"])


def numpy_attention(weights, heads, queries, context):
    """Heads one by one, from the textbook; context is what keys, and what values, are made of."""
    size = queries.shape[1] // heads
    out = []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        w = {n: np.asarray(weights[n]["weight"]).T[:, part] for n in ("query", "key", "value")}
        b = {n: np.asarray(weights[n]["bias"])[part] for n in ("query", "value")}
        q, k = queries @ w["query"] + b["query"], context[0] @ w["key"]
        logits = q @ k.T / np.sqrt(size)
        softmax = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        out.append(softmax @ (context[1] @ w["value"] + b["value"]))
    joined = np.concatenate(out, axis=1)
    return joined @ np.asarray(weights["out"]["weight"]).T + np.asarray(weights["out"]["bias"])


def numpy_density(params, code, sigma_min=0.01):
    raw = relu_net(params["decoder"], code)
    return raw[:, :2], (sigma_min + (1 - sigma_min) * np.log1p(np.exp(raw[:, 2:]))) ** 2


def literal_cnp(params, support, x):
    pairs = np.concatenate([support.x, support.y], axis=1)
    r = relu_net(params["encoder"], pairs).mean(axis=0)
    return np.concatenate([np.tile(r, (len(x), 1)), x], axis=1)


def literal_attentive(params, support, x):
    pairs = np.concatenate([support.x, support.y], axis=1)
    keys, queries = (relu_net(params["key_encoder"], np.asarray(at)) for at in (support.x, x))
    context = keys, relu_net(params["encoder"], pairs)
    return np.concatenate([numpy_attention(params["attention"], 3, queries, context), x], axis=1)


def literal_tnp(params, support, x):
    """All tokens together in one sequence, and a mask that hides the targets from all."""

    def normalise(norm, h):
        centred = h - h.mean(axis=1, keepdims=True)
        scaled = centred / np.sqrt(h.var(axis=1, keepdims=True) + 1e-5)
        return np.asarray(norm["scale"]) * scaled + np.asarray(norm["shift"])

    n = len(support.x)
    pairs = np.concatenate([support.x, support.y], axis=1)
    unknown = np.concatenate([x, np.zeros((len(x), 2))], axis=1)
    h = relu_net(params["embedding"], np.concatenate([pairs, unknown]))
    for layer in range(2):
        weights = jax.tree.map(lambda leaf, i=layer: np.asarray(leaf)[i], params["layers"])
        seen = h[:n]
        h = normalise(
            weights["norms"][0], h + numpy_attention(weights["attention"], 2, h, (seen, seen))
        )
        h = normalise(weights["norms"][1], h + relu_net(weights["feedforward"], h))
    return h[n:]


LITERAL = {"cnp": literal_cnp, "attentive": literal_attentive, "tnp": literal_tnp}


@EVERY
def test_prediction_is_the_papers_formula(x64, name):
    params, support, query = setting(name)
    # scales and shifts that are not those of the start
    noise = jax.random.normal(jax.random.key(4), (50,))
    params = params.replace_learned(
        jax.tree.map(lambda leaf: leaf + 0.1 * noise[: leaf.shape[-1]], params.learned)
    )
    prediction = predict(params, support, query.x)
    code = LITERAL[name](params, support, np.asarray(query.x))
    mean, variance = numpy_density(params, code)
    assert_close(prediction.mean, mean, 1e-10)
    assert_close(prediction.noise, variance, 1e-10)
    assert prediction.epistemic is None


@EVERY
def test_loss_is_the_mean_negative_log_density_of_real_query_points(x64, name):
    params, support, query = setting(name)
    prediction = predict(params, support, query.x)
    density = scipy.stats.norm(prediction.mean, np.sqrt(prediction.noise))
    expected = -density.logpdf(query.y)
    loss = params.method.loss
    assert_close(loss(params, lj.Task(support, query), None), expected.mean(), 1e-12)
    mask = jnp.array([True, False, True, True, False])
    hidden = lj.Points(
        jnp.where(mask[:, None], query.x, jnp.nan), jnp.where(mask[:, None], query.y, 1e9), mask
    )
    real = expected[np.asarray(mask)].mean()
    assert_close(loss(params, lj.Task(support, hidden), None), real, 1e-12)


@EVERY
def test_order_and_repetition_of_the_support_have_no_effect(x64, name):
    """Mean and softmax: a support given twice is the same support."""
    params, support, query = setting(name)
    expected = predict(params, support, query.x)
    order = np.array([2, 0, 3, 1])
    shuffled = lj.Points(support.x[order], support.y[order])
    assert_close(predict(params, shuffled, query.x), expected, 1e-12)
    twice = lj.Points(jnp.tile(support.x, (2, 1)), jnp.tile(support.y, (2, 1)))
    assert_close(predict(params, twice, query.x), expected, 1e-12)
    assert_different(predict(params, lj.Points(twice.x[:5], twice.y[:5]), query.x), expected)
    relabelled = lj.Points(support.x, support.y[order])
    assert_different(predict(params, relabelled, query.x), expected)


@EVERY
def test_targets_do_not_see_each_other(x64, name):
    """Each is predicted as if alone; another order gives the same in another order."""
    params, support, query = setting(name)
    adapted = lj.adapt(params, support)
    together = lj.predict(params, adapted, query.x)
    for i in range(2):
        alone = lj.predict(params, adapted, query.x[i : i + 1])
        assert_close(alone.mean[0], together.mean[i], 1e-12)
        assert_close(alone.noise[0], together.noise[i], 1e-12)
    assert_close(lj.predict(params, adapted, query.x[::-1]).mean, together.mean[::-1], 1e-12)
    assert lj.predict(params, adapted, query.x[:0]).mean.shape == (0, 2)


@EVERY
def test_padding_has_no_effect_on_predictions_and_gradients(x64, name):
    params, support, query = setting(name)
    slots = jnp.array([0, 2, 3, 5])
    padded = lj.Points(
        jnp.full((6, 2), jnp.nan).at[slots].set(support.x),
        jnp.full((6, 2), jnp.inf).at[slots].set(support.y),
        jnp.zeros(6, bool).at[slots].set(True),
    )
    assert_close(predict(params, padded, query.x), predict(params, support, query.x), 1e-12)
    slopes = [
        jax.jit(jax.grad(lambda p, s: p.method.loss(p, lj.Task(s, query), None)))(params, s)
        for s in (padded, support)
    ]
    assert_close(slopes[0].learned, slopes[1].learned, 1e-10)


@EVERY
def test_without_support_there_is_a_prior_prediction_with_finite_gradients(x64, name):
    params, _, query = setting(name)
    empty = lj.Points(jnp.zeros((0, 2)), jnp.zeros((0, 2)))
    hidden = make_points(3, 2, d=2, mask=[0, 0, 0])
    hidden = dataclasses.replace(hidden, y=hidden.y * jnp.nan)
    prior = predict(params, empty, query.x)
    assert_finite(prior)
    assert np.ptp(prior.mean, axis=0).min() > 0  # a function of x
    assert_close(predict(params, hidden, query.x), prior, 1e-12)
    slope = jax.jit(jax.grad(lambda p, s: p.method.loss(p, lj.Task(s, query), None)))
    for support in (empty, hidden):
        assert_finite(slope(params, support))


def test_attention_is_the_softmax_and_zero_without_points(x64):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (n, 2, 3)) for key, n in zip(keys, (4, 5, 5), strict=True))
    real = jnp.array([True, False, True, True, False])
    logits = jnp.einsum("mhd,nhd->mhn", q, k) / np.sqrt(3)
    weights = jax.nn.softmax(logits, axis=-1, where=real)
    assert_close(attend(q, k, v, real), jnp.einsum("mhn,nhd->mhd", weights, v), 1e-12)
    assert not np.any(attend(q, k, v, jnp.zeros(5, bool)))
    assert not np.any(attend(q, k[:0], v[:0], real[:0]))
    far = attend(q, 1e4 * k, v, real)  # nearest alone, without overflow
    assert_close(far, v[jnp.argmax(jnp.where(real, logits, -jnp.inf), -1), jnp.arange(2)], 1e-6)
    # The derivative passes the shift by the largest logit, also where it is the only one.
    for mask in (real, jnp.arange(5) == 2):
        expected = jax.jit(
            jax.grad(
                lambda k, m=mask: jnp.sum(
                    jnp.einsum(
                        "mhn,nhd->mhd",
                        jax.nn.softmax(
                            jnp.einsum("mhd,nhd->mhn", q, k) / np.sqrt(3), axis=-1, where=m
                        ),
                        v,
                    )
                    ** 2
                )
            )
        )(k)
        actual = jax.jit(jax.grad(lambda k, m=mask: jnp.sum(attend(q, k, v, m) ** 2)))(k)
        np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_equal_keys_average_the_values(x64):
    """Without preference the attention is the mean pool of a CNP."""
    weights = init_attention(jax.random.key(0), 6)
    weights["key"] = {"weight": jnp.zeros((6, 6))}
    context = jax.random.normal(jax.random.key(1), (4, 6))
    queries = jax.random.normal(jax.random.key(2), (3, 6))
    keys, values = (project(weights[n], context, 2) for n in ("key", "value"))
    actual = attend_multi_head(weights, queries, keys, values, jnp.ones(4, bool))
    out = weights["out"]
    mean = jnp.mean(values, axis=0).reshape(6) @ out["weight"].T + out["bias"]
    assert_close(actual, jnp.tile(mean, (3, 1)), 1e-12)


@EVERY
def test_deviation_stays_above_its_floor(x64, name):
    params, support, query = setting(name)
    *rest, last = params["decoder"]
    sunk = {**last, "bias": last["bias"].at[2:].set(-1e4)}
    low = params.replace_learned({**params.learned, "decoder": [*rest, sunk]})
    prediction = predict(low, support, query.x)
    np.testing.assert_allclose(prediction.noise, 0.01**2, rtol=1e-12)
    assert_finite(
        jax.jit(jax.grad(lambda p: p.method.loss(p, lj.Task(support, query), None)))(low).learned
    )


@EVERY
def test_training_learns_means_and_errors_of_their_size(name):
    tasks = lj.Sine(shots=10, queries=10, phase=(0.0, 0.0))  # the amplitude alone is unknown
    small = {
        "cnp": lj.Cnp(encoder=(32, 32), encoding=32, decoder=(32, 32)),
        "attentive": lj.AttentiveCnp(
            width=16, heads=2, key_encoder=(16,), encoder=(16,), decoder=(32,)
        ),
        "tnp": lj.Tnp(width=16, embedding_layers=2, layers=1, feedforward=16, decoder=(32,)),
    }[name]
    trained = lj.train(small, tasks, steps=800, meta_batch=4, chunk=100)
    history = trained.history["loss"]
    assert np.all(np.isfinite(history))
    assert history[-1] < history[0] - 0.5

    def judge(task):
        prediction = predict(trained.params, task.support, task.query.x)
        errors = (prediction.mean - task.query.y) ** 2
        return jnp.mean(errors), jnp.mean(errors / prediction.noise)

    held_out = jax.vmap(lambda key: tasks.sample(key, "test"))(
        jax.random.split(jax.random.key(0), 200)
    )
    error, standard = np.mean(jax.jit(jax.vmap(judge))(held_out), axis=1)
    assert error < 0.5 * jnp.mean(held_out.query.y**2)
    assert 0.5 < standard < 2


def test_defaults_are_the_published_sizes():
    support = make_points(3, 1)

    def block(method):
        return jax.eval_shape(lambda: method.adapt(make_params(method, support), support).block)

    def widths(layers):
        return [layer["weight"].shape[::-1] for layer in layers]

    cnp = jax.eval_shape(lambda: make_params(lj.Cnp(), support))
    assert widths(cnp["encoder"]) == [(2, 128), *[(128, 128)] * 3]
    assert widths(cnp["decoder"]) == [(129, 128), (128, 128), (128, 2)]
    attentive = jax.eval_shape(lambda: make_params(lj.AttentiveCnp(), support))
    assert widths(attentive["key_encoder"]) == [(1, 128), (128, 128)]
    assert block(lj.AttentiveCnp())["keys"].shape == (3, 8, 16)
    tnp = jax.eval_shape(lambda: make_params(lj.Tnp(), support))
    assert widths(tnp["embedding"]) == [(2, 64), *[(64, 64)] * 3]
    assert widths(tnp["decoder"]) == [(64, 128), (128, 2)]
    assert block(lj.Tnp())["tokens"].shape == (6, 3, 64)


@EVERY
def test_inputs_that_are_no_vectors_and_labels_are_refused(name):
    images = lj.Points(jnp.zeros((3, 4, 4)), jnp.zeros((3, 1)))
    with pytest.raises(ValueError, match=r"x must have shape \[N, d\] .* got \(3, 4, 4\)"):
        make_params(METHODS[name], images)
    with pytest.raises(ValueError, match="y must have shape"):
        make_params(METHODS[name], make_labels(3))
    with pytest.raises(ValueError, match=r"point_loss must be SquaredError\(\): .* Anil"):
        dataclasses.replace(METHODS[name], point_loss=lj.CrossEntropy(3))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lj.Cnp(sigma_min=0.0), r"Cnp\.sigma_min must be a finite number above 0"),
        (lambda: lj.Tnp(sigma_min=1.0), r"Tnp\.sigma_min must be below 1, got 1\.0"),
        (lambda: lj.Cnp(encoding=0), r"Cnp\.encoding must be an integer"),
        (lambda: lj.Cnp(encoder=(0,)), r"Cnp\.encoder must be a sequence"),
        (lambda: lj.Cnp(activation="rleu"), "activation must be one of"),
        (lambda: lj.Cnp("mse"), r"Cnp\.point_loss must be an instance"),
        (lambda: lj.AttentiveCnp(width=10), r"width must be a multiple of heads = 8, got 10"),
        (lambda: lj.AttentiveCnp(key_encoder=5), r"AttentiveCnp\.key_encoder must be a sequence"),
        (lambda: lj.Tnp(width=63), r"Tnp\.width must be a multiple of heads = 4, got 63"),
        (lambda: lj.Tnp(layers=0), r"Tnp\.layers must be an integer of at least 1"),
        (lambda: lj.Tnp(decoder="x"), r"Tnp\.decoder must be a sequence"),
    ],
)
def test_impossible_settings_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
