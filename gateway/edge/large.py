"""A large JSON body → InferenceRequest in turns, so that no other caller's stream waits for it. Called by inference.py.

The same as decode.py, which does it in one go. A thread would not help: msgspec and the UTF-8 decoder hold the GIL from
their first byte to their last, and the loop needs it back after every wait. So each step is bounded by its bytes or by
the objects that it makes, and what makes too many of them is refused: engines would be held up by it far longer.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from gateway.domain.endpoint import Endpoint, Prompt, Rules
from gateway.domain.errors import BadRequest
from gateway.domain.media import Media
from gateway.domain.request import InferenceRequest, Principal
from gateway.edge.blocks import check_block_messages, check_system
from gateway.edge.decode import made_of, parsed
from gateway.edge.fields import Fields
from gateway.edge.media import MEDIA_PART, PART_BYTES, each_in, media_marks_in
from gateway.edge.messages import check_messages, decoded_messages
from gateway.edge.prompts import (
    CHAT_INSIDE,
    MAX_PROMPTS,
    PROMPT_CHECKS,
    TEXT,
    UNCOUNTED,
    PromptFacts,
    check_items,
    check_pairs,
    check_texts,
    cut_by_the_engine,
    first_byte,
    not_texts,
    too_many_prompts,
)

LARGE_BYTES = 131_072  # up to here decoding in one go takes 20 ms for the worst of shapes, and 1 ms for ordinary ones
STEP_BYTES = 65_536  # of a search, which may find something at every second byte
UTF8_BYTES = 1_048_576
FEW_OBJECTS = 8192  # are decoded in one go: 5 ms
MAX_OBJECTS = 131_072  # messages, their parts and calls
MAX_MEMBERS = 65_536  # of all objects beside the prompt
GROUP = 1024  # messages

# Each finds all that there are, and rarely more: within a string a quote has a backslash before it.
_OBJECT = re.compile(rb'\{\s*["}]')
_MEMBER = re.compile(rb'"\s*:')
_BETWEEN_STRINGS = re.compile(rb'"\s*,\s*"')
_DIGIT = re.compile(rb"\d")
_OF_IDS = b"0123456789-, \t\r\n"


class _Message(msgspec.Struct, gc=False):
    role: msgspec.Raw


class _AnyObject(msgspec.Struct, gc=False):
    pass


_messages = msgspec.json.Decoder(list[_Message] | None)
_texts_or_objects = msgspec.json.Decoder(list[str | _AnyObject])
_strings = msgspec.json.Decoder(list[str])
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_split = msgspec.json.Decoder(dict[str, msgspec.Raw])
_NOTHING = msgspec.Raw(b"")
_PROMPTS: dict[Rules, msgspec.json.Decoder[Any]] = {
    endpoint.rules: msgspec.json.Decoder(
        msgspec.defstruct("Prompt", [(name, msgspec.Raw, _NOTHING) for name in endpoint.rules.prompt_fields])
    )
    for endpoint in Endpoint
    if not endpoint.rules.is_form
}


async def decode_large(
    body: bytes, endpoint: Endpoint, principal: Principal, class_name: str, request_id: str
) -> InferenceRequest:
    """What decode() makes of the body, or the BadRequest that it raises. For JSON alone."""
    rules = endpoint.rules
    await _check_utf8(body)
    await _bound_members(body, rules)
    fields: Fields = parsed(_split, body)
    await _turn()
    prompt = await _facts(fields, rules)
    return made_of(fields, len(body), endpoint, principal, class_name, request_id, prompt)


async def _turn() -> None:
    """Everybody else first."""
    await asyncio.sleep(0)


async def _check_utf8(body: bytes) -> None:
    if body.isascii():
        return
    at = 0
    while at < len(body):
        end = min(at + UTF8_BYTES, len(body))
        while end < len(body) and end > at + UTF8_BYTES - 4 and body[end] & 0xC0 == 0x80:
            end -= 1  # not within a character
        try:
            body[at:end].decode()
        except UnicodeDecodeError as exc:
            raise BadRequest(f"The body is not valid UTF-8 (byte {at + exc.start}).") from exc
        at = end
        await _turn()


async def _bound_members(body: bytes, rules: Rules) -> None:
    """Of what stands beside the prompt: each field becomes an entry of a dict, and tools have many of their own."""
    prompt = msgspec.structs.astuple(parsed(_PROMPTS[rules], body))
    if len(body) - sum(len(memoryview(raw)) for raw in prompt) <= LARGE_BYTES:
        return
    await _turn()
    inside = 0
    for raw in prompt:
        inside += await _occurrences(_MEMBER, bytes(raw))
    if await _occurrences(_MEMBER, body, inside + MAX_MEMBERS) > inside + MAX_MEMBERS:
        raise BadRequest(f"The fields beside '{rules.prompt_fields[0]}' hold more than {MAX_MEMBERS} members.")


async def _occurrences(pattern: re.Pattern[bytes], text: bytes, most: int | None = None) -> int:
    """How often it is found; may stop once it is more than `most`."""
    found = 0
    for start in range(0, len(text), STEP_BYTES):
        found += sum(1 for _ in pattern.finditer(text, start, start + STEP_BYTES))
        if most is not None and found > most:
            break
        await _turn()
    return found


async def _bound_objects(raw: msgspec.Raw, name: str) -> int:
    """How many objects it holds. Raises BadRequest for more than MAX_OBJECTS."""
    text = bytes(raw)
    found = text.count(b"{")
    if found > FEW_OBJECTS:
        found = await _occurrences(_OBJECT, text, MAX_OBJECTS)
    if found > MAX_OBJECTS:
        raise BadRequest(f"'{name}' holds more than {MAX_OBJECTS} messages and parts.", param=name)
    await _turn()
    return found


# --- what decoding learns of the prompt, as in prompts.py ---------------------------------------------------


async def _facts(fields: Fields, rules: Rules) -> PromptFacts:
    match rules.prompt:
        case Prompt.CHAT:
            return await _chat(fields, "messages", TEXT)
        case Prompt.CHAT_OR_TEXT if "prompt" not in fields and "messages" in fields:
            return await _chat(fields, "messages", TEXT)
        case Prompt.BLOCKS:
            return await _blocks(fields)
        case Prompt.TEXTS:
            return await _texts(fields, rules.prompt_fields[0])
        case Prompt.INPUT:
            return await _input(fields)
        case Prompt.ITEMS:
            return await _items(fields)
        case Prompt.PAIRS:
            return await _pairs(fields, rules)
        case Prompt.IDS if (name := rules.prompt_fields[0]) in fields:
            text = bytes(fields[name])
            facts = await _ids(text, name)
            if facts is not None and text.count(b"[") == 1:
                return facts
            if text.strip(b"[ \t\r\n]"):  # else it has none of them
                raise BadRequest(f"'{name}' must be an array of token ids.", param=name)
    return PROMPT_CHECKS[rules](fields, rules)


async def _chat(fields: Fields, name: str, otherwise: PromptFacts) -> PromptFacts:
    def check(raw: msgspec.Raw | None, first: int = 0) -> bool:
        return check_messages(raw, name, first)

    return await _with_media(fields, name) if await _grouped(fields.get(name), name, check) else otherwise


async def _blocks(fields: Fields) -> PromptFacts:
    has_media = await _grouped(fields.get("messages"), "messages", check_block_messages)
    if (system := fields.get("system")) is not None:
        await _bound_objects(system, "system")
        has_media |= check_system(system)
    return await _with_media(fields, "messages", "system") if has_media else TEXT


async def _grouped(raw: msgspec.Raw | None, name: str, check: Callable[..., bool]) -> bool:
    """`check(raw, first)` of all messages, some of them at a time; `first` is the number of the first of those."""
    if raw is None or await _bound_objects(raw, name) <= FEW_OBJECTS:
        return check(raw)
    decoded_messages(_messages, raw, name)  # none of them is anything but an object, of which there are not too many
    await _turn()
    messages = _raws.decode(raw)
    await _turn()
    found = False
    for first in range(0, len(messages), GROUP):
        found |= check(msgspec.Raw(b"[%b]" % b",".join(messages[first : first + GROUP])), first)
        await _turn()
    return found


async def _with_media(fields: Fields, *names: str) -> PromptFacts:
    found = Media()
    for name in names:
        if name in fields:
            for i, each in enumerate(each_in(fields[name], depth=name == "system"), start=1):
                if each is not None:
                    found += each
                if i % GROUP == 0:
                    await _turn()
    return PromptFacts(False, found)


async def _may_hold_media(text: bytes) -> bool:
    if not media_marks_in(text):
        return False
    for start in range(0, len(text), STEP_BYTES):
        if MEDIA_PART.search(text, start, start + STEP_BYTES + PART_BYTES) is not None:
            return True
        await _turn()
    return False


async def _texts(fields: Fields, name: str) -> PromptFacts:
    raw = fields.get(name)
    text = b"" if raw is None else bytes(raw)
    if text[:1] != b"[":
        return check_texts(raw, name)
    if (facts := await _ids(text, name)) is not None:
        return facts
    if await _occurrences(_BETWEEN_STRINGS, text, MAX_PROMPTS) > MAX_PROMPTS:
        raise too_many_prompts(name, f"more than {MAX_PROMPTS}")
    try:
        found = _strings.decode(text)
    except (msgspec.ValidationError, RecursionError) as exc:
        raise not_texts(name) from exc
    if len(found) > MAX_PROMPTS:
        raise too_many_prompts(name, len(found))
    return PromptFacts(False, prompts=len(found)) if found else check_texts(raw, name)


async def _ids(text: bytes, name: str) -> PromptFacts | None:
    """Of token ids or lists of them, without making a number of each. None: it is something else, or empty."""
    rest = b""
    for start in range(0, len(text), UTF8_BYTES):
        rest += text[start : start + UTF8_BYTES].translate(None, _OF_IDS)
        if rest.strip(b"[]"):
            return None
        await _turn()
    if rest == b"[]":
        ids = text.count(b",") + 1
        return PromptFacts(False, ids=ids, longest_ids=ids) if _DIGIT.search(text) is not None else None
    lists = len(rest) // 2 - 1
    if lists > MAX_PROMPTS:
        raise too_many_prompts(name, lists)
    if rest != b"[%b]" % (b"[]" * lists):
        raise not_texts(name)
    lengths: list[int] = []
    *each, after = text.strip()[1:-1].split(b"]")
    for piece in each:
        before, _, ids_of_one = piece.partition(b"[")
        if before.strip(b", \t\r\n"):
            raise not_texts(name)  # ids beside lists of them
        lengths.append(ids_of_one.count(b",") + 1 if ids_of_one.strip() else 0)
    if after.strip(b", \t\r\n"):
        raise not_texts(name)
    return PromptFacts(False, prompts=lists, ids=sum(lengths), longest_ids=max(lengths))


async def _input(fields: Fields) -> PromptFacts:
    raw = fields.get("input")
    if raw is None and "messages" in fields:
        return await _chat(fields, "messages", UNCOUNTED)
    if raw is not None and CHAT_INSIDE.match(raw) is not None:
        return await _chat(fields, "input", UNCOUNTED)
    return cut_by_the_engine(fields, await _texts(fields, "input"))


async def _items(fields: Fields) -> PromptFacts:
    raw = fields.get("input")
    if raw is None or first_byte(raw) != b"[":
        return check_items(fields)
    await _bound_objects(raw, "input")
    facts = check_items(fields)
    await _turn()
    return await _with_media(fields, "input") if await _may_hold_media(bytes(raw)) else facts


async def _pairs(fields: Fields, rules: Rules) -> PromptFacts:
    for name in rules.prompt_fields:
        raw = fields.get(name)
        if raw is None or first_byte(raw) != b"[":
            continue
        await _bound_objects(raw, name)
        if bytes(raw).count(b",") <= MAX_OBJECTS:
            continue
        if await _occurrences(_BETWEEN_STRINGS, bytes(raw), MAX_OBJECTS) > MAX_OBJECTS:  # those in objects too
            raise too_many_prompts(name, f"more than {MAX_OBJECTS}", "texts")
        try:  # else they are numbers or the like
            _texts_or_objects.decode(raw)
        except (msgspec.ValidationError, RecursionError) as exc:
            raise BadRequest(f"'{name}' must be a text or an array of texts.", param=name) from exc
        await _turn()
    one, many, facts = check_pairs(fields, rules)
    if await _may_hold_media(bytes(fields[one])) or await _may_hold_media(bytes(fields[many])):
        return replace(facts, media=(await _with_media(fields, one, many)).media)
    return facts
