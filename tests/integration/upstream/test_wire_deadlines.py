"""Which deadline ends an exchange, in whatever state the engine hangs, and what puts one off."""

from __future__ import annotations

import asyncio

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, chunk, plain
from fakes.waits import eventually

from gateway.upstream.transport import Deadlines, UpstreamRequest

from .conftest import Pair
from .exchanges import (
    LONG,
    PATIENT,
    POST,
    answer_ok,
    expect_timeout,
    fetch,
    head_alone,
    keeps_sending,
    pauses,
    silent,
    tell_and_hang,
)


@pytest.mark.parametrize(
    ("deadlines", "name"),
    [(Deadlines(0.05, LONG, LONG, LONG), "connect"), (Deadlines(LONG, LONG, LONG, 0.05), "total")],
)
async def test_a_connect_that_hangs_ends_by_its_deadline(both: Pair, deadlines: Deadlines, name: str) -> None:
    async with both.deaf() as url:
        await expect_timeout(both.transport.send(url, POST, deadlines), name)
        assert not both.transport._open


async def test_one_hung_worker_ends_by_first_byte_timeout_and_does_not_touch_the_others(
    both: Pair,
) -> None:
    async with both.upstream(silent) as hung, both.upstream(answer_ok) as healthy:
        brief = Deadlines(LONG, 0.3, LONG, LONG)
        stuck = [asyncio.create_task(both.transport.send(hung.url, POST, brief)) for _ in range(100)]
        await eventually(lambda: len(hung.requests) == 100)
        for _ in range(10):
            assert await fetch(both, healthy.url) == b"hello"
        for task in stuck:
            await expect_timeout(task, "first byte")
        await eventually(lambda: hung.open_connections == 0)


async def test_a_head_that_trickles_in_does_not_put_off_the_first_byte_deadline(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nx: ")
        while True:
            await peer.send(b"y")
            await asyncio.sleep(0.005)

    async with both.upstream(script) as upstream:
        await expect_timeout(both.transport.send(upstream.url, POST, Deadlines(LONG, 0.1, LONG, LONG)), "first byte")


async def test_a_head_without_a_first_byte_of_body_ends_by_the_first_byte_deadline(both: Pair) -> None:
    async with both.upstream(head_alone) as upstream:

        async def run() -> None:
            reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.2, 0.001, LONG))
            await reply.read()

        await expect_timeout(run(), "first byte")
        await eventually(lambda: upstream.open_connections == 0)


async def test_silence_between_two_reads_ends_by_the_gap_deadline(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 0.05, LONG))
        assert await reply.read() == b"one"
        await expect_timeout(reply.read(), "gap")
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_reader_that_takes_its_time_is_no_gap(both: Pair) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await go_on.wait()
        await peer.send(chunk(b"two"))
        go_on.clear()
        await go_on.wait()
        await peer.send(chunk(b"three") + STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 0.5, LONG))
        assert await reply.read() == b"one"
        waiting = asyncio.create_task(reply.read())
        await asyncio.sleep(0)
        go_on.set()
        assert await waiting == b"two"
        await asyncio.sleep(0.7)  # longer than the gap
        go_on.set()
        assert await reply.read() == b"three"
        assert await reply.read() == b""


async def test_each_piece_of_a_stream_starts_the_gap_anew(both: Pair) -> None:
    # the last wait begins before the timer of the first one fires: it must be armed again then
    async with both.upstream(pauses(3, 0.2)) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 0.6, LONG))
        for _ in range(3):
            assert await reply.read() == b"x"
        await expect_timeout(reply.read(), "gap")
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_stream_that_never_pauses_ends_by_the_total_deadline(both: Pair) -> None:
    async with both.upstream(keeps_sending(0.002)) as upstream:

        async def run() -> None:
            reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, LONG, 0.15))
            while await reply.read():
                pass

        await expect_timeout(run(), "total")
        await eventually(lambda: upstream.open_connections == 0)


async def test_the_total_deadline_holds_while_nobody_reads(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, LONG, 0.5))
        await eventually(lambda: both.transport.active == 0 and upstream.open_connections == 0)
        assert await reply.read() == b"one"
        await expect_timeout(reply.read(), "total")


async def test_a_body_that_the_engine_does_not_take_ends_by_the_first_byte_deadline(both: Pair) -> None:
    async def deaf(peer: Peer) -> None:
        await eventually(lambda: both.transport.active == 0)

    async with both.upstream(deaf) as upstream:
        big = UpstreamRequest(b"POST", b"/", (), b"x" * 50_000_000)
        await expect_timeout(both.transport.send(upstream.url, big, Deadlines(LONG, 0.1, LONG, LONG)), "first byte")


async def test_a_timer_of_an_earlier_exchange_does_not_end_a_later_one(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await peer.request()
        await asyncio.sleep(0.7)  # until the first one's deadline has passed
        await peer.send(plain(b"later"))
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.5, LONG, LONG))
        assert await reply.read_all(10) == b"hello"
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read_all(10) == b"later"
        assert upstream.accepted == 1
