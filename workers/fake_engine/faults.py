"""What one request asks the fake to do wrong: the body field `x_fake` as a value; `api.py` obeys it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

_ENDS: Final = ("die", "engine_dead", "reset", "cut", "close", "error_event", "stall")


class BadFault(Exception):
    """`x_fake` is not what the manual in `options.py` describes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """See the manual in `options.py`; `end` is one of die, engine_dead, reset, cut, close, error_event, stall."""

    end: str | None = None
    after: int = 0
    no_headers: bool = False
    headers_only: bool = False
    exit_code: int = 1
    status: int | None = None
    message: str = "asked for by x_fake"
    retry_after: int | None = None
    body: str | None = None
    content_type: str = "application/json"
    body_bytes: int = 0
    delay_s: float = 0.0
    ttft_ms: float | None = None
    itl_ms: float | None = None
    tokens: int | None = None
    text: str | None = None
    extra_delta: dict[str, Any] = field(default_factory=dict)
    byte_by_byte: bool = False
    chunk_bytes: int = 0
    abort: bool = False
    no_finish: bool = False
    no_done: bool = False
    no_usage: bool = False


NO_FAULT: Final = Fault()
_KEYS: Final = {f.name for f in fields(Fault)} - {"end", "after"}


def fault_of(value: object) -> Fault:
    """Fault from the field's value; None is no fault. Raises BadFault, so that a typing error in a test is seen."""
    if value is None:
        return NO_FAULT
    if not isinstance(value, dict):
        raise BadFault("x_fake must be an object")
    settings: dict[str, Any] = {}
    for key, setting in value.items():
        end = key.removesuffix("_after")
        if end != key and end in _ENDS:
            if "end" in settings:
                raise BadFault("x_fake: only one end")
            settings |= {"end": end, "after": int(setting)}
        elif key in _KEYS:
            settings[key] = setting
        else:
            raise BadFault(f"x_fake: unknown key {key}")
    if settings.get("headers_only"):
        settings |= {"end": "stall", "after": 0}
    return Fault(**settings)
