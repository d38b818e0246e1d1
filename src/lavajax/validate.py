"""Checks of hyperparameters: what every frozen dataclass runs in ``__post_init__``.

Fields are coerced to plain Python values, since ``jit`` compares static metadata by ``==`` and
never hashes it: a list or an array in a field would pass, and go stale.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any


def _name(owner: object, field: str) -> str:
    return f"{type(owner).__name__}.{field}"


def _set(owner: object, field: str, value: object) -> None:
    object.__setattr__(owner, field, value)  # the dataclasses are frozen


def number(
    owner: Any,
    field: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    strict: bool = False,
) -> None:
    """Coerces a field to a finite float, at least (or, with ``strict``, above) ``minimum``.

    And at most ``maximum``, where there is one.
    """
    value = getattr(owner, field)
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        result = float(value)
    except OverflowError:
        result = math.inf
    except (TypeError, ValueError):
        raise ValueError(f"{_name(owner, field)} must be a number, got {value!r}") from None
    bad = not math.isfinite(result)
    if minimum is not None:
        bad = bad or result < minimum or (strict and result == minimum)
    if maximum is not None:
        bad = bad or result > maximum
    if bad:
        bound = "" if minimum is None else f" {'above' if strict else 'of at least'} {minimum:g}"
        bound += "" if maximum is None else f" and at most {maximum:g}"
        raise ValueError(f"{_name(owner, field)} must be a finite number{bound}, got {value!r}")
    _set(owner, field, result)


def integer(owner: Any, field: str, *, minimum: int, maximum: int | None = None) -> None:
    """Coerces a field to an int of at least ``minimum``, and at most ``maximum``, if any."""
    value = whole(_name(owner, field), getattr(owner, field), minimum)
    if maximum is not None and value > maximum:
        raise ValueError(f"{_name(owner, field)} must be at most {maximum}, got {value}")
    _set(owner, field, value)


def whole(name: str, value: Any, minimum: int, otherwise: str = "") -> int:
    """An argument as an int of at least ``minimum``; NumPy's integers are some too.

    Raises:
        ValueError: it is none; the message adds what it could be ``otherwise``.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(
            f"{name} must be an integer of at least {minimum}{otherwise}, got {value!r}"
        )
    return int(value)


def real(name: str, value: Any, needed: str, holds: Callable[[float], bool]) -> float:
    """An argument as a float; scalars of NumPy and JAX are some too.

    Raises:
        ValueError: it is none, or not what is ``needed``.
    """
    try:
        if isinstance(value, bool | str) or bool(getattr(value, "ndim", 0)):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        result = math.nan
    if not holds(result):  # of NaN nothing does
        raise ValueError(f"{name} must be {needed}, got {value!r}")
    return result


def check_seed(seed: Any, number: int = 1) -> int:
    """The first of so many seeds, as an int: larger ones than JAX's 32 bits would repeat others.

    Raises:
        ValueError: it is none.
    """
    last: int = 2**32 - number
    if (
        isinstance(seed, bool)
        or not isinstance(seed, numbers.Integral)
        or not 0 <= int(seed) <= last
    ):
        several = f" for the {number} seeds from it on" if number > 1 else ""
        raise ValueError(f"seed must be an integer from 0 to {last}{several}, got {seed!r}")
    return int(seed)


MOST = 1000
"""Entries of a sequence in a field, and layers: a record that is read may ask for any number."""


def integers(owner: Any, field: str, *, minimum: int) -> None:
    """Coerces a field to a tuple of at most ``MOST`` ints, each at least ``minimum``."""
    value = getattr(owner, field)
    good = isinstance(value, Sequence) and not isinstance(value, str)
    if good and len(value) > MOST:
        raise ValueError(
            f"{_name(owner, field)} must have at most {MOST} entries, got {len(value)}"
        )
    if not good or any(
        isinstance(v, bool) or not isinstance(v, numbers.Integral) or v < minimum for v in value
    ):
        raise ValueError(
            f"{_name(owner, field)} must be a sequence of integers of at least {minimum}, "
            f"got {value!r}"
        )
    _set(owner, field, tuple(int(v) for v in value))


def interval(owner: Any, field: str) -> None:
    """Coerces a field to a pair of finite floats ``(low, high)`` with ``low <= high``."""
    value = getattr(owner, field)
    try:
        low, high = (float(v) for v in value)
        good = math.isfinite(low) and math.isfinite(high) and low <= high
    except (TypeError, ValueError):
        good = False
    if not good:
        raise ValueError(
            f"{_name(owner, field)} must be a pair (low, high) of finite numbers with "
            f"low <= high, got {value!r}"
        )
    _set(owner, field, (low, high))


def positive_interval(owner: Any, field: str) -> None:
    """``interval``, above 0."""
    interval(owner, field)
    low, high = getattr(owner, field)
    if low <= 0:
        raise ValueError(f"{_name(owner, field)} must be above 0, got {(low, high)}")


def flag(owner: Any, field: str) -> None:
    """Requires a field to be True or False."""
    value = getattr(owner, field)
    if not isinstance(value, bool):
        raise ValueError(f"{_name(owner, field)} must be True or False, got {value!r}")


def choice(owner: Any, field: str, options: Sequence[str]) -> None:
    """Requires a field to be one of ``options``."""
    value = getattr(owner, field)
    if not isinstance(value, str) or value not in options:
        raise ValueError(
            f"{_name(owner, field)} must be one of {', '.join(map(repr, options))}, got {value!r}"
        )


def names(owner: Any, field: str) -> None:
    """Coerces a field to a tuple of one or more different strings; a single string is one name."""
    value = getattr(owner, field)
    found = (value,) if isinstance(value, str) else value
    good = isinstance(found, Sequence) and len(found) > 0
    if not good or not all(isinstance(v, str) and v for v in found) or len(set(found)) < len(found):
        raise ValueError(
            f"{_name(owner, field)} must be a name, or several different ones, got {value!r}"
        )
    _set(owner, field, tuple(found))


def part(owner: Any, field: str, methods: Sequence[str], examples: str) -> None:
    """Requires a field to be an object that has ``methods``, as a protocol demands."""
    value = getattr(owner, field)
    if isinstance(value, type) or not all(callable(getattr(value, m, None)) for m in methods):
        raise ValueError(
            f"{_name(owner, field)} must be an instance such as {examples}, got {value!r}"
        )


def hashable(owner: Any) -> None:
    """Requires the whole object to be usable as static metadata of a compiled function."""
    try:
        hash(owner)
    except TypeError as error:
        fields = [
            f.name for f in dataclasses.fields(owner) if not _is_hashable(getattr(owner, f.name))
        ]
        raise ValueError(
            f"{type(owner).__name__} needs hashable fields, since it is compiled in as a constant; "
            f"not hashable: {', '.join(fields)} ({error})"
        ) from None


def nearest(word: object, options: Any) -> str:
    """``; did you mean ...?``, or nothing where no option is near."""
    found = difflib.get_close_matches(str(word), list(options), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
