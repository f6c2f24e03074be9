"""A stream on which most reads go the short way: its deadlines, comments and bills, clients that leave or are full."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.client import read_reply
from fakes.passage import FAILED, PROMPT_TOKENS, Clock, Passage
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, chunk
from fakes.story import DONE, event, usage_event
from fakes.waits import loop_turns

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import UpstreamBroken, UpstreamTimeout
from gateway.domain.outcome import Ending, Usage
from gateway.edge import comments
from gateway.edge.comments import COMMENT
from gateway.upstream import forward
from gateway.upstream.connection import HIGH_WATER_BYTES

WORDS = [event(f"word {i} ") for i in range(12)]
LAST = event("", "stop")
BEGIN = STREAM_HEAD + chunk(WORDS[0])  # the first read, which never goes the short way
SECOND = chunk(WORDS[1])  # shows what plain events look like


async def begun(**more: Any) -> Passage:
    """A stream on which each read that can goes the short way from now on."""
    passage = Passage(**more)
    await passage.begin()
    await passage.send(BEGIN, SECOND)
    assert passage.short == 0
    return passage


# --- framing that is broken behind reads that went the short way ----------------------------------------------------

HI = event("Hi")
BROKEN = {
    "no size": b"zz\r\n" + HI + b"\r\n",
    "size missing": b"\r\n" + HI + b"\r\n",
    "a NUL for the size": b"\0\r\n" + HI + b"\r\n",
    "size too small": b"%x\r\n" % (len(HI) - 1) + HI + b"\r\n",
    "size far too small": b"3\r\n" + HI + b"\r\n",
    "size too large": b"%x\r\n" % (len(HI) + 2) + HI + b"\r\n" + SECOND,
    "size line ended by LF": b"%x\n" % len(HI) + HI + b"\r\n",
    "chunk ended by LF": b"%x\r\n" % len(HI) + HI + b"\n",
    "chunk without an end": b"%x\r\n" % len(HI) + HI + SECOND,
    "the event alone": HI,
    "NULs": bytes(262),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_broken_framing_behind_fast_reads_fails_the_reply(name: str) -> None:
    passage = await begun()
    await passage.send(*map(chunk, WORDS[2:6]))
    assert passage.short == 4
    await passage.send(BROKEN[name], SECOND, STREAM_END)
    await passage.client.idle()
    assert isinstance(passage.error, UpstreamBroken) and "malformed" in str(passage.error)
    assert passage.settled == [] and passage.freed == [False] and passage.socket.is_closed
    assert passage.short == 4
    body = passage.client.body
    assert body.startswith(b"".join(WORDS[:6])) and body.endswith(FAILED)
    assert passage.client.is_whole, "the client is told in the stream"


@pytest.mark.parametrize("gap", range(len(SECOND)))
async def test_a_reply_that_ends_within_a_chunk_behind_fast_reads_is_not_whole(gap: int) -> None:
    passage = await begun()
    await passage.send(chunk(WORDS[2]), *filter(None, [SECOND[:gap]]))
    passage.end()
    await passage.client.idle()
    assert isinstance(passage.error, UpstreamBroken) and passage.short == 1
    assert passage.client.body.endswith(FAILED)


# --- where a chunk begins -------------------------------------------------------------------------------------------

LOOKALIKE = chunk(WORDS[2])  # in the middle of a larger chunk: its text, not its framing
IN_THE_MIDDLE = {
    "behind a whole size line": [SECOND + b"%x\r\n" % len(LOOKALIKE), LOOKALIKE, b"\r\n"],
    "behind half a size line": [SECOND + b"1", LOOKALIKE, b"x" * 0xFE + b"\r\n"],  # a chunk of 0x100 bytes more
    "behind an event of the same chunk": [b"%x\r\n" % (len(HI) + len(LOOKALIKE)) + HI, LOOKALIKE, b"\r\n"],
    "its end that of the chunk": [b"%x\r\n" % (len(HI) + len(LOOKALIKE) - 2) + HI, LOOKALIKE],
    "behind a chunk without its end": [SECOND[:-2], b"\r\n", SECOND[:-1], b"\n"],
}


@pytest.mark.parametrize("name", IN_THE_MIDDLE)
async def test_a_read_that_begins_within_a_chunk_never_goes_the_short_way(name: str) -> None:
    passage = await begun()
    fed = passage.client.body
    await passage.send(*IN_THE_MIDDLE[name])
    assert passage.short == 0
    with_own = decoded(b"".join(IN_THE_MIDDLE[name]))
    await passage.send(chunk(b"\n\n"), SECOND, SECOND, chunk(WORDS[3]))
    assert passage.short > 0, "behind it, all is as before"
    await passage.send(chunk(DONE), STREAM_END)
    await passage.client.idle()
    assert passage.client.body == fed + with_own + b"\n\n" + WORDS[1] * 2 + WORDS[3] + DONE
    assert passage.error is None and passage.freed == [True]


def decoded(chunks: bytes) -> bytes:
    reply, rest = read_reply(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
    assert rest == b""
    return reply.body


async def test_a_read_that_was_half_a_chunk_is_followed_by_one_more_long_one_at_most() -> None:
    passage = await begun()
    await passage.send(SECOND[:9], SECOND[9:], chunk(WORDS[2]), chunk(WORDS[3]))
    assert passage.short == 1


# --- deadlines ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(comments, "asyncio", made)
    monkeypatch.setattr(forward, "asyncio", made)
    return made


async def six_fast_reads(passage: Passage, clock: Clock, each_s: float) -> None:
    """One after each `each_s` seconds, of the words behind the first two."""
    for event_ in WORDS[2:8]:
        clock.advance(each_s)
        await passage.send(chunk(event_))
    assert passage.short == 6


async def test_silence_is_counted_from_the_last_read_whichever_way_it_went(clock: Clock) -> None:
    passage = await begun(clock=clock, gap_s=10)
    await six_fast_reads(passage, clock, 9)
    clock.advance(9.9)
    await loop_turns()
    assert passage.error is None and passage.freed == []
    clock.advance(0.2)
    await passage.client.idle()
    assert isinstance(passage.error, UpstreamTimeout) and "gap" in str(passage.error)
    assert passage.client.body == b"".join(WORDS[:8]) + FAILED
    assert passage.freed == [False] and passage.socket.is_closed


async def test_a_read_that_comes_after_the_reply_was_given_up_goes_nowhere(clock: Clock) -> None:
    passage = await begun(clock=clock, gap_s=10)
    await passage.send(chunk(WORDS[2]))
    clock.advance(10.1)
    passage.socket.protocol.data_received(chunk(WORDS[3]))  # the loop had it already
    await passage.client.idle()
    passage.socket.protocol.data_received(chunk(WORDS[4]))
    assert passage.client.body == b"".join(WORDS[:3]) + FAILED and passage.short == 1


async def test_the_total_deadline_holds_while_fast_reads_flow(clock: Clock) -> None:
    passage = await begun(clock=clock, gap_s=10, total_s=30)
    await six_fast_reads(passage, clock, 4.9)
    assert passage.error is None
    clock.advance(0.7)
    await passage.client.idle()
    assert isinstance(passage.error, UpstreamTimeout) and "total" in str(passage.error)


async def test_no_comment_is_put_in_while_fast_reads_flow_and_one_when_they_stop(clock: Clock) -> None:
    passage = await begun(clock=clock, keepalive_s=5)
    await six_fast_reads(passage, clock, 4)
    clock.advance(4.9)
    assert passage.client.body == b"".join(WORDS[:8])
    clock.advance(0.1)
    assert passage.client.body == b"".join(WORDS[:8]) + COMMENT
    await passage.send(chunk(WORDS[8]))
    assert passage.short == 7, "a comment of ours does not close the short way"
    clock.advance(4.9)
    assert passage.client.body.count(COMMENT) == 1
    clock.advance(5.1)
    assert passage.client.body == b"".join(WORDS[:8]) + COMMENT + WORDS[8] + COMMENT * 2


# --- a client that does not read, or leaves -------------------------------------------------------------------------


async def test_a_full_client_gets_no_second_read_the_short_way_and_everything_in_order_when_it_reads(
    clock: Clock,
) -> None:
    passage = await begun(clock=clock, gap_s=10)
    texts = [event(f"{i} " + "x" * 2000) for i in range(200)]
    passage.line.room_bytes = 0
    await passage.send(*map(chunk, texts[:1]))
    assert passage.line.is_full and passage.short == 1
    written = passage.line.writes
    await passage.send(*map(chunk, texts[1:]))
    assert passage.short == 1, "no more than the one that filled it"
    assert passage.line.writes - written <= 1
    assert not passage.socket.is_reading, "the replica is not read from"
    held = len(b"".join(map(chunk, texts[1:]))) - passage.socket.waiting_bytes
    assert held < 2 * HIGH_WATER_BYTES
    clock.advance(50)
    assert passage.error is None, "a slow client is no silence of the replica"
    passage.line.read_on(room_bytes=10_000)
    await loop_turns(len(texts))
    assert passage.line.is_full and not passage.socket.is_reading, "full once more"
    passage.line.read_on()
    await loop_turns(len(texts))
    assert passage.socket.is_reading and passage.socket.waiting_bytes == 0
    before = passage.short
    await passage.send(SECOND, chunk(WORDS[2]))
    assert passage.short > before, "it goes the short way again"
    await passage.send(chunk(DONE), STREAM_END)
    await passage.client.idle()
    assert passage.client.body == b"".join((*WORDS[:2], *texts, *WORDS[1:3], DONE))
    assert passage.error is None and passage.client.is_whole
    assert passage.settled[0].usage == Usage(PROMPT_TOKENS, 2 + len(texts) + 2)


async def test_a_client_that_is_full_from_the_first_byte_gets_all_in_order() -> None:
    passage = Passage(room_bytes=0)
    await passage.begin()
    await passage.send(BEGIN, *map(chunk, WORDS[1:6]))
    assert passage.client.body == WORDS[0] and passage.short == 0
    passage.line.read_on()
    await loop_turns()
    await passage.send(*map(chunk, WORDS[6:]), chunk(DONE), STREAM_END)
    await passage.client.idle()
    assert passage.client.body == b"".join((*WORDS, DONE)) and passage.client.is_whole
    assert passage.short == len(WORDS[6:]) - 1


async def test_silence_is_counted_again_once_the_client_has_room(clock: Clock) -> None:
    passage = await begun(clock=clock, gap_s=10)
    passage.line.room_bytes = 0
    await passage.send(chunk(WORDS[2]), chunk(WORDS[3]))
    assert passage.line.is_full and passage.short == 1
    clock.advance(50)
    passage.line.read_on()
    clock.advance(9.9)
    await loop_turns()
    assert passage.error is None
    clock.advance(0.2)
    await passage.client.idle()
    assert isinstance(passage.error, UpstreamTimeout)


async def test_a_client_that_is_full_when_the_reply_ends_gets_the_rest() -> None:
    passage = await begun()
    passage.line.room_bytes = 0
    await passage.send(*map(chunk, WORDS[2:]), chunk(LAST), chunk(DONE), STREAM_END)
    assert passage.short == 1 and passage.line.is_full
    passage.line.read_on()
    await passage.client.idle()
    assert passage.client.body == b"".join((*WORDS, LAST, DONE)) and passage.client.is_whole
    assert passage.freed == [True]


@pytest.mark.parametrize("late", [0, 1, 5])
async def test_a_client_that_leaves_in_mid_stream_costs_what_it_got_and_ends_the_replicas_work(
    late: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`late`: reads that come between its leaving and our knowing; one more comes while the work is being ended."""
    passage = await begun()
    await passage.send(*map(chunk, WORDS[2:6]))
    passage.line.is_closed = True  # the transport knows first
    for event_ in WORDS[6 : 6 + late]:
        passage.socket.deliver(chunk(event_))
    assert passage.short == 4, "nothing is written to it any more"
    passage.client.hang_up()
    passage.socket.deliver(SECOND)
    await passage.client.idle()
    assert passage.was_cancelled and passage.error is None
    assert passage.socket.is_closed and passage.freed == [False]
    assert passage.settled == []
    assert passage.journey.cut_off() == Usage(PROMPT_TOKENS, 6 + late + 1)
    assert caplog.records == []


async def test_a_stream_that_is_stopped_in_mid_course_is_billed_for_what_went_the_short_way() -> None:
    passage = await begun()
    await passage.send(*map(chunk, WORDS[2:9]))
    passage.exchange.end()
    await passage.client.idle()
    assert passage.was_cancelled and passage.short == 7
    assert passage.journey.cut_off() == Usage(PROMPT_TOKENS, 9)
    assert passage.client.body == b"".join(WORDS[:9])
    assert passage.socket.is_closed


async def test_the_engines_own_count_stands_above_the_events_that_went_the_short_way() -> None:
    passage = await begun()
    await passage.send(*map(chunk, (*WORDS[2:6], LAST, usage_event(7, 99), DONE)), STREAM_END)
    await passage.client.idle()
    assert passage.short == 4 and [outcome.usage for outcome in passage.settled] == [Usage(7, 99)]
    assert passage.client.body == b"".join((*WORDS[:6], LAST, DONE)), "which the client did not ask for"


# --- who goes the short way -----------------------------------------------------------------------------------------


async def test_the_next_request_on_both_connections_comes_through_as_the_first() -> None:
    passage = await begun()
    for _ in range(3):
        await passage.send(*map(chunk, WORDS[2:6]), chunk(DONE))
        await passage.send(STREAM_END)
        await passage.client.idle()
        assert passage.short == 4 and passage.outcome is not None and passage.outcome.ending is Ending.COMPLETED
        old = passage.exchange
        await passage.again()
        assert old.fast_path is None and passage.exchange is not old
        await passage.send(BEGIN, SECOND)
        assert passage.short == 0
    replies = passage.client.replies()
    assert [reply.body for reply in replies[:3]] == [b"".join((*WORDS[:6], DONE))] * 3
    assert passage.freed == [True] * 3 and not passage.socket.is_closed


async def test_reads_behind_the_end_mark_go_nowhere() -> None:
    passage = await begun()
    await passage.send(chunk(WORDS[2]), chunk(DONE), SECOND, chunk(WORDS[3]))
    assert len(passage.settled) == 1
    await passage.send(STREAM_END, chunk(WORDS[4]))
    await passage.client.idle()
    assert passage.client.body == b"".join((*WORDS[:3], DONE))
    assert passage.client.is_whole and passage.socket.is_closed, "bytes that nobody asked for"


async def test_a_client_of_http_1_0_gets_the_same_text_without_chunks() -> None:
    passage = await begun(version="1.0")
    await passage.send(*map(chunk, WORDS[2:]), chunk(DONE), STREAM_END)
    await passage.client.idle()
    assert passage.client.body == b"".join((*WORDS, DONE))
    assert passage.short == 0 and passage.exchange.fast_path is None
    assert passage.journey.cut_off() == Usage(PROMPT_TOKENS, len(WORDS))


@pytest.mark.parametrize("length", [b"content-length: 100000", b"connection: close"])
async def test_a_reply_without_chunks_is_never_taken_for_one_with_them(length: bytes) -> None:
    passage = await begun(stream_options={"include_usage": True})  # nothing is held back
    await passage.send(chunk(WORDS[2]), chunk(DONE), STREAM_END)
    await passage.client.idle()
    assert passage.short == 1, "the reply before it on this connection had chunks"
    await passage.again()
    await passage.send(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n", WORDS[0], WORDS[1], SECOND, SECOND)
    assert passage.short == 0
    assert passage.client.replies()[1].body == WORDS[0] + WORDS[1] + SECOND + SECOND


def completion(text: str) -> bytes:
    document = {"id": "x", "choices": [{"index": 0, "text": text, "finish_reason": None}]}
    return b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"


def delta(text: str) -> bytes:
    return named("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": text}})


def named(name: str, document: dict[str, Any]) -> bytes:
    data = json.dumps({"type": name, **document}, separators=(",", ":")).encode()
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


SHORT_AT = {
    Endpoint.CHAT: [event(str(i)) for i in range(8)],
    Endpoint.COMPLETIONS: [completion(str(i)) for i in range(8)],
    Endpoint.MESSAGES: [delta(str(i)) for i in range(8)],
}


@pytest.mark.parametrize("endpoint", SHORT_AT)
@pytest.mark.parametrize("wants_usage", [False, True])
async def test_the_plain_events_of_a_stream_go_the_short_way(endpoint: Endpoint, wants_usage: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if wants_usage and endpoint is not Endpoint.MESSAGES else {}
    passage = Passage(endpoint, **more)
    await passage.begin()
    pieces = SHORT_AT[endpoint]
    await passage.send(STREAM_HEAD + chunk(pieces[0]), *map(chunk, pieces[1:]))
    assert passage.short == len(pieces) - 2
    assert passage.client.body == b"".join(pieces)
    assert passage.journey.cut_off() == Usage(PROMPT_TOKENS, len(pieces))


async def test_an_event_that_says_more_ends_the_short_way_until_the_next_plain_one() -> None:
    passage = await begun()
    reads = [chunk(WORDS[2]), chunk(event('a "quote"')), chunk(WORDS[3]), chunk(b": comment\n\n"), *[SECOND] * 3]
    ways = []
    for read in reads:
        before = passage.short
        await passage.send(read)
        ways.append(passage.short - before)
    assert ways == [1, 0, 0, 0, 0, 1, 1]
    assert passage.journey.cut_off() == Usage(PROMPT_TOKENS, 2 + len(reads) - 1)


async def test_half_an_event_keeps_what_looks_like_a_plain_one_from_the_short_way() -> None:
    """Else the half would stick to the next event that is read, and spoil it."""
    passage = Passage(Endpoint.MESSAGES)
    await passage.begin()
    begin = named("message_start", {"message": {"usage": {"input_tokens": 7, "output_tokens": 1}}})
    told = named("message_delta", {"usage": {"output_tokens": 9}})
    pieces = [begin, delta("a"), delta("b"), b"data: {", delta("c"), told, named("message_stop", {})]
    await passage.send(STREAM_HEAD, *map(chunk, pieces), STREAM_END)
    await passage.client.idle()
    assert passage.short == 1 and passage.client.body == b"".join(pieces)
    assert [outcome.usage for outcome in passage.settled] == [Usage(7, 9)]
