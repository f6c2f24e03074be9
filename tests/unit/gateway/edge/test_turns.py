"""Turns under a real Front: one reply after the other, a client that does not read, and one that leaves."""

from __future__ import annotations

import asyncio
import gc

import pytest
from fakes.client import Client, Timers
from fakes.front_work import AT_ONCE, CHAT, Work, connected, request
from fakes.waits import loop_turns

from gateway.edge.context import Exchange
from gateway.edge.front import Front
from gateway.edge.incoming import EARLY_BODY_BYTES
from gateway.edge.timers import KEEP_ALIVE_S
from gateway.edge.turns import MAX_PIPELINED


async def test_pipelined_requests_are_answered_in_their_order_one_at_a_time() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") + request("b") + request("c"))
    await loop_turns()
    assert len(work.exchanges) == 1 and client.line.is_reading, "else nobody would notice that the caller leaves"
    for i, id_ in enumerate("abc"):
        assert len(work.exchanges) == i + 1
        await work.answer(i)
        assert client.replies()[-1].body == id_.encode()
    assert client.line.is_reading and not client.line.is_closed
    assert client.state.total_requests == 3


async def test_proxied_and_other_paths_keep_their_order_too() -> None:
    client = connected(AT_ONCE)
    client.send(request("a") + request(path="/x", method="GET", body=b"") + request("b") + request(path="/y"))
    await client.idle()
    assert [reply.body for reply in client.replies()] == [b"a", b"/x?", b"b", b"/y?"]


async def test_a_body_that_comes_in_pieces_behind_another_request_reaches_its_own_exchange() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    second = request("b", b"0123456789")
    client.send(request("a", b"first") + second[:-10])
    await loop_turns()
    await work.answer(0)
    for i in range(10):
        client.send(second[len(second) - 10 + i :][:1])
        await loop_turns()
    await work.answer(1)
    assert work.bodies == [b"first", b"0123456789"]
    assert [reply.body for reply in client.replies()] == [b"a", b"b"]


async def test_of_a_heap_of_pipelined_requests_the_first_are_answered_and_the_last_reply_says_so() -> None:
    client = connected(AT_ONCE)
    client.send(request() * (MAX_PIPELINED + 20))
    await client.idle()
    replies = client.replies()
    assert len(replies) == MAX_PIPELINED + 1 and client.line.is_closed
    assert [reply.headers.get(b"connection") for reply in replies[-2:]] == [None, b"close"]


async def test_as_many_pipelined_requests_as_are_allowed_are_all_answered() -> None:
    client = connected(AT_ONCE)
    client.send(request() * (MAX_PIPELINED + 1))
    await client.idle()
    assert len(client.replies()) == MAX_PIPELINED + 1


# --- a client that does not read --------------------------------------------------------------------------------


async def streaming(client: Client, write_s: float, timers: Timers) -> Exchange:
    work = Work()
    client.connect(work.handlers, write_s=write_s, timers=timers)
    client.send(request("a"))
    await loop_turns()
    (exchange,) = work.exchanges
    exchange.start(200, [])
    exchange.write(b"1")
    return exchange


async def test_a_client_that_takes_nothing_for_too_long_is_cut() -> None:
    timers, client = Timers(), Client()
    exchange = await streaming(client, 7, timers)
    client.stop_reading()
    assert not exchange.write(b"2")
    timers.advance(6.9)
    assert not client.line.is_closed
    timers.advance(0.1)
    await client.idle()
    assert client.line.was_cut and exchange.is_gone


async def test_a_client_that_reads_on_in_time_is_not_cut() -> None:
    timers, client = Timers(), Client()
    exchange = await streaming(client, 7, timers)
    room: list[int] = []
    exchange.on_room = lambda: room.append(1)
    for _ in range(5):
        client.stop_reading()
        timers.advance(6)
        client.read_on()
        timers.advance(6)
    assert not client.line.is_closed and len(room) == 5
    assert exchange.write(b"2")


@pytest.mark.parametrize("path", [CHAT, "/x"])
@pytest.mark.parametrize("ahead", [1, 2])
async def test_a_long_body_behind_another_request_is_not_waited_for_with_closed_eyes(path: str, ahead: int) -> None:
    """Else nobody would notice that the caller leaves; it is told to send that request once more elsewhere."""
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") * ahead + request("b", bytes(EARLY_BODY_BYTES + 1), path=path) + request("c"))
    await loop_turns()
    assert client.line.is_reading
    for number in range(ahead):
        assert len(work.exchanges) == number + 1
        await work.answer(number)
    client.send(request("d"))
    await client.idle()
    replies = client.replies()
    assert [reply.body for reply in replies] == [b"a"] * ahead and len(work.exchanges) == ahead
    assert replies[-1].headers[b"connection"] == b"close"


async def test_a_long_body_that_only_waits_for_its_caller_to_read_is_kept() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    client.send(request("a"))
    await loop_turns()
    client.stop_reading()
    await work.answer(0)
    whole = request("b", bytes(2 * EARLY_BODY_BYTES))
    client.send(whole[:-9])
    assert not client.line.is_reading
    client.read_on()
    await loop_turns()
    assert client.line.is_reading
    client.send(whole[-9:])
    await loop_turns()
    await work.answer(1)
    assert [reply.body for reply in client.replies()] == [b"a", b"b"]


async def test_nothing_is_begun_for_a_client_that_does_not_read_what_it_asked_for() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") + request("b"))
    await loop_turns()
    client.stop_reading()
    await work.answer(0)
    client.send(request("c"))
    await loop_turns()
    assert len(work.exchanges) == 1
    client.read_on()
    await loop_turns()
    assert len(work.exchanges) == 2
    await work.answer(1)
    await work.answer(2)
    assert [reply.body for reply in client.replies()] == [b"a", b"b", b"c"]
    assert not client.line.is_closed


async def test_a_request_that_comes_while_the_last_reply_is_not_read_waits_and_is_no_idleness() -> None:
    timers, work = Timers(), Work()
    client = Client()
    client.connect(work.handlers, write_s=1000, timers=timers)
    client.send(request("a"))
    await loop_turns()
    client.stop_reading()
    await work.answer(0)
    client.send(request("b"))
    await loop_turns()
    client.line.untaken = 5
    timers.advance(2 * KEEP_ALIVE_S)
    assert len(work.exchanges) == 1 and not client.line.is_closed
    client.read_on()
    await loop_turns()
    await work.answer(1)
    assert [reply.body for reply in client.replies()] == [b"a", b"b"]


async def test_garbage_behind_requests_that_wait_for_a_reader_is_refused_behind_them() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a"))
    await loop_turns()
    client.stop_reading()
    await work.answer(0)
    client.send(request("b"))
    client.send(b"\0\0\0\r\n\r\n")
    client.read_on()
    await loop_turns()
    await work.answer(1)
    await client.idle()
    assert [reply.body for reply in client.replies()] == [b"a", b"b"] and client.line.is_closed


# --- a client that leaves ---------------------------------------------------------------------------------------


async def test_a_caller_who_leaves_with_a_request_pipelined_behind_is_noticed() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a"))
    client.send(request("b"))
    await loop_turns()
    assert client.line.is_reading
    client.hang_up()
    await client.idle()
    assert work.cancelled == 1 and len(work.exchanges) == 1


async def test_a_client_that_half_closes_and_does_not_read_has_left() -> None:
    """The transport closes once all is written, which may never be: the work ends at once."""
    timers, client = Timers(), Client()
    exchange = await streaming(client, 1000, timers)
    client.stop_reading()
    client.front.eof_received()
    await loop_turns()
    assert exchange.is_gone and exchange.task is None


@pytest.mark.parametrize("state", ["reads its body", "works", "streams", "waits for room"])
async def test_a_client_that_leaves_ends_the_work_in_every_state(state: str) -> None:
    cancelled = asyncio.Event()

    async def work(exchange: Exchange) -> None:
        try:
            if state == "reads its body":
                await exchange.read_body(1000, 60, 60)
            elif state in ("streams", "waits for room"):
                exchange.start(200, [])
                exchange.write(b"1")
                if state == "waits for room":
                    client.stop_reading()
                    await exchange.drained()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            assert exchange.is_gone
            cancelled.set()
            exchange.write(b"too late")
            raise
        finally:
            exchange.close()

    client = connected({CHAT.encode(): work})
    data = request("a", b"0123456789")
    client.send(data[:-5] if state == "reads its body" else data)
    await loop_turns()
    before = bytes(client.line.written)
    client.hang_up()
    await client.idle()
    assert cancelled.is_set() and client.line.written == before
    assert not client.state.connections and not client.state.tasks


async def test_a_client_that_leaves_before_its_handler_began_has_it_never_begin() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request())
    client.hang_up()
    await client.idle()
    assert work.exchanges == [] or work.cancelled == 1


async def test_requests_that_waited_behind_never_begin() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") + request("b") + request("c"))
    await loop_turns()
    client.hang_up()
    await client.idle()
    assert len(work.exchanges) == 1 and work.cancelled == 1


async def test_bytes_that_come_after_the_end_are_nobodys() -> None:
    work = Work()
    client = connected(work.handlers)
    client.hang_up()
    client.send(request())
    await loop_turns()
    assert work.exchanges == []


@pytest.mark.parametrize("begin", [b"", b"POST /v1", request()[:-1], request()])
async def test_a_lost_connection_leaves_no_timer_behind(begin: bytes) -> None:
    timers = Timers()
    client = connected(AT_ONCE, timers)
    client.send(begin)
    client.stop_reading()
    client.hang_up()
    await client.idle()
    assert timers.pending == 0


async def test_a_connection_is_freed_without_the_garbage_collector() -> None:
    client = connected(AT_ONCE)
    client.send(request())
    await client.idle()
    client.hang_up()
    gc.collect()
    before = sum(isinstance(thing, Front) for thing in gc.get_objects())
    gc.disable()
    try:
        del client.front, client.line.protocol
        after = sum(isinstance(thing, Front) for thing in gc.get_objects())
    finally:
        gc.enable()
    assert after == before - 1
