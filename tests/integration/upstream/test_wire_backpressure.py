"""A reader that is slower than the engine: the engine waits, memory and open files stay bounded."""

from __future__ import annotations

import asyncio
import os

from fakes.scripted_upstream import Peer, plain
from fakes.waits import eventually

from gateway.upstream.connection import HIGH_WATER_BYTES
from gateway.upstream.reply import WireReply

from .conftest import Pair
from .exchanges import MOST_AT_ONCE, PATIENT, POST, Flood, tell_and_hang


async def test_slow_reader_does_not_fill_memory_the_engine_stalls_instead(both: Pair) -> None:
    flood = Flood()
    async with both.upstream(flood) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert isinstance(reply, WireReply)
        await eventually(lambda: reply.unread_bytes > HIGH_WATER_BYTES)
        await flood.stalls()
        most = received = 0
        while data := await reply.read():
            received += len(data)
            most = max(most, len(data))
            await asyncio.sleep(0)
        assert received == flood.size
        assert most < MOST_AT_ONCE
        assert both.transport.idle == 1


async def test_a_reply_that_ends_while_paused_leaves_a_connection_that_reads(both: Pair) -> None:
    body = bytes(HIGH_WATER_BYTES * 8)

    async def script(peer: Peer) -> None:
        for _ in range(2):
            await peer.request()
            await peer.send(plain(body))
        await peer.closed()

    async with both.upstream(script) as upstream:
        for _ in range(2):
            reply = await both.transport.send(upstream.url, POST, PATIENT)
            assert isinstance(reply, WireReply)
            await eventually(lambda reply=reply: reply.unread_bytes > HIGH_WATER_BYTES)  # type: ignore[misc]
            assert await reply.read_all(1 << 20) == body
        assert upstream.accepted == 1


async def test_five_hundred_broken_exchanges_leave_the_open_files_as_they_were(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        before = 0
        for n in range(101):
            if n == 1:  # in the first round a loop opens descriptors of its own
                await eventually(lambda: not both.transport._open and upstream.open_connections == 0)
                before = len(os.listdir("/proc/self/fd"))
            replies = await asyncio.gather(*(both.transport.send(upstream.url, POST, PATIENT) for _ in range(5)))
            for reply in replies:
                reply.close()
        await eventually(lambda: upstream.open_connections == 0 and not both.transport._open)
        assert len(os.listdir("/proc/self/fd")) == before
