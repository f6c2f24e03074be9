"""FastPath on a transport in memory: which reads go the short way, and that all others are left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from fakes.scripted_upstream import chunk
from hypothesis import given
from hypothesis import strategies as st

from gateway.upstream.fast_path import _SIZE_LINES, MAX_CHUNK_BYTES, NO_EVENT, FastPath


class Kept(asyncio.WriteTransport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_closed
        self.writes.append(bytes(data))

    def is_closing(self) -> bool:
        return self.is_closed


class Way:
    """A fast path, its transport, and a clock that stands at 5.0."""

    def __init__(self, *opened_by: bytes) -> None:
        self.transport = Kept()
        self.path = FastPath(self.transport, lambda: 5.0)
        for event in opened_by:
            self.path.open(event)

    def takes(self, data: bytes) -> bool:
        """Whether it took this read; what it says, what it wrote, and what it counted have to agree."""
        before = self.path.events
        was_taken = self.path.take(data)
        assert self.transport.writes == ([data] if was_taken else [])
        assert (self.path.events - before, self.path.passed_at) == ((1, 5.0) if was_taken else (0, 0.0))
        self.transport.writes.clear()
        self.path.passed_at = 0.0
        return was_taken


def chat(text: str, finish: str | None = None, **more: object) -> bytes:
    """As vLLM writes it; `more` are fields of the event."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return line({"id": "chatcmpl-1", "created": 1, "model": "mod", "choices": [choice], **more})


def line(document: object) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


HI = chat("Hi")


def sized(size: bytes, event: bytes = HI) -> bytes:
    return size + b"\r\n" + event + b"\r\n"


# --- the length of a chunk ------------------------------------------------------------------------------------------


def test_each_length_has_the_size_line_of_the_one_chunk_that_long() -> None:
    chunks = {len(made): made for made in (chunk(bytes(size)) for size in range(1, MAX_CHUNK_BYTES))}
    assert len(_SIZE_LINES) == MAX_CHUNK_BYTES + 1
    for length, size_line in enumerate(_SIZE_LINES):
        made = chunks.get(length)
        expected = NO_EVENT if made is None else made[: made.index(b"\n") + 1]
        assert size_line == expected, length
    assert [n for n, size_line in enumerate(_SIZE_LINES) if size_line is NO_EVENT] == [0, 1, 2, 3, 4, 5, 21, 262]


@given(st.integers(0, 5000))
def test_a_plain_event_goes_the_short_way_at_any_length_a_chunk_can_have(length: int) -> None:
    way = Way(HI)
    event = chat("x" * length)
    assert way.takes(chunk(event)) == (len(chunk(event)) <= MAX_CHUNK_BYTES)


@pytest.mark.parametrize("length", [n for n, size_line in enumerate(_SIZE_LINES) if size_line is NO_EVENT])
def test_no_read_of_a_length_that_no_chunk_has_is_taken(length: int) -> None:
    """Whatever it begins with: the mark for "no such chunk" is none that a replica can send."""
    way = Way(b'data: {"text":""}\n\n')
    begins, ends = b'data: {"text":"', b'"}\n\n\r\n'
    for start in (b"\0", NO_EVENT, b"", b"0\r\n"):
        for with_text in (start + begins + b"x" * 300, start + begins, start):
            assert not way.takes(with_text[: max(length - len(ends), 0)] + ends[-length:] if length else b"")
    for closed in (Way(), Way(HI)):
        closed.path.close()
        assert not closed.takes(bytes(length))


def test_the_longest_chunk_is_taken_and_one_byte_more_is_not() -> None:
    way = Way(HI)
    longest = chat("x" * (MAX_CHUNK_BYTES - 7 - len(chat(""))))
    assert len(chunk(longest)) == MAX_CHUNK_BYTES
    assert way.takes(chunk(longest))
    assert not way.takes(chunk(longest.replace(b"xx", b"xxx", 1)))


# --- what a read has to be ------------------------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "Hi",
    "한국어 👍",
    "a\u2028b\u2029c\u0085d",
    "\\",
    "\n\n",
    "\r\n",
    "\t\0",
    "usage",
    "[DONE]",
    "data: x",
    "}]}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_an_event_that_differs_in_its_text_alone_goes_on_byte_for_byte(text: str) -> None:
    assert Way(HI).takes(chunk(chat(text)))


@pytest.mark.parametrize("text", TEXTS)
def test_whichever_plain_event_opened_the_way_the_others_take_it(text: str) -> None:
    way = Way(chat(text))
    assert way.takes(chunk(HI)) and way.takes(chunk(chat(text)))


SIZE = b"%x" % len(HI)
assert SIZE.upper() != SIZE, "the size is to have a letter in it"
OTHER_READS = {
    "size in capitals": sized(SIZE.upper()),
    "leading zero": sized(b"0" + SIZE),
    "chunk extension": sized(SIZE + b";a=b"),
    "space behind the size": sized(SIZE + b" "),
    "size too small": sized(b"%x" % (len(HI) - 1)),
    "size too large": sized(b"%x" % (len(HI) + 1)),
    "size of another length": sized(b"f"),
    "no size": sized(b""),
    "size line ended by LF": SIZE + b"\n" + HI + b"\r\n",
    "size line ended by CR": SIZE + b"\r" + HI + b"\r\n",
    "chunk ended by LF": SIZE + b"\r\n" + HI + b"\n",
    "chunk without its end": SIZE + b"\r\n" + HI,
    "CR without its LF": SIZE + b"\r\n" + HI + b"\r",
    "two chunks": chunk(HI) + chunk(HI),
    "a chunk and half a one": chunk(HI) + chunk(HI)[:20],
    "a chunk and one more size line": chunk(HI) + b"3e\r\n",
    "a chunk and an empty line": chunk(HI) + b"\r\n",
    "a chunk and the end": chunk(HI) + b"0\r\n\r\n",
    "an empty line before": b"\r\n" + chunk(HI),
    "the end": b"0\r\n\r\n",
    "nothing": b"",
    "first half of a chunk": chunk(HI)[: len(HI) // 2],
    "second half of a chunk": chunk(HI)[len(HI) // 2 :],
    "the event alone": HI,
    "two events in a chunk": chunk(HI + HI),
    "an event and half a one": chunk(HI + HI[:30]),
    "half an event": chunk(HI[:-20]),
    "event without its empty line": chunk(HI[:-1]),
    "an empty line too many": chunk(HI + b"\n"),
    "a comment before": chunk(b": hi\n\n" + HI),
    "a comment alone": chunk(b": hi\n\n"),
    "the end mark": chunk(b"data: [DONE]\n\n"),
    "the end mark behind": chunk(HI + b"data: [DONE]\n\n"),
    "line ends CR LF": chunk(HI.replace(b"\n", b"\r\n")),
    "line ends CR": chunk(HI.replace(b"\n", b"\r")),
    "quote in the text": chunk(chat('say "hi"')),
    "quote ends the text": chunk(chat('say "')),
    "quote begins the text": chunk(chat('" said')),
    "backslash and quote": chunk(chat('\\"')),
    "another id": chunk(HI.replace(b"chatcmpl-1", b"chatcmpl-2")),
    "another index": chunk(HI.replace(b'"index":0', b'"index":1')),
    "a role": chunk(HI.replace(b'"delta":{', b'"delta":{"role":"assistant",')),
    "reasoning": chunk(HI.replace(b'"content"', b'"reasoning"')),
    "a second choice": chunk(line({"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}}]})),
    "finish_reason": chunk(chat("Hi", "stop")),
    "finish_reason without text": chunk(chat("", "stop")),
    "given up": chunk(chat("Hi", "abort")),
    "usage behind": chunk(chat("Hi", usage={"prompt_tokens": 1, "completion_tokens": 2})),
    "usage before": chunk(HI.replace(b"data: {", b'data: {"usage":{"prompt_tokens":1,"completion_tokens":2},')),
    "usage that is null": chunk(chat("Hi", usage=None)),
    "usage alone": chunk(line({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})),
    "error beside": chunk(chat("Hi", error={"message": "boom"})),
    "error alone": chunk(line({"error": {"message": "boom", "code": 500}})),
    "logprobs": chunk(HI.replace(b'"logprobs":null', b'"logprobs":{"content":[{"token":"Hi","logprob":-1.5}]}')),
    "logprobs hidden behind a text": chunk(HI.replace(b'Hi"', b'Hi","logprobs":{"content":[{"token":"Hi"}]}')),
    "finish_reason hidden behind a text": chunk(HI.replace(b'Hi"', b'Hi","x":[{"finish_reason":"stop"}],"y":"')),
    "text of no string": chunk(HI.replace(b'"Hi"', b"null")),
}


@pytest.mark.parametrize("name", OTHER_READS)
def test_any_other_read_goes_the_long_way(name: str) -> None:
    way = Way(HI)
    assert not way.takes(OTHER_READS[name])
    assert way.takes(chunk(HI)), "it was looked at, and changed nothing"


@given(st.binary(max_size=40), st.integers(0, len(chunk(HI))), st.integers(0, len(chunk(HI))))
def test_a_read_that_is_taken_is_one_chunk_with_one_event(patch: bytes, start: int, end: int) -> None:
    """Any piece of a good read replaced by any bytes: either it is not taken, or a parser finds one plain event."""
    good = chunk(HI)
    read = good[:start] + patch + good[max(start, end) :]
    if Way(HI).takes(read):
        size, _, rest = read.partition(b"\r\n")
        assert read == chunk(rest[:-2]) and int(size, 16) == len(rest) - 2
        begin = HI.index(b"Hi")
        assert rest.startswith(HI[:begin]) and rest.endswith(HI[begin + 2 :] + b"\r\n")
        assert b'"' not in rest[begin : len(rest) - 2 - len(HI) + begin + 2]


# --- what opens and closes it ---------------------------------------------------------------------------------------


def completion(text: str) -> bytes:
    return line({"id": "cmpl-1", "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]})


def reasoning(text: str, name: str) -> bytes:
    return line({"id": "x", "choices": [{"index": 0, "delta": {name: text}, "finish_reason": None}]})


def message(text: str) -> bytes:
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
    return b"event: content_block_delta\n" + line(delta)


MAKERS: dict[str, Callable[[str], bytes]] = {
    "chat": chat,
    "completion": completion,
    "reasoning": lambda text: reasoning(text, "reasoning"),
    "reasoning_content": lambda text: reasoning(text, "reasoning_content"),
    "message": message,
    "spaces between": lambda text: chat(text).replace(b"null", b" null"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_each_kind_of_text_goes_the_short_way(kind: str) -> None:
    way = Way(MAKERS[kind]("Hi"))
    assert way.takes(chunk(MAKERS[kind](" there")))
    for other in MAKERS:
        if other != kind:
            assert not way.takes(chunk(MAKERS[other]("Hi"))), other


@pytest.mark.parametrize("text", ['"', 'a "b" c', '\\"', '"\\', '","finish_reason":null}'])
def test_an_event_with_a_quote_opens_the_way_for_none_that_says_anything_else(text: str) -> None:
    way = Way(chat(text))
    assert not way.takes(chunk(HI))
    assert not way.takes(chunk(chat("Hi", "stop")))


def test_a_later_event_opens_the_way_for_its_own_kind_alone() -> None:
    way = Way(HI, reasoning("hm", "reasoning"))
    assert way.takes(chunk(reasoning("so", "reasoning")))
    assert not way.takes(chunk(HI))


NOTHING_LIKE_TEXT = {
    "a tool's arguments": line({"choices": [{"delta": {"tool_calls": [{"function": {"arguments": "{"}}]}}]}),
    "no content": line({"choices": [{"delta": {"content": None}, "finish_reason": None}]}),
    "a comment": b": hi\n\n",
    "the name at the very beginning": b'"content":"Hi"}\n\n',
    "a text without end": b'data: {"choices":[{"finish_reason":null,"delta":{"content":"Hi\n\n',
    "nothing": b"",
}


@pytest.mark.parametrize("name", NOTHING_LIKE_TEXT)
def test_an_event_without_text_closes_it(name: str) -> None:
    event = NOTHING_LIKE_TEXT[name]
    way = Way(HI, event)
    assert not way.takes(chunk(HI))
    assert not way.takes(chunk(event)) and not way.takes(chunk(event + event))
    way.path.open(HI)
    assert way.takes(chunk(HI))


def test_it_is_closed_until_it_is_opened() -> None:
    way = Way()
    for read in (chunk(HI), b"", b"\0", b"\0\0", b"\0\0\0", b"1\r\n\0\r\n", bytes(21), bytes(262), chunk(b"\0" + HI)):
        assert not way.takes(read)


def test_once_closed_it_takes_nothing_until_it_is_opened_again() -> None:
    way = Way(HI)
    way.path.close()
    ends = HI[HI.index(b'"},') :]
    for read in (chunk(HI), chunk(b"\0" + ends), chunk(b"\0Hi" + ends), b"\0\0Hi" + ends + b"\r\n"):
        assert not way.takes(read)
    way.path.close()
    way.path.open(HI)
    assert way.takes(chunk(HI))


def test_nothing_is_written_to_a_caller_who_is_gone() -> None:
    way = Way(HI)
    way.transport.is_closed = True
    assert not way.takes(chunk(HI))


def test_each_event_is_counted_and_the_last_one_timed() -> None:
    times = iter([3.0, 4.5, 9.0])
    path = FastPath(Kept(), lambda: next(times))
    assert (path.events, path.passed_at) == (0, 0.0)
    path.open(HI)
    for events, passed_at in ((1, 3.0), (2, 4.5), (3, 9.0)):
        assert path.take(chunk(HI))
        assert not path.take(HI)
        assert (path.events, path.passed_at) == (events, passed_at)
