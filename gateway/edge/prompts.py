"""Checks the prompt of each kind of path and says what can be known of its length. Called by decode.py.

A fault is named by its element. The texts themselves are never copied into an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from gateway.domain.endpoint import Endpoint, Prompt, Rules
from gateway.domain.errors import BadRequest
from gateway.domain.media import Media
from gateway.edge.blocks import check_blocks
from gateway.edge.fields import NULL, Fields
from gateway.edge.media import may_hold_media, media_in
from gateway.edge.messages import check_messages

MAX_PROMPTS = 2048  # of one request: each is a sequence of its own in the engine


@dataclass(frozen=True, slots=True)
class PromptFacts:
    """What decoding learns of a prompt; the fields are those of InferenceRequest."""

    is_countable: bool
    media: Media | None = None
    prompts: int = 1
    ids: int | None = None
    longest_ids: int = 0
    repeated_bytes: int = 0


TEXT = PromptFacts(is_countable=True)
UNCOUNTED = PromptFacts(is_countable=False)

CHAT_INSIDE = re.compile(rb"\[\s*\{")
# with one of these, a response's prompt is not what /tokenize makes of the same text
_BEYOND_TEXT = ("tools", "reasoning", "previous_input_messages", "prompt")


class Item(msgspec.Struct, gc=False):
    """Of a response: what is in it is the engine's matter."""


_texts = msgspec.json.Decoder(list[str | int | list[int]])
_items = msgspec.json.Decoder(list[Item])
_raws = msgspec.json.Decoder(list[msgspec.Raw])
_ids = msgspec.json.Decoder(list[int])


def _with_media(fields: Fields, *names: str) -> PromptFacts:
    found = (media_in(fields[name], depth=name == "system") for name in names if name in fields)
    return PromptFacts(False, sum(found, Media()))


def _chat(fields: Fields, rules: Rules) -> PromptFacts:
    return _with_media(fields, "messages") if check_messages(fields.get("messages")) else TEXT


def _plain_texts(fields: Fields, rules: Rules) -> PromptFacts:
    return check_texts(fields.get(rules.prompt_fields[0]), rules.prompt_fields[0])


def _input(fields: Fields, rules: Rules) -> PromptFacts:
    """`input` of /v1/embeddings, or a chat in `messages` or `input`; chats are not counted: their template differs."""
    raw = fields.get("input")
    if raw is None and "messages" in fields:
        return _with_media(fields, "messages") if check_messages(fields["messages"]) else UNCOUNTED
    if raw is not None and CHAT_INSIDE.match(raw) is not None:
        return _with_media(fields, "input") if check_messages(raw, "input") else UNCOUNTED
    return cut_by_the_engine(fields, check_texts(raw, "input"))


def cut_by_the_engine(fields: Fields, facts: PromptFacts) -> PromptFacts:
    if "truncate_prompt_tokens" in fields:
        return PromptFacts(False, prompts=facts.prompts)  # the engine cuts each to what fits
    return facts


def check_texts(raw: msgspec.Raw | None, name: str) -> PromptFacts:
    """A string, strings, token ids, or lists of token ids; at most MAX_PROMPTS."""
    if raw is None or bytes(raw) == NULL:
        raise BadRequest(f"'{name}' is missing.", param=name)
    first = bytes(raw)[:1]
    if first == b'"':
        return TEXT
    if first != b"[":
        raise BadRequest(f"'{name}' must be a string or an array.", param=name)
    try:
        prompts = _texts.decode(raw)
    except msgspec.ValidationError as exc:
        raise not_texts(name) from exc
    except RecursionError as exc:
        raise BadRequest(f"'{name}' is nested too deeply.", param=name) from exc
    if not prompts:
        raise BadRequest(f"'{name}' is empty; send at least one prompt.", param=name)
    if len({type(prompt) for prompt in prompts}) > 1:
        raise BadRequest(f"'{name}' mixes strings and token ids; send one kind.", param=name)
    if isinstance(prompts[0], int):
        return PromptFacts(False, ids=len(prompts), longest_ids=len(prompts))
    if len(prompts) > MAX_PROMPTS:
        raise too_many_prompts(name, len(prompts))
    if isinstance(prompts[0], str):
        return PromptFacts(False, prompts=len(prompts))
    lengths = [len(prompt) for prompt in prompts if isinstance(prompt, list)]
    return PromptFacts(False, prompts=len(prompts), ids=sum(lengths), longest_ids=max(lengths))


def not_texts(name: str) -> BadRequest:
    return BadRequest(f"'{name}' must hold strings, token ids, or arrays of token ids.", param=name)


def too_many_prompts(name: str, count: int | str, what: str = "prompts") -> BadRequest:
    return BadRequest(f"'{name}' holds {count} {what}; at most {MAX_PROMPTS} are allowed.", param=name)


def _pairs(fields: Fields, rules: Rules) -> PromptFacts:
    one, many, facts = check_pairs(fields, rules)
    if may_hold_media(bytes(fields[one])) or may_hold_media(bytes(fields[many])):
        return replace(facts, media=media_in(fields[one]) + media_in(fields[many]))
    return facts


def check_pairs(fields: Fields, rules: Rules) -> tuple[str, str, PromptFacts]:
    """One text against many: the engine reads the first once for each of the others. The names of both with it."""
    names = rules.prompt_fields
    for one, many in zip(names[::2], names[1::2], strict=True):
        if one in fields and many in fields:
            break
    else:
        raise BadRequest(
            f"'{names[0]}' and '{names[1]}' are needed, one text and those to hold against it.", param=names[0]
        )
    documents = 1
    for name in (one, many):
        if first_byte(fields[name]) != b"[":
            continue
        try:
            documents = max(documents, len(_raws.decode(fields[name])))
        except (msgspec.DecodeError, RecursionError) as exc:
            raise BadRequest(f"'{name}' must be a text or an array of texts.", param=name) from exc
    if documents > MAX_PROMPTS:
        raise too_many_prompts(many, documents, "texts")
    repeated = 0 if first_byte(fields[one]) == b"[" else len(memoryview(fields[one])) * (documents - 1)
    return one, many, PromptFacts(False, prompts=documents, repeated_bytes=repeated)


def _items_of_a_response(fields: Fields, rules: Rules) -> PromptFacts:
    facts = check_items(fields)
    is_list = first_byte(fields["input"]) == b"["
    return _with_media(fields, "input") if is_list and may_hold_media(bytes(fields["input"])) else facts


def check_items(fields: Fields) -> PromptFacts:
    """A text, or items, whose media are not looked for."""
    raw = fields.get("input")
    if raw is None or bytes(raw) == NULL:
        raise BadRequest("'input' is missing.", param="input")
    first = first_byte(raw)
    if first == b'"':
        return UNCOUNTED if any(name in fields for name in _BEYOND_TEXT) else TEXT
    if first != b"[":
        raise BadRequest("'input' must be a string or an array of items.", param="input")
    try:
        items = _items.decode(raw)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadRequest("'input' must hold objects, each an item of the conversation.", param="input") from exc
    if not items:
        raise BadRequest("'input' is empty; send at least one item.", param="input")
    return UNCOUNTED


def first_byte(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


def _blocks(fields: Fields, rules: Rules) -> PromptFacts:
    if check_blocks(fields.get("messages"), fields.get("system")):
        return _with_media(fields, "messages", "system")
    return TEXT


def _chat_or_text(fields: Fields, rules: Rules) -> PromptFacts:
    if "prompt" in fields:
        if bytes(fields["prompt"])[:1] != b'"':
            raise BadRequest("'prompt' must be a string.", param="prompt")
        return TEXT
    if "messages" not in fields:
        raise BadRequest("'messages' or 'prompt' is missing.", param="messages")
    return _chat(fields, rules)


def _token_ids(fields: Fields, rules: Rules) -> PromptFacts:
    name = rules.prompt_fields[0]
    try:
        tokens = _ids.decode(fields[name])
    except KeyError as exc:
        raise BadRequest(f"'{name}' is missing.", param=name) from exc
    except (msgspec.DecodeError, RecursionError) as exc:
        raise BadRequest(f"'{name}' must be an array of token ids.", param=name) from exc
    return PromptFacts(False, ids=len(tokens), longest_ids=len(tokens))


# a path whose prompt is a file is none of JSON's: edge/form.py reads it
_CHECKS: dict[Prompt, Callable[[Fields, Rules], PromptFacts]] = {
    Prompt.CHAT: _chat,
    Prompt.TEXTS: _plain_texts,
    Prompt.INPUT: _input,
    Prompt.PAIRS: _pairs,
    Prompt.ITEMS: _items_of_a_response,
    Prompt.BLOCKS: _blocks,
    Prompt.CHAT_OR_TEXT: _chat_or_text,
    Prompt.IDS: _token_ids,
}

# by the row of the path's table, which is found faster than an enum's member
PROMPT_CHECKS = {endpoint.rules: _CHECKS[endpoint.rules.prompt] for endpoint in Endpoint if not endpoint.rules.is_form}
