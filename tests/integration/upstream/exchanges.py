"""The requests, deadlines, replicas and takers that the tests of the wire share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Script, ScriptedUpstream, chunk, plain
from fakes.waits import eventually

from gateway.domain.errors import UpstreamBroken, UpstreamTimeout
from gateway.upstream.connection import HIGH_WATER_BYTES
from gateway.upstream.reply import WireReply
from gateway.upstream.transport import Deadlines, UpstreamRequest

from .conftest import Pair

LONG = 60.0  # longer than the fake upstream waits: a deadline that does not come when it should fails the test
PATIENT = Deadlines(LONG, LONG, LONG, LONG)
POST = UpstreamRequest(b"POST", b"/v1/chat/completions", ((b"content-type", b"application/json"),), b'{"a":1}')
MOST_AT_ONCE = HIGH_WATER_BYTES + 300_000  # a read of the loop takes at most 256 kB from the kernel

EVENTS = [b"data: %d\n\n" % i for i in range(40)]
STREAM = STREAM_HEAD + b"".join(map(chunk, EVENTS)) + STREAM_END


# --- replicas -------------------------------------------------------------------------------------------------------


async def answer_ok(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(plain(b"hello"))


async def silent(peer: Peer) -> None:
    await peer.request()
    await peer.closed()


async def stale(peer: Peer) -> None:
    """Closes the moment the second request has come, as a server whose idle time just passed."""
    await peer.request()
    await peer.send(plain(b"hello"))
    await peer.request()
    peer.reset()


async def tell_and_hang(peer: Peer) -> None:
    await peer.request()
    await peer.send(STREAM_HEAD + chunk(b"one"))
    await peer.closed()


async def head_alone(peer: Peer) -> None:
    """A hung vLLM answers a stream with 200 and headers at once, and then nothing."""
    await peer.request()
    await peer.send(STREAM_HEAD)
    await peer.closed()


def sends(reply: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply)
        await peer.closed()

    return script


def sends_apart(taker: Taker, first: bytes, second: bytes) -> Script:
    """A stream's beginning; the rest once that was taken, so that they are never one read."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + first)
        await eventually(lambda: bool(taker.reads))
        await peer.send(second)
        await peer.closed()

    return script


def goes_on_when_told(told: asyncio.Event, first: bytes, rest: bytes) -> Script:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + first)
        await told.wait()
        await peer.send(rest)
        await peer.closed()

    return script


def resets_when_told(told: asyncio.Event) -> Script:
    """In the midst of a stream, behind its first chunk."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await told.wait()
        peer.reset()

    return script


def keeps_sending(pause_s: float) -> Script:
    """A stream without end, a byte of text every `pause_s` seconds."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x"))
            await asyncio.sleep(pause_s)

    return script


def pauses(times: int, pause_s: float) -> Script:
    """So many pieces with a pause behind each, then nothing more."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(times):
            await peer.send(chunk(b"x"))
            await asyncio.sleep(pause_s)
        await peer.closed()

    return script


class Flood:
    """A reply that is too long for all buffers on the way together."""

    size = 20_000_000

    def __init__(self) -> None:
        self._peer: Peer | None = None

    async def __call__(self, peer: Peer) -> None:
        self._peer = peer
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % self.size)
        await peer.send(bytes(self.size))
        await peer.closed()

    async def stalls(self) -> None:
        """Until its writes stand still, with some of it unsent."""
        assert self._peer is not None
        assert await self._peer.stalls() < self.size


# --- what is asked of them ------------------------------------------------------------------------------------------


async def fetch(both: Pair, url: str, request: UpstreamRequest = POST) -> bytes:
    reply = await both.transport.send(url, request, PATIENT)
    try:
        return await reply.read_all(1 << 20)
    finally:
        reply.close()


def is_stuck(both: Pair) -> bool:
    """Whether a request cannot go on because its engine does not read."""
    return any(connection._is_write_paused for connection in both.transport._open)


async def expect_timeout(sending: Awaitable[object], deadline: str) -> None:
    with pytest.raises(UpstreamTimeout, match=f"the {deadline} deadline") as caught:
        await sending
    assert caught.value.deadline == deadline


async def cancel(task: asyncio.Task[object], times: int) -> None:
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


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
    both: Pair, script: Script, take: Callable[[bytes], bool], deadlines: Deadlines = PATIENT
) -> AsyncIterator[tuple[ScriptedUpstream, WireReply, asyncio.Task[None]]]:
    """A reply of `script` that is being relayed to `take`; at the end it is closed and its connection gone or idle."""
    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, deadlines)
        task = asyncio.create_task(reply.relay(take))
        try:
            yield upstream, reply, task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, UpstreamBroken, UpstreamTimeout):
                await task
            reply.close()
