"""The loss of one task: how well a method does on the query after adapting to the support."""

from __future__ import annotations

import jax.numpy as jnp

from lavajax import points
from lavajax.gaussian import negative_log_density
from lavajax.methods.base import Method, NetworkMethod, outputs
from lavajax.methods.on_features import on_features
from lavajax.types import Adapted, Array, MetaParams, Points, Task


def query_loss(method: NetworkMethod, params: MetaParams, task: Task, key: Array | None) -> Array:
    """The mean loss of the query after adapting to the support; 0 for an empty query."""
    return loss_at(method, params, method.adapt(params, task.support, key=key), task.query)


def one_pass_loss(
    method: NetworkMethod, params: MetaParams, task: Task, key: Array | None
) -> Array:
    """``query_loss``, of a method that sees inputs through its backbone alone."""
    return query_loss(*on_features(method, params, task), key)


def loss_at(method: NetworkMethod, params: MetaParams, adapted: Adapted, at: Points) -> Array:
    """The mean loss of an adapted network at the points ``at``; 0 without any."""
    at = points.sanitise(at)
    f = outputs(method, params, adapted, at.x, at.mask)
    return points.mean_loss(method.point_loss, f, at)


def density_loss(method: Method, params: MetaParams, task: Task, key: Array | None) -> Array:
    """-log density of the query's targets, the mean over its points and outputs, in nats.

    The variance is that of the observations, ``epistemic`` and ``noise`` together.
    """
    adapted = method.adapt(params, task.support, key=key)
    query = points.sanitise(task.query)
    prediction = method.predict(params, adapted, query.x, mask=query.mask)
    assert prediction.variance is not None
    y = method.point_loss.cast(query.y, prediction.mean.dtype)
    nll = negative_log_density(prediction.mean, prediction.variance, y)
    return points.average(jnp.mean(nll, axis=-1), query)
