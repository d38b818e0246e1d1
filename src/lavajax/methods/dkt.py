"""Deep kernel transfer: a Gaussian process on learned features."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp

from lavajax import kernels, linalg, points, validate
from lavajax.losses import Loss, SquaredError
from lavajax.methods.base import check_gaussian, check_parts, init_network, scalar
from lavajax.models.base import Model
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.subspace import Head
from lavajax.types import Adapted, Array, MetaParams, Points, Prediction, Task


@dataclasses.dataclass(frozen=True)
class Dkt:
    r"""Deep kernel transfer (Patacchiola, Turner, Crowley, O'Boyle and Storkey 2020, algorithm 1).

    The targets of a task are a Gaussian process on the features phi of the network, y ~ N(m,
    K + sigma^2 I) for every output, with one kernel for all outputs and a constant mean m ``[k]``.
    All of it is learned; nothing adapts but by conditioning on the support (X, Y):

        mean(x) = m + k(x, X) alpha,   alpha = (K + sigma^2 I)^-1 (Y - m),
        var(x) = k(x, x) - k(x, X) (K + sigma^2 I)^-1 k(X, x).

    There is no linear head, and training maximises the density of the task's points, in nats for
    each point and output. ``kernel="linear"`` is ``Alpaca`` with K0 = m in the bias row, 0
    elsewhere, and Lambda0 a multiple of the identity.

    Attributes:
        model: backbone.
        point_loss: ``SquaredError``: the reported metric.
        kernel: ``"linear"``, s z . z' with z = [phi, 1]; ``"rbf"``, s exp(-||phi - phi'||^2 /
            (2 l^2)); or ``"spectral_mixture"``, a mixture of normal densities in the spectrum.
        mixtures: components of the spectral mixture; unused otherwise.
        noise: sigma, the standard deviation of the noise where it starts, in units of the targets.
        noise_floor: the least sigma^2, without which training of noise-free tasks ends at a kernel
            that float32 cannot factor.
        objective: ``"mll"``, the density of support and query together; or ``"predictive"``, the
            density of the query given the support.
    """

    subspace: ClassVar[Head] = Head()

    model: Model = MLP()
    point_loss: Loss = SquaredError()
    kernel: Literal["linear", "rbf", "spectral_mixture"] = "rbf"
    mixtures: int = 4
    noise: float = 0.1
    noise_floor: float = 1e-4
    objective: Literal["mll", "predictive"] = "mll"

    def __post_init__(self) -> None:
        validate.choice(self, "kernel", ("linear", "rbf", "spectral_mixture"))
        validate.integer(self, "mixtures", minimum=1)
        validate.number(self, "noise", minimum=0.0, strict=True)
        validate.number(self, "noise_floor", minimum=0.0, strict=True)
        validate.choice(self, "objective", ("mll", "predictive"))
        check_parts(self)
        check_gaussian(self)
        if self.noise**2 <= self.noise_floor:
            raise ValueError(
                f"Dkt.noise must start above its floor, got noise**2 = {self.noise**2:g} and "
                f"noise_floor={self.noise_floor:g}"
            )

    @property
    def _kernel(self) -> kernels.Kernel:
        if self.kernel == "spectral_mixture":
            return kernels.SpectralMixture(self.mixtures)
        return kernels.Linear() if self.kernel == "linear" else kernels.RBF()

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """The backbone, the mean, and the hyperparameters of kernel and noise.

        Raises:
            ValueError: the points do not fit the model or the loss.
        """
        params = init_network(self, key, x, y, {})
        head = params.learned.pop("head")
        params.learned["mean"] = jnp.zeros_like(head[0])
        # The network has split the key in two, and so has its folds of 0 and 1.
        kernel_key = jax.random.fold_in(key, 2)
        params.learned["kernel"] = self._kernel.init(kernel_key, head.shape[0] - 1)
        raw = kernels.unconstrained(self.noise**2, self.noise_floor)
        params.learned["raw_noise"] = scalar(raw)
        return params

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """Conditions on the support of one task.

        Returns:
            ``block``: the ``features`` of the support, ``[N, D]``, and their ``weights`` alpha,
            ``[N, k]``, 0 for padding. ``posterior``: ``gram``, K + sigma^2 I, ``[N, N]``, with rows
            of the identity for padding, and ``real``, ``[N]``, 0 for padding.
        """
        del key  # deterministic
        support = points.sanitise(support)
        features = self._features(params, support.x, support.mask)
        real = points.weights(support, features.dtype)
        gram = self._gram(params, features, real)
        residual = self._residual(params, support, real)
        weights = linalg.solve_positive(gram, residual) if real.size else residual
        return Adapted({"features": features, "weights": weights}, {"gram": gram, "real": real})

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """The predictive density at x ``[M, ...]``; see ``Method``."""
        block, posterior = adapted.block, adapted.posterior
        features, hyper = self._features(params, x, mask), self._hyper(params)
        cross = self._kernel.matrix(hyper, features, block["features"]) * posterior["real"]
        mean = params["mean"] + linalg.matmul(cross, block["weights"])
        variance = prior = self._kernel.diagonal(hyper, features)
        if posterior["real"].size:
            solved = linalg.solve_positive(posterior["gram"], cross.T)
            # A difference that rounding could make negative.
            least = jnp.finfo(prior.dtype).eps * prior
            variance = jnp.maximum(prior - jnp.sum(cross.T * solved, axis=0), least)
        noise = jnp.broadcast_to(self._noise(params), mean.shape)
        return Prediction(mean, jnp.broadcast_to(variance[:, None], mean.shape), noise)

    def loss(self, params: MetaParams, task: Task, key: Array | None) -> Array:
        """-log density, the mean over points and outputs, in nats; see ``objective``."""
        del key
        both = points.sanitise(points.concatenate(task.support, task.query))
        features = self._features(params, both.x, both.mask)
        real = points.weights(both, features.dtype)
        residual = self._residual(params, both, real)
        gram = self._gram(params, features, real)
        total, count = _negative_log_density(gram, residual, real), jnp.sum(real)
        if self.objective == "predictive" and (n := task.support.x.shape[0]):
            total -= _negative_log_density(gram[:n, :n], residual[:n], real[:n])
            count -= jnp.sum(real[:n])
        return total / (jnp.maximum(count, 1.0) * residual.shape[1])

    memory = no_memory
    step = gradient_step

    def _features(self, params: MetaParams, x: Array, mask: Array | None) -> Array:
        """phi, ``[N, D]``, in float32 or better."""
        weights, fixed = params["weights"], params.fixed["backbone"]
        return linalg.lift(self.model.features(weights, fixed, x, mask=mask))

    def _hyper(self, params: MetaParams) -> dict[str, Array]:
        return linalg.lift(params["kernel"])

    def _noise(self, params: MetaParams) -> Array:
        """sigma^2, a scalar."""
        return kernels.positive(linalg.lift(params["raw_noise"]), self.noise_floor)

    def _residual(self, params: MetaParams, at: Points, real: Array) -> Array:
        """Y - m, ``[N, k]``; 0 for padding."""
        y = self.point_loss.cast(at.y, real.dtype)
        return (y - linalg.lift(params["mean"])) * real[:, None]

    def _gram(self, params: MetaParams, features: Array, real: Array) -> Array:
        """K + sigma^2 I, ``[N, N]``; rows and columns of the identity for padding."""
        matrix = self._kernel.matrix(self._hyper(params), features, features)
        matrix = matrix * real[:, None] * real[None, :]
        noise = linalg.above_rounding(self._noise(params), matrix)
        return matrix + jnp.diag(jnp.where(real > 0, noise, 1.0))


def _negative_log_density(gram: Array, residual: Array, real: Array) -> Array:
    """-log N(r_o; 0, G) summed over the outputs o, for ``[N, N]`` and ``[N, k]``; a scalar."""
    k = residual.shape[1]
    quadratic = jnp.sum(residual * linalg.solve_positive(gram, residual))
    constant = jnp.sum(real) * math.log(2 * math.pi)
    return 0.5 * (quadratic + k * (linalg.log_det_positive(gram) + constant))
