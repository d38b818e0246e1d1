"""A head's task in terms of its features, so that all points pass the backbone together."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lavajax import points
from lavajax.types import Array, MetaParams, Points, PyTree, Task

Parts = tuple[Array, Array]


@dataclasses.dataclass(frozen=True)
class Given:
    """The backbone of inputs that are features already."""

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """Nothing: see ``Model``."""
        del key, x, context
        return {}, {}

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """x itself, ``[N, D]``."""
        del weights, fixed, context, mask
        return x


def on_features(method: Any, params: MetaParams, task: Task) -> tuple[Any, MetaParams, Task]:
    """The same problem with the features of a shared backbone for inputs, else as it is.

    One pass of support and query has half as many operations as a pass of each, and on few points
    an operation costs most for being one. Only where the backbone takes points apart: what it may
    draw, such as dropout, is the same for all points of a task. For methods that see inputs through
    the backbone alone. Its derivative is taken backwards; forwards, only of a derivative.
    """
    subspace = getattr(method, "subspace", None)
    if subspace is None or not subspace.shares_backbone:
        return method, params, task
    fixed = params.fixed["backbone"]
    if "batch_stats" in fixed:
        return method, params, task
    support, query = points.sanitise(task.support), points.sanitise(task.query)
    both, n = points.concatenate(support, query), support.x.shape[0]
    phi = method.model.features(params["weights"], fixed, both.x, mask=both.mask)
    params = dataclasses.replace(
        params,
        learned={**params.learned, "weights": {}},
        fixed={**params.fixed, "backbone": {}},
    )
    first, rest = _parted(phi, n)
    featured = Task(Points(first, support.y, support.mask), Points(rest, query.y, query.mask))
    return dataclasses.replace(method, model=Given()), params, featured


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _parted(phi: Array, n: int) -> Parts:
    """phi[:n] and phi[n:].

    Going back, both are written into one array. Two slices by themselves are padded and added,
    element by element in each of the loops that XLA makes it a part of: a tenth of a training step.
    """
    return phi[:n], phi[n:]


def _parted_forward(phi: Array, n: int) -> tuple[Parts, None]:
    return (phi[:n], phi[n:]), None  # not by itself: a derivative of the derivative goes forwards


def _parted_backward(n: int, _: None, parts: Parts) -> tuple[Array]:
    first, rest = parts
    whole = jnp.zeros((n + rest.shape[0], *rest.shape[1:]), rest.dtype)
    corner = (0,) * (rest.ndim - 1)
    whole = lax.dynamic_update_slice(whole, first, (0, *corner))
    return (lax.dynamic_update_slice(whole, rest, (n, *corner)),)


_parted.defvjp(_parted_forward, _parted_backward)
