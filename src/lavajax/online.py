"""Adaptation as points arrive, without keeping them.

A head in closed form adapts by four sums over points (``lavajax.sums``), which are all that there
is to know of the past, however many points it had. To take in a point costs O(P^2), to read the
estimate one solve of P x P; nothing changes its shape, and nothing is compiled again.

    sums = lavajax.online(params)
    for x, y in stream:
        sums = lavajax.update(params, sums, (x[None], y[None]))
        adapted = lavajax.estimate(params, sums)
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from lavajax.arguments import (
    check_adapted,
    check_estimate,
    check_params,
    check_points,
    with_finite,
)
from lavajax.methods.base import Method, expected_params
from lavajax.posterior import DensePosterior
from lavajax.sums import Sums, add, followed
from lavajax.types import Adapted, Array, MetaParams, Points, PointSpec
from lavajax.validate import real


class OnlineMethod(Protocol):
    """A method whose adaptation needs no more of the support than sums."""

    def absorb(self, params: MetaParams, points: Points) -> Sums:
        """The sums of some points ``[N]``, N >= 0."""

    def conclude(self, params: MetaParams, sums: Sums) -> Adapted:
        """What ``adapt`` gives for all points that are in the sums."""

    def recall(self, params: MetaParams, adapted: Adapted) -> Sums:
        """The sums of the points that ``adapt`` was given; of methods with a posterior."""


def online(params: MetaParams, support: Points | tuple[Any, Any] | Adapted | None = None) -> Sums:
    """Begins to follow a task.

    Args:
        params: meta-parameters of a method with a linear head in closed form, such as ``Lava()``.
        support: the first points, as for ``adapt``; None without any. Or what ``adapt`` gave for
            them, where its posterior tells the rest: of ``lava_bayesian()`` and ``Alpaca()``.

    Returns:
        Their sums, for ``update`` and ``estimate``.

    Raises:
        ValueError: the method cannot adapt on-line, or the points are not those of the model; or
            what was adapted does not tell its points.
    """
    _check_method(params)
    if support is None:
        return _absorb(params.standardised, _no_points(params.spec))
    if isinstance(support, Adapted):
        return _recall(params.standardised, _check_recalled(params, support))
    return _absorb(params.standardised, check_points(params, support))


def update(
    params: MetaParams, sums: Sums, points: Points | tuple[Any, Any], *, forget: float | Array = 1.0
) -> Sums:
    """Takes in more points of a task.

    Args:
        params: as in ``online``.
        sums: of the points so far.
        points: new ones, ``[N]``, as for ``adapt``; a mask makes any number of them one shape.
        forget: what the points so far count for from now on, in (0, 1]: a task that changes is
            followed at about 1/(1 - forget) updates' length.

    Returns:
        The sums of all points so far, of the same shapes.

    Raises:
        ValueError: as in ``online``; or ``forget`` is not in (0, 1].
    """
    _check_method(params)
    _check_sums(params, sums)
    if not isinstance(forget, jax.core.Tracer):
        # One type, so that one compilation does.
        forget = real("forget", forget, "a number above 0 and at most 1", lambda f: 0 < f <= 1)
    return _update(params.standardised, sums, check_points(params, points), forget)


def estimate(params: MetaParams, sums: Sums) -> Adapted:
    """The outcome of adapting to all points at once, for ``predict``.

    Raises:
        ValueError: as in ``online``; or, outside ``jit``, there is no finite estimate.
    """
    _check_method(params)
    _check_sums(params, sums)
    adapted, finite = _conclude(params.standardised, sums)
    check_estimate(params.method, finite)
    return adapted


_absorb = jax.jit(lambda params, points: followed(params.method.absorb(params, points)))
_recall = jax.jit(lambda params, adapted: followed(params.method.recall(params, adapted)))
_conclude = jax.jit(lambda params, sums: with_finite(params.method.conclude(params, sums)))


@jax.jit
def _update(params: MetaParams, sums: Sums, points: Points, forget: float | Array) -> Sums:
    return add(sums, params.method.absorb(params, points), forget)  # type: ignore[attr-defined]


def _check_method(params: MetaParams) -> OnlineMethod:
    check_params(params)
    method: Any = params.method
    if not callable(getattr(method, "absorb", None)):
        raise ValueError(
            "params must be of a method that adapts by sums over points, such as Lava() with a "
            f"head, Ridge() or Alpaca(), got {method!r}"
        )
    if "batch_stats" in params.fixed["backbone"]:
        raise ValueError(
            "params must be of a model that takes points apart: this one couples those of a batch "
            "(batch normalisation), and the features of a point would change with every other; use "
            "layer or group normalisation"
        )
    return method


def _check_recalled(params: MetaParams, adapted: Adapted) -> Adapted:
    if not callable(getattr(params.method, "recall", None)):
        raise ValueError(
            f"support must be the points themselves: what {type(params.method).__name__} adapted "
            "to does not tell them; lava_bayesian() and Alpaca() keep them in a posterior"
        )
    check_adapted(params, adapted)
    if isinstance(adapted.posterior, DensePosterior):
        raise ValueError(
            "support must be what adapt returned, or points; what estimate returned has its sums"
        )
    return adapted


def _check_sums(params: MetaParams, sums: Any) -> None:
    if not isinstance(sums, Sums) or not isinstance(sums.lost, Sums):
        got = "Sums without lost" if isinstance(sums, Sums) else type(sums).__name__
        raise ValueError(f"sums must be what online or update returned, got {got}")
    expected = _expected_sums(params.method, params.spec)
    for name in ("features", "curved"):
        found, needed = jnp.shape(getattr(sums, name)), getattr(expected, name).shape
        if found != needed:
            raise ValueError(
                f"sums must be of this model, with {name} of shape {needed}, got {found}"
            )


def _no_points(spec: PointSpec) -> Points:
    x = jnp.zeros((0, *spec.x_shape), spec.x_dtype)
    return Points(x, jnp.zeros((0, *spec.y_shape), spec.y_dtype))


# To trace it anew would take longer than a point, and much memory.
@functools.lru_cache(maxsize=128)
def _expected_sums(method: Method, spec: PointSpec) -> Sums:
    """The sums of a model, as shapes."""
    params = expected_params(method, spec)
    return jax.eval_shape(lambda params: _absorb(params, _no_points(spec)), params)
