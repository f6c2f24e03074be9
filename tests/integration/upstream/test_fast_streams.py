"""The short way of a stream on real sockets and both loops: callers that leave or do not read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fakes.caller import Caller, replies_so_far
from fakes.inner_gateway import InnerGateway, inner_gateway
from fakes.line import KEY, MESSAGES, sha256
from fakes.ruled_line import LAST, USAGE_EVENT, HangUp, text
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, ScriptedUpstream, chunk
from fakes.stage import DONE
from fakes.waits import eventually

from gateway.edge.context import Exchange
from gateway.upstream.fast_path import FastPath

from .conftest import Pair
from .exchanges import PATIENT, POST, Taker

CHAT = {"model": "chat", "messages": MESSAGES, "stream": True}
PATH = "/v1/chat/completions"


class Ways:
    """Counts the reads that went the short way, in all streams of a test."""

    def __init__(self) -> None:
        self.short = 0


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    counted, take = Ways(), FastPath.take

    def counting(path: FastPath, data: bytes) -> bool:
        was_taken = take(path, data)
        counted.short += was_taken
        return was_taken

    monkeypatch.setattr(FastPath, "take", counting)
    return counted


@pytest.fixture
def complaints(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """What the loop had no one to tell; empty at the end, and nothing was logged above info."""
    told: list[str] = []
    yield told
    assert told == []
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


@asynccontextmanager
async def gateway_to(
    upstream: ScriptedUpstream, folder: Path, redis_url: str, complaints: list[str], **gateway: Any
) -> AsyncIterator[InnerGateway]:
    """`gateway` are keys of that section. At the end nothing is held for any request, here or at the replica."""
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(str(context)))
    async with upstream:
        sections: dict[str, Any] = {
            "gateway": gateway,
            "keys": {"test": {"sha256": sha256(KEY)}},
            "pools": {"p": {"urls": [upstream.url], "served_name": "tiny", "max_model_len": 100_000}},
            "routes": {"chat": {"targets": [{"pool": "p"}]}},
        }
        async with inner_gateway(folder, redis_url, **sections) as made:
            yield made
            await eventually(lambda: not any(made.left().values()))


async def endless(peer: Peer) -> None:
    """One small event after the other, each a read of its own as far as the kernel has it so."""
    await peer.request()
    await peer.send(STREAM_HEAD)
    number = 0
    while True:
        await peer.send(chunk(text(f"{number} ")))
        number += 1
        await asyncio.sleep(0.0005)


@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
async def test_callers_who_leave_in_a_fast_stream_end_the_replicas_work_and_raise_nothing(
    way: str, tmp_path: Path, redis_url: str, ways: Ways, complaints: list[str]
) -> None:
    upstream = ScriptedUpstream(endless)
    async with gateway_to(upstream, tmp_path, redis_url, complaints) as gateway:
        for _ in range(8):
            async with Caller(gateway.url) as caller:
                await caller.ask(PATH, CHAT)
                before = ways.short
                await eventually(lambda before=before: ways.short > before + 3)  # type: ignore[misc]
                await caller.read_until(b"3 ")
                match way:
                    case "close":
                        caller.close()
                    case "reset":
                        caller.reset()
                    case _:
                        caller.sock.shutdown(1)
                await eventually(lambda: upstream.open_connections == 0)
        await eventually(lambda: len(gateway.records) == 8)
        for record in gateway.records:
            assert record.ending == "client_gone"
            assert record.completion_tokens is not None and record.completion_tokens > 4


async def test_a_caller_who_was_just_cut_off_is_not_written_to(
    tmp_path: Path, redis_url: str, ways: Ways, complaints: list[str]
) -> None:
    """A read that comes in the same turn of the loop: uvloop's transport raises at a write then."""
    upstream = ScriptedUpstream(endless)
    async with gateway_to(upstream, tmp_path, redis_url, complaints) as gateway, Caller(gateway.url) as caller:
        await caller.ask(PATH, CHAT)
        await eventually(lambda: ways.short > 3)
        (exchange,) = gateway.runtime.exchanges
        assert isinstance(exchange, Exchange) and exchange.fast_path is not None and exchange.chunks is not None
        path, read = exchange.fast_path, chunk(text("late "))
        assert path.take(read)
        exchange.chunks.abort()
        for _ in range(5):
            assert not path.take(read)
            await asyncio.sleep(0)
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_caller_who_does_not_read_holds_the_replica_back_and_gets_all_in_order(
    tmp_path: Path, redis_url: str, ways: Ways, complaints: list[str]
) -> None:
    texts = [text(f"{i} " + "x" * 3000) for i in range(6000)]  # 18 MB, more than the kernel's buffers hold
    peers: list[Peer] = []

    async def script(peer: Peer) -> None:
        peers.append(peer)
        await peer.request()
        await peer.send(STREAM_HEAD)
        for i, piece in enumerate((*texts, LAST, USAGE_EVENT, DONE)):
            await peer.send(chunk(piece))
            if i < 50:
                await asyncio.sleep(0.001)  # a read of its own
        await peer.send(STREAM_END)

    upstream = ScriptedUpstream(script)
    async with (
        gateway_to(upstream, tmp_path, redis_url, complaints) as gateway,
        Caller(gateway.url, receive_buffer=65_536) as caller,
    ):
        await caller.ask(PATH, CHAT)
        await eventually(lambda: bool(peers))
        assert await peers[0].stalls() < sum(map(len, texts)), "the replica is held back"
        assert ways.short > 0
        pieces: list[bytes] = []
        while not pieces or not pieces[-1].endswith(STREAM_END):
            pieces.append(await caller.read(1 << 20))
            caller.data = b""
            assert pieces[-1]
        (reply,) = replies_so_far(b"".join(pieces))
        assert reply.body == b"".join((*texts, LAST, DONE))
        (record,) = gateway.records
        assert (record.ending, record.completion_tokens) == ("completed", 48)


async def test_the_same_connection_to_the_replica_serves_the_next_stream(
    tmp_path: Path, redis_url: str, ways: Ways, complaints: list[str]
) -> None:
    pieces = [text(f"{i} ") for i in range(10)]

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(STREAM_HEAD)
            for piece in pieces:
                await peer.send(chunk(piece))
                await asyncio.sleep(0.005)
            await peer.send(chunk(LAST) + chunk(DONE) + STREAM_END)

    upstream = ScriptedUpstream(script)
    async with gateway_to(upstream, tmp_path, redis_url, complaints) as gateway:
        for _ in range(3):
            before = ways.short
            async with Caller(gateway.url) as caller:
                await caller.ask(PATH, CHAT)
                assert (await caller.reply()).body == b"".join((*pieces, LAST, DONE))
            assert ways.short > before
        assert upstream.accepted == 1
        assert [record.completion_tokens for record in gateway.records] == [len(pieces) + 1] * 3


@pytest.mark.parametrize("cut", ["reset", "malformed"])
async def test_a_replica_that_breaks_off_a_fast_stream_is_told_to_the_caller(
    cut: str, tmp_path: Path, redis_url: str, ways: Ways
) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for i in range(10):
            await peer.send(chunk(text(f"{i} ")))
            await asyncio.sleep(0.005)
        if cut == "reset":
            peer.reset()
        else:
            await peer.send(b"zz\r\n" + chunk(text("never to be seen")))
            await peer.closed()
        raise HangUp

    upstream, nothing = ScriptedUpstream(script), list[str]()
    async with gateway_to(upstream, tmp_path, redis_url, nothing) as gateway, Caller(gateway.url) as caller:
        await caller.ask(PATH, CHAT)
        reply = await caller.reply()
        assert reply.body.startswith(b"".join(text(f"{i} ") for i in range(10)))
        assert reply.body.count(b'"error"') == 1 and b"never to be seen" not in reply.body
        assert ways.short > 0
        (record,) = gateway.records
        assert record.completion_tokens == 10 and record.ending == "upstream_error"
    assert nothing == []


class Kept(asyncio.WriteTransport):
    """Where the short way leads, beside a taker: both write into the same body."""

    def __init__(self, taker: Taker) -> None:
        super().__init__()
        self._taker = taker

    def write(self, data: bytes | bytearray | memoryview) -> None:
        _, _, rest = bytes(data).partition(b"\r\n")
        self._taker.reads.append(rest[:-2])

    def is_closing(self) -> bool:
        return False


async def test_a_reply_comes_over_tls_as_it_does_without(both: Pair) -> None:
    pieces = [text(f"{i} ") for i in range(20)]

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for piece in pieces:
            await peer.send(chunk(piece))
            await asyncio.sleep(0.005)
        await peer.send(STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        first = await reply.read()
        taker = Taker()
        fast = FastPath(Kept(taker), asyncio.get_running_loop().time)
        fast.open(pieces[0])

        def take(data: bytes) -> bool:
            fast.open(pieces[0])
            return taker(data)

        await asyncio.wait_for(reply.relay(take, fast), 10)
        assert first + taker.data == b"".join(pieces)
        assert fast.events > 0 and both.transport.idle == 1
