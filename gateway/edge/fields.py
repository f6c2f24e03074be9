"""Reads the top-level fields that the gateway owns, and says which ones nobody may set. Called by the decoders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.domain.endpoint import Rules
from gateway.domain.errors import BadRequest

# Fields by which a caller could reach past the gateway or harm others; refused, never silently dropped.
DENIED_FIELDS = frozenset(
    {
        "priority",  # the caller's class decides
        "request_id",  # ours, fresh per attempt
        "cache_salt",
        "kv_transfer_params",
        "ec_transfer_params",
        "vllm_xargs",
        "mm_processor_kwargs",
        "chat_template",  # a program of the caller's that runs in the engine's API server
    }
)
MAX_N = 128

Fields = dict[str, Any]  # each value as the bytes it came in (msgspec.Raw)
NULL = b"null"
_OFF = (NULL, b"false")

string = msgspec.json.Decoder(str | None)
boolean = msgspec.json.Decoder(bool | None)
_any = msgspec.json.Decoder()


def refuse_denied(names: Iterable[str]) -> None:
    """Raises BadRequest for the first of them that nobody may set."""
    for name in names:
        if name in DENIED_FIELDS:
            raise BadRequest(f"'{name}' cannot be set through this gateway; remove it.", param=name)


def refuse_stateful(fields: Fields, rules: Rules) -> None:
    """Raises BadRequest where the request needs what an earlier one left behind in one engine's memory."""
    for name in rules.stateful_fields:
        raw = fields.get(name)
        if raw is not None and bytes(raw) not in _OFF:
            raise BadRequest(
                f"'{name}' is not supported: no replica keeps a response. Send the whole conversation in 'input'.",
                param=name,
            )


def refuse_values(fields: Fields, rules: Rules) -> None:
    for name, allowed in rules.allowed_values:
        value = owned(fields, name, string, "a string")
        if value is not None and value not in allowed:
            raise BadRequest(f"'{name}' must be one of {', '.join(allowed)}.", param=name)


def owned(fields: Fields, name: str, decoder: msgspec.json.Decoder[Any], expected: str) -> Any:
    """The field's value; None where it is absent or null. Raises BadRequest where it is not what is expected.

    `decoder` takes null as None: the value need not be looked at twice.
    """
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadRequest(f"'{name}' must be {expected}.", param=name) from exc


def output_tokens(fields: Fields, rules: Rules) -> tuple[str, int | None]:
    """(field name, tokens asked for); None when the client said nothing, or null.

    1. chat knows two names; two different values are refused, since no one could tell which is meant.
    2. anything but a whole number above 0 is refused.
    3. how large it may be is the route's and the pool's matter, not decided here.
    """
    used, asked = "", None
    for name in rules.output_fields:
        if name not in fields or (value := positive(fields, name)) is None:
            continue
        if asked is None:
            used, asked = name, value
        elif asked != value:
            raise BadRequest(f"'{name}' is {value} and '{used}' is {asked}: send one of them.", param=used)
    if asked is None and rules.output_fields:
        used = rules.output_fields[-1]
    return used, asked


def answers(fields: Fields, rules: Rules) -> int:
    """How many answers to each prompt are asked for; between 1 and MAX_N."""
    most = 1
    for name in rules.answer_fields:
        if name in fields and (value := positive(fields, name)) is not None:
            if value > MAX_N:
                raise BadRequest(f"'{name}' is {value}; at most {MAX_N} are allowed.", param=name)
            most = max(most, value)
    return most


def positive(fields: Fields, name: str) -> int | None:
    """The field as a whole number of at least 1; None where it is absent or null."""
    raw = fields.get(name)
    if raw is None:
        return None
    text = bytes(raw)
    if len(text) < 10 and text.isdigit() and text != b"0":
        return int(text)  # how nearly everybody writes it
    if text == NULL:
        return None
    try:
        value = _any.decode(raw) if len(text) <= 32 else None
    except (msgspec.DecodeError, RecursionError):
        value = None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        shown = text[:32].decode(errors="replace")
        raise BadRequest(f"'{name}' must be a whole number of at least 1, not {shown}.", param=name)
    return value
