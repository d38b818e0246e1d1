"""CNP: the support as the mean of its points' encodings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from lavajax import points, validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import example_points
from lavajax.methods.neural_process import (
    Activation,
    check_process,
    decode,
    init_decoder,
    perceptron,
)
from lavajax.methods.task_loss import density_loss
from lavajax.outer import gradient_step, no_memory
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction


@dataclasses.dataclass(frozen=True)
class Cnp:
    """Conditional neural process (Garnelo et al. 2018, equations 1 to 3).

    r = mean_i encoder([x_i, y_i]), and the decoder reads [r, x] and gives mean and standard
    deviation of a normal density for each output. The outer loss is the negative log density of the
    query, in nats. The prediction's ``noise`` is the variance of the density; ``epistemic`` is
    None, since the model does not tell noise from what the support leaves open. Inputs are vectors
    ``[d]``, targets ``[k]``, best of order 1.

    Attributes:
        point_loss: ``SquaredError()``: what is reported of the mean.
        encoder: widths of the encoder's hidden layers.
        encoding: width of r, a linear layer.
        decoder: widths of the decoder's hidden layers.
        activation: of all hidden layers.
        sigma_min: the least standard deviation, in the units of the targets; below 1. It bounds
            the loss from below: 0.01 suits targets without noise, the paper's code has 0.1.
    """

    point_loss: Loss = SquaredError()
    encoder: tuple[int, ...] = (128, 128, 128)
    encoding: int = 128
    decoder: tuple[int, ...] = (128, 128)
    activation: Activation = "relu"
    sigma_min: float = 0.01

    def __post_init__(self) -> None:
        validate.integers(self, "encoder", minimum=1)
        validate.integer(self, "encoding", minimum=1)
        check_process(self)

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """See ``Method``.

        Raises:
            ValueError: besides, an input is not a vector.
        """
        x, y, spec = example_points(x, y)
        k = self.point_loss.out_dim(spec.y_shape)
        pairs = points.pairs(self.point_loss, Points(x, y))
        encoder_key, decoder_key = jax.random.split(key)
        encoder = perceptron(self, self.encoder, self.encoding)
        learned = {
            "encoder": encoder.init(encoder_key, pairs)[0],
            "decoder": init_decoder(self, decoder_key, self.encoding + x.shape[1], k),
        }
        return MetaParams(learned, {}, self, spec)

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """See ``Method``; the block is r ``[encoding]``, 0 without any point."""
        del key  # deterministic
        support = points.sanitise(support)
        encoder = perceptron(self, self.encoder, self.encoding)
        pairs = points.pairs(self.point_loss, support)
        return Adapted(points.average(encoder.features(params["encoder"], {}, pairs), support))

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """See ``Method``."""
        del mask  # targets do not see each other
        r = jnp.broadcast_to(adapted.block, (x.shape[0], self.encoding))
        return decode(self, params, jnp.concatenate([r, x.astype(r.dtype)], axis=1))

    loss = density_loss
    memory = no_memory
    step = gradient_step
