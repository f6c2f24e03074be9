"""Reads usage, errors and the end of a stream from the side, while its bytes go through. Made by `taps.tap_for`.

Events are looked at as bytes: nothing is decoded that does not have to be, so a character cut in two, or a line
separator inside a string, is no matter here. Most events of a stream cost a few substring counts.
"""

from __future__ import annotations

import re

import msgspec

from gateway.domain.outcome import Usage
from gateway.upstream.sse import event_ends, payload_of
from gateway.upstream.tap import Tap
from gateway.upstream.usage import UNREADABLE, PromptUsage

_PLAIN = (b'"finish_reason":null', b'"finish_reason": null')  # as engines write it, one way or the other

MAX_EVENT_BYTES = 1 << 18  # of an event that has not ended; a longer one goes through unread
GIVEN_UP = frozenset({"abort", "error"})

# A key with something to read behind it. Quotes inside a string are escaped, so text that a model writes never looks
# like this; a match only means that the event is decoded.
_TELLING = re.compile(rb'"(?:error"\s*:(?!\s*null)|usage"\s*:(?!\s*null)|finish_reason"\s*:(?!\s*null))')
_CHOICE = b'"finish_reason"'  # each choice has one


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    """What we look for in an event. Each field is read on its own, so that an odd one hides no other."""

    choices: msgspec.Raw = msgspec.Raw(b"null")
    usage: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")


_event_decoder = msgspec.json.Decoder(_Event)
_usage_decoder = msgspec.json.Decoder(PromptUsage | None)
_choices_decoder = msgspec.json.Decoder(list[_Choice])


class StreamTap(Tap):
    """Of the streams that end with [DONE]. With `drop_usage_event` an event that has usage and no choices is taken out.

    Nothing else is changed. To be able to, it then holds back an event that has not ended; a client could not have used
    that part anyway. Events that carry choices are counted: neither usage alone, nor an error, nor the end mark.
    """

    __slots__ = ("_drops", "_ended_in_cr", "_given", "_last_was_dropped", "_plain")

    def __init__(self, drop_usage_event: bool) -> None:
        super().__init__()
        self._drops = drop_usage_event
        self._given = 0  # bytes of `_tail` that have been passed on
        self._ended_in_cr = False  # the last event ended in CR and the read with it: a LF may belong to it
        self._last_was_dropped = False
        self._plain = _PLAIN[0]  # how this engine writes it

    def _pieces(self, data: bytes) -> int:
        events = data.count(b"\n\n")
        if (
            events == data.count(self._plain)  # each a piece of an answer that goes on
            and events == data.count(_CHOICE)  # and no other choice beside it has ended
            and data.count(b"\n") == 2 * events
            and data.endswith(b"\n\n")
            and data.startswith(b"data:")
            and not self._tail
            and not self._ended_in_cr
            and b'"usage"' not in data
            and b'"error"' not in data
            and b"\r" not in data
            and b"[DONE]" not in data
        ):
            return events
        return 0

    def finish(self) -> bytes:
        tail, self._tail = self._tail, b""
        if not tail or self._is_skipping:
            return b""
        if self._is_usage_only_closely(tail, is_whole=False) and self._drops:
            return b""
        return tail[self._given :]

    def _feed_any(self, data: bytes) -> bytes:
        if not data:
            return data
        old = self._tail
        buffer = old + data if old else data
        begin = 0  # of the event looked at
        given = self._given  # up to here the buffer was passed on, or dropped
        parts: list[bytes] = []
        if self._ended_in_cr:
            self._ended_in_cr = False
            if data.startswith(b"\n"):
                begin = 1
                given = 1 if self._last_was_dropped else 0
        # the first line end of an event's end may have come before
        for end in event_ends(buffer, max(begin, len(old) - 1)):
            event = buffer[begin:end]
            self._last_was_dropped = False
            if self._is_skipping:
                self._is_skipping = False
            elif self._is_usage_only(event) and self._drops:
                own = begin + len(event) - len(event.lstrip(b"\r\n"))  # empty lines before it are not part of it
                parts.append(buffer[given:own])
                given = end
                self._last_was_dropped = True
            begin = end
        self._ended_in_cr = begin == len(buffer) and buffer.endswith(b"\r")
        self._tail = buffer[begin:]
        if len(self._tail) > MAX_EVENT_BYTES and not self._is_skipping:
            self._is_skipping = True
            self._events += 1
        if self._is_skipping:
            self._tail = self._tail[-2:]
        if not self._drops or self._is_skipping:
            self._given = len(self._tail)
            if not parts and given == len(old):
                return data
            return b"".join((*parts, buffer[given:]))
        self._given = 0
        if not parts and not old and not self._tail and not given:
            return data
        return b"".join((*parts, buffer[given:begin]))

    def _is_usage_only(self, event: bytes) -> bool:
        """Notes the facts of a whole event; True for the one to drop."""
        if _TELLING.search(event) is None and event.rfind(_CHOICE) > 0 and event.startswith(b"data:"):
            self._events += 1  # a piece of the answer, and nothing else to be known from it
            if self._plain not in event and _PLAIN[1] in event:
                self._plain = _PLAIN[1]
            return False
        return self._is_usage_only_closely(event, is_whole=True)

    def _is_usage_only_closely(self, event: bytes, *, is_whole: bool) -> bool:
        payload = payload_of(event)
        if payload is None:  # a comment, an empty event
            return False
        if payload == b"[DONE]":
            self.saw_done = True
            return False
        try:
            fields = _event_decoder.decode(payload)
        except UNREADABLE:
            self._events += is_whole  # it may well hold text: better counted than free
            return False
        usage = _read_usage(fields.usage)
        if usage is not None:
            self.usage = usage
        if bytes(fields.error) != b"null":
            self._note_error(fields.error)
            return False
        choices = bytes(fields.choices)
        if choices == b"null":
            return False
        if choices[:1] == b"[" and not choices[1:-1].strip():
            return usage is not None
        self._events += 1
        self.was_given_up = self.was_given_up or not _finish_reasons(choices).isdisjoint(GIVEN_UP)
        return False


def _read_usage(raw: msgspec.Raw) -> Usage | None:
    try:
        usage = _usage_decoder.decode(raw)
    except UNREADABLE:
        return None
    return None if usage is None else usage.usage()


def _finish_reasons(choices: bytes) -> set[str]:
    try:
        return {choice.finish_reason for choice in _choices_decoder.decode(choices) if choice.finish_reason is not None}
    except UNREADABLE:
        return set()
