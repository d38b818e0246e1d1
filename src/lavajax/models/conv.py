"""The convolutional network of the few-shot papers."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from lavajax import validate
from lavajax.models.flax import Linen
from lavajax.types import Array, PyTree

BLOCKS = 4
_FILM_BLOCK = 3  # of 1 to 4: where CAVIA's authors condition this network on a context


@dataclasses.dataclass(frozen=True)
class Conv4:
    """Features of images ``[N, H, W, C]`` by four blocks of convolution (Vinyals et al. 2016).

    A block is a 3x3 convolution, a normalisation, a ReLU and a 2x2 max-pooling, which leaves out
    an odd last row or column. What the last block gives is flattened: D = 64 for Omniglot at 28x28,
    1600 for mini-ImageNet at 84x84, at width 64.

    Inputs are cast to the dtype of the weights, and not scaled: ``Episodes.inputs`` does that.

    A context ``[C]``, where the method adapts one, scales and shifts the channels of the third
    block after its normalisation (FiLM; Zintgraf et al. 2019), h <- (1 + A c) h + B c: at c = 0
    nothing is changed.

    Attributes:
        width: channels of every block.
        norm: ``"batch"`` normalises each channel over all points of one forward pass, the support
            in the inner loop and the query in the outer: no running statistics, so predictions are
            transductive, and methods that need the loss of each point alone refuse it in a context
            or in all weights. ``"layer"`` normalises each point alone, over its channels and
            positions together; for LAVA's head on Omniglot it does as well. ``"none"`` leaves it
            out.
        linear_features: add a linear layer of width ``feature_dim``, **without** activation, before
            the head; see ``MLP.linear_features``. The few-shot papers have none.
        feature_dim: D, the width of that layer; None: the width of the flattened blocks.
    """

    width: int = 64
    norm: Literal["batch", "layer", "none"] = "batch"
    linear_features: bool = False
    feature_dim: int | None = None

    def __post_init__(self) -> None:
        validate.integer(self, "width", minimum=1)
        validate.choice(self, "norm", ("batch", "layer", "none"))
        validate.flag(self, "linear_features")
        if self.feature_dim is not None:
            validate.integer(self, "feature_dim", minimum=1)
            if not self.linear_features:
                raise ValueError(
                    f"Conv4.feature_dim is the width of the linear feature layer, which "
                    f"linear_features=False leaves out; got feature_dim={self.feature_dim}"
                )

    @property
    def _linen(self) -> Linen:
        return Linen(_Blocks(self.width, self.norm, self.linear_features, self.feature_dim))

    def init(self, key: Array, x: Array, context: Array | None = None) -> tuple[PyTree, PyTree]:
        """Draws the weights.

        Args:
            key: PRNG key.
            x: example images, ``[N, H, W, C]``.
            context: the context ``[C]`` that will be given, or None.

        Returns:
            ``(weights, fixed)``: the parameters of the layers by name, and the collection
            ``batch_stats`` of batch normalisation, which nothing reads.

        Raises:
            ValueError: the inputs are not images, or are too small to be halved four times.
        """
        least = 2**BLOCKS
        if x.ndim != 4 or min(x.shape[1:3]) < least:
            raise ValueError(
                f"x must have shape [N, H, W, C] for Conv4, with H and W of at least {least}, "
                f"since each of {BLOCKS} poolings halves them; got {x.shape}"
            )
        return self._linen.init(key, x.astype(jnp.result_type(float)), context)

    def features(
        self,
        weights: PyTree,
        fixed: PyTree,
        x: Array,
        *,
        context: Array | None = None,
        mask: Array | None = None,
    ) -> Array:
        """Features ``[N, D]`` of images ``[N, H, W, C]``; padding stays out of the statistics."""
        x = x.astype(jax.tree.leaves(weights)[0].dtype)
        return self._linen.features(weights, fixed, x, context=context, mask=mask)


class _Blocks(nn.Module):
    """The layers of ``Conv4``."""

    width: int
    norm: str
    linear_features: bool
    feature_dim: int | None

    @nn.compact
    def __call__(self, x: Array, context: Array | None = None, mask: Array | None = None) -> Array:
        dtype = jnp.result_type(float)
        h = x
        for block in range(1, BLOCKS + 1):
            shape = (3, 3, h.shape[-1], self.width)
            kernel = self.param(f"kernel_{block}", nn.initializers.lecun_normal(), shape, dtype)
            h = self._normalise(convolve(h, kernel), block, mask)
            if context is not None and block == _FILM_BLOCK:
                film = nn.Dense(2 * self.width, use_bias=False, param_dtype=dtype)(context)
                scale, shift = jnp.split(film.astype(h.dtype), 2)
                h = (1 + scale) * h + shift
            h = nn.relu(_pool(h))  # a ReLU after the pooling is the same, on a quarter of it
        h = h.reshape(h.shape[0], math.prod(h.shape[1:]))  # of no image too
        if self.linear_features:
            h = nn.Dense(self.feature_dim or h.shape[1], param_dtype=dtype)(h)
        return h

    def _normalise(self, h: Array, block: int, mask: Array | None) -> Array:
        dtype = jnp.result_type(float)
        if self.norm == "batch":
            if mask is not None:
                # Where no image is real, padding stands in, which is no NaN: a mean of none is one.
                mask = (mask.astype(bool) | ~jnp.any(mask))[:, None, None, None]
            return nn.BatchNorm(use_running_average=False, param_dtype=dtype)(h, mask=mask)
        if self.norm == "layer":
            return nn.GroupNorm(num_groups=1, param_dtype=dtype)(h)
        # A normalisation brings a bias of its own, and takes away one before it.
        zeros = nn.initializers.zeros_init()
        return h + self.param(f"bias_{block}", zeros, (self.width,), dtype)


def convolve(h: Array, kernel: Array) -> Array:
    """3x3 convolution of ``[N, H, W, C]`` with a kernel ``[3, 3, C, D]``, zeros beyond the edges.

    On CPU it is a product of matrices. XLA's own convolution there takes 13 times as long in the
    gradient inside a compiled loop, which training is, and with a kernel for each task, as all
    weights adapted give, as much more.
    """
    if jax.default_backend() != "cpu":
        return lax.conv_general_dilated(
            h, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    return as_product(h, kernel)


def as_product(h: Array, kernel: Array) -> Array:
    """``convolve`` as a product of the 3x3 surroundings ``[N, H, W, 9 C]`` with the kernel."""
    height, width = h.shape[1:3]
    padded = jnp.pad(h, ((0, 0), (1, 1), (1, 1), (0, 0)))
    shifted = [padded[:, i : i + height, j : j + width] for i in range(3) for j in range(3)]
    return jnp.concatenate(shifted, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])


def _pool(h: Array) -> Array:
    """2x2 max-pooling of ``[N, H, W, C]``.

    By reshaping: on CPU its gradient takes half the time of that of a windowed reduction.
    """
    n, height, width, channels = h.shape
    height, width = height // 2, width // 2
    tiles = h[:, : 2 * height, : 2 * width].reshape(n, height, 2, width, 2, channels)
    rows = _larger(tiles[:, :, 0], tiles[:, :, 1])
    return _larger(rows[:, :, :, 0], rows[:, :, :, 1])


def _larger(a: Array, b: Array) -> Array:
    """The larger, or NaN.

    By a choice: the gradient of ``jnp.max`` looks for what equals the maximum, which a compiler may
    round otherwise when it computes h again, and is then 0/0.
    """
    return jnp.where((a >= b) | jnp.isnan(a), a, b)
