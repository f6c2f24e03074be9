"""Compares JSON with a shape: which keys, which types, which fixed values. The contract tests use it.

A shape is a type (`bool` is not an `int`), a compiled pattern for a whole string, a dict (exactly these keys), a list
of one shape (at least one element, all alike), `Either`, or a value that must be equal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Either:
    """One of several shapes."""

    shapes: tuple[Any, ...]


def either(*shapes: Any) -> Either:
    return Either(shapes)


def mismatch(shape: Any, value: Any, at: str = "$") -> str | None:
    """What is wrong first, with its path; None when the value has the shape."""
    if isinstance(shape, Either):
        found = [mismatch(one, value, at) for one in shape.shapes]
        return None if None in found else " / ".join(filter(None, found))
    if isinstance(shape, type):
        fits = type(value) is shape or (shape is float and type(value) is int)
        return None if fits else f"{at}: {value!r} is no {shape.__name__}"
    if isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value) is not None
        return None if fits else f"{at}: {value!r} is not {shape.pattern}"
    if isinstance(shape, dict):
        return _object_mismatch(shape, value, at)
    if isinstance(shape, list) and len(shape) == 1:
        if not isinstance(value, list) or not value:
            return f"{at}: {value!r} is no list with elements"
        found = [mismatch(shape[0], item, f"{at}[{i}]") for i, item in enumerate(value)]
        return next(filter(None, found), None)
    return None if shape == value and type(shape) is type(value) else f"{at}: {value!r} is not {shape!r}"


def _object_mismatch(shape: dict[str, Any], value: Any, at: str) -> str | None:
    if not isinstance(value, dict):
        return f"{at}: {value!r} is no object"
    missing, extra = shape.keys() - value.keys(), value.keys() - shape.keys()
    if missing or extra:
        return f"{at}: missing {sorted(missing)}, not expected {sorted(extra)}"
    found = [mismatch(shape[key], value[key], f"{at}.{key}") for key in shape]
    return next(filter(None, found), None)
