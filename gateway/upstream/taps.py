"""Reads the streams of /v1/responses and /v1/messages from the side, as relay.StreamTap reads those with [DONE].

forward.py takes the tap that `tap_for` gives. Here nothing is ever held back or taken out: what a read brought goes
on as the same object. Most reads cost two substring counts.
"""

from __future__ import annotations

import re
from abc import abstractmethod

import msgspec

from gateway.domain.endpoint import StreamEnd
from gateway.domain.outcome import Usage
from gateway.domain.request import InferenceRequest
from gateway.upstream.relay import StreamTap
from gateway.upstream.sse import event_ends, payload_of
from gateway.upstream.tap import Tap
from gateway.upstream.usage import UNREADABLE, InputUsage

# The last event of a response repeats its whole output, so it may be large; a longer one goes through unread
MAX_EVENT_BYTES = 4 << 20
HEAD_BYTES = 512  # of an event that is too long: enough for its name
_NAME = re.compile(rb'(?:^|[\r\n])event:[ ]?([a-z_.]+)|"type"\s*:\s*"([a-z_.]+)"')


class _Event(msgspec.Struct):
    """What we look for in an event. The large ones are not decoded unless they are asked for."""

    type: str = ""
    response: msgspec.Raw = msgspec.Raw(b"null")  # /v1/responses
    message: msgspec.Raw = msgspec.Raw(b"null")  # Anthropic's first event; the text of an error of a response
    usage: msgspec.Raw = msgspec.Raw(b"null")
    delta: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Told(msgspec.Struct):
    """A response or a message within an event."""

    usage: InputUsage | None = None
    status: str | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Delta(msgspec.Struct):
    stop_reason: str | None = None


_event = msgspec.json.Decoder(_Event)
_told = msgspec.json.Decoder(_Told)
_input_usage = msgspec.json.Decoder(InputUsage | None)
_delta = msgspec.json.Decoder(_Delta)


class NamedTap(Tap):
    """What both have in common: cutting reads into events, counting those that carry a piece of the answer.

    While it skips, `_tail` holds the beginning of the event and its last bytes.
    """

    __slots__ = ()

    piece: bytes  # ends the name of an event that carries a piece of the answer, with the next line's beginning

    def finish(self) -> bytes:
        tail, self._tail = self._tail, b""
        if tail:
            self._end(tail)
        return b""

    def _pieces(self, data: bytes) -> int:
        if self._tail or not data.endswith(b"\n\n"):
            return 0
        pieces = data.count(self.piece)  # a line end inside a string is escaped: no text looks like this
        return pieces if pieces == data.count(b"\n\n") else 0

    def _feed_any(self, data: bytes) -> bytes:
        old = self._tail
        buffer = old + data if old else data
        begin = 0
        for end in event_ends(buffer, max(0, len(old) - 1)):  # the first line end may have come before
            self._end(buffer[begin:end])
            begin = end
        tail = buffer[begin:]
        if len(tail) > MAX_EVENT_BYTES:
            self._is_skipping = True
        # the last bytes are kept to see where it ends; three, since CR LF CR LF may be cut
        self._tail = tail[:HEAD_BYTES] + tail[-3:] if self._is_skipping and len(tail) > HEAD_BYTES + 3 else tail
        return data

    def _end(self, event: bytes) -> None:
        if self._is_skipping:
            self._is_skipping = False
            name = _NAME.search(event)
            self._unread((name[1] or name[2]).decode() if name else "")
            return
        payload = payload_of(event)
        if payload is None:  # a comment, an empty event
            return
        try:
            fields = _event.decode(payload)
        except UNREADABLE:
            self._events += 1  # it may well hold text: better counted than free
            return
        self._read(fields)

    @abstractmethod
    def _read(self, event: _Event) -> None:
        """Notes the facts of a whole event."""

    @abstractmethod
    def _unread(self, name: str) -> None:
        """An event that was too long; only its name is known."""

    def _fail(self, error: msgspec.Raw) -> None:
        """Anything that says it is an error ends these streams."""
        self.saw_done = True
        self._note_error(error)


_RESPONSE_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponsesTap(NamedTap):
    """OpenAI's /v1/responses: `response.….delta` carries the answer, `response.completed` the usage."""

    __slots__ = ()
    piece = b".delta\ndata:"

    def _read(self, event: _Event) -> None:
        if event.type.endswith(".delta"):
            self._events += 1
        elif event.type in _RESPONSE_ENDS:
            self.saw_done = True
            told = _read_told(event.response)
            if told.usage is not None:
                self.usage = told.usage.usage()
            self.was_given_up = told.status == "cancelled"
            if event.type == "response.failed":
                self._fail(told.error)
        elif event.type == "error":
            self._fail(event.message if bytes(event.error) == b"null" else event.error)
        elif bytes(event.error) != b"null":
            self._fail(event.error)

    def _unread(self, name: str) -> None:
        if name in _RESPONSE_ENDS:
            self.saw_done = True
            if name == "response.failed":
                self._fail(msgspec.Raw(b"null"))
        elif name.endswith(".delta"):
            self._events += 1


class MessagesTap(NamedTap):
    """Anthropic's /v1/messages: `content_block_delta` carries the answer, `message_delta` the usage and the reason."""

    __slots__ = ("_prompt",)
    piece = b"event: content_block_delta\ndata:"

    def __init__(self) -> None:
        super().__init__()
        self._prompt: Usage | None = None  # as the first event tells it

    def _read(self, event: _Event) -> None:
        match event.type:
            case "content_block_delta":
                self._events += 1
            case "message_start":
                told = _read_told(event.message).usage
                self._prompt = None if told is None else told.usage()
            case "message_delta":
                self._note_end(event)
            case "message_stop":
                self.saw_done = True
            case _ if event.type == "error" or bytes(event.error) != b"null":
                self._fail(event.error)

    def _note_end(self, event: _Event) -> None:
        try:
            told = _input_usage.decode(event.usage)
            told_usage = None if told is None else told.usage()
        except UNREADABLE:
            told_usage = self._output_alone(event.usage)
        if told_usage is not None:
            self.usage = told_usage
        try:
            self.was_given_up = _delta.decode(event.delta).stop_reason is None  # vLLM has no word of Anthropic's for it
        except UNREADABLE:
            return

    def _output_alone(self, raw: msgspec.Raw) -> Usage | None:
        """Anthropic's own API tells the prompt once, in the first event."""
        try:
            output = _output.decode(raw).output_tokens
        except UNREADABLE:
            return None
        return None if self._prompt is None else Usage(self._prompt.prompt_tokens, output)

    def _unread(self, name: str) -> None:
        self._events += name == "content_block_delta"


class _Output(msgspec.Struct):
    output_tokens: int


_output = msgspec.json.Decoder(_Output)


def tap_for(request: InferenceRequest) -> Tap:
    """A new one for the stream of this request."""
    match request.endpoint.rules.end:
        case StreamEnd.RESPONSE:
            return ResponsesTap()
        case StreamEnd.MESSAGE_STOP:
            return MessagesTap()
        case _:
            return StreamTap(drop_usage_event=not request.wants_usage)


def _read_told(raw: msgspec.Raw) -> _Told:
    try:
        return _told.decode(raw)
    except UNREADABLE:
        return _Told()
