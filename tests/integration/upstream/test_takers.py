"""What a taker of a reply is promised, with TLS and without: room, closing, deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, chunk, eventually, plain

from gateway.domain.errors import UpstreamBroken, UpstreamTimeout
from gateway.upstream.transport import Deadlines

from .conftest import Pair
from .test_wire_promises import LONG, PATIENT, POST, cancel, silent, tell_and_hang


class Taker:
    """Takes what it is handed; has room for `room` bytes until `resume`."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.data = b""
        self.calls = 0
        self.room = room
        self.on_take: Callable[[], None] | None = None

    def __call__(self, data: bytes) -> bool:
        self.data += data
        self.calls += 1
        if self.on_take is not None:
            self.on_take()
        return len(self.data) < self.room


async def test_taker_gets_every_read_to_the_end(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for i in range(20):
            await peer.send(chunk(b"%02d" % i))
            await asyncio.sleep(0.001)
        await peer.send(STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        first = await reply.read()
        taker = Taker()
        await reply.relay(taker)
        assert first + taker.data == b"".join(b"%02d" % i for i in range(20))
        assert taker.calls > 1
        assert both.transport.idle == 1


async def test_slow_taker_pauses_the_engine_and_goes_on_after_resume(both: Pair) -> None:
    size = 20_000_000
    peers: list[Peer] = []

    async def flood(peer: Peer) -> None:
        peers.append(peer)
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        await peer.send(bytes(size))
        await peer.closed()

    async with both.upstream(flood) as upstream:
        # a gap deadline that would pass if a taker without room counted as silence of the engine
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 1.0, LONG))
        taker = Taker(room=1)
        relaying = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.calls == 1)
        sent = -1
        while sent != peers[0].sent_bytes:  # until the engine's writes stand still
            sent = peers[0].sent_bytes
            await asyncio.sleep(0.2)
        assert sent < size
        await asyncio.sleep(1.2)
        assert taker.calls == 1 and not relaying.done()
        before = len(taker.data)
        taker.room = before + 1
        reply.resume()
        assert taker.calls == 2 and len(taker.data) - before < 400_000
        taker.room = 1 << 30
        reply.resume()
        await relaying
        assert len(taker.data) == size


async def test_taker_that_closes_ends_the_relay_and_the_connection(both: Pair) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.001)

    async with both.upstream(endless) as upstream:
        for at_once in (True, False):
            reply = await both.transport.send(upstream.url, POST, PATIENT)
            if at_once:
                await asyncio.sleep(0.02)  # bytes are there: the taker is called from `relay` itself
            taker = Taker()
            taker.on_take = reply.close
            with pytest.raises(UpstreamBroken, match="closed before its end"):
                await reply.relay(taker)
            assert taker.calls == 1
            assert both.transport.active == 0
            await eventually(lambda: upstream.open_connections == 0)


async def test_each_piece_puts_off_the_gap_deadline_of_a_relay(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(4):
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.3)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 0.8, LONG))
        taker = Taker()
        with pytest.raises(UpstreamTimeout) as caught:
            await reply.relay(taker)
        assert (caught.value.deadline, taker.data) == ("gap", b"xxxx")
        await eventually(lambda: upstream.open_connections == 0)


async def test_silence_before_the_first_byte_ends_a_relay(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.3, 0.001, LONG))
        with pytest.raises(UpstreamTimeout) as caught:
            await reply.relay(Taker())
        assert caught.value.deadline == "first byte"


async def test_broken_reply_ends_a_relay_after_the_bytes_that_had_come(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        peer.reset()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: upstream.open_connections == 0 and both.transport.active == 0)
        taker = Taker()
        with pytest.raises(UpstreamBroken) as caught:
            await reply.relay(taker)
        assert taker.data in (b"one", b"") and caught.value.response_began


async def test_bytes_that_wait_for_a_taker_come_before_the_error(both: Pair) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await go_on.wait()
        await peer.send(chunk(b"two"))
        await asyncio.sleep(0.05)
        peer.reset()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        taker = Taker(room=1)
        relaying = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.data == b"one")
        go_on.set()
        await eventually(lambda: both.transport.active == 0)
        assert not relaying.done()
        taker.room = 1 << 30
        reply.resume()
        with pytest.raises(UpstreamBroken):
            await relaying
        assert taker.data == b"onetwo"


async def test_taker_that_never_has_room_again_ends_by_the_total_deadline(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"x" * 300_000))
        await peer.closed()

    for long_reply in (script, tell_and_hang):
        async with both.upstream(long_reply) as upstream:
            reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, LONG, 0.5))
            with pytest.raises(UpstreamTimeout) as caught:
                await reply.relay(Taker(room=1))
            assert caught.value.deadline == "total"
            await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("is_paused", [False, True])
async def test_cancelled_relay_closes_the_engine_connection(both: Pair, is_paused: bool) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        taker = Taker(room=1 if is_paused else 100)
        task: asyncio.Task[object] = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.calls == 1)
        await cancel(task, 2)
        assert both.transport.active == 0
        await eventually(lambda: upstream.open_connections == 0)


async def test_close_of_a_relay_by_somebody_else_ends_it(both: Pair) -> None:
    async with both.upstream(silent, tell_and_hang) as upstream:
        waiting = asyncio.create_task(both.transport.send(upstream.url, POST, PATIENT))
        await eventually(lambda: len(upstream.requests) == 1)
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        relaying = asyncio.create_task(reply.relay(Taker()))
        await asyncio.sleep(0.02)
        reply.close()
        with pytest.raises(UpstreamBroken):
            await relaying
        await cancel(waiting, 1)
        await eventually(lambda: upstream.open_connections == 0)


async def test_close_of_a_whole_reply_that_waits_for_room_ends_the_relay(both: Pair) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await go_on.wait()
        await peer.send(chunk(b"two") + STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        taker = Taker(room=1)
        relaying = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.data == b"one")
        go_on.set()
        await eventually(lambda: both.transport.idle == 1)
        assert not relaying.done()
        reply.close()
        with pytest.raises(UpstreamBroken, match="closed before its end"):
            await relaying
        assert taker.data == b"one"
