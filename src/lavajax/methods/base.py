"""The contract of a method, and what most methods share.

A method is a frozen dataclass of hyperparameters with pure methods. Shared behaviour is shared as
functions, assigned in the class body (``loss = query_loss``, of ``task_loss``), never by
inheritance.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from lavajax import linalg, network, points, validate
from lavajax.losses import GaussianNll, Loss, SquaredError
from lavajax.methods.batch_norm import check_batch
from lavajax.models.base import MODEL, Model
from lavajax.outer import Expectation
from lavajax.subspace import Bound, Subspace, bind, net_of
from lavajax.types import (
    Adapted,
    Array,
    MetaParams,
    Points,
    PointSpec,
    Prediction,
    PyTree,
    Task,
    TrainState,
)


class Method(Protocol):
    """A meta-learning method. All functions are pure and take one task; callers vmap.

    Every method is hashable and comparable, since it rides in ``MetaParams`` as static metadata.
    """

    def __hash__(self) -> int:
        """Of the hyperparameters."""

    @property
    def point_loss(self) -> Loss:
        """The loss of one point, of support and query alike."""

    def init(self, key: Array, x: Array, y: Array) -> MetaParams:
        """Draws meta-parameters for points like the examples x ``[N, ...]``, y ``[N, ...]``.

        Raises:
            ValueError: the model or loss cannot take such points, or the method such a model.
        """

    def adapt(self, params: MetaParams, support: Points, *, key: Array | None = None) -> Adapted:
        """Adapts to the support of one task.

        Args:
            params: meta-parameters.
            support: ``[N]`` points, N >= 0; without any, the prior is returned.
            key: PRNG key. None asks for the deterministic answer; stochastic methods that have
                none refuse it.
        """

    def predict(
        self, params: MetaParams, adapted: Adapted, x: Array, *, mask: Array | None = None
    ) -> Prediction:
        """Predicts at x ``[M, ...]``; ``mask`` ``[M]`` is for backbones that couple points."""

    def loss(self, params: MetaParams, task: Task, key: Array) -> Array:
        """What the outer loop minimises, for one task; a scalar.

        To be differentiated in reverse mode, or forward over reverse: a head's has no forward mode
        by itself.
        """

    def memory(self, params: MetaParams) -> PyTree:
        """What ``step`` carries between steps, at the start of training."""

    def step(
        self, state: TrainState, expect: Expectation, tx: optax.GradientTransformation
    ) -> tuple[TrainState, dict[str, Array]]:
        """One outer step; counts it, and returns scalar metrics with at least ``loss``."""


class NetworkMethod(Method, Protocol):
    """A method that adapts a part of one network."""

    @property
    def model(self) -> Model:
        """The backbone."""

    @property
    def subspace(self) -> Subspace:
        """The part that adapts."""


LOSS = ("value", "factor", "constant_curvature")
SUBSPACE = ("block", "merge", "init_context")


def check_parts(method: NetworkMethod) -> None:
    """Requires model, loss and subspace to be what their protocols say, and all to be hashable."""
    validate.part(method, "model", MODEL, "MLP(), Linen(module) or NNX(constructor)")
    validate.part(method, "point_loss", LOSS, "SquaredError() or CrossEntropy(classes=5)")
    validate.part(method, "subspace", SUBSPACE, "Head(), Context(size=4) or Full()")
    validate.hashable(method)


def check_gaussian(method: Method) -> None:
    """Requires the loss of real targets, for a method that predicts a normal density of them."""
    if not isinstance(method.point_loss, SquaredError):
        name = type(method).__name__
        raise ValueError(
            f"{name}.point_loss must be SquaredError(): {name} predicts a normal density of real "
            f"targets, got {method.point_loss!r}; for classes and directions take a method such as "
            "Anil"
        )


def init_network(
    method: NetworkMethod, key: Array, x: Array, y: Array, learned: dict[str, Array]
) -> MetaParams:
    """Meta-parameters of a network method: its net, and the further ``learned`` leaves.

    Raises:
        ValueError: x and y do not fit each other, the model, or the loss.
    """
    x, y, spec = example_points(x, y)
    context_key, net_key = jax.random.split(key)
    context = method.subspace.init_context(context_key)
    out_dim = method.point_loss.out_dim(spec.y_shape)
    net, backbone = network.init_net(method.model, net_key, x, out_dim, context)
    fixed: dict[str, PyTree] = {"backbone": backbone}
    if context is not None and not method.subspace.learns_context:
        fixed["context"] = net.pop("context")
    return MetaParams({**net, **learned}, fixed, method, spec)


def example_points(x: Array, y: Array) -> tuple[Array, Array, PointSpec]:
    """Example points as arrays, and what one of them looks like.

    Raises:
        ValueError: x and y do not have as many points.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.ndim == 0 or y.ndim == 0 or x.shape[0] != y.shape[0]:
        raise ValueError(
            f"x and y must have the same number of points on their first axis, got shapes "
            f"{x.shape} and {y.shape}"
        )
    return x, y, PointSpec(x.shape[1:], x.dtype.name, y.shape[1:], y.dtype.name)


def expected_params(method: Method, spec: PointSpec) -> MetaParams:
    """The meta-parameters that a method makes for such points, as shapes and dtypes."""
    like = expected_points(spec, 2)
    return jax.eval_shape(method.init, jax.random.key(0), like.x, like.y)


def expected_points(spec: PointSpec, number: int) -> Points:
    """So many points, as shapes and dtypes."""

    def like(shape: tuple[int, ...], dtype: str) -> Any:
        return jax.ShapeDtypeStruct((number, *shape), jax.dtypes.canonicalize_dtype(dtype))

    return Points(like(spec.x_shape, spec.x_dtype), like(spec.y_shape, spec.y_dtype))


def require_key(method: Method, key: Array | None) -> Array:
    """The key, for a stochastic method that has no deterministic answer.

    Raises:
        ValueError: there is none.
    """
    if key is None:
        raise ValueError(
            f"key must be given: {type(method).__name__} is stochastic, and draws from it; "
            "for example jax.random.key(0)"
        )
    return key


def scalar(value: float) -> Array:
    """A learned scalar leaf, float32 or, where the user has enabled it, float64."""
    return jnp.asarray(value, jnp.result_type(float))


class RateMethod(Protocol):
    """A method with an inner rate that may be learned."""

    @property
    def inner_rate(self) -> float:
        """Step size alpha, or where it starts."""

    @property
    def learn_inner_rate(self) -> bool:
        """Whether alpha is learned."""


def learned_rate(method: RateMethod) -> dict[str, Array]:
    """The leaf ``inner_rate``, where it is learned."""
    return {"inner_rate": scalar(method.inner_rate)} if method.learn_inner_rate else {}


def inner_rate(method: RateMethod, params: MetaParams) -> Array | float:
    """alpha: the learned leaf, or the fixed hyperparameter."""
    return params.learned["inner_rate"] if method.learn_inner_rate else method.inner_rate


def regulariser(
    params: MetaParams, name: str, fixed: float, floor: float, scale: Array | float
) -> Array | float:
    """The learned leaf ``name``, a logarithm, as a regulariser above a floor; else ``fixed``.

    A learned regulariser of a linear system shrinks until float32 cannot solve the system, and
    training ends in NaN, unless it stands above a floor relative to the system's ``scale``.
    """
    if name not in params.learned:
        return fixed
    return jnp.exp(params.learned[name]) + floor * scale


def prior_of(method: NetworkMethod, params: MetaParams) -> Adapted:
    """The outcome without any support: the prior block, in float32 or better."""
    return Adapted(linalg.lift(method.subspace.block(net_of(params))))


def bind_support(
    method: NetworkMethod, params: MetaParams, support: Points, name: str = "support"
) -> tuple[Points, Bound]:
    """The support with its padding made harmless, and the outputs there given the block.

    The prior block is float32 or better, whatever the dtype of the network, and so is the block
    that an inner loop or a solve makes of it.

    Raises:
        ValueError: batch normalisation would leave nothing of the support, called ``name``.
    """
    check_batch(params, support.x, support.x.shape[0], name)
    support = points.sanitise(support)
    bound = bind(method.subspace, method.model, params, support.x, support.mask)
    return support, bound._replace(prior=inner_start(bound.prior, support))


def inner_start(block: PyTree, support: Points) -> PyTree:
    """A block as an inner loop starts from it: float32 or better, and varying with the support."""
    zero = points.varying_zero(support.y)
    return jax.tree.map(lambda leaf: leaf + zero.astype(leaf.dtype), linalg.lift(block))


def outputs(
    method: NetworkMethod, params: MetaParams, adapted: Adapted, x: Array, mask: Array | None = None
) -> Array:
    """The outputs f ``[M, k]`` of the adapted network."""
    net = method.subspace.merge(net_of(params), adapted.block)
    return linalg.lift(network.outputs(method.model, net, params.fixed["backbone"], x, mask))


def predict_mean(
    method: NetworkMethod,
    params: MetaParams,
    adapted: Adapted,
    x: Array,
    *,
    mask: Array | None = None,
) -> Prediction:
    """The prediction of the adapted network, without error bars but those that it predicts."""
    f = outputs(method, params, adapted, x, mask)
    loss = method.point_loss
    noise = jax.vmap(loss.noise)(f) if isinstance(loss, GaussianNll) else None
    return Prediction(jax.vmap(loss.mean)(f), noise=noise)
