"""The meta-batch over devices: a mesh of one axis, and what each device takes of a batch.

Parameters and optimiser state are the same on every device; the tasks of an outer step are shared
out, and one mean over the axis ``"tasks"`` makes a meta-gradient of what the devices have found.
The devices may belong to several processes, which then all run the same program; a device draws
its tasks from the data of its process.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lavajax.types import Array, PyTree

AXIS = "tasks"


@dataclasses.dataclass(frozen=True)
class Share:
    """What one device takes of a meta-batch of B tasks: b >= B / devices of them, in order.

    Where B does not divide, the last devices repeat the last task, which counts 0 there.

    Attributes:
        devices: how many devices share the batch.
        axis_name: name of the mapped axis over them, of ``shard_map`` or ``pmap``; None for one
            device alone.
        at_once: tasks that a device computes at once: b is a multiple of it, or less. None: any
            number.
    """

    devices: int = 1
    axis_name: str | None = None
    at_once: int | None = None

    def size(self, meta_batch: int) -> int:
        """b."""
        least = -(-meta_batch // self.devices)
        if self.at_once is None or least <= self.at_once:
            return least
        return -(-least // self.at_once) * self.at_once

    def indices(self, meta_batch: int) -> Array:
        """The indices ``[b]`` of this device's tasks."""
        places = self._places(meta_batch)
        return places if self._is_full(meta_batch) else jnp.minimum(places, meta_batch - 1)

    def real(self, meta_batch: int) -> Array | None:
        """``[b]`` booleans, False where a task only fills up; None where none does."""
        return None if self._is_full(meta_batch) else self._places(meta_batch) < meta_batch

    def whole(self, values: Array, meta_batch: int) -> Array:
        """The values ``[B, ...]`` of all tasks, from each device's ``[b, ...]``."""
        if self.axis_name is not None:
            values = lax.all_gather(values, self.axis_name, tiled=True)
        return values if self._is_full(meta_batch) else values[:meta_batch]

    def _is_full(self, meta_batch: int) -> bool:
        return self.devices * self.size(meta_batch) == meta_batch

    def _places(self, meta_batch: int) -> Array:
        places = jnp.arange(self.size(meta_batch))
        if self.axis_name is None:
            return places
        return lax.axis_index(self.axis_name) * len(places) + places


ALONE = Share()


def task_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh | None:
    """The mesh of some devices, with the one axis ``"tasks"``.

    Args:
        devices: of all processes; None: all that there are.

    Returns:
        The mesh; None for the only device there is, where JAX puts everything anyway.

    Raises:
        ValueError: no device, one twice, something else, or none of this process.
    """
    if devices is None:
        every = jax.devices()
        return None if len(every) == 1 else Mesh(np.array(every), (AXIS,))
    if isinstance(devices, jax.Device) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(
            f"devices must be a sequence of jax.devices(), or None for all, got {devices!r}"
        )
    for device in devices:
        if not isinstance(device, jax.Device):
            raise ValueError(f"devices must hold devices such as jax.devices()[0], got {device!r}")
    if len(set(devices)) < len(devices):
        raise ValueError(f"devices must be different ones, got {list(devices)}")
    if not any(device.process_index == jax.process_index() for device in devices):
        raise ValueError(
            f"devices must have some of every process, got none of process {jax.process_index()}"
        )
    return Mesh(np.array(devices), (AXIS,))


def share_of(mesh: Mesh | None) -> Share:
    """What a device of the mesh takes."""
    return ALONE if mesh is None or mesh.size == 1 else Share(mesh.size, AXIS)


def over_devices(fn: Callable[..., Any], mesh: Mesh | None) -> Callable[..., Any]:
    """``fn(state, tasks, *rest)``, written for one device and the axis, on all those of the mesh.

    Arguments and results are replicated, but for the tasks, which ``give`` has put on each device.
    On one device this is ``fn`` itself.
    """
    if share_of(mesh) == ALONE:
        return fn

    def on_device(state: PyTree, tasks: PerDevice, *rest: Any) -> Any:
        own = [leaf.reshape(leaf.shape[1:]) for leaf in tasks.leaves]
        return fn(state, jax.tree.unflatten(tasks.structure, own), *rest)

    def everywhere(state: PyTree, tasks: PerDevice, *rest: Any) -> Any:
        same, apart = PartitionSpec(), PartitionSpec(AXIS)
        # Unchecked, as under pmap: the check refuses a loop, in a user's source or method, that
        # starts from constants and goes on with what differs between devices.
        return jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(same, apart, *(same for _ in rest)),
            out_specs=same,
            check_vma=False,
        )(state, tasks, *rest)

    return everywhere


def replicate(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """A copy of the tree on every device of the mesh; every process gives the same values."""
    if mesh is None:
        return tree
    sharding = NamedSharding(mesh, PartitionSpec())
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def place(leaf: Any) -> Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            words = place(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(place, tree)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PerDevice:
    """A pytree of which every device has its own, taken apart: its nodes may check their arrays.

    Attributes:
        leaves: arrays ``[devices, ...]`` over the mesh.
        structure: of the tree; static.
    """

    leaves: list[Array]
    structure: Any = dataclasses.field(metadata={"static": True})


def give(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """A copy of what a process has on each of its devices, ``PerDevice``; on one, the tree itself.

    Raises:
        ValueError: the processes have arrays of different shapes, or other settings.
    """
    if mesh is None or share_of(mesh) == ALONE:
        return replicate(tree, mesh)
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    if not sharding.is_fully_addressable:
        _check_alike(tree)

    def place(leaf: Any) -> Array:
        one = (leaf if isinstance(leaf, jax.Array) else np.asarray(leaf))[None]
        copies = [jax.device_put(one, device) for device in mesh.local_devices]
        shape = (mesh.size, *one.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, copies)

    leaves, structure = jax.tree.flatten(tree)
    return PerDevice([place(leaf) for leaf in leaves], structure)


def check_processes() -> None:
    """Requires as many devices of every process, as JAX does to tell all what one of them has.

    Raises:
        ValueError: one has more than another.
    """
    counts = collections.Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        found = ", ".join(str(counts[process]) for process in sorted(counts))
        raise ValueError(f"every process must have as many devices as the others, got {found}")


def _check_alike(tree: PyTree) -> None:
    """Requires the same shapes and settings in every process, which else wait for each other."""
    from jax.experimental import multihost_utils

    check_processes()
    leaves, structure = jax.tree.flatten(tree)
    found = [(jnp.shape(leaf), str(jnp.result_type(leaf))) for leaf in leaves]
    # The structure has what is static, units among it; of a function, its address too.
    whole = repr(found) + re.sub(r" at 0x[0-9a-f]+", "", repr(structure))
    digest = np.frombuffer(hashlib.sha256(whole.encode()).digest(), np.uint8)
    every = np.asarray(multihost_utils.process_allgather(digest)).reshape(-1, digest.size)
    if np.any(every != every[0]):
        raise ValueError(
            "tasks must have arrays of the same shapes and dtypes in every process, and the same "
            "settings, units among them, got "
            f"{', '.join(f'{dtype} {list(shape)}' for shape, dtype in found)} in process "
            f"{jax.process_index()}, and others elsewhere"
        )


def local(tree: PyTree, mesh: Mesh | None) -> PyTree:
    """A replicated tree as it is on the first device of this process, without a copy.

    What is done with it there needs no other process.
    """
    return tree if mesh is None else jax.tree.map(lambda leaf: leaf.addressable_data(0), tree)
