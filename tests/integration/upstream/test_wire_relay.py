"""Replies that are pushed: what a taker gets, when it is not given anything, and how such a relay ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, ScriptedUpstream, chunk, eventually, plain

from gateway.domain.errors import UpstreamBroken, UpstreamTimeout
from gateway.upstream.connection import HIGH_WATER_BYTES
from gateway.upstream.reply import WireReply
from gateway.upstream.transport import Deadlines

from .conftest import Pair
from .test_wire_promises import LONG, PATIENT, POST

MOST_AT_ONCE = HIGH_WATER_BYTES + 300_000  # a read of the loop takes at most 256 kB from the kernel


class Taker:
    """Keeps what it is given; has room while `has_room`."""

    def __init__(self, *, has_room: bool = True) -> None:
        self.reads: list[bytes] = []
        self.has_room = has_room

    def __call__(self, data: bytes) -> bool:
        assert data, "nothing is no read"
        self.reads.append(data)
        return self.has_room

    @property
    def data(self) -> bytes:
        return b"".join(self.reads)


@asynccontextmanager
async def relayed(
    both: Pair,
    script: Callable[[Peer], object],
    take: Callable[[bytes], bool],
    deadlines: Deadlines = PATIENT,
) -> AsyncIterator[tuple[ScriptedUpstream, WireReply, asyncio.Task[None]]]:
    """A reply of `script` that is being relayed to `take`; at the end it is closed and its connection gone or idle."""
    async with both.upstream(script) as upstream:  # type: ignore[arg-type]
        reply = await both.transport.send(upstream.url, POST, deadlines)
        task = asyncio.create_task(reply.relay(take))
        try:
            yield upstream, reply, task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, UpstreamBroken, UpstreamTimeout):
                await task
            reply.close()


def sends(*pieces: bytes, pause: bool = True, then: str = "wait") -> Callable[[Peer], object]:
    async def script(peer: Peer) -> None:
        await peer.request()
        for piece in pieces:
            await peer.send(piece)
            await asyncio.sleep(0.002 if pause else 0)
        if then == "reset":
            peer.reset()
        elif then == "wait":
            await peer.closed()

    return script


EVENTS = [b"data: %d\n\n" % i for i in range(40)]
FORMS = {
    "chunked": STREAM_HEAD + b"".join(map(chunk, EVENTS)) + STREAM_END,
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


# --- a taker without room -----------------------------------------------------------------------------------------


async def test_a_held_taker_gets_nothing_and_the_engine_stalls_with_bounded_bytes_here(
    both: Pair,
) -> None:
    size = 20_000_000
    peers: list[Peer] = []

    async def flood(peer: Peer) -> None:
        peers.append(peer)
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        await peer.send(bytes(size))
        await peer.closed()

    taker = Taker(has_room=False)
    async with relayed(both, flood, taker) as (_, reply, task):
        await eventually(lambda: reply.unread_bytes > HIGH_WATER_BYTES)
        sent = -1
        while sent != peers[0].sent_bytes:  # until the engine's writes stand still
            sent = peers[0].sent_bytes
            await asyncio.sleep(0.1)
        assert sent < size and len(taker.reads) == 1
        assert reply.unread_bytes < MOST_AT_ONCE
        for number in range(2, 6):  # each time there is room for one more
            reply.resume()
            assert len(taker.reads) == number
            await eventually(lambda: reply.unread_bytes > HIGH_WATER_BYTES)
            assert reply.unread_bytes < MOST_AT_ONCE
        taker.has_room = True
        reply.resume()
        await asyncio.wait_for(task, 30)
        assert len(taker.data) == size
        assert max(map(len, taker.reads)) < MOST_AT_ONCE
        assert both.transport.idle == 1


async def test_the_end_waits_for_a_held_taker(both: Pair) -> None:
    taker = Taker(has_room=False)
    script = sends(STREAM_HEAD + chunk(b"one"), chunk(b"two") + STREAM_END)
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
    async with relayed(both, sends(STREAM_HEAD + chunk(b"one"), STREAM_END), taker) as (_, _, task):
        await asyncio.wait_for(task, 10)
        assert taker.reads == [b"one"]


async def test_room_is_told_too_often_without_harm(both: Pair) -> None:
    taker = Taker()
    async with relayed(both, sends(STREAM_HEAD + chunk(b"one"), chunk(b"two") + STREAM_END), taker) as (
        _,
        reply,
        task,
    ):
        for _ in range(5):
            reply.resume()
            await asyncio.sleep(0)
        await asyncio.wait_for(task, 10)
        reply.resume()
        reply.close()
        reply.resume()
    assert taker.data == b"onetwo"


# --- deadlines ----------------------------------------------------------------------------------------------------


async def test_silence_while_relaying_ends_by_the_gap_deadline(both: Pair) -> None:
    taker = Taker()
    async with relayed(both, sends(STREAM_HEAD + chunk(b"one")), taker, Deadlines(LONG, LONG, 0.1, LONG)) as (
        upstream,
        _,
        task,
    ):
        with pytest.raises(UpstreamTimeout) as caught:
            await asyncio.wait_for(task, 10)
        assert caught.value.deadline == "gap" and taker.data == b"one"
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_relay_that_gets_no_first_byte_at_all_ends_as_well(both: Pair) -> None:
    async with relayed(both, sends(STREAM_HEAD), Taker(), Deadlines(LONG, 0.1, 0.1, LONG)) as (_, _, task):
        with pytest.raises(UpstreamTimeout):
            await asyncio.wait_for(task, 10)


async def test_each_read_starts_the_gap_anew(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(5):
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.2)
        await peer.closed()

    taker = Taker()
    async with relayed(both, script, taker, Deadlines(LONG, LONG, 0.6, LONG)) as (_, _, task):
        with pytest.raises(UpstreamTimeout, match="gap"):
            await asyncio.wait_for(task, 10)
        assert taker.data == b"xxxxx"


async def test_no_silence_is_counted_while_the_taker_has_no_room(both: Pair) -> None:
    taker = Taker(has_room=False)
    script = sends(STREAM_HEAD + chunk(b"one"), chunk(b"two"))
    async with relayed(both, script, taker, Deadlines(LONG, LONG, 0.2, LONG)) as (_, reply, task):
        await eventually(lambda: taker.reads == [b"one"])
        await asyncio.sleep(0.6)
        assert not task.done()
        taker.has_room = True
        reply.resume()
        assert taker.reads == [b"one", b"two"]
        with pytest.raises(UpstreamTimeout, match="gap"):  # from here on it counts
            await asyncio.wait_for(task, 10)


@pytest.mark.parametrize("has_room", [True, False])
async def test_the_total_deadline_holds_for_a_relay(both: Pair, has_room: bool) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.01)

    taker = Taker(has_room=has_room)
    async with relayed(both, endless, taker, Deadlines(LONG, LONG, LONG, 0.3)) as (upstream, reply, task):
        await eventually(lambda: upstream.open_connections == 0)
        if not has_room:
            reply.resume()  # what had come is still handed over, then the error
        with pytest.raises(UpstreamTimeout) as caught:
            await asyncio.wait_for(task, 10)
        assert caught.value.deadline == "total"


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["reset", "close", "garbage"])
async def test_a_relay_that_breaks_off_raises_after_what_had_come(both: Pair, then: str) -> None:
    more = [b"no chunk\r\n"] if then == "garbage" else []
    taker = Taker()
    script = sends(STREAM_HEAD + chunk(b"one"), chunk(b"two"), *more, then=then if then == "reset" else "close")
    async with relayed(both, script, taker) as (_, _, task):
        with pytest.raises(UpstreamBroken) as caught:
            await asyncio.wait_for(task, 10)
        assert caught.value.response_began and caught.value.request_sent
        assert taker.data == b"onetwo"


async def test_an_error_behind_a_held_read_comes_after_it(both: Pair) -> None:
    taker = Taker(has_room=False)
    script = sends(STREAM_HEAD + chunk(b"one"), chunk(b"two"), then="close")
    async with relayed(both, script, taker) as (upstream, reply, task):
        await eventually(lambda: upstream.open_connections == 0 and reply.is_over)
        assert taker.reads == [b"one"] and not task.done()
        reply.resume()
        with pytest.raises(UpstreamBroken):
            await asyncio.wait_for(task, 10)
        assert taker.reads == [b"one", b"two"]


async def test_a_taker_may_close_the_reply(both: Pair) -> None:
    reads: list[bytes] = []
    replies: list[WireReply] = []

    def take(data: bytes) -> bool:
        reads.append(data)
        replies[0].close()
        return True

    async with both.upstream(sends(STREAM_HEAD + chunk(b"one"), chunk(b"two") + STREAM_END)) as upstream:
        replies.append(await both.transport.send(upstream.url, POST, PATIENT))
        with pytest.raises(UpstreamBroken, match="closed before its end"):
            await asyncio.wait_for(replies[0].relay(take), 10)
        assert reads == [b"one"]
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_cancelled_relay_closes_the_engines_connection(both: Pair, has_room: bool) -> None:
    taker = Taker(has_room=has_room)
    async with relayed(both, sends(STREAM_HEAD + chunk(b"one"), chunk(b"two")), taker) as (upstream, _, task):
        await eventually(lambda: bool(taker.reads))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)
        before = list(taker.reads)
        await asyncio.sleep(0.02)
        assert taker.reads == before, "nothing is handed over any more"


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
