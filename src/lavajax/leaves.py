"""A pytree as named arrays, each with a description, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lavajax.types import PyTree


def named(tree: PyTree, prefix: str = "") -> dict[str, Any]:
    """The leaves by name, such as ``learned/weights/0/weight``, in the order of the tree.

    Raises:
        ValueError: two leaves would have one name.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = {
        prefix + jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat
    }
    if len(found) < len(flat):
        raise ValueError("params must have leaves of different names: a name contains a slash")
    return found


def describe(leaf: Any) -> dict[str, Any]:
    """Shape and dtype of a leaf, as JSON."""
    return {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}


def stored(entry: dict[str, Any]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype as stored; a key is stored as its words."""
    if "impl" in entry:
        return (*entry["shape"], *entry["words"]), np.dtype(np.uint32)
    return tuple(entry["shape"]), jnp.dtype(entry["dtype"])


def check(where: str, saved: dict[str, Any], expected: dict[str, Any]) -> None:
    """Requires the described leaves to be the expected ones, in name, shape and dtype.

    Raises:
        ValueError: they are not; the message names the first few, and ``where`` they are.
    """
    extra = saved.keys() - expected.keys()
    problems = [f"{name} is there, and the method has none" for name in sorted(extra)]
    for name, leaf in expected.items():
        if name not in saved:
            problems.append(f"{name} is missing")
        elif (entry := saved[name])["shape"] != list(leaf.shape) or entry["dtype"] != str(
            leaf.dtype
        ):
            problems.append(
                f"{name} is {tuple(entry['shape'])} {entry['dtype']}, and the method has "
                f"{leaf.shape} {leaf.dtype}{_remedy(entry['dtype'], str(leaf.dtype))}"
            )
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"{where} must hold the leaves that its method and model make: "
            f"{'; '.join(problems[:5])}{more}"
        )


def _remedy(saved: str, expected: str) -> str:
    """What to do where the two differ by JAX's precision alone."""
    if (saved, expected) in (("float64", "float32"), ("int64", "int32")):
        return ' (jax.config.update("jax_enable_x64", True) comes first)'
    if (saved, expected) in (("float32", "float64"), ("int32", "int64")):
        return " (load it where jax_enable_x64 is off, as it was when this was saved)"
    return ""


def pack(tree: PyTree) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Descriptions and arrays of all leaves by name; a typed PRNG key becomes its words."""
    entries, arrays = {}, {}
    for name, leaf in named(tree).items():
        entries[name] = describe(leaf)
        if _is_key(leaf):
            arrays[name] = np.asarray(jax.random.key_data(leaf))
            words = list(arrays[name].shape[leaf.ndim :])
            entries[name] |= {"impl": str(jax.random.key_impl(leaf)), "words": words}
        else:
            arrays[name] = np.asarray(leaf)
    return entries, arrays


def unpack(
    like: PyTree, entries: dict[str, Any], arrays: dict[str, np.ndarray], prefix: str = ""
) -> PyTree:
    """The tree ``like`` with the leaves that ``pack`` made of it, under ``prefix``; not checked."""
    values = []
    for name in named(like, prefix):
        value = jnp.asarray(arrays[name])
        if "impl" in entries[name]:
            value = jax.random.wrap_key_data(value, impl=entries[name]["impl"])
        values.append(value)
    return jax.tree.unflatten(jax.tree.structure(like), values)


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
