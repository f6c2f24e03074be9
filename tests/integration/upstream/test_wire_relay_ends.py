"""How a relay ends before its reply does: by a deadline, by the engine, by its taker, by whoever else closes it."""

from __future__ import annotations

import asyncio

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Script, chunk, plain
from fakes.waits import eventually

from gateway.domain.errors import UpstreamBroken
from gateway.upstream.reply import WireReply
from gateway.upstream.transport import Deadlines

from .conftest import Pair
from .exchanges import (
    LONG,
    PATIENT,
    POST,
    Flood,
    Taker,
    cancel,
    expect_timeout,
    goes_on_when_told,
    head_alone,
    keeps_sending,
    pauses,
    relayed,
    resets_when_told,
    sends,
    sends_apart,
    silent,
    tell_and_hang,
)

# --- deadlines ----------------------------------------------------------------------------------------------------


async def test_silence_while_relaying_ends_by_the_gap_deadline(both: Pair) -> None:
    taker = Taker()
    async with relayed(both, tell_and_hang, taker, Deadlines(LONG, LONG, 0.1, LONG)) as (upstream, _, task):
        await expect_timeout(task, "gap")
        assert taker.data == b"one"
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_relay_that_gets_no_first_byte_at_all_ends_as_well(both: Pair) -> None:
    async with relayed(both, head_alone, Taker(), Deadlines(LONG, 0.3, 0.001, LONG)) as (_, _, task):
        await expect_timeout(task, "first byte")


async def test_each_read_starts_the_gap_anew(both: Pair) -> None:
    taker = Taker()
    async with relayed(both, pauses(5, 0.2), taker, Deadlines(LONG, LONG, 0.6, LONG)) as (upstream, _, task):
        await expect_timeout(task, "gap")
        assert taker.data == b"xxxxx"
        await eventually(lambda: upstream.open_connections == 0)


async def test_no_silence_is_counted_while_the_taker_has_no_room(both: Pair) -> None:
    taker = Taker(has_room=False)
    script = sends_apart(taker, chunk(b"one"), chunk(b"two"))
    async with relayed(both, script, taker, Deadlines(LONG, LONG, 0.2, LONG)) as (_, reply, task):
        await eventually(lambda: reply.unread_bytes > 0)
        await asyncio.sleep(0.6)  # longer than the gap
        assert taker.reads == [b"one"] and not task.done()
        taker.has_room = True
        reply.resume()
        assert taker.reads == [b"one", b"two"]
        await expect_timeout(task, "gap")  # from here on it counts


async def test_no_silence_is_counted_while_an_engine_with_more_to_send_is_held(both: Pair) -> None:
    flood, taker = Flood(), Taker(has_room=False)
    async with relayed(both, flood, taker, Deadlines(LONG, LONG, 1.0, LONG)) as (_, reply, task):
        await eventually(lambda: bool(taker.reads))
        await flood.stalls()
        await asyncio.sleep(1.2)  # longer than the gap
        assert len(taker.reads) == 1 and not task.done()
        taker.has_room = True
        reply.resume()
        await asyncio.wait_for(task, 30)
        assert len(taker.data) == flood.size


@pytest.mark.parametrize("has_room", [True, False])
async def test_the_total_deadline_holds_for_a_relay(both: Pair, has_room: bool) -> None:
    taker = Taker(has_room=has_room)
    async with relayed(both, keeps_sending(0.01), taker, Deadlines(LONG, LONG, LONG, 0.3)) as (upstream, reply, task):
        await eventually(lambda: upstream.open_connections == 0)
        if not has_room:
            reply.resume()  # what had come is still handed over, then the error
        await expect_timeout(task, "total")


@pytest.mark.parametrize("script", [sends(plain(b"x" * 300_000)), tell_and_hang], ids=["whole", "hangs"])
async def test_taker_that_never_has_room_again_ends_by_the_total_deadline(both: Pair, script: Script) -> None:
    taker = Taker(has_room=False)
    async with relayed(both, script, taker, Deadlines(LONG, LONG, LONG, 0.5)) as (upstream, _, task):
        await expect_timeout(task, "total")
        await eventually(lambda: upstream.open_connections == 0)


# --- ends ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("then", ["reset", "close", "garbage"])
async def test_a_relay_that_breaks_off_raises_after_what_had_come(both: Pair, then: str) -> None:
    taker = Taker()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await peer.send(chunk(b"two"))
        if then == "garbage":
            await peer.send(b"no chunk\r\n")
        elif then == "reset":
            await eventually(lambda: taker.data == b"onetwo")  # a reset may overtake what was sent before it
            peer.reset()

    async with relayed(both, script, taker) as (_, _, task):
        with pytest.raises(UpstreamBroken) as caught:
            await asyncio.wait_for(task, 10)
        assert caught.value.response_began and caught.value.request_sent
        assert taker.data == b"onetwo"


@pytest.mark.parametrize("then", ["reset", "close"])
async def test_an_error_behind_a_held_read_comes_after_it(both: Pair, then: str) -> None:
    has_come = asyncio.Event()
    taker = Taker(has_room=False)

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await eventually(lambda: taker.reads == [b"one"])
        await peer.send(chunk(b"two"))
        await has_come.wait()
        if then == "reset":
            peer.reset()

    async with relayed(both, script, taker) as (upstream, reply, task):
        await eventually(lambda: reply.unread_bytes > 0)
        has_come.set()
        await eventually(lambda: upstream.open_connections == 0 and reply.is_over)
        assert taker.reads == [b"one"] and not task.done()
        reply.resume()
        with pytest.raises(UpstreamBroken):
            await asyncio.wait_for(task, 10)
        assert taker.reads == [b"one", b"two"]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_taker_may_close_the_reply(both: Pair, at_once: bool) -> None:
    reads: list[bytes] = []
    replies: list[WireReply] = []

    def take(data: bytes) -> bool:
        reads.append(data)
        replies[0].close()
        return True

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        await eventually(lambda: bool(replies) and replies[0]._take is not None)
        await peer.send(chunk(b"x"))
        await peer.closed()

    async with both.upstream(keeps_sending(0.001) if at_once else script) as upstream:
        replies.append(await both.transport.send(upstream.url, POST, PATIENT))
        if at_once:  # bytes are there: the taker is called from `relay` itself
            await eventually(lambda: replies[0].unread_bytes > 0)
        with pytest.raises(UpstreamBroken, match="closed before its end"):
            await asyncio.wait_for(replies[0].relay(take), 10)
        assert len(reads) == 1
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("has_room", [True, False])
async def test_a_cancelled_relay_closes_the_engines_connection(both: Pair, has_room: bool) -> None:
    taker = Taker(has_room=has_room)
    async with relayed(both, sends_apart(taker, chunk(b"one"), chunk(b"two")), taker) as (upstream, _, task):
        await eventually(lambda: bool(taker.reads))
        await cancel(task, 2)
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)
        before = list(taker.reads)
        await asyncio.sleep(0.02)
        assert taker.reads == before, "nothing is handed over any more"


async def test_a_reply_that_broke_off_before_its_relay_began_is_told_after_what_had_come(both: Pair) -> None:
    has_come = asyncio.Event()
    async with both.upstream(resets_when_told(has_come)) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: reply.unread_bytes > 0)
        has_come.set()
        await eventually(lambda: upstream.open_connections == 0 and both.transport.active == 0)
        taker = Taker()
        with pytest.raises(UpstreamBroken) as caught:
            await reply.relay(taker)
        assert taker.data == b"one" and caught.value.response_began


async def test_close_of_a_relay_by_somebody_else_ends_it(both: Pair) -> None:
    async with both.upstream(silent, tell_and_hang) as upstream:
        waiting = asyncio.create_task(both.transport.send(upstream.url, POST, PATIENT))
        await eventually(lambda: len(upstream.requests) == 1)
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        taker = Taker()
        relaying = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.data == b"one")
        reply.close()
        with pytest.raises(UpstreamBroken):
            await relaying
        await cancel(waiting, 1)
        await eventually(lambda: upstream.open_connections == 0)


async def test_close_of_a_whole_reply_that_waits_for_room_ends_the_relay(both: Pair) -> None:
    go_on = asyncio.Event()
    script = goes_on_when_told(go_on, chunk(b"one"), chunk(b"two") + STREAM_END)
    taker = Taker(has_room=False)
    async with relayed(both, script, taker) as (_, reply, task):
        await eventually(lambda: taker.data == b"one")
        go_on.set()
        await eventually(lambda: both.transport.idle == 1)
        assert not task.done()
        reply.close()
        with pytest.raises(UpstreamBroken, match="closed before its end"):
            await task
        assert taker.data == b"one"
