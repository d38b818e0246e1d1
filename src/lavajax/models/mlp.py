"""The built-in multi-layer perceptron."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from lavajax import validate
from lavajax.types import Array, PyTree

_ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "gelu": jax.nn.gelu, "silu": jax.nn.silu}


@dataclasses.dataclass(frozen=True)
class MLP:
    """Features of vectors ``[N, d]`` by a multi-layer perceptron.

    Inputs are cast to the dtype of the weights. A context ``[C]``, where the method adapts one,
    is concatenated to every input.

    Attributes:
        hidden: widths of the hidden layers.
        linear_features: add one more layer **without** activation, of width ``feature_dim``,
            before the head. It decides how well an adapted head can do: after a ReLU the features
            are non-negative, so is their kernel z.z', and most regression tasks need a kernel that
            changes sign. On sine waves with two support points the test error is fifteen times
            lower with it. False is the architecture of the LAVA paper's text.
        feature_dim: D, the width of that layer; None: the last hidden width.
        activation: of the hidden layers.
        initializer: ``"torch"`` draws weights and biases from U(-1, 1)/sqrt(fan_in), as the
            paper's runs did; ``"lecun"`` and ``"he"`` draw normal weights of variance 1/fan_in and
            2/fan_in and set biases to 0 (with wide inputs ``"he"`` starts at a huge loss).
    """

    hidden: tuple[int, ...] = (64, 64, 64)
    linear_features: bool = True
    feature_dim: int | None = None
    activation: Literal["relu", "tanh", "gelu", "silu"] = "relu"
    initializer: Literal["torch", "lecun", "he"] = "torch"

    def __post_init__(self) -> None:
        validate.integers(self, "hidden", minimum=1)
        validate.flag(self, "linear_features")
        if self.feature_dim is not None:
            validate.integer(self, "feature_dim", minimum=1)
            if not self.linear_features:
                raise ValueError(
                    f"MLP.feature_dim is the width of the linear feature layer, which "
                    f"linear_features=False leaves out; got feature_dim={self.feature_dim}"
                )
        validate.choice(self, "activation", tuple(_ACTIVATIONS))
        validate.choice(self, "initializer", ("torch", "lecun", "he"))
        if not self.hidden and self.feature_dim is None:
            raise ValueError("MLP.hidden is empty: give a hidden layer, or a feature_dim")

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """Draws the weights.

        Args:
            key: PRNG key.
            x: example inputs, ``[N, d]``.
            context: the context ``[C]`` that will be given, or None.

        Returns:
            ``(weights, fixed)``: a list of layers ``{"weight": [out, in], "bias": [out]}``, and
            ``{}``.

        Raises:
            ValueError: an input is not a vector.
        """
        if x.ndim != 2:
            raise ValueError(
                f"x must have shape [N, d] for MLP, got {x.shape}; a single input per point is "
                "x[:, None]"
            )
        widths = list(self.hidden)
        if self.linear_features:
            widths.append(self.feature_dim or self.hidden[-1])
        fan_in = x.shape[1] + (0 if context is None else context.shape[0])
        weights = []
        for layer_key, width in zip(jax.random.split(key, len(widths)), widths, strict=True):
            weights.append(self._layer(layer_key, fan_in, width))
            fan_in = width
        return weights, {}

    def _layer(self, key: Array, fan_in: int, width: int) -> dict[str, Array]:
        dtype = jnp.result_type(float)
        if self.initializer == "torch":
            return uniform_layer(key, fan_in, width)
        std = math.sqrt((2.0 if self.initializer == "he" else 1.0) / fan_in)
        return {
            "weight": std * jax.random.normal(key, (fan_in, width), dtype).T,
            "bias": jnp.zeros((width,), dtype),
        }

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """Features ``[N, D]`` of inputs ``[N, d]``; points do not see each other."""
        del mask
        h = x.astype(weights[0]["weight"].dtype)
        if context is not None:
            repeated = jnp.broadcast_to(context.astype(h.dtype), (*h.shape[:-1], *context.shape))
            h = jnp.concatenate([h, repeated], axis=-1)
        return self._run(weights, h)

    def tapped(
        self, weights: PyTree, fixed: PyTree, x: Array, tap: Callable[[int, Array], Array]
    ) -> Array:
        """See ``TappedModel``."""
        del fixed
        return self._run(weights, x, tap=tap)

    def layers(self, weights: PyTree) -> int:
        """See ``LayeredModel``."""
        return len(weights)

    def layered(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        visit: Callable[[int, Array], Array],
        *,
        mask: Array | None = None,
    ) -> Array:
        """See ``LayeredModel``."""
        del fixed, mask
        return self._run(weights, x, visit)

    def _run(
        self,
        weights: PyTree,
        x: Array,
        visit: Callable[[int, Array], Array] | None = None,
        tap: Callable[[int, Array], Array] | None = None,
    ) -> Array:
        """Features of x, under ``visit`` in place of layer inputs and ``tap`` beside outputs."""
        activation: Any = _ACTIVATIONS[self.activation]
        h = x.astype(weights[0]["weight"].dtype)
        for index, layer in enumerate(weights):
            if visit is not None:
                h = visit(index, h)
            out = linear(layer, h)
            h = out if tap is None else out + tap(index, h)
            if index < len(self.hidden):
                h = activation(h)
        return h


def uniform_layer(key: Array, fan_in: int, width: int) -> dict[str, Array]:
    """A linear layer, ``[out, in]`` and ``[out]``, from U(-1, 1)/sqrt(fan_in).

    A row for each output: automatic differentiation gives the gradient in that shape, and for
    ``[in, out]`` transposes it, which XLA on CPU makes part of the product, in twice its time. That
    was a quarter of a training step.
    """
    bound = 1.0 / math.sqrt(fan_in)
    w_key, b_key = jax.random.split(key)
    dtype = jnp.result_type(float)
    return {
        "weight": jax.random.uniform(w_key, (fan_in, width), dtype, -bound, bound).T,
        "bias": jax.random.uniform(b_key, (width,), dtype, -bound, bound),
    }


def linear(layer: dict[str, Array], h: Array) -> Array:
    """h W^T + b, ``[..., out]``, for h ``[..., in]``; without b, where a layer has none."""
    weight = layer["weight"]
    few = 1 <= weight.shape[1] <= 3
    out = _by_columns(weight, h) if few else h @ weight.T
    return out + layer["bias"] if "bias" in layer else out


def _by_columns(weight: Array, h: Array) -> Array:
    """h W^T as a sum over the inputs, of which there are few.

    The gradient of a product with up to three columns takes XLA on CPU longer than that of one with
    four: a fifteenth of a training step. The barrier keeps the sum over tasks, which is then one of
    whole rows, apart from the sum over points.
    """
    shape = (*h.shape[:-1], weight.shape[0])
    columns = [lax.optimization_barrier(jnp.broadcast_to(c, shape)) for c in weight.T]
    return sum(h[..., i, None] * column for i, column in enumerate(columns))
