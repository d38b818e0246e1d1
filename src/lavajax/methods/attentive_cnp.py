"""CANP: every target attends to the points of the support."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

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
from lavajax.outer import gradient_step, no_memory
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction


@dataclasses.dataclass(frozen=True)
class AttentiveCnp:
    """Attentive conditional neural process (Kim et al. 2019, without the latent path).

    Keys and queries are one perceptron of x, values one of [x_i, y_i]; a target's code r(x) is
    multi-head attention over the support, and the decoder reads [r(x), x]. Density, loss and units
    are those of ``Cnp``. Without any point, attention is 0.

    Attributes:
        point_loss: ``SquaredError()``: what is reported of the mean.
        width: of keys, queries, values and r(x); a multiple of ``heads``.
        heads: H.
        key_encoder: widths of the hidden layers of keys and queries.
        encoder: widths of the hidden layers of values.
        decoder: widths of the decoder's hidden layers.
        activation: of all hidden layers.
        sigma_min: the least standard deviation, in the units of the targets; below 1.
    """

    point_loss: Loss = SquaredError()
    width: int = 128
    heads: int = 8
    key_encoder: tuple[int, ...] = (128,)
    encoder: tuple[int, ...] = (128, 128, 128)
    decoder: tuple[int, ...] = (128, 128)
    activation: Activation = "relu"
    sigma_min: float = 0.01

    def __post_init__(self) -> None:
        validate.integer(self, "width", minimum=1)
        validate.integer(self, "heads", minimum=1)
        check_heads(self, self.width, self.heads)
        validate.integers(self, "key_encoder", minimum=1)
        validate.integers(self, "encoder", minimum=1)
        check_process(self)

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """See ``Method``.

        Raises:
            ValueError: besides, an input is not a vector.
        """
        x, y, spec = example_points(x, y)
        k = self.point_loss.out_dim(spec.y_shape)
        pairs = points.pairs(self.point_loss, Points(x, y))
        at_x, encoder_key, attention_key, decoder_key = jax.random.split(key, 4)
        learned = {
            "key_encoder": perceptron(self, self.key_encoder, self.width).init(at_x, x)[0],
            "encoder": perceptron(self, self.encoder, self.width).init(encoder_key, pairs)[0],
            "attention": init_attention(attention_key, self.width),
            "decoder": init_decoder(self, decoder_key, self.width + x.shape[1], k),
        }
        return MetaParams(learned, {}, self, spec)

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """See ``Method``; the block is the support as attention reads it.

        Its ``keys`` and ``values`` are ``[N, H, width / H]``, its ``real`` ``[N]`` is 0 at padding,
        else 1.
        """
        del key  # deterministic
        support = points.sanitise(support)
        encoder = perceptron(self, self.encoder, self.width)
        pairs = points.pairs(self.point_loss, support)
        values = encoder.features(params["encoder"], {}, pairs)
        attention, at_x = params["attention"], self._at_x(params, support.x)
        return Adapted(
            {
                "keys": project(attention["key"], at_x, self.heads),
                "values": project(attention["value"], values, self.heads),
                "real": points.weights(support, values.dtype),
            }
        )

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """See ``Method``."""
        del mask  # targets do not see each other
        r = attend_multi_head(params["attention"], self._at_x(params, x), **adapted.block)
        return decode(self, params, jnp.concatenate([r, x.astype(r.dtype)], axis=1))

    def _at_x(self, params: MetaParams, x: Array) -> Array:
        """What keys and queries are made of, ``[N, width]``."""
        encoder = perceptron(self, self.key_encoder, self.width)
        return encoder.features(params["key_encoder"], {}, x)

    loss = density_loss
    memory = no_memory
    step = gradient_step
