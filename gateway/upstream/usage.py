"""What a plain reply says of itself: its usage, whether the engine gave it up, its type. Called by forward.py."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated

import msgspec

from gateway.domain.endpoint import Counts, Endpoint, StreamEnd
from gateway.domain.outcome import Usage

JSON = b"application/json"
# what a reply that need not be JSON may call itself: a transcript as text or as subtitles
TEXT_TYPES = frozenset({b"text/plain", b"text/vtt", b"text/srt", b"application/x-subrip"})
# quotes inside a text are escaped, so no text looks like these
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"(?:abort|error)"')
_STOP_REASON = re.compile(rb'"stop_reason"\s*:\s*"')

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)  # ValueError: UnicodeDecodeError, for bad UTF-8
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]


class PromptUsage(msgspec.Struct):
    """OpenAI's usage object; embeddings, rerank and score have no completion_tokens to speak of."""

    prompt_tokens: Tokens
    completion_tokens: Tokens | None = None

    def usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.completion_tokens or 0)


class InputUsage(msgspec.Struct):
    """That of /v1/responses and of Anthropic, which counts what it took from or put into a cache apart."""

    input_tokens: Tokens
    output_tokens: Tokens = 0
    cache_creation_input_tokens: Tokens | None = None
    cache_read_input_tokens: Tokens | None = None

    def usage(self) -> Usage:
        cached = (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)
        return Usage(self.input_tokens + cached, self.output_tokens)


class _PromptReply(msgspec.Struct):
    usage: PromptUsage | None = None


class _InputReply(msgspec.Struct):
    usage: InputUsage | None = None


_BY_COUNTS: dict[Counts, msgspec.json.Decoder[_PromptReply] | msgspec.json.Decoder[_InputReply] | None] = {
    Counts.PROMPT: msgspec.json.Decoder(_PromptReply),
    Counts.INPUT: msgspec.json.Decoder(_InputReply),
    Counts.NONE: None,
}
# by the row of the path's table, which is found faster than an enum's member
_DECODERS = {endpoint.rules: _BY_COUNTS[endpoint.rules.usage] for endpoint in Endpoint}


def usage_of(body: bytes, endpoint: Endpoint) -> Usage | None:
    """The usage of a plain reply; None when it has none, or none that can be read. Raises ValueError for no JSON."""
    decoder = _DECODERS[endpoint.rules]
    if decoder is None:
        return None
    try:
        told = decoder.decode(body).usage
    except msgspec.ValidationError:
        return None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ValueError("not JSON") from exc
    return None if told is None else told.usage()


def was_given_up(body: bytes, endpoint: Endpoint) -> bool:
    """Did the engine stop before its answer was finished, and say so? On /v1/responses vLLM does not tell."""
    match endpoint.rules.end:
        case StreamEnd.DONE:
            return _ABORTED.search(body) is not None
        case StreamEnd.MESSAGE_STOP:
            return _STOP_REASON.search(body) is None  # vLLM leaves it out
        case _:
            return False


def reply_type(headers: Iterable[tuple[bytes, bytes]], body: bytes, endpoint: Endpoint) -> bytes | None:
    """The content type that goes to the caller; None for a reply that makes no sense on that path."""
    is_object = body.lstrip()[:1] == b"{" and body.rstrip()[-1:] == b"}"
    if endpoint.rules.is_object:
        return JSON if is_object else None
    for name, value in headers:
        if name == b"content-type":
            kind = value.partition(b";")[0].strip().lower()
            if kind in TEXT_TYPES:
                return value
            break
    return JSON if is_object else None
