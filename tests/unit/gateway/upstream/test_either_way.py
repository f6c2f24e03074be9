"""Whole streams with the short way and without it, however they are cut: the same is passed on, and the same known."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import dataclass
from typing import Any

import pytest
from fakes.passage import Passage
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD
from fakes.story import DONE, event, usage_event
from fakes.waits import loop_turns
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint
from gateway.upstream.fast_path import FastPath

LAST = event("", "stop")
OPENAI = (Endpoint.CHAT, Endpoint.COMPLETIONS)
QUOTED = 'say "usage": {"prompt_tokens":1}, "finish_reason":"stop"'
HARMLESS = ["Hi", "", " 한국어 👍", "a\u2028b", "\\", "\n\n", "\r\n\r\n", "[DONE]", "x" * 300, "y" * 5000]
TEXTS = [*HARMLESS, QUOTED, '"', '\\"']


def with_crlf(data: bytes) -> bytes:
    return data.replace(b"\n", b"\r\n")


def chat(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": None}
    return line({"id": "x", "choices": [choice], **more})


def line(document: Any) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def named(name: str, document: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + line({"type": name, **document})


def delta(text: str) -> bytes:
    return named("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})


def completion(text: str, finish: str | None = None) -> bytes:
    return line({"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": finish}]})


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
ODD = [
    b": a comment\n\n",
    b"\n",
    b"data: {not json\n\n",
    b"event: ping\ndata: {}\n\n",
    b'data: {"error":{"message":"boom","code":500}}\n\n',
    DONE,
    usage_event(7, 3),
    LAST,
    event("", "abort"),
    event("more", "length"),
]
SPEECH: dict[Endpoint, tuple[list[bytes], list[bytes]]] = {
    Endpoint.CHAT: (
        [chat(text) for text in TEXTS],
        [
            *ODD,
            chat("Hi", usage=USAGE),
            chat("Hi", usage=None),
            with_crlf(chat("Hi")),
            chat("Hi").replace(b"\n", b"\r"),
            chat("Hi") + b": and a comment\n\n",
            chat("Hi").replace(b'"logprobs":null', b'"logprobs":{"content":[{"token":"Hi"}]}'),
            chat("Hi").replace(b"content", b"reasoning"),
            chat("Hi").replace(b":null", b": null"),
            chat("Hi").replace(b"}}],", b'}},{"index":1,"delta":{"content":"b"},"finish_reason":"stop"}],'),
        ],
    ),
    Endpoint.COMPLETIONS: ([completion(text) for text in TEXTS], [*ODD, completion("", "stop"), chat("Hi")]),
    Endpoint.MESSAGES: (
        [delta(text) for text in TEXTS],
        [
            *ODD[:5],
            with_crlf(delta("Hi")),
            named("message_start", {"message": {"usage": {"input_tokens": 7, "output_tokens": 1}}}),
            named("content_block_delta", {"index": 0, "delta": {"type": "input_json_delta", "partial_json": "{"}}),
            named("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 9}}),
            named("message_stop", {}),
            named("error", {"error": {"type": "api_error", "message": "boom"}}),
        ],
    ),
}
SIZES = [b"%x", b"%x", b"%x", b"%x", b"%x", b"%x", b"%X", b"0%x", b"%x;a=b", b'%x;a="b c"']
ENDS = [STREAM_END, STREAM_END, STREAM_END, b"0;a=b\r\nx-trailer: 1\r\n\r\n", b"", b"zz\r\n", b"0\r\n"]


@dataclass(frozen=True)
class Sent:
    endpoint: Endpoint
    reads: list[bytes]
    wants_usage: bool
    version: str


@st.composite
def streams(draw: st.DrawFn, *, is_damaged: bool = False) -> Sent:
    """Mostly one event a chunk and one chunk a read, as engines send; and all else that HTTP/1.1 allows."""
    endpoint = draw(st.sampled_from(list(SPEECH)))
    plain, other = SPEECH[endpoint]
    kind = st.integers(0, 5).flatmap(lambda n: st.sampled_from(other if n == 5 else plain if n == 4 else plain[:5]))
    payloads: list[bytes] = []
    for said in draw(st.lists(kind, min_size=5, max_size=20)):
        match draw(st.integers(0, 15)):
            case 15:  # beside the event before it
                payloads.append((payloads.pop() if payloads else b"") + said)
            case 14:
                at = draw(st.integers(1, len(said) - 1)) if len(said) > 1 else 0
                payloads += [said[:at], said[at:]] if at else [said]
            case _:
                payloads.append(said)
    wire, ends = STREAM_HEAD, {len(STREAM_HEAD)}
    for payload in payloads:
        wire += draw(st.sampled_from(SIZES)) % len(payload) + b"\r\n" + payload + b"\r\n"
        ends.add(len(wire))
    wire += draw(st.sampled_from(ENDS))
    if is_damaged:
        near = sorted(ends)[draw(st.integers(len(ends) // 2, len(ends) - 1))]  # mostly there: it is framing that counts
        at = draw(st.sampled_from([min(near + n, len(wire) - 1) for n in (*range(-3, 6), 40, 80, 90)]))
        byte = draw(st.sampled_from([b"", b"\0", b"0", b"f", b"\r", b"\n", b";", b'"', b" ", b"g"]))
        wire = wire[:at] + byte + wire[at + draw(st.integers(0, 1)) :]
    joined = draw(st.sets(st.sampled_from(sorted(ends)), max_size=1))
    cuts = draw(st.sets(st.integers(1, len(wire) - 1), max_size=3))
    edges = sorted({0, len(wire)} | (ends - joined) | cuts)
    reads = [wire[start:end] for start, end in itertools.pairwise(edges)]
    version = draw(st.sampled_from(["1.1", "1.1", "1.1", "1.0"]))
    return Sent(endpoint, [read for read in reads if read], draw(st.booleans()), version)


async def outcome_of(sent: Sent) -> tuple[dict[str, Any], int]:
    """What came of a stream, and how many of its reads went the short way."""
    more = {"stream_options": {"include_usage": True}} if sent.wants_usage and sent.endpoint in OPENAI else {}
    passage = Passage(sent.endpoint, version=sent.version, **more)
    await passage.begin()
    for read in sent.reads:
        if not passage.socket.is_closed:
            await passage.send(read)
    passage.end()
    await passage.client.idle()
    await loop_turns()
    reply, journey = passage.client.reply, passage.journey
    tap = journey.tap  # None: the reply was broken before it had a head
    return {
        "reply": (reply.status, reply.body, reply.is_whole),
        "outcome": (passage.outcome, passage.settled, repr(passage.error), passage.was_cancelled),
        "replica": (passage.freed, passage.socket.is_closed),
        "tap": tap and (tap.events, tap.usage, tap.saw_done, tap.was_given_up, tap.error),
        "cost": journey.cut_off(),
    }, passage.short


def same_both_ways(sent: Sent, runner: asyncio.Runner) -> int:
    found, short = runner.run(outcome_of(sent))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FastPath, "take", lambda *_: False)
        expected, none = runner.run(outcome_of(sent))
    assert none == 0 and found == expected
    return short


@pytest.mark.parametrize("is_damaged", [False, True], ids=["as HTTP wants it", "damaged in one place"])
def test_any_stream_comes_through_as_it_would_the_long_way(is_damaged: bool) -> None:
    short = 0
    with asyncio.Runner() as runner:

        @settings(max_examples=250, deadline=None)
        @given(streams(is_damaged=is_damaged))
        def compare(sent: Sent) -> None:
            nonlocal short
            short += same_both_ways(sent, runner)

        compare()
    assert short > 100, "hardly a read went the short way: nothing was compared"
