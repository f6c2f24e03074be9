"""Cancelled twice, or failing from within: a whole gateway in this process, so that its own counts can be looked at."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path

import pytest
from fakes.caller import Caller
from fakes.inner_gateway import InnerGateway, inner_gateway
from fakes.line import KEY, MESSAGES, sha256
from fakes.ruled_line import HangUp, text
from fakes.scripted_upstream import STREAM_HEAD, Peer, ScriptedUpstream, chunk
from fakes.waits import eventually

from gateway.edge.context import Exchange
from gateway.upstream.fast_path import FastPath
from gateway.upstream.relay import StreamTap

CHAT = {"model": "chat", "messages": MESSAGES, "stream": True}
EVENTS = [text("one "), text("two "), text("three "), text("four ")]


def sections(url: str) -> dict[str, object]:
    return {
        "keys": {"test": {"sha256": sha256(KEY), "limits": {"in_flight": 10}}},
        "pools": {"p": {"urls": [url], "served_name": "tiny", "max_model_len": 100_000}},
        "routes": {"chat": {"targets": [{"pool": "p"}]}},
    }


def cancel(gateway: InnerGateway, exchange: Exchange, way: str) -> None:
    """One of the three that end a request: its caller is gone, the drain time is over, the server stops at once."""
    match way:
        case "gone":
            exchange.abandon()
        case "drain":
            exchange.end()
        case _:
            if exchange.task is not None:
                exchange.task.cancel()


@pytest.mark.parametrize("turns_between", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("first", "second"), [("gone", "drain"), ("drain", "gone"), ("gone", "stop"), ("drain", "stop"), ("stop", "gone")]
)
async def test_two_cancels_in_a_row_leave_no_connection_counted(
    tmp_path: Path, redis_url: str, first: str, second: str, turns_between: int
) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(EVENTS[0]))
        await peer.closed()
        raise HangUp

    async with (
        ScriptedUpstream(endless) as upstream,
        inner_gateway(tmp_path, redis_url, **sections(upstream.url)) as gateway,
        contextlib.AsyncExitStack() as stack,
    ):
        callers = [await stack.enter_async_context(Caller(gateway.url)) for _ in range(10)]
        for caller in callers:
            await caller.ask("/v1/chat/completions", CHAT)
        await asyncio.gather(*(caller.read_until(b"one ") for caller in callers))
        assert (gateway.wire.active, upstream.open_connections, gateway.unsettled) == (10, 10, 10)
        exchanges = [exchange for exchange in gateway.runtime.exchanges if isinstance(exchange, Exchange)]
        for exchange in exchanges:
            cancel(gateway, exchange, first)
            if not turns_between:
                cancel(gateway, exchange, second)
        for _ in range(turns_between):
            await asyncio.sleep(0)
        for exchange in exchanges if turns_between else ():
            cancel(gateway, exchange, second)
        for caller in callers:
            caller.reset()
        await eventually(lambda: not any(gateway.left().values()))
        await eventually(lambda: upstream.open_connections == 0)
        assert (gateway.begun, len(gateway.records)) == (10, 10)
        assert gateway.wire.idle == 0, "a connection with half a reply on it may not be used again"


@pytest.mark.parametrize(("owner", "name"), [(StreamTap, "feed"), (FastPath, "take")])
async def test_a_fault_of_our_own_after_the_first_tokens_is_no_silence(
    owner: type,
    name: str,
    tmp_path: Path,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What looks at each event raises at the fourth one, whichever way that goes."""
    look = getattr(owner, name)

    def failing(this: object, data: bytes) -> object:
        if EVENTS[3] in data:
            raise RuntimeError("a defect")
        return look(this, data) if owner is StreamTap else False

    monkeypatch.setattr(owner, name, failing)
    if owner is StreamTap:
        monkeypatch.setattr(FastPath, "take", lambda *_: False)
    read: asyncio.Queue[None] = asyncio.Queue()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for event in EVENTS:
            await peer.send(chunk(event))
            if event is not EVENTS[-1]:
                await read.get()
        await peer.closed()
        raise HangUp

    async with (
        ScriptedUpstream(script) as upstream,
        inner_gateway(tmp_path, redis_url, **sections(upstream.url)) as gateway,
        Caller(gateway.url) as caller,
    ):
        await caller.ask("/v1/chat/completions", CHAT)
        for event in EVENTS[:3]:
            await caller.read_until(event)
            read.put_nowait(None)
        reply = await caller.reply()
        caller.close()
        body = reply.body.removeprefix(b"".join(EVENTS[:3]))
        assert body.startswith(b"data: ") and body.endswith(b"\n\n") and body.count(b"\n\n") == 1
        assert set(json.loads(body.removeprefix(b"data: "))["error"]) == {"message", "type", "param", "code"}
        await eventually(lambda: not any(gateway.left().values()))
        await eventually(lambda: upstream.open_connections == 0)
        (record,) = gateway.records
        assert (record.ending, record.error_code) == ("failed", "internal_error")
        assert record.completion_tokens is not None and record.completion_tokens >= 3
        assert "RuntimeError: a defect" in caplog.text, "it is told, not swallowed"
