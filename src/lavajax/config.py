"""Hyperparameters as JSON, and back: exact, and limited to a closed table of classes.

What is read names a class of the table or is refused; nothing is imported by name, so a file can
never run code.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Mapping
from typing import Any

from lavajax.validate import nearest

# What a record may name.
_NAMES = (
    *("Lava", "Maml", "Anil", "Cavia"),
    *("MetaSgd", "Reptile", "Llama", "Vfml", "VrMaml", "MetaMix"),
    *("Platipus", "Bmaml", "HyperNetwork"),
    *("Cnp", "AttentiveCnp", "Tnp", "Conditioned"),
    *("Ridge", "Alpaca", "Dkt", "IMaml"),
    *("MLP", "Conv4", "Correlated", "Head", "Context", "Full"),
    *("SquaredError", "DirectionError", "Huber", "GaussianNll", "CrossEntropy"),
    *("Sine", "FitzHughNagumo", "MassSpring", "Pendulum", "VanDerPol", "Cartpole"),
    *("AirQuality", "Radio", "SyntheticFm", "Omniglot", "MiniImageNet", "Table"),
    *("NoisyLabels", "FixedTasks", "VaryingShots", "Units", "Columns"),
)


@functools.cache
def classes() -> dict[str, Any]:
    """The classes that a record may name, most of which are imported at the first call."""
    import lavajax

    return {name: getattr(lavajax, name) for name in _NAMES}


class MissingPartError(ValueError):
    """A record has a user's own object in some place, and it was not given.

    Attributes:
        field: the field that holds it; empty where the record is nothing else.
        description: what it was.
    """

    def __init__(self, field: str, description: str) -> None:
        super().__init__(f"{field or 'the record'} must be given, it was {description}")
        self.field = field
        self.description = description


def to_json(value: Any, *, describe: bool = False) -> Any:
    """A dataclass of the table as JSON-ready dicts, lists, numbers and strings.

    Args:
        value: the dataclass.
        describe: write a user's own object as its class and description, for ``from_json`` to be
            given again, instead of refusing it.

    Raises:
        ValueError: it contains something that is not in the table, such as a user's own module.
    """
    if classes().get(type(value).__name__) is type(value):
        fields = {
            f.name: to_json(getattr(value, f.name), describe=describe)
            for f in dataclasses.fields(value)
        }
        return {"class": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [to_json(v, describe=describe) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if describe:
        own = f"{type(value).__module__}.{type(value).__qualname__}"
        plain = re.sub(r" at 0x[0-9a-f]+", "", " ".join(repr(value).split()))
        return {"own": own, "description": plain[:1000]}
    raise ValueError(
        f"cannot write {type(value).__name__} as JSON: only lavajax's own classes have a record; "
        f"got {value!r}"
    )


def from_json(data: Any, own: Mapping[str, Any] | None = None) -> Any:
    """The inverse of ``to_json``; every class checks its own fields.

    Args:
        data: the record.
        own: by field, what stands where the record has a user's own object.

    Raises:
        MissingPartError: the record has such an object, and ``own`` has not.
        ValueError: the data names an unknown class or field, or a value that a class refuses.
    """
    return _from_json(data, own or {}, "")


def _from_json(data: Any, own: Mapping[str, Any], field: str) -> Any:
    if isinstance(data, list):
        return tuple(_from_json(v, own, field) for v in data)
    if not isinstance(data, dict):
        return data
    if "own" in data:
        given = own.get(field)
        if given is None:
            raise MissingPartError(field, str(data.get("description", data["own"])))
        found = to_json(given, describe=True)
        # The class by its name alone: its module is __main__ where a script defines it.
        if str(found.get("own")).rsplit(".", 1)[-1] != str(data["own"]).rsplit(".", 1)[-1]:
            raise ValueError(f"{field} is saved as {data['own']}, got {given!r}")
        if found["description"] != data.get("description"):
            warnings.warn(
                f"{field} is saved as {data.get('description')}, and is now {found['description']}",
                stacklevel=2,
            )
        return given
    if "class" not in data:
        raise ValueError(f"a record must name its class, got the keys {', '.join(data) or 'none'}")
    name = data["class"]
    if not isinstance(name, str) or name not in classes():
        raise ValueError(
            f"class must be one of {', '.join(classes())}, got {name!r}{nearest(name, classes())}"
        )
    known = {f.name for f in dataclasses.fields(classes()[name])}
    fields = {key: _from_json(value, own, key) for key, value in data.items() if key != "class"}
    for key in fields:
        if key not in known:
            raise ValueError(f"{name} has no field {key!r}{nearest(key, known)}")
    required = {
        f.name for f in dataclasses.fields(classes()[name]) if f.default is dataclasses.MISSING
    }
    if missing := required - fields.keys():
        raise ValueError(f"{name} must have the field {', '.join(sorted(missing))}, and has not")
    return classes()[name](**fields)


def differences(saved: Any, given: Any, name: str) -> list[str]:
    """Where two records differ, each as ``name.field is saved as ..., got ...``.

    Of users' own objects the classes are compared alone; see ``changed``.
    """
    if isinstance(saved, dict) and isinstance(given, dict) and saved.keys() == given.keys():
        keys = [key for key in saved if key != "description" or "own" not in saved]
        return [
            line for key in keys for line in differences(saved[key], given[key], f"{name}.{key}")
        ]
    return [] if saved == given else [f"{name} is saved as {saved!r}, got {given!r}"]


def changed(saved: Any, given: Any, name: str) -> list[str]:
    """Where users' own objects of the same class describe themselves otherwise in two records."""
    if not (isinstance(saved, dict) and isinstance(given, dict)):
        return []
    if "own" not in saved:
        shared = [key for key in saved if key in given]
        return [line for key in shared for line in changed(saved[key], given[key], f"{name}.{key}")]
    was, now = saved.get("description"), given.get("description")
    return [] if was == now else [f"{name} is saved as {was}, and is now {now}"]
