"""A head's task in terms of its features, so that all points pass the backbone together."""

from __future__ import annotations

import dataclasses
from typing import Any

from lavajax import points
from lavajax.types import Array, MetaParams, Points, PyTree, Task


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
    the backbone alone.
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
    featured = Task(Points(phi[:n], support.y, support.mask), Points(phi[n:], query.y, query.mask))
    return dataclasses.replace(method, model=Given()), params, featured
