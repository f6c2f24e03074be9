"""Checks `messages` of a chat request: roles, contents, tool messages. Called by decode.py.

A fault is named by its element (`messages[3].content[0].type`). The texts themselves are never copied into an error.
"""

from __future__ import annotations

import msgspec

from gateway.domain.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class Part(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Part] | None = None
    tool_calls: list[msgspec.Raw] | None = None
    tool_call_id: str | None = None
    function_call: msgspec.Raw | None = None


_messages = msgspec.json.Decoder(list[Message])


def check_messages(raw: msgspec.Raw | None) -> bool:
    """True when a part is something other than text (image, audio, …). Raises BadRequest at the first fault."""
    if raw is None or bytes(raw) == b"null":
        raise BadRequest("'messages' is missing.", param="messages")
    try:
        messages = _messages.decode(raw)
    except msgspec.ValidationError as exc:
        raise BadRequest(_explain(str(exc)), param="messages") from exc
    except RecursionError as exc:
        raise BadRequest("'messages' is nested too deeply.", param="messages") from exc
    if not messages:
        raise BadRequest("'messages' is empty; send at least one message.", param="messages")
    is_multimodal = False
    for i, message in enumerate(messages):
        is_multimodal |= _check(message, f"messages[{i}]")
    return is_multimodal


def _check(message: Message, where: str) -> bool:
    if message.role not in ROLES:
        raise BadRequest(f"{where}.role must be one of {', '.join(ROLES)}.", param=f"{where}.role")
    if message.content is None and message.role != "assistant":
        # an assistant's turn may be tool calls alone; what the engine makes of an empty one is the engine's matter
        raise BadRequest(f"{where}.content is missing: a string or an array of parts.", param=f"{where}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise BadRequest(
            f"{where}.tool_call_id is missing: a tool message names the call that it answers.",
            param=f"{where}.tool_call_id",
        )
    if not isinstance(message.content, list):
        return False
    is_multimodal = False
    for j, part in enumerate(message.content):
        if part.type != "text":
            is_multimodal = True
        elif part.text is None:
            place = f"{where}.content[{j}].text"
            raise BadRequest(f"{place} is missing: a part of type text has a string there.", param=place)
    return is_multimodal


def _explain(text: str) -> str:
    """msgspec's 'Expected `str`, got `int` - at `$[1].role`' with our own root name."""
    what, _, where = text.partition(" - at `$")
    place = "messages" + where.rstrip("`") if where else "messages"
    return f"{place}: {what[0].lower() + what[1:]}."[:500]
