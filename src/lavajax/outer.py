"""The outer step: one update of the meta-parameters from a meta-batch of tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import lax

from lavajax.models.base import is_stochastic
from lavajax.types import Array, MetaParams, PyTree, Task, TrainState

if TYPE_CHECKING:
    from lavajax.methods.base import Method

# Folded into a task's key for what its backbone draws.
_BACKBONE = 0xD409


class Expectation(Protocol):
    """Means over the tasks of the meta-batch, on all devices.

    A method sees its meta-batch through this alone, and may use it as often as it likes: the same
    tasks come with the same keys every time.
    """

    def __call__(self, fn: Callable[[Task, Array], PyTree]) -> PyTree:
        """The mean of ``fn(task, key)``, a pytree of arrays. Not to be differentiated through."""

    def value_and_grad(
        self, fn: Callable[[PyTree, Task, Array], PyTree], learned: PyTree, *, has_aux: bool = False
    ) -> tuple[PyTree, PyTree]:
        """The mean of the scalar ``fn(learned, task, key)``, and its gradient in ``learned``.

        With ``has_aux``, ``fn`` returns ``(scalar, aux)``, and the first result is the mean of
        both; only the scalar is differentiated.
        """


@dataclasses.dataclass(frozen=True)
class BatchExpectation:
    """The expectation over tasks held by this device, and by its peers on a named axis.

    Attributes:
        tasks: tasks with a leading axis ``[B]``.
        keys: typed PRNG keys ``[B]``, one for each task.
        axis_name: name of the mapped axis over devices (of ``shard_map`` or ``pmap``), or None.
        real: ``[B]`` booleans, True where a task counts, on some device at least one; None when
            all do.
        microbatch: how many tasks to compute at once, a divisor of B; None: all.
    """

    tasks: Task
    keys: Array
    axis_name: str | None = None
    real: Array | None = None
    microbatch: int | None = None

    def __call__(self, fn: Callable[[Task, Array], PyTree]) -> PyTree:
        """See ``Expectation``."""

        def mean(tasks: Task, keys: Array, real: Array | None) -> PyTree:
            return _mean(jax.vmap(fn)(tasks, keys), real)

        return self._over_tasks(mean)

    def value_and_grad(
        self, fn: Callable[[PyTree, Task, Array], PyTree], learned: PyTree, *, has_aux: bool = False
    ) -> tuple[PyTree, PyTree]:
        """See ``Expectation``."""
        own = self.own(learned)

        def mean(tasks: Task, keys: Array, real: Array | None) -> PyTree:
            def of(learned: PyTree) -> PyTree:
                return _mean(jax.vmap(fn, in_axes=(None, 0, 0))(learned, tasks, keys), real)

            return jax.value_and_grad(of, has_aux=has_aux)(own)

        return self._over_tasks(mean)

    def own(self, tree: PyTree) -> PyTree:
        """A replicated tree for this device to differentiate in, or to return beside its tasks.

        The gradient in a value that is replicated over devices would already be a sum over them.
        Made varying, it is this device's own, under ``shard_map`` and ``pmap`` alike.
        """
        if self.axis_name is None:
            return tree
        return jax.tree.map(lambda leaf: lax.pcast(leaf, self.axis_name, to="varying"), tree)

    def _over_tasks(self, mean: Callable[[Task, Array, Array | None], PyTree]) -> PyTree:
        """The mean over all tasks that count, given ``mean`` over the places of a few."""
        tree = self._over_devices(self._over_microbatches(mean))
        if self.real is None:
            return tree
        share = self._over_devices(jnp.mean(self.real.astype(float)))
        return jax.tree.map(lambda v: v / share.astype(v.dtype), tree)

    def _over_microbatches(self, mean: Callable[[Task, Array, Array | None], PyTree]) -> PyTree:
        """The mean over the places of this device."""
        whole = self.tasks, self.keys, self.real
        if self.microbatch is None:
            return mean(*whole)
        parts = jax.tree.map(lambda v: v.reshape(-1, self.microbatch, *v.shape[1:]), whole)
        like = jax.eval_shape(lambda p: mean(*jax.tree.map(lambda v: v[0], p)), parts)
        zeros = self.own(jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), like))

        def add(total: PyTree, part: Any) -> tuple[PyTree, None]:
            return jax.tree.map(jnp.add, total, mean(*part)), None

        total, _ = lax.scan(add, zeros, parts)
        number = self.keys.shape[0] // self.microbatch
        return jax.tree.map(lambda v: v / number, total)

    def without(self, bad: Array) -> BatchExpectation:
        """The same without some tasks, ``[B]`` booleans, of which not all may be bad.

        A good task, a peer's where this device has none, takes the place of a bad one, and counts 0
        there: what is not finite in a bad one then reaches no gradient.
        """
        first = jnp.argmin(bad)
        good = jax.tree.map(lambda leaf: leaf[first], self.tasks)
        if self.axis_name is not None:
            donor = jnp.argmin(lax.all_gather(bad[first], self.axis_name))
            good = jax.tree.map(lambda leaf: lax.all_gather(leaf, self.axis_name)[donor], good)

        def choose(leaf: Array, spare: Array) -> Array:
            return jnp.where(bad.reshape((-1,) + (1,) * spare.ndim), spare, leaf)

        tasks = jax.tree.map(choose, self.tasks, good)
        real = ~bad if self.real is None else self.real & ~bad
        return dataclasses.replace(self, tasks=tasks, real=real)

    def any(self, flags: Array) -> Array:
        """Whether one of the flags ``[B]`` is True, on any device; a boolean scalar."""
        found = jnp.any(flags)
        if self.axis_name is None:
            return found
        return lax.pmax(found.astype(jnp.int32), self.axis_name) > 0

    def _over_devices(self, tree: PyTree) -> PyTree:
        return tree if self.axis_name is None else lax.pmean(tree, self.axis_name)


def _mean(values: PyTree, real: Array | None) -> PyTree:
    """Over all places, with 0 at those that do not count."""

    def mean(v: Array) -> Array:
        if real is not None:
            v = jnp.where(real.reshape((-1,) + (1,) * (v.ndim - 1)), v, 0)
        return jnp.mean(v, axis=0)  # floating, of integers too

    return jax.tree.map(mean, values)


def gradient_step(
    method: Method, state: TrainState, expect: Expectation, tx: optax.GradientTransformation
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step along the gradient of the mean task loss; for methods without memory.

    Returns:
        The next state, and metrics ``loss`` and those of ``gradient_norms``, scalars.
    """
    loss, grads = meta_gradient(method, state.params, expect)
    return apply_gradient(state, grads, tx), {"loss": loss, **gradient_norms(grads)}


def gradient_norms(grads: dict[str, PyTree]) -> dict[str, Array]:
    """The metrics of a meta-gradient, before any clipping.

    Returns:
        ``grad_norm``; and of a network ``layer_grad_norm``, the least norm that a matrix of the
        backbone has, which is 0 where a layer is dead.
    """
    matrices = [leaf for leaf in jax.tree.leaves(grads.get("weights", ())) if leaf.ndim > 1]
    norms = {"grad_norm": optax.tree.norm(grads)}
    if matrices:
        norms["layer_grad_norm"] = jnp.min(jnp.stack([optax.tree.norm(m) for m in matrices]))
    return norms


def meta_gradient(
    method: Method, params: MetaParams, expect: Expectation
) -> tuple[Array, dict[str, Any]]:
    """The mean task loss, and its gradient in the learned leaves."""

    def objective(learned: dict[str, Any], task: Task, key: Array) -> Array:
        return training_loss(method, params.replace_learned(learned), task, key)

    return expect.value_and_grad(objective, params.learned)


def training_loss(method: Method, params: MetaParams, task: Task, key: Array) -> Array:
    """``method.loss``, with a backbone that draws."""
    return method.loss(in_training(params, key), task, key)


def in_training(params: MetaParams, key: Array) -> MetaParams:
    """The parameters as one task of an outer step sees them, given its key.

    A backbone with dropout draws from it; any other is the same.
    """
    model = getattr(params.method, "model", None)
    if not is_stochastic(model):
        return params
    # A key of its own: the method draws from the task's.
    backbone = model.drawn(params.fixed["backbone"], jax.random.fold_in(key, _BACKBONE))
    return dataclasses.replace(params, fixed={**params.fixed, "backbone": backbone})


def storm(average: PyTree, now: PyTree, before: PyTree, gamma: float) -> PyTree:
    """The recursive gradient estimate of STORM (Cutkosky and Orabona 2019).

    now + (1 - gamma) (average - before): the new gradient, corrected by how far the running
    estimate was off at the previous parameters, **on the same data**.

    Args:
        average: the estimate at the previous parameters, from the data of earlier steps.
        now: the gradient at the current parameters, on this step's data.
        before: the gradient at the previous parameters, on this step's data.
        gamma: from 0 to 1; 1 forgets the estimate.
    """
    return jax.tree.map(lambda a, g, d: g + (1 - gamma) * (a - d), average, now, before)


def apply_gradient(
    state: TrainState, grads: PyTree, tx: optax.GradientTransformation
) -> TrainState:
    """The state after the optimiser has taken ``grads``, with the step counted."""
    learned = state.params.learned
    updates, opt = tx.update(grads, state.opt, learned)
    params = state.params.replace_learned(optax.apply_updates(learned, updates))
    return dataclasses.replace(state, params=params, opt=opt, step=state.step + 1)


def no_memory(method: Method, params: Any) -> tuple[()]:
    """The memory of a method that carries nothing from step to step."""
    del method, params
    return ()
