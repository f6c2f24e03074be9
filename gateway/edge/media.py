"""Finds the parts of a prompt that are no text, wherever messages, items or documents hold them. Called by prompts.py.

Only for prompts that seem to have some, and after their shape was checked: what cannot be read here counts as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from gateway.domain.media import Media
from gateway.edge.fields import NULL

MAX_DEPTH = 4  # message → tool_result → parts is the deepest that engines know

# as vLLM 0.32 knows them: MM_PARSER_MAP of its chat, ResponseInputImageParam, Anthropic's blocks
IMAGES = frozenset((b'"image_url"', b'"input_image"', b'"image"', b'"image_pil"'))
AUDIOS = frozenset((b'"input_audio"', b'"audio_url"', b'"audio"'))
VIDEOS = frozenset((b'"video_url"', b'"input_video"', b'"video"'))
TEXTS = frozenset(
    (
        b'"text"',
        b'"input_text"',
        b'"output_text"',
        b'"summary_text"',
        b'"reasoning_text"',
        b'"refusal"',
        b'"thinking"',
        b'"redacted_thinking"',
        b'"tool_use"',
        b'"tool_result"',
        b'"tool_reference"',
    )
)

# Seen from afar. Quotes inside a string are escaped; that a text is exactly such a word and nothing else makes its
# length unknown to us, no more.
MEDIA_PART = re.compile(rb'"(?:input_image|input_file|input_audio|(?:image|video|audio)_[a-z]+)"')
PART_BYTES = 32  # longer than any of them
_MARKS = (b"input_", b"image_", b"video_", b"audio_")  # found ten times as fast


class _Element(msgspec.Struct, gc=False):
    """A message, an item, a document or a part. Each field as the bytes it came in."""

    type: msgspec.Raw = msgspec.Raw(NULL)
    content: msgspec.Raw = msgspec.Raw(NULL)  # parts, of whatever has some
    output: msgspec.Raw = msgspec.Raw(NULL)  # parts, of a function's result among a response's items


_raws = msgspec.json.Decoder(list[msgspec.Raw])
_element = msgspec.json.Decoder(_Element)


def media_marks_in(text: bytes) -> bool:
    return any(mark in text for mark in _MARKS)


def may_hold_media(text: bytes) -> bool:
    """In items and documents, whose parts are not looked at one by one."""
    return media_marks_in(text) and MEDIA_PART.search(text) is not None


def media_in(raw: msgspec.Raw, depth: int = 0) -> Media:
    """What of `raw` is no text: a list of messages or the like, or one of them; with depth 1, of parts."""
    return sum((found for found in each_in(raw, depth) if found is not None), Media())


def each_in(raw: msgspec.Raw, depth: int = 0) -> Iterator[Media | None]:
    """One by one, for callers who do it in turns: a part that is no text, or None for anything else."""
    first = bytes(memoryview(raw)[:1])
    if first == b"[" and depth <= MAX_DEPTH:
        for element in _raws.decode(raw):
            yield from _weigh(element, depth)
    elif first == b"{":
        yield from _weigh(raw, depth)


def _weigh(raw: msgspec.Raw, depth: int) -> Iterator[Media | None]:
    try:
        element = _element.decode(raw)
    except (msgspec.ValidationError, RecursionError):  # a string, or a number
        yield None
        return
    kind, size = bytes(element.type), len(memoryview(raw))
    if kind in IMAGES:
        yield Media(images=1, body_bytes=size)
    elif kind in AUDIOS:
        yield Media(audios=1, body_bytes=size)
    elif kind in VIDEOS:
        yield Media(videos=1, body_bytes=size)
    elif depth and kind[:1] == b'"' and kind not in TEXTS:  # a part; what a response's items are called, is all text
        yield Media(body_bytes=size, unknown_bytes=size)
    else:
        yield None
        yield from each_in(element.content, depth + 1)
        yield from each_in(element.output, depth + 1)
