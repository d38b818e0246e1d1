"""A hypernetwork: one network writes the adapted block of another."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from lavajax import points, validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import check_parts, init_network, predict_mean, prior_of
from lavajax.methods.task_loss import query_loss
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Context, Head, net_of
from lavajax.types import Adapted, Array, MetaParams, Points


@dataclasses.dataclass(frozen=True)
class HyperNetwork:
    """Amortised adaptation: the support is read once, and the block written in one pass.

    theta' = theta_0 + decoder(mean_i encoder([x_i, y_i])), with multi-layer perceptrons in the form
    of deep sets (Zaheer et al. 2017, theorem 2): the order of the support is of no effect, nor is
    its repetition. Labels of classes enter as one-hot vectors. The decoder starts near 0.

    Unlike gradient steps this is learned for the sizes of support seen in training, and has no
    reason to hold at others: train with the sizes that it will meet.

    Attributes:
        model: backbone.
        point_loss: loss of one point.
        subspace: what is written: ``Head()`` or ``Context(size)``.
        encoder: widths of the encoder's hidden layers.
        encoding: width of its linear output.
        decoder: widths of the decoder's hidden layers; its linear output is the block.
        activation: of the hidden layers of both.
    """

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    subspace: Head | Context = Head()
    encoder: tuple[int, ...] = (64, 64, 64)
    encoding: int = 64
    decoder: tuple[int, ...] = (64, 64)
    activation: Literal["relu", "tanh", "gelu", "silu"] = "relu"

    def __post_init__(self) -> None:
        check_parts(self)
        if not isinstance(self.subspace, (Head, Context)):
            raise ValueError(
                "HyperNetwork.subspace must be Head() or Context(size), got "
                f"{self.subspace!r}: the last layer has an output for every adapted parameter, "
                "too many for all weights; gradient steps on these are Maml"
            )
        validate.integers(self, "encoder", minimum=1)
        validate.integer(self, "encoding", minimum=1)
        validate.integers(self, "decoder", minimum=1)
        self._networks(1)  # refuses the rest

    def _networks(self, size: int) -> tuple[MLP, MLP]:
        """Encoder, and decoder to a block of ``size`` parameters."""
        return (
            MLP(self.encoder, feature_dim=self.encoding, activation=self.activation),
            MLP(self.decoder, feature_dim=size, activation=self.activation),
        )

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """See ``Method``.

        Raises:
            ValueError: besides, an input is not a vector.
        """
        net_key, encoder_key, decoder_key, last_key = jax.random.split(key, 4)
        params = init_network(self, net_key, x, y, {})
        pairs = points.pairs(self.point_loss, Points(jnp.asarray(x), jnp.asarray(y)))
        block = self.subspace.block(net_of(params))
        encoder, decoder = self._networks(block.size)
        encoding = jnp.zeros((1, self.encoding), block.dtype)
        weights = {
            "encoder": encoder.init(encoder_key, pairs)[0],
            "decoder": decoder.init(decoder_key, encoding)[0],
        }
        last = weights["decoder"][-1]
        out, width = last["weight"].shape
        last["weight"] = 0.01 * jax.random.normal(last_key, (width, out), last["weight"].dtype).T
        last["bias"] = jnp.zeros_like(last["bias"])
        return params.replace_learned({**params.learned, **weights})

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """See ``Method``."""
        del key  # deterministic
        support = points.sanitise(support)
        prior = prior_of(self, params).block
        encoder, decoder = self._networks(prior.size)
        pairs = points.pairs(self.point_loss, support)
        encodings = encoder.features(params["encoder"], {}, pairs)
        mean = points.average(encodings, support)
        delta = decoder.features(params["decoder"], {}, mean[None]).reshape(prior.shape)
        return Adapted(prior + jnp.where(points.any_real(support), delta, 0).astype(prior.dtype))

    predict = predict_mean
    loss = query_loss
    memory = no_memory
    step = gradient_step
