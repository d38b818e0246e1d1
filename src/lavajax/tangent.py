r"""The Jacobian of the outputs in all weights, without forming it.

For the weights of a linear layer, the row of the Jacobian that belongs to output o at point i is
an outer product: the layer's input at i times the signal that o sends back to the layer's output.
The Gram matrix J J^T (the empirical tangent kernel) and the combinations J^T u follow from inputs
and signals alone, so memory grows as the number of points times the width, not times the number
of weights.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TypeGuard

import jax
import jax.numpy as jnp

from lavajax import linalg, network
from lavajax.models.base import Model, TappedModel
from lavajax.types import Array, PyTree


@dataclasses.dataclass(frozen=True)
class Rows:
    """A Jacobian J = df/dblock at N points with k outputs each, row by row; 0 at padding.

    Attributes:
        rows: the block's pytree with leaves ``[N, k, ...]``.
    """

    rows: PyTree

    def gram(self) -> Array:
        """J J^T as ``[N, k, N, k]``."""
        return self._products("nkw,mlw->nkml")

    def combine(self, u: Array) -> PyTree:
        """J^T u for u ``[N, k]``, a block."""
        return self._combinations("nk,nk...->...", u)

    def blocks(self) -> Array:
        """J_i J_i^T of each point, ``[N, k, k]``."""
        return self._products("nkw,nlw->nkl")

    def spread(self, u: Array) -> PyTree:
        """J_i^T u_i of each point, leaves ``[N, ...]``."""
        return self._combinations("nk,nk...->n...", u)

    def matrix(self) -> Array:
        """J as ``[N, k, n]``, parameters in the order of the block's leaves."""
        leaves = jax.tree.leaves(self.rows)
        return jnp.concatenate([_flat(a) for a in leaves], axis=2)

    def _products(self, spec: str) -> Array:
        flat = [_flat(leaf) for leaf in jax.tree.leaves(self.rows)]
        return functools.reduce(jnp.add, (linalg.einsum(spec, leaf, leaf) for leaf in flat))

    def _combinations(self, spec: str, u: Array) -> PyTree:
        return jax.tree.map(lambda leaf: linalg.einsum(spec, u, leaf), self.rows)


def _flat(leaf: Array) -> Array:
    """``[N, k, ...]`` as ``[N, k, n]``, of N = 0 too."""
    return leaf.reshape(*leaf.shape[:2], math.prod(leaf.shape[2:]))


@dataclasses.dataclass(frozen=True)
class LayerRows:
    """The Jacobian in all weights of a tapped backbone and its head, by inputs and signals.

    Attributes:
        z: augmented features, ``[N, P]``: the head's inputs.
        inputs: of each tapped layer, ``[N, in]``.
        signals: df/d(output of the layer), of each tapped layer, ``[k, N, out]``.
    """

    z: Array
    inputs: list[Array]
    signals: list[Array]

    def gram(self) -> Array:
        """J J^T as ``[N, k, N, k]``."""
        return self.products(self)

    def products(self, other: LayerRows) -> Array:
        """J J'^T with the Jacobian J' of the same network elsewhere, ``[N, k, N, k]``."""
        k = self.signals[0].shape[0]
        head = linalg.matmul(self.z, other.z.T)
        total = head[:, None, :, None] * jnp.eye(k, dtype=head.dtype)[None, :, None, :]
        for mine, others in zip(self._layers(), other._layers(), strict=True):
            inner = 1 + linalg.matmul(mine[0], others[0].T)  # 1 for the bias
            outer = linalg.einsum("onw,pmw->nomp", mine[1], others[1])
            total = total + inner[:, None, :, None] * outer
        return total

    def written_out(self, factors: Array) -> Rows:
        """S_i^T J_i for factors S ``[N, k, r]``, row by row: for what needs the rows themselves."""
        layers = []
        for h, s in self._layers():
            sent = linalg.einsum("nkr,knj->nrj", factors, s)
            layers.append({"weight": linalg.einsum("nrj,ni->nrji", sent, h), "bias": sent})
        head = linalg.einsum("np,nkr->nrpk", self.z, factors)
        return Rows({"weights": layers, "head": head})

    def steps(self, u: Array) -> LayerSteps:
        """J_i^T u_i of each point, for u ``[N, k]``."""
        return LayerSteps(self.z, u, self.inputs, self.sent(u))

    def sent(self, u: Array) -> list[Array]:
        """What u ``[N, k]`` sends back to the output of each layer, ``[N, out]``."""
        return [linalg.einsum("no,onw->nw", u, s) for s in self.signals]

    def _layers(self) -> list[tuple[Array, Array]]:
        return list(zip(self.inputs, self.signals, strict=True))


@dataclasses.dataclass(frozen=True)
class LayerSteps:
    """A step of each point along its own rows: in every layer of rank one, sent_i h_i^T.

    Attributes:
        z: augmented features, ``[N, P]``, from which the head steps to W + z_i u_i^T.
        u: ``[N, k]``.
        inputs: h, of each tapped layer, ``[N, in]``.
        sent: of each tapped layer, ``[N, out]``.
    """

    z: Array
    u: Array
    inputs: list[Array]
    sent: list[Array]

    def in_layer(self, index: int, h: Array) -> Array:
        """What the step of each point adds to a layer's output for its input h, ``[N, out]``."""
        inner = 1 + jnp.sum(h * self.inputs[index], axis=-1, keepdims=True)
        return inner * self.sent[index]

    def in_head(self, z: Array) -> Array:
        """What it adds to the outputs for features z, ``[N, k]``."""
        return jnp.sum(z * self.z, axis=-1, keepdims=True) * self.u


def combined(moves: Sequence[tuple[LayerRows, Array]]) -> PyTree:
    """The sum of J^T u, for Jacobians J and their u ``[N, k]``; leaves of the shapes of the block.

    By one product in each layer: a sum of several would hold copies of the weights beside it.
    """
    sent = [rows.sent(u) for rows, u in moves]
    layers = []
    for index, together in enumerate(zip(*sent, strict=True)):
        h = jnp.concatenate([rows.inputs[index] for rows, _ in moves])
        s = jnp.concatenate(together)
        layers.append({"weight": linalg.matmul(s.T, h), "bias": jnp.sum(s, axis=0)})
    z = jnp.concatenate([rows.z for rows, _ in moves])
    head = linalg.matmul(z.T, jnp.concatenate([u for _, u in moves]))
    return {"weights": layers, "head": head}


def outputs_after(
    model: TappedModel,
    net: dict[str, PyTree],
    fixed: PyTree,
    x: Array,
    moves: Sequence[tuple[LayerRows, Array]],
) -> Array:
    """The outputs ``[M, k]`` at x ``[M, ...]`` of the net + sum of J^T u, which is not written out.

    A layer's move is a matrix of rank N, sum_n h_n s_n^T for its inputs and signals at the N
    points: for many tasks at once it takes less than weights for each of them.

    Args:
        model: a backbone that does not couple points.
        net: ``{"weights", "head"}``.
        fixed: its fixed leaves.
        x: inputs.
        moves: Jacobians J and their u ``[N, k]``.
    """
    sent = [rows.sent(u) for rows, u in moves]

    def move(index: int, h: Array) -> Array:
        added = jnp.zeros((), h.dtype)
        for (rows, _), signals in zip(moves, sent, strict=True):
            added = added + (h @ rows.inputs[index].T + 1) @ signals[index]  # 1 for the bias
        return added

    z = network.augment(model.tapped(net["weights"], fixed, x, move))
    return z @ net["head"] + sum((z @ rows.z.T) @ u for rows, u in moves)


def layer_rows(
    model: TappedModel,
    net: dict[str, PyTree],
    fixed: PyTree,
    x: Array,
    weight: Array,
    *,
    steps: LayerSteps | None = None,
) -> tuple[Array, LayerRows]:
    """The outputs ``[N, k]`` and their Jacobian in the whole net, at inputs ``[N, ...]``.

    k passes back, each for all points at once, since a point's output sends no signal to another.
    The same with ``steps``, where every point has weights of its own: these are never written out.

    Args:
        model: a backbone that does not couple points.
        net: its net, all of which is differentiated.
        fixed: its fixed leaves.
        x: inputs.
        weight: ``[N]``, 0 for padding.
        steps: where each point has gone from the net; None: nowhere.
    """

    def through(taps: list[Array]) -> tuple[Array, tuple[Array, list[Array]]]:
        inputs: list[Array] = []

        def tap(index: int, h: Array) -> Array:
            inputs.append(h)
            return taps[index] if steps is None else taps[index] + steps.in_layer(index, h)

        z = network.augment(model.tapped(net["weights"], fixed, x, tap))
        f = z @ net["head"]
        return f if steps is None else f + steps.in_head(z), (z, inputs)

    k = net["head"].shape[1]
    # A zero that varies over devices where the points do: see ``points.varying_zero``.
    zero = 0 * weight[:, None]
    taps = [
        (zero + jnp.zeros_like(layer["bias"])).astype(layer["bias"].dtype)
        for layer in net["weights"]
    ]
    f, pull, (z, inputs) = jax.vjp(through, taps, has_aux=True)
    starts = weight[None, :, None] * jnp.eye(k, dtype=f.dtype)[:, None, :]  # [k, N, k]
    (signals,) = jax.vmap(pull)(starts)
    return f, LayerRows(z * weight[:, None], inputs, signals)


def is_tapped(model: Model) -> TypeGuard[TappedModel]:
    """Whether a backbone shows the inputs of its layers."""
    return callable(getattr(model, "tapped", None))
