"""Checks `messages` of a chat request: roles, contents, tool messages. Called by prompts.py.

A fault is named by its element (`messages[3].content[0].type`). The texts themselves are never copied into an error.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from gateway.domain.errors import BadRequest

M = TypeVar("M")

ROLES = ("user", "assistant", "system", "tool", "developer", "function")
_PLAIN_ROLES = frozenset(ROLES) - {"tool"}  # with these a text is all there has to be


# gc=False: they hold no cycles, and a garbage collector that walks a hundred thousand of them holds up the loop
class Part(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class Call(msgspec.Struct, gc=False):
    """Whatever is in it is the engine's matter."""


class Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


_NUMBER = re.compile(r"^\[(\d+)\]")
_messages = msgspec.json.Decoder(list[Message] | None)


def check_messages(raw: msgspec.Raw | None, name: str = "messages", first: int = 0) -> bool:
    """True when a part is something other than text (image, audio, …). Raises BadRequest at the first fault.

    `name` is the field that they came in, and `first` the number of the first of them there.
    """
    is_multimodal = False
    for i, message in enumerate(decoded_messages(_messages, raw, name, first), first):
        if type(message.content) is not str or message.role not in _PLAIN_ROLES:
            is_multimodal |= _check(message, f"{name}[{i}]")
    return is_multimodal


def decoded_messages(
    decoder: msgspec.json.Decoder[list[M] | None], raw: msgspec.Raw | None, name: str, first: int = 0
) -> list[M]:
    """At least one of them. Raises BadRequest."""
    try:
        messages = None if raw is None else decoder.decode(raw)
    except msgspec.ValidationError as exc:
        raise BadRequest(explain(str(exc), name, first), param=name) from exc
    except RecursionError as exc:
        raise BadRequest(f"'{name}' is nested too deeply.", param=name) from exc
    if messages is None:
        raise BadRequest(f"'{name}' is missing.", param=name)
    if not messages:
        raise BadRequest(f"'{name}' is empty; send at least one message.", param=name)
    return messages


def _check(message: Message, at: str) -> bool:
    content = message.content
    if message.role not in ROLES:
        raise fault(f"{at}.role", f"must be one of {', '.join(ROLES)}.")
    if content is None and message.role != "assistant":
        # an assistant's turn may be tool calls alone; what the engine makes of an empty one is the engine's matter
        raise fault(f"{at}.content", "is missing: a string or an array of parts.")
    if message.role == "tool" and not message.tool_call_id:
        raise fault(f"{at}.tool_call_id", "is missing: a tool message names the call that it answers.")
    if not isinstance(content, list):
        return False
    is_multimodal = False
    for j, part in enumerate(content):
        if part.type != "text":
            is_multimodal = True
        elif part.text is None:
            raise fault(f"{at}.content[{j}].text", "is missing: a part of type text has a string there.")
    return is_multimodal


def fault(place: str, what: str) -> BadRequest:
    return BadRequest(f"{place} {what}", param=place)


def explain(text: str, name: str, first: int = 0) -> str:
    """msgspec's 'Expected `str`, got `int` - at `$[1].role`' with our own root name and numbers from `first` on."""
    what, _, where = text.partition(" - at `$")
    if first:
        where = _NUMBER.sub(lambda match: f"[{int(match[1]) + first}]", where, count=1)
    place = name + where.rstrip("`") if where else name
    return f"{place}: {what[0].lower() + what[1:]}."[:500]
