"""Whoever leaves, and whenever: the connection to the engine is closed."""

from __future__ import annotations

import asyncio

import pytest
from fakes.scripted_upstream import Peer
from fakes.waits import eventually

from gateway.domain.errors import UpstreamBroken, UpstreamTimeout
from gateway.upstream.transport import Deadlines, UpstreamRequest

from .conftest import Pair
from .exchanges import LONG, PATIENT, POST, cancel, fetch, is_stuck, silent, stale, tell_and_hang

TIMES = pytest.mark.parametrize("times", [1, 2])


@TIMES
async def test_cancelled_while_connecting(both: Pair, times: int) -> None:
    async with both.deaf() as url:
        task: asyncio.Task[object] = asyncio.create_task(both.transport.send(url, POST, PATIENT))
        await eventually(lambda: both.transport.active == 1)
        await asyncio.sleep(0.01)  # the loop shows to nobody that it waits for the other side
        await cancel(task, times)
        assert (both.transport.active, len(both.transport._open)) == (0, 0)


async def test_cancelled_at_each_turn_of_the_loop_leaves_nothing_open(both: Pair) -> None:
    async with both.upstream(silent) as upstream:
        for turns in range(60 if both.is_tls else 12):
            task: asyncio.Task[object] = asyncio.create_task(both.transport.send(upstream.url, POST, PATIENT))
            for _ in range(turns):
                await asyncio.sleep(0)
            await cancel(task, 1)
            assert both.transport.active == 0
        await eventually(lambda: upstream.open_connections == 0 and not both.transport._open)


@TIMES
async def test_cancelled_while_the_body_is_going_out(both: Pair, times: int) -> None:
    async def deaf(peer: Peer) -> None:
        await eventually(lambda: both.transport.active == 0)

    async with both.upstream(deaf) as upstream:
        big = UpstreamRequest(b"POST", b"/", (), b"x" * 50_000_000)
        task: asyncio.Task[object] = asyncio.create_task(both.transport.send(upstream.url, big, PATIENT))
        await eventually(lambda: is_stuck(both))
        await cancel(task, times)
        await eventually(lambda: not both.transport._open)


@TIMES
async def test_client_gone_while_waiting_for_the_head_closes_the_engine_connection(both: Pair, times: int) -> None:
    async with both.upstream(silent) as upstream:
        task: asyncio.Task[object] = asyncio.create_task(both.transport.send(upstream.url, POST, PATIENT))
        await eventually(lambda: len(upstream.requests) == 1)
        await cancel(task, times)
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)


@TIMES
async def test_client_gone_in_the_middle_of_a_stream_closes_the_engine_connection(both: Pair, times: int) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"one"
        task: asyncio.Task[object] = asyncio.create_task(reply.read())
        await asyncio.sleep(0)
        await cancel(task, times)
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)


async def test_cancelled_during_the_second_try_of_a_stale_connection(both: Pair) -> None:
    async with both.upstream(stale, silent) as upstream:
        await fetch(both, upstream.url)
        task: asyncio.Task[object] = asyncio.create_task(both.transport.send(upstream.url, POST, PATIENT))
        await eventually(lambda: len(upstream.requests) == 3)
        await cancel(task, 2)
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("phase", ["connecting", "head", "body"])
async def test_aclose_ends_what_is_under_way(both: Pair, phase: str) -> None:
    async with both.upstream(silent if phase == "head" else tell_and_hang) as upstream, both.deaf() as deaf:
        url = deaf if phase == "connecting" else upstream.url

        async def run() -> bytes:
            reply = await both.transport.send(url, POST, Deadlines(0.5, LONG, LONG, LONG))
            return await reply.read_all(100)

        task = asyncio.create_task(run())
        await eventually(lambda: both.transport.active == 1 and (phase == "connecting" or len(upstream.requests) == 1))
        await both.transport.aclose()
        with pytest.raises((UpstreamBroken, UpstreamTimeout)):
            await task
        assert (both.transport.active, len(both.transport._open)) == (0, 0)


async def test_close_while_somebody_reads_ends_the_read(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"one"
        reading = asyncio.create_task(reply.read())
        await asyncio.sleep(0)  # one turn of the loop: it reads
        reply.close()
        with pytest.raises(UpstreamBroken):
            await reading
        await eventually(lambda: upstream.open_connections == 0)
