"""Bodies as objects with typed fields, refused in the words of vLLM's schema; `checks.py` and `api.py` call it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

Body = Mapping[str, Any]
_KINDS: Final[dict[str, type]] = {
    "model": str,
    "stream": bool,
    "ignore_eos": bool,
    "max_tokens": int,
    "max_completion_tokens": int,
    "n": int,
    "priority": int,
    "temperature": float,
    "top_p": float,
    "stream_options": dict,
    "request_id": str,
}
_TRUE: Final = {"true", "1", "yes", "on", "t", "y"}
_FALSE: Final = {"false", "0", "no", "off", "f", "n"}
_MESSAGES: Final = {
    int: ("int_parsing", "Input should be a valid integer, unable to parse string as an integer"),
    float: ("float_parsing", "Input should be a valid number, unable to parse string as a number"),
    bool: ("bool_parsing", "Input should be a valid boolean, unable to interpret input"),
    str: ("string_type", "Input should be a valid string"),
    dict: ("model_attributes_type", "Input should be a valid dictionary or object to extract fields from"),
}


class Refusal(Exception):
    """An answer that is not a completion: a status and its JSON body."""

    def __init__(self, status: int, body: object) -> None:
        super().__init__(status)
        self.status = status
        self.document = body
        self.body = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def refusal(status: int, message: str, type_: str = "BadRequestError", param: str | None = None) -> Refusal:
    """vLLM's usual error object."""
    return Refusal(status, {"error": {"message": message, "type": type_, "param": param, "code": status}})


def schema_error(loc: str, type_: str, message: str, value: object) -> Refusal:
    """A schema error: pydantic's text in `message`, and type "Bad Request" with a blank."""
    what = {"type": type_, "loc": loc, "msg": message, "input": str(value)}
    return refusal(400, f"1 validation error:\n  {what}", "Bad Request", loc)


def missing(body: Body, name: str) -> Refusal:
    """A field that has to be there and is not."""
    return schema_error(f"body.{name}", "missing", "Field required", f"<dict of {len(body)} items>")


def decode(content_type: str | None, raw: bytes) -> Body:
    """The body as an object; refuses what FastAPI and vLLM refuse before they look at any field."""
    if (content_type or "").split(";")[0].strip().lower() != "application/json":
        text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise refusal(400, text, "Bad Request")
    if not raw:
        raise schema_error("body", "missing", "Field required", None)
    try:
        body = json.loads(raw)
    except json.JSONDecodeError as exc:
        raise schema_error(f"body.{exc.pos}", "json_invalid", "JSON decode error", "<dict of 0 items>") from None
    except (UnicodeDecodeError, RecursionError):
        raise Refusal(400, {"detail": "There was an error parsing the body"}) from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise schema_error("body", "model_attributes_type", message, f"<{type(body).__name__}>")
    return {name: _typed(name, value) for name, value in body.items()}


def _typed(name: str, value: Any) -> Any:
    """The value as its field's type, as leniently as pydantic reads it; a field that we do not know as it is."""
    kind = _KINDS.get(name)
    if kind is None or value is None:
        return value
    try:
        if kind is int and float(value) != int(value):
            message = "Input should be a valid integer, got a number with a fractional part"
            raise schema_error(f"body.{name}", "int_from_float", message, value)
        if kind in (int, float):
            return kind(value)
        if kind is bool and str(value).lower() in _TRUE | _FALSE:
            return str(value).lower() in _TRUE
        if kind is not bool and isinstance(value, kind):
            return value
    except (TypeError, ValueError, OverflowError):
        pass
    raise schema_error(f"body.{name}", *_MESSAGES[kind], value)
