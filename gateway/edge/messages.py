"""Checks `messages` of a chat request: roles, contents, tool messages. Called by decode.py.

A fault is named by its element (`messages[3].content[0].type`). The texts themselves are never copied into an error.
"""

from __future__ import annotations

import msgspec

from gateway.domain.errors import BadRequest

ROLES = ("user", "assistant", "system", "tool", "developer", "function")


# gc=False: they hold no cycles, and a garbage collector that walks a hundred thousand of them holds up the loop
class Part(msgspec.Struct, gc=False):
    type: str
    text: str | None = None


class Message(msgspec.Struct, gc=False):
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
        is_multimodal |= _check(message, i)
    return is_multimodal


def _check(message: Message, i: int) -> bool:
    content = message.content
    if message.role not in ROLES:
        raise _fault(f"messages[{i}].role", f"must be one of {', '.join(ROLES)}.")
    if content is None and message.role != "assistant":
        # an assistant's turn may be tool calls alone; what the engine makes of an empty one is the engine's matter
        raise _fault(f"messages[{i}].content", "is missing: a string or an array of parts.")
    if message.role == "tool" and not message.tool_call_id:
        raise _fault(f"messages[{i}].tool_call_id", "is missing: a tool message names the call that it answers.")
    if not isinstance(content, list):
        return False
    is_multimodal = False
    for j, part in enumerate(content):
        if part.type != "text":
            is_multimodal = True
        elif part.text is None:
            raise _fault(f"messages[{i}].content[{j}].text", "is missing: a part of type text has a string there.")
    return is_multimodal


def _fault(place: str, what: str) -> BadRequest:
    return BadRequest(f"{place} {what}", param=place)


def _explain(text: str) -> str:
    """msgspec's 'Expected `str`, got `int` - at `$[1].role`' with our own root name."""
    what, _, where = text.partition(" - at `$")
    place = "messages" + where.rstrip("`") if where else "messages"
    return f"{place}: {what[0].lower() + what[1:]}."[:500]
