"""Replies that are pushed: what a taker gets, how it is held, and that nothing is lost or kept too long meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, chunk, plain
from fakes.waits import eventually

from gateway.upstream.connection import HIGH_WATER_BYTES

from .conftest import Pair
from .exchanges import EVENTS, MOST_AT_ONCE, PATIENT, POST, STREAM, Flood, Taker, relayed, sends, sends_apart

FORMS = {
    "chunked": STREAM,
    "length": plain(b"".join(EVENTS)),
    "to the end of the connection": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"".join(EVENTS),
}


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize("form", FORMS)
async def test_what_is_pushed_is_what_would_have_been_pulled(both: Pair, form: str, size: int) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        for start in range(0, len(FORMS[form]), size):
            await peer.send(FORMS[form][start : start + size])
            await asyncio.sleep(0)

    async with both.upstream(script) as upstream:
        pulled = await (await both.transport.send(upstream.url, POST, PATIENT)).read_all(1 << 20)
        taker = Taker()
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        await asyncio.wait_for(reply.relay(taker), 10)
        assert taker.data == pulled == b"".join(EVENTS)
        assert await reply.read() == b"", "nothing is left to be pulled"
        reply.close()


@pytest.mark.parametrize("pulled", [0, 1, 5])
async def test_a_relay_takes_over_where_reading_stopped(both: Pair, pulled: int) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for i, event in enumerate(EVENTS):
            if i == pulled:
                await go_on.wait()
            await peer.send(chunk(event))
        await peer.send(STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        got = b""
        while len(got) < len(b"".join(EVENTS[:pulled])):
            got += await reply.read()
        taker = Taker()
        task = asyncio.create_task(reply.relay(taker))
        go_on.set()
        await asyncio.wait_for(task, 10)
        assert got + taker.data == b"".join(EVENTS)
        assert both.transport.idle == 1, "the connection is good for another request"


async def test_what_had_come_before_the_relay_began_is_handed_over_first(both: Pair) -> None:
    async with both.upstream(sends(FORMS["chunked"])) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: reply.is_whole)
        taker = Taker()
        await asyncio.wait_for(reply.relay(taker), 10)
        assert taker.data == b"".join(EVENTS)


async def test_each_read_is_handed_over_at_once(both: Pair) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for event in EVENTS[:3]:
            await peer.send(chunk(event))
            await go_on.wait()
            go_on.clear()
        await peer.send(STREAM_END)
        await peer.closed()

    taker = Taker()
    async with relayed(both, script, taker) as (_, _, task):
        for i in range(3):
            await eventually(lambda expected=EVENTS[: i + 1]: taker.reads == expected)  # type: ignore[misc]
            assert not task.done()
            go_on.set()
        await asyncio.wait_for(task, 10)


async def test_the_connection_of_a_relay_serves_the_next_request(both: Pair) -> None:
    async def twice(peer: Peer) -> None:
        for _ in range(2):
            await peer.request()
            await peer.send(FORMS["chunked"])
        await peer.closed()

    async with both.upstream(twice) as upstream:
        for _ in range(2):
            taker = Taker()
            reply = await both.transport.send(upstream.url, POST, PATIENT)
            await asyncio.wait_for(reply.relay(taker), 10)
            reply.close()
            assert taker.data == b"".join(EVENTS)
        assert upstream.accepted == 1


# --- a taker without room -----------------------------------------------------------------------------------------


async def test_a_held_taker_gets_nothing_and_the_engine_stalls_with_bounded_bytes_here(
    both: Pair,
) -> None:
    flood, taker = Flood(), Taker(has_room=False)
    async with relayed(both, flood, taker) as (_, reply, task):
        await eventually(lambda: reply.unread_bytes > HIGH_WATER_BYTES)
        await flood.stalls()
        assert len(taker.reads) == 1
        assert reply.unread_bytes < MOST_AT_ONCE
        for number in range(2, 6):  # each time there is room for one more
            reply.resume()
            assert len(taker.reads) == number
            await eventually(lambda: reply.unread_bytes > HIGH_WATER_BYTES)
            assert reply.unread_bytes < MOST_AT_ONCE
        taker.has_room = True
        reply.resume()
        await asyncio.wait_for(task, 30)
        assert len(taker.data) == flood.size
        assert max(map(len, taker.reads)) < MOST_AT_ONCE
        assert both.transport.idle == 1


async def test_the_end_waits_for_a_held_taker(both: Pair) -> None:
    taker = Taker(has_room=False)
    script = sends_apart(taker, chunk(b"one"), chunk(b"two") + STREAM_END)
    async with relayed(both, script, taker) as (_, reply, task):
        await eventually(lambda: reply.is_whole)
        assert taker.reads == [b"one"] and not task.done()
        reply.resume()
        assert taker.reads == [b"one", b"two"]
        await asyncio.wait_for(task, 10)


async def test_an_end_behind_the_last_read_that_was_taken_ends_the_relay_though_there_is_no_room(
    both: Pair,
) -> None:
    taker = Taker(has_room=False)
    async with relayed(both, sends_apart(taker, chunk(b"one"), STREAM_END), taker) as (_, _, task):
        await asyncio.wait_for(task, 10)
        assert taker.reads == [b"one"]


async def test_room_is_told_too_often_without_harm(both: Pair) -> None:
    taker = Taker()
    script = sends_apart(taker, chunk(b"one"), chunk(b"two") + STREAM_END)
    async with relayed(both, script, taker) as (_, reply, task):
        for _ in range(5):
            reply.resume()
            await asyncio.sleep(0)
        await asyncio.wait_for(task, 10)
        reply.resume()
        reply.close()
        reply.resume()
    assert taker.data == b"onetwo"
