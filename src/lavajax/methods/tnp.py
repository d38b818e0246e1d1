"""TNP-D: a transformer whose tokens are points."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from lavajax import points, validate
from lavajax.attention import attend_multi_head, init_attention, project
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import example_points
from lavajax.methods.neural_process import (
    Activation,
    check_heads,
    check_process,
    decode,
    init_decoder,
    perceptron,
)
from lavajax.methods.task_loss import density_loss
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction, PyTree


@dataclasses.dataclass(frozen=True)
class Tnp:
    """Transformer neural process with independent targets (Nguyen and Grover 2022, TNP-D).

    Tokens [x_i, y_i] of the support and [x, 0] of the targets pass through transformer layers
    (Vaswani et al. 2017, normalised after each residual) without positions. **Every** token attends
    to the support alone, so the support is encoded once, and a prediction costs N for each target.
    Density, loss and units are those of ``Cnp``. Without any point, attention is 0.

    Attributes:
        point_loss: ``SquaredError()``: what is reported of the mean.
        width: of a token; a multiple of ``heads``.
        embedding_layers: layers of the perceptron that makes the tokens, the last one linear.
        layers: L, transformer layers.
        heads: H.
        feedforward: width of the hidden layer in each transformer layer.
        decoder: widths of the decoder's hidden layers.
        activation: of all hidden layers.
        sigma_min: the least standard deviation, in the units of the targets; below 1.
    """

    point_loss: Loss = SquaredError()
    width: int = 64
    embedding_layers: int = 4
    layers: int = 6
    heads: int = 4
    feedforward: int = 128
    decoder: tuple[int, ...] = (128,)
    activation: Activation = "relu"
    sigma_min: float = 0.01

    def __post_init__(self) -> None:
        for name in ("embedding_layers", "layers"):
            validate.integer(self, name, minimum=1, maximum=validate.MOST)
        for name in ("width", "heads", "feedforward"):
            validate.integer(self, name, minimum=1)
        check_heads(self, self.width, self.heads)
        check_process(self)

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """See ``Method``; the leaves of ``layers`` have a leading axis ``[L]``.

        Raises:
            ValueError: besides, an input is not a vector.
        """
        x, y, spec = example_points(x, y)
        k = self.point_loss.out_dim(spec.y_shape)
        pairs = points.pairs(self.point_loss, Points(x, y))
        embedding_key, layers_key, decoder_key = jax.random.split(key, 3)
        learned = {
            "embedding": self._embedding.init(embedding_key, pairs)[0],
            "layers": jax.vmap(self._init_layer)(jax.random.split(layers_key, self.layers)),
            "decoder": init_decoder(self, decoder_key, self.width, k),
        }
        return MetaParams(learned, {}, self, spec)

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """See ``Method``; the block is the support as the targets will read it.

        Its ``tokens`` ``[L, N, width]`` enter each layer, its ``real`` ``[N]`` is 0 at padding,
        else 1.
        """
        del key  # deterministic
        support = points.sanitise(support)
        pairs = points.pairs(self.point_loss, support)
        start = self._embedding.features(params["embedding"], {}, pairs)
        real = points.weights(support, start.dtype)

        def layer(tokens: Array, weights: PyTree) -> tuple[Array, Array]:
            return self._layer(weights, tokens, tokens, real), tokens

        return Adapted({"tokens": lax.scan(layer, start, params["layers"])[1], "real": real})

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """See ``Method``."""
        del mask  # targets do not see each other

        def layer(tokens: Array, at: tuple[PyTree, Array]) -> tuple[Array, None]:
            weights, support = at
            return self._layer(weights, tokens, support, adapted.block["real"]), None

        unknown = Points(x, jnp.zeros((x.shape[0], *params.spec.y_shape)))
        pairs = points.pairs(self.point_loss, unknown)
        start = self._embedding.features(params["embedding"], {}, pairs)
        # In a user's shard_map x may be the same on all devices, and what the loop makes of it not.
        start = start + 0 * jnp.sum(adapted.block["real"]).astype(start.dtype)
        tokens, _ = lax.scan(layer, start, (params["layers"], adapted.block["tokens"]))
        return decode(self, params, tokens)

    @property
    def _embedding(self) -> MLP:
        return perceptron(self, (self.width,) * (self.embedding_layers - 1), self.width)

    @property
    def _feedforward(self) -> MLP:
        return perceptron(self, (self.feedforward,), self.width)

    def _init_layer(self, key: Array) -> dict[str, PyTree]:
        attention_key, feed_key = jax.random.split(key)
        norm = {"scale": jnp.ones(self.width), "shift": jnp.zeros(self.width)}
        return {
            "attention": init_attention(attention_key, self.width),
            "feedforward": self._feedforward.init(feed_key, norm["scale"][None])[0],
            "norms": [norm, norm],
        }

    def _layer(self, weights: PyTree, tokens: Array, support: Array, real: Array) -> Array:
        """One layer of tokens ``[M, width]`` that attend to the support's ``[N, width]``."""
        attention, (first, second) = weights["attention"], weights["norms"]
        keys = project(attention["key"], support, self.heads)
        values = project(attention["value"], support, self.heads)
        h = _normalise(first, tokens + attend_multi_head(attention, tokens, keys, values, real))
        return _normalise(second, h + self._feedforward.features(weights["feedforward"], {}, h))

    loss = density_loss
    memory = no_memory
    step = gradient_step


def _normalise(norm: dict[str, Array], h: Array) -> Array:
    """Layer normalisation of ``[M, width]`` (Ba et al. 2016)."""
    h = h - jnp.mean(h, axis=-1, keepdims=True)
    h = h * lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-5)
    return norm["scale"] * h + norm["shift"]
