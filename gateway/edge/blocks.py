"""Checks `messages` and `system` of a request in Anthropic's shape: roles, contents, blocks. Called by prompts.py."""

from __future__ import annotations

import re

import msgspec

from gateway.edge.messages import decoded_messages, fault

ROLES = ("user", "assistant", "system")
_MEDIA_TYPES = ("image", "document")
_MEDIA = re.compile(rb'"(?:image|document)"')  # within what a tool gave back


class Block(msgspec.Struct, gc=False):
    type: str
    text: str | None = None
    content: msgspec.Raw = msgspec.Raw(b"null")  # of a tool_result: a string or blocks again


class Message(msgspec.Struct, gc=False):
    role: str
    content: str | list[Block]


_messages = msgspec.json.Decoder(list[Message] | None)
_system = msgspec.json.Decoder(list[Block] | None)


def check_blocks(messages: msgspec.Raw | None, system: msgspec.Raw | None) -> bool:
    """True when a block is something other than text (an image, a document). Raises BadRequest at the first fault."""
    is_multimodal = check_block_messages(messages)
    return check_system(system) or is_multimodal


def check_block_messages(messages: msgspec.Raw | None, first: int = 0) -> bool:
    """`first`: the number of the first of them in the field."""
    is_multimodal = False
    for i, message in enumerate(decoded_messages(_messages, messages, "messages", first), first):
        if message.role not in ROLES:
            raise fault(f"messages[{i}].role", f"must be one of {', '.join(ROLES)}.")
        if isinstance(message.content, list):
            is_multimodal |= _check(message.content, f"messages[{i}].content")
    return is_multimodal


def check_system(system: msgspec.Raw | None) -> bool:
    if system is None or bytes(memoryview(system)[:1]) in (b'"', b"n"):  # a string, or null
        return False
    return _check(decoded_messages(_system, system, "system"), "system")


def _check(blocks: list[Block], at: str) -> bool:
    is_multimodal = False
    for j, block in enumerate(blocks):
        if block.type == "text" and block.text is None:
            raise fault(f"{at}[{j}].text", "is missing: a block of type text has a string there.")
        if block.type in _MEDIA_TYPES or _MEDIA.search(block.content) is not None:
            is_multimodal = True
    return is_multimodal
