"""Any method, with inputs that know the other points of the support."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lavajax import linalg, points, validate
from lavajax.losses import CrossEntropy, Loss
from lavajax.methods.base import Method, example_points
from lavajax.methods.lava import lava_converged
from lavajax.methods.neural_process import Activation
from lavajax.models.mlp import MLP
from lavajax.outer import gradient_step, no_memory
from lavajax.types import Adapted, Array, MetaParams, Points, PointSpec, Prediction, Task

_OWN = "relations"
"""The learned leaf beside those of the method."""


@dataclasses.dataclass(frozen=True)
class Conditioned:
    r"""A method whose inputs carry what the points of the support say where each of them lies.

    An adapted head is linear in the targets of the support, however deep the network under it. Here
    the network reads them too: with m and s the mean and standard deviation of the targets of S,
    for a query the whole support, for a point of the support all others,

        r(x) = mean_{i in S} h([(x_i - x) / l, |x_i - x| / l, (y_i - m) / s, m, log s]),

    with a perceptron h and a length-scale l, and the method adapts to, and predicts at,
    [x, r(x), m, log s] in place of x. h sees where points lie from x alone, as relation networks
    and convolutional neural processes do (Santoro et al. 2017, equation 1; Gordon et al. 2020,
    section 4), and the sum over a set is that of Zaheer et al. (2017): the order of the points does
    not matter. Nothing at a point of the support depends on its own target: what the method sees
    there is what it would see of a query at the same place. The idea of features that the support
    conditions, under an adapted head, is that of Requeima et al. (2019).

    Memory and time grow with N (N + M) pairs of points. It cannot be updated on-line: each new
    point changes the features of all others.

    Inputs are vectors ``[d]``, targets real vectors ``[k]``; best standardised.

    Attributes:
        method: what adapts; one whose outer step is along its gradient, such as ``Lava``, ``Anil``
            or ``Ridge``. Its network gets inputs of width d + ``encoding`` + 2 k.
        encoder: widths of the hidden layers of h.
        encoding: width of r(x).
        activation: of all layers of h.
        lengthscale: l, in units of the inputs: about the distance over which what a point says
            changes; 0.3 served hours that run from -1 to 1 over a window of 20.
        min_scale: bounds s from below, in units of the targets: s^2 = variance + ``min_scale``^2.
    """

    method: Method = dataclasses.field(default_factory=lava_converged)
    encoder: tuple[int, ...] = (32, 32)
    encoding: int = 32
    activation: Activation = "silu"
    lengthscale: float = 1.0
    min_scale: float = 0.01

    def __post_init__(self) -> None:
        validate.part(self, "method", ("init", "adapt", "predict", "loss", "step"), "Lava()")
        validate.integers(self, "encoder", minimum=1)
        validate.integer(self, "encoding", minimum=1)
        for name in ("lengthscale", "min_scale"):
            validate.number(self, name, minimum=0.0, strict=True)
        _ = self._relate  # refuses an unknown activation
        if getattr(type(self.method), "step", None) is not gradient_step:
            raise ValueError(
                "Conditioned.method must take outer steps along the gradient of its loss, such as "
                f"Lava() or Anil(), got {type(self.method).__name__}, whose step is its own"
            )
        if getattr(self.method, "objective", None) == "mll":
            raise ValueError(
                "Conditioned.method must not be trained by the likelihood of its support, which "
                "its features know: give Dkt objective='predictive', got 'mll'"
            )
        if isinstance(self.method, Conditioned):
            raise ValueError(f"Conditioned.method is conditioned already, got {self.method!r}")
        if isinstance(self.point_loss, CrossEntropy):
            raise ValueError(
                "Conditioned.method must have a loss of real targets, such as SquaredError(), got "
                f"{self.point_loss!r}"
            )
        validate.hashable(self)

    @property
    def point_loss(self) -> Loss:
        """That of the method."""
        return self.method.point_loss

    @property
    def model(self) -> Any:
        """The backbone of the method; None where it has none."""
        return getattr(self.method, "model", None)

    @property
    def why_no_estimate(self) -> str | None:
        """What may help where there is none, as the method says it."""
        return getattr(self.method, "why_no_estimate", None)

    @property
    def sample(self) -> Callable[[MetaParams, Adapted, Array, Array, int], Array]:
        """Draws functions from the method's posterior: ``[number, M, k]``.

        Raises:
            AttributeError: the method has no such posterior.
        """
        draw = getattr(self.method, "sample")  # noqa: B009, the protocol of a method has none

        def sample(
            params: MetaParams, adapted: Adapted, x: Array, key: Array, number: int
        ) -> Array:
            adapted, x = self._as_the_method_sees(params, adapted, x)
            return draw(self._inner(params), adapted, x, key, number)

        return sample

    @functools.cached_property
    def _relate(self) -> MLP:
        return MLP(
            (*self.encoder, self.encoding),
            linear_features=False,
            activation=self.activation,
            initializer="lecun",
        )

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """See ``Method``; the leaves are those of the method, and ``relations`` of h.

        Raises:
            ValueError: besides, an input or a target is not a vector.
        """
        x, y, spec = example_points(x, y)
        self.point_loss.out_dim(spec.y_shape)
        points.pairs(self.point_loss, Points(x, y))  # both refuse what is not vectors
        own_key, key = jax.random.split(key)
        d, k = spec.x_shape[0], spec.y_shape[0]
        wide = jnp.zeros((x.shape[0], d + self.encoding + 2 * k))
        inner = self.method.init(key, wide, y)
        relations = self._relate.init(own_key, jnp.zeros((1, 2 * d + 3 * k)))[0]
        return MetaParams({**inner.learned, _OWN: relations}, inner.fixed, self, spec)

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """See ``Method``.

        The block has that of the method, ``adapted``, and the support as predictions read it:
        ``x`` ``[N, d]``, ``y`` ``[N, k]``, and ``real`` ``[N]``, 0 at padding, else 1.
        """
        known, support = self._known(params, points.sanitise(support))
        adapted = self.method.adapt(self._inner(params), support, key=key)
        return Adapted({"adapted": adapted.block, **known}, adapted.posterior)

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """See ``Method``; error bars are those of the method, at inputs that it takes as given."""
        adapted, x = self._as_the_method_sees(params, adapted, x)
        return self.method.predict(self._inner(params), adapted, x, mask=mask)

    def loss(self, params: MetaParams, task: Task, key: Array) -> Array:
        """That of the method at the wider inputs, a scalar."""
        known, support = self._known(params, points.sanitise(task.support))
        query = points.sanitise(task.query)
        query = dataclasses.replace(query, x=self._widen(params, known, query.x))
        return self.method.loss(self._inner(params), Task(support, query), key)

    memory = no_memory
    step = gradient_step

    def _inner(self, params: MetaParams) -> MetaParams:
        """The parameters as the method made them."""
        spec = params.spec
        wide = spec.x_shape[0] + self.encoding + 2 * spec.y_shape[0]
        learned = {name: leaf for name, leaf in params.learned.items() if name != _OWN}
        x_dtype = jnp.result_type(float).name
        spec = PointSpec((wide,), x_dtype, spec.y_shape, spec.y_dtype)
        return MetaParams(learned, params.fixed, self.method, spec)

    def _as_the_method_sees(
        self, params: MetaParams, adapted: Adapted, x: Array
    ) -> tuple[Adapted, Array]:
        """The method's own outcome, and inputs as wide as it takes them."""
        known = dict(adapted.block)
        own = Adapted(known.pop("adapted"), adapted.posterior)
        return own, self._widen(params, known, x)

    def _known(self, params: MetaParams, support: Points) -> tuple[dict[str, Array], Points]:
        """What predictions read of a support, and the support at wider inputs."""
        # In float32 or better, whatever the dtype of the network.
        dtype = linalg.lift(params[_OWN][0]["bias"]).dtype
        known = {
            "x": support.x.astype(dtype),
            "y": self.point_loss.cast(support.y, dtype),
            "real": points.weights(support, dtype),
        }
        others = 1 - jnp.eye(support.x.shape[0], dtype=dtype)
        wide = self._widen(params, known, support.x, others)
        return known, dataclasses.replace(support, x=wide)

    def _widen(
        self,
        params: MetaParams,
        known: dict[str, Array],
        x: Array,
        seen: Array | float = 1.0,
    ) -> Array:
        """[x, r(x), m, log s], ``[M, d + encoding + 2 k]``.

        Args:
            params: meta-parameters.
            known: what is known of the support.
            x: inputs ``[M, d]``.
            seen: 1 for a point of the support that is in S of an input, else 0, ``[M, N]``.
        """
        y = known["y"]
        m, n, dtype = x.shape[0], y.shape[0], y.dtype
        x = x.astype(dtype)
        weight = jnp.broadcast_to(seen * known["real"], (m, n))
        weight = (weight / jnp.maximum(jnp.sum(weight, axis=1, keepdims=True), 1))[..., None]
        mean = jnp.sum(weight * y, axis=1)
        centred = y - mean[:, None]
        scale = jnp.sqrt(jnp.sum(weight * centred**2, axis=1) + self.min_scale**2)
        level = jnp.concatenate([mean, jnp.log(scale)], axis=1)
        offset = (known["x"] - x[:, None]) / self.lengthscale
        parts = (offset, jnp.abs(offset), centred / scale[:, None])
        pairs = jnp.concatenate(
            [*parts, jnp.broadcast_to(level[:, None], (m, n, level.shape[1]))], axis=-1
        )
        relations = self._relate.features(params[_OWN], {}, pairs.reshape(m * n, pairs.shape[-1]))
        relations = relations.astype(dtype).reshape(m, n, self.encoding)
        return jnp.concatenate([x, jnp.sum(weight * relations, axis=1), level], axis=1)
