"""When a connection is kept and when it ends: idleness, heads and bodies that do not come, last replies."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.client import Client, Timers
from fakes.front_work import AT_ONCE, CHAT, Work, app, at_once, connected, request
from fakes.waits import loop_turns

from gateway.edge.context import Exchange
from gateway.edge.incoming import EARLY_BODY_BYTES
from gateway.edge.timers import HEAD_S, KEEP_ALIVE_S

# --- keep-alive -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", b"Connection: keep-alive\r\n", b"Connection: x-hop\r\n"])
async def test_a_connection_serves_request_after_request(more: bytes) -> None:
    client = connected(AT_ONCE)
    for _ in range(3):
        client.send(b"POST %b HTTP/1.1\r\nHost: x\r\n%bContent-Length: 0\r\n\r\n" % (CHAT.encode(), more))
        await client.idle()
    assert len(client.replies()) == 3 and not client.line.is_closed
    assert all(b"connection" not in reply.headers for reply in client.replies())


@pytest.mark.parametrize(
    ("version", "more"),
    [(b"1.1", b"Connection: close\r\n"), (b"1.0", b""), (b"1.0", b"Connection: keep-alive\r\n")],
    ids=["close", "1.0", "1.0 keep-alive"],
)
async def test_a_connection_that_is_not_to_be_kept_is_closed_behind_its_reply(version: bytes, more: bytes) -> None:
    client = connected(AT_ONCE)
    client.send(b"POST %b HTTP/%b\r\nHost: x\r\n%bContent-Length: 0\r\n\r\n" % (CHAT.encode(), version, more))
    await client.idle()
    assert client.is_whole and client.headers[b"connection"] == b"close"
    assert client.line.is_closed and not client.line.was_cut


async def test_what_comes_behind_a_request_that_closes_is_not_answered() -> None:
    client = connected(AT_ONCE)
    client.send(request("a").replace(b"Host: x", b"Host: x\r\nConnection: close") + request("b"))
    await client.idle()
    assert client.body == b"a" and client.line.is_closed


async def test_an_idle_connection_is_closed_after_its_time_and_not_before() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    for _ in range(3):
        timers.advance(KEEP_ALIVE_S - 1 if client.line.written else HEAD_S - 1)
        assert not client.line.is_closed
        client.send(request())
        await client.idle()
    timers.advance(KEEP_ALIVE_S - 1)
    assert not client.line.is_closed
    timers.advance(2)
    assert client.line.is_closed and not client.line.was_cut


async def test_a_long_reply_is_no_idleness() -> None:
    timers, work = Timers(), Work()
    client = connected(work.handlers, timers)
    client.send(request("a"))
    await loop_turns()
    await work.answer(0)
    client.send(request("b"))
    await loop_turns()
    timers.advance(10 * KEEP_ALIVE_S)
    assert not client.line.is_closed
    await work.answer(1)
    timers.advance(KEEP_ALIVE_S - 1)
    assert not client.line.is_closed
    timers.advance(2)
    assert client.line.is_closed


async def test_idleness_counts_again_behind_a_body_that_was_dropped_when_the_idle_timer_went_off() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    client.send(request("a"))
    await client.idle()
    timers.advance(KEEP_ALIVE_S - 1)
    late = request("b", b"x" * 100)
    client.send(late[:-50])  # answered before its body is there
    await client.idle()
    timers.advance(2)
    client.send(late[-50:])
    timers.advance(2 * KEEP_ALIVE_S)
    assert client.line.is_closed


# --- heads and bodies that do not come --------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"", b"POST /v1/chat", b"\r\n", b"POST / HTTP/1.1\r\nX-Slow: "])
async def test_a_head_that_never_comes_is_not_waited_for(begin: bytes) -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    if begin:
        client.send(begin)
    timers.advance(HEAD_S - 0.1)
    assert not client.line.is_closed
    timers.advance(0.2)
    assert client.line.is_closed and not client.line.written


async def test_a_drip_does_not_put_off_the_end_of_a_head() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    client.send(request())
    await client.idle()
    timers.advance(20)
    for byte in b"POST /aaaaaaaaaaaaaaa":
        if client.line.is_closed:
            break
        client.send(bytes([byte]))
        timers.advance(1)
    assert client.line.is_closed


async def test_the_time_for_a_pipelined_head_counts_from_the_reply_before_it() -> None:
    timers, work = Timers(), Work()
    client = connected(work.handlers, timers)
    client.send(request("a"))
    client.send(b"POST /v1/ch")
    await loop_turns()
    timers.advance(5 * HEAD_S)
    assert not client.line.is_closed
    await work.answer(0)
    timers.advance(2 * HEAD_S)
    assert client.line.is_closed and client.body == b"a"


async def test_a_body_that_nobody_reads_is_not_taken_for_ever() -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    data = request("a", b"x" * 1000)
    client.send(data[:-900])
    await client.idle()
    for i in range(9):
        client.send(data[-900 + i :][:1])
        timers.advance(1)
    assert not client.line.is_closed
    timers.advance(2)
    assert client.line.is_closed


async def test_a_pipelined_request_refused_before_its_body_leaves_no_deadline_once_the_body_is_there() -> None:
    timers, work = Timers(), Work()
    client = connected(work.handlers, timers)
    second = request("b", b"x" * 100)
    client.send(request("a") + second[:-50])
    await loop_turns()
    await work.answer(0)
    await work.answer(1)
    client.send(second[-50:])
    timers.advance(KEEP_ALIVE_S - 1)
    assert not client.line.is_closed and len(client.replies()) == 2


async def refuse(exchange: Exchange) -> None:
    exchange.reply(413, [(b"connection", b"close")], b"too large")
    exchange.close()


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_caller_who_still_sends_is_not_reset_before_it_has_read_its_last_reply(leaves: bool) -> None:
    timers = Timers()
    client = connected({CHAT.encode(): refuse}, timers)
    data = request("a", b"x" * (4 * EARLY_BODY_BYTES))
    client.send(data[: 2 * EARLY_BODY_BYTES])
    await client.idle()
    assert client.status == 413 and client.line.has_ended and client.line.is_reading
    client.send(data[2 * EARLY_BODY_BYTES :] + request("b") + b"\x00garbage")
    await loop_turns()
    assert client.state.total_requests == 1 and client.is_whole and not client.line.is_closed
    if leaves:
        client.hang_up()
    else:
        timers.advance(HEAD_S + 0.1)
    assert client.line.is_closed and not client.line.was_cut


# --- the server stops -------------------------------------------------------------------------------------------


async def test_an_idle_connection_is_closed_at_a_stop() -> None:
    client = connected(AT_ONCE)
    client.send(request())
    await client.idle()
    client.front.shutdown()
    assert client.line.is_closed and not client.line.was_cut


@pytest.mark.parametrize("path", [CHAT, "/other"])
async def test_a_running_reply_is_finished_at_a_stop_and_nothing_behind_it_begun(path: str) -> None:
    go_on = asyncio.Event()

    async def slow_app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        await go_on.wait()
        await app(scope, receive, send)

    async def slow(exchange: Exchange) -> None:
        await go_on.wait()
        await at_once(exchange)

    client = Client()
    client.connect({CHAT.encode(): slow}, app=slow_app)
    client.send(request("a", path=path) + request("b"))
    await loop_turns()
    client.front.shutdown()
    assert not client.line.is_closed
    go_on.set()
    await client.idle()
    assert client.is_whole and client.headers[b"connection"] == b"close"
    assert client.line.is_closed
