"""Exchange on a line in memory: who is gone, what a reply looks like, and a client that does not take it."""

from __future__ import annotations

import asyncio

import pytest

from gateway.domain.request import RateState
from gateway.edge.context import Exchange

from .exchange_line import exchange


# --- hang-ups -----------------------------------------------------------------------------------------------
async def working() -> tuple[asyncio.Task[None], Exchange]:
    """An exchange whose handler would work for ever."""

    async def work() -> None:
        await asyncio.Event().wait()

    mine, _ = exchange()
    mine.task = asyncio.create_task(work())
    await asyncio.sleep(0)  # one turn of the loop: it is at work now
    return mine.task, mine


async def test_work_is_cancelled_when_the_caller_hangs_up() -> None:
    task, mine = await working()
    mine.abandon()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mine.is_gone and not mine.is_ended


async def test_an_exchange_ended_by_us_is_not_a_hang_up() -> None:
    task, mine = await working()
    mine.end()
    mine.end()
    assert task.cancelling() == 1
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mine.is_ended and not mine.is_gone


async def test_a_caller_who_is_gone_is_not_ended_once_more() -> None:
    task, mine = await working()
    mine.abandon()
    mine.abandon()
    mine.end()
    assert task.cancelling() == 1
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_who_leaves_behind_a_whole_reply_did_not_hang_up() -> None:
    task, mine = await working()
    mine.reply(200, [], b"x")
    mine.abandon()
    assert not mine.is_gone and not task.cancelling()
    task.cancel()


def test_an_exchange_without_a_whole_reply_is_cut_when_its_handler_is_done() -> None:
    for begin in (lambda mine: None, lambda mine: mine.start(200, [])):
        mine, line = exchange()
        begin(mine)
        mine.close()
        assert line.calls == ["handler ended", "cut"]
    mine, line = exchange()
    mine.reply(200, [], b"x")
    mine.close()
    assert line.calls == ["ended", "handler ended"]


# --- replies ------------------------------------------------------------------------------------------------


def test_every_reply_carries_the_request_id_and_what_is_left_of_the_limits() -> None:
    for answer in (
        lambda mine: mine.reply(200, [(b"content-type", b"text/plain")], b"ok"),
        lambda mine: (mine.start(200, [(b"content-type", b"text/plain")]), mine.finish(b"ok")),
    ):
        mine, line = exchange()
        mine.rate = RateState(limit_requests=5, remaining_requests=4)
        answer(mine)
        reply = line.reply()
        lengths = {b"content-length", b"transfer-encoding"}
        assert {name: value for name, value in reply.headers.items() if name not in lengths} == {
            b"content-type": b"text/plain",
            b"x-ratelimit-limit-requests": b"5",
            b"x-ratelimit-remaining-requests": b"4",
            b"x-request-id": b"mine",
        }
        assert reply.is_whole and reply.body == b"ok" and line.calls == ["ended"]
        assert mine.has_started and mine.response_complete and mine.status == 200


@pytest.mark.parametrize("size", [0, 1, 65_536, 65_537, 1_000_000])
def test_a_whole_reply_tells_its_length(size: int) -> None:
    mine, line = exchange()
    mine.reply(200, [], b"x" * size)
    assert line.reply().headers[b"content-length"] == b"%d" % size
    assert line.reply().is_whole and line.reply().body == b"x" * size


def test_the_answer_to_a_head_is_the_head_alone() -> None:
    mine, line = exchange(method="HEAD")
    mine.reply(405, [(b"allow", b"POST")], b"12345")
    reply = line.reply(is_head=True)
    assert (reply.status, reply.headers[b"content-length"]) == (405, b"5")
    assert line.written.endswith(b"\r\n\r\n")


def test_a_status_without_a_name_is_still_a_status() -> None:
    mine, line = exchange()
    mine.reply(499, [], b"")
    assert line.reply().status == 499


def test_a_stream_goes_out_write_by_write_its_head_with_the_first() -> None:
    mine, line = exchange()
    mine.start(200, [])
    assert line.written == b""
    assert mine.write(b"data: 1\n\n")
    assert line.reply().pieces == [b"data: 1\n\n"]
    assert mine.write(b"data: 2\n\n")
    mine.finish()
    assert line.reply().pieces == [b"data: 1\n\n", b"data: 2\n\n"] and line.reply().is_whole
    assert mine.keep_alive


def test_a_client_of_http_1_0_gets_its_stream_without_chunks_and_the_end_of_the_connection() -> None:
    mine, line = exchange(version="1.0")
    mine.start(200, [])
    mine.write(b"data: 1\n\n")
    mine.finish(b"data: 2\n\n")
    reply = line.reply()
    assert reply.body == b"data: 1\n\ndata: 2\n\n"
    assert reply.headers[b"connection"] == b"close" and b"transfer-encoding" not in reply.headers
    assert not mine.keep_alive


def test_a_reply_that_closes_says_so_once() -> None:
    mine, line = exchange()
    mine.reply(413, [(b"connection", b"close")], b"x")
    assert line.reply().headers[b"connection"] == b"close" and not mine.keep_alive


def test_an_engines_refusal_comes_in_our_envelope() -> None:
    mine, line = exchange()
    mine.refuse(400, "no", "BadRequestError", "messages", 400)
    reply = line.reply()
    assert reply.error() == {"message": "no", "type": "BadRequestError", "param": "messages", "code": 400}
    assert reply.headers[b"x-poolgate-error-source"] == b"engine"
    assert reply.headers[b"x-request-id"] == b"mine"


def streamed(*writes: bytes) -> bytes:
    mine, line = exchange()
    mine.start(200, [])
    for data in writes:
        mine.write(data)
    mine.fail(502, (), b"{error}")
    assert line.reply().is_whole
    return line.reply().body


@pytest.mark.parametrize("before", [b"data: 1\n\n", b"data: 1\r\n\r\n", b"data: 1\r\r"])
def test_an_error_event_follows_whole_events_directly(before: bytes) -> None:
    assert streamed(before) == before + b"data: {error}\n\n"
    assert streamed() == b"data: {error}\n\n"


@pytest.mark.parametrize("before", [b'data: {"cho', b"data: 1\n", b"da", b"data: 1\n\ndata"])
def test_an_error_event_is_not_swallowed_by_an_event_that_broke_off(before: bytes) -> None:
    body = streamed(b"data: 0\n\n", before)
    assert body.endswith(b"\n\ndata: {error}\n\n") or body.endswith(b"\n\n\ndata: {error}\n\n")


# --- a client that does not take what is written ----------------------------------------------------------------
async def test_a_full_line_is_told_to_the_writer_and_room_to_whoever_waits() -> None:
    mine, line = exchange()
    room: list[str] = []
    mine.on_room = lambda: room.append("room")
    mine.start(200, [])
    line.is_full = True
    assert not mine.write(b"data: 1\n\n")
    waiting = asyncio.create_task(mine.drained())
    await asyncio.sleep(0)
    assert not waiting.done() and room == []
    line.is_full = False
    mine.room()
    await asyncio.wait_for(waiting, 5)
    assert room == ["room"]
    assert mine.write(b"data: 2\n\n")


async def test_nobody_waits_for_room_that_is_there() -> None:
    mine, _ = exchange()
    await asyncio.wait_for(mine.drained(), 5)


def test_a_reply_that_is_whole_wants_no_room_any_more() -> None:
    mine, _ = exchange()
    mine.on_room = lambda: pytest.fail("called for a reply that has ended")
    mine.start(200, [])
    mine.finish(b"x")
    mine.room()
