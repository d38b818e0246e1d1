"""Hyperparameters as JSON, and back: exact, and limited to a closed table of classes.

What is read names a class of the table or is refused; nothing is imported by name, so a file can
never run code.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from lavajax.losses import CrossEntropy, SquaredError
from lavajax.methods.alpaca import Alpaca
from lavajax.methods.anil import Anil
from lavajax.methods.cavia import Cavia
from lavajax.methods.dkt import Dkt
from lavajax.methods.imaml import IMaml
from lavajax.methods.lava import Lava
from lavajax.methods.maml import Maml
from lavajax.methods.ridge import Ridge
from lavajax.models.mlp import MLP
from lavajax.subspace import Context, Full, Head
from lavajax.tasks.air_quality import AirQuality
from lavajax.tasks.sine import Sine

CLASSES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(Lava, Maml, Anil, Cavia),
        *(Ridge, Alpaca, Dkt, IMaml),
        *(MLP, Head, Context, Full),
        *(SquaredError, CrossEntropy),
        *(Sine, AirQuality),
    )
}


def to_json(value: Any) -> Any:
    """A dataclass of the table as JSON-ready dicts, lists, numbers and strings.

    Raises:
        ValueError: it contains something that is not in the table, such as a user's own module.
    """
    if CLASSES.get(type(value).__name__) is type(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [to_json(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"cannot write {type(value).__name__} as JSON: only lavajax's own classes have a record; "
        f"got {value!r}"
    )


def from_json(data: Any) -> Any:
    """The inverse of ``to_json``; every class checks its own fields.

    Raises:
        ValueError: the data names an unknown class or field, or a value that a class refuses.
    """
    if isinstance(data, list):
        return tuple(from_json(v) for v in data)
    if not isinstance(data, dict):
        return data
    if "class" not in data:
        raise ValueError(f"a record must name its class, got the keys {', '.join(data) or 'none'}")
    name = data["class"]
    if not isinstance(name, str) or name not in CLASSES:
        raise ValueError(
            f"class must be one of {', '.join(CLASSES)}, got {name!r}{nearest(name, CLASSES)}"
        )
    known = {f.name for f in dataclasses.fields(CLASSES[name])}
    fields = {key: from_json(value) for key, value in data.items() if key != "class"}
    for key in fields:
        if key not in known:
            raise ValueError(f"{name} has no field {key!r}{nearest(key, known)}")
    required = {
        f.name for f in dataclasses.fields(CLASSES[name]) if f.default is dataclasses.MISSING
    }
    if missing := required - fields.keys():
        raise ValueError(f"{name} must have the field {', '.join(sorted(missing))}, and has not")
    return CLASSES[name](**fields)


def nearest(word: object, options: Any) -> str:
    """``; did you mean ...?``, or nothing where no option is near."""
    found = difflib.get_close_matches(str(word), list(options), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""
