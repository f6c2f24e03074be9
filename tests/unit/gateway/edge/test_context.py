"""Exchange on scripted ASGI messages: request ids, the body under its limit, hang-ups, and what a reply carries."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.asgi import Headers, Server

from gateway.domain.errors import BodyTimeout, BodyTooLarge, ClientGone, UnsupportedEncoding
from gateway.domain.request import RateState
from gateway.edge.context import Exchange, request_id_of


def exchange(server: Server) -> Exchange:
    return Exchange(server.scope, server.receive, server.send)


# --- request ids --------------------------------------------------------------------------------------------


def id_of(*values: bytes) -> str:
    return request_id_of(Server(headers=[(b"x-request-id", value) for value in values]).scope)


@pytest.mark.parametrize("value", [b"a", b"customer-42", b"4bf92f35-77b3.x_y", b"A" * 128])
def test_a_sane_request_id_is_kept(value: bytes) -> None:
    assert id_of(value) == value.decode()


@pytest.mark.parametrize(
    "values",
    [
        (),
        (b"",),
        (b"customer 42/\xc3\xa4",),
        (b"\xff",),
        (b"x" * 129,),
        (b"x" * 5000,),
        (b"a\r\nset-cookie: b",),
        (b"a\n",),
        (b"-a",),
        (b'a"b',),
        (b"a", b"a"),
        (b"a", b"b"),
    ],
)
def test_any_other_request_id_is_replaced_by_a_new_one(values: tuple[bytes, ...]) -> None:
    first, second = id_of(*values), id_of(*values)
    assert first.startswith("req-") and first.isascii() and len(first) < 64
    assert first != second


# --- the body -----------------------------------------------------------------------------------------------


async def read(server: Server, limit: int = 10, silence_s: float = 5, total_s: float = 50) -> bytes:
    return await exchange(server).read_body(limit, silence_s, total_s)


@pytest.mark.parametrize("pieces", [[b""], [b"12345"], [b"12", b"", b"345"], [b"1"] * 10, [b"1234567890"]])
async def test_a_body_up_to_the_limit_is_read_whole_however_it_comes(pieces: list[bytes]) -> None:
    assert await read(Server(pieces)) == b"".join(pieces)


@pytest.mark.parametrize(
    ("pieces", "declared"),
    [
        ([b"12345678901"], None),
        ([b"1"] * 11, None),
        ([b"1"] * 100_000, None),
        ([b"123456", b"789012"], b"10"),
        ([b"1"], b"11"),
        ([b"1"], b"9" * 400),
    ],
    ids=["one piece", "many", "endless", "more than declared", "declared", "declared absurdly"],
)
async def test_a_body_over_the_limit_is_cut_there_whatever_the_headers_say(
    pieces: list[bytes], declared: bytes | None
) -> None:
    server = Server(pieces, headers=[] if declared is None else [(b"content-length", declared)])
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        await read(server)


@pytest.mark.parametrize("declared", [b"abc", b"-1", b"", b"5"])
async def test_a_wrong_length_is_not_believed(declared: bytes) -> None:
    assert await read(Server([b"123"], headers=[(b"content-length", declared)])) == b"123"


async def test_a_stalled_upload_ends_at_its_deadline() -> None:
    server = Server([b"1", b"2"])
    server._incoming.pop()
    with pytest.raises(BodyTimeout, match=r"stopped arriving for 0\.001 s"):
        await read(server, silence_s=0.001)


async def test_a_body_that_drips_is_not_read_for_ever() -> None:
    server = Server([b""] * 100_000)  # each piece in time, none of them the last
    with pytest.raises(BodyTimeout, match=r"not whole after 0\.001 s"):
        await read(server, total_s=0.001)


async def test_a_caller_who_leaves_while_sending_is_gone() -> None:
    server = Server([b"1", b"2"])
    server._incoming.pop()
    server.hang_up()
    with pytest.raises(ClientGone):
        await read(server)


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"gzip, gzip", b"GZIP", b"unheard-of"])
async def test_a_compressed_body_is_a_415_that_says_so(encoding: bytes) -> None:
    with pytest.raises(UnsupportedEncoding, match="Content-Encoding"):
        await read(Server(b"\x1f\x8b", headers=[(b"content-encoding", encoding)]))


@pytest.mark.parametrize("encoding", [b"identity", b" Identity "])
async def test_identity_is_no_compression(encoding: bytes) -> None:
    assert await read(Server(b"123", headers=[(b"content-encoding", encoding)])) == b"123"


# --- hang-ups -----------------------------------------------------------------------------------------------


async def working(server: Server, made: list[Exchange]) -> None:
    """A handler's task that would work for ever."""
    mine = exchange(server)
    made.append(mine)
    mine.watch()
    try:
        await asyncio.Event().wait()
    finally:
        mine.unwatch()


async def started(server: Server) -> tuple[asyncio.Task[None], Exchange]:
    made: list[Exchange] = []
    server._incoming.clear()
    task = asyncio.create_task(working(server, made))
    await asyncio.sleep(0)  # one turn of the loop: it is at work now
    return task, made[0]


async def test_work_is_cancelled_when_the_caller_hangs_up() -> None:
    server = Server()
    task, mine = await started(server)
    server.hang_up()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mine.is_gone and not mine.is_ended


async def test_an_exchange_ended_by_us_is_not_a_hang_up() -> None:
    task, mine = await started(Server())
    mine.end()
    mine.end()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert mine.is_ended and not mine.is_gone


async def test_a_caller_who_is_gone_is_not_ended_once_more() -> None:
    task, mine = await started(Server())
    mine.abandon()
    mine.abandon()
    mine.end()
    assert task.cancelling() == 1
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_servers_own_disconnect_behind_a_whole_reply_is_no_hang_up() -> None:
    server = Server(b"x")
    mine = exchange(server)
    await mine.read_body(10, 5, 50)
    mine.watch()
    await mine.start(200, [])
    await mine.finish(b"x")
    server.hang_up()
    await asyncio.sleep(0)
    assert not mine.is_gone


async def test_only_a_write_that_hangs_is_seen_by_the_sweep() -> None:
    server = Server()
    server.stalls_at = 1
    mine = exchange(server)
    await mine.start(200, [])
    assert mine.writing_since is None
    task = asyncio.create_task(mine.write(b"x"))
    await server.stalled.wait()
    assert mine.writing_since is not None
    task.cancel()


# --- replies ------------------------------------------------------------------------------------------------


def with_id(**more: Any) -> Server:
    return Server(headers=[(b"x-request-id", b"mine")], **more)


async def test_every_reply_carries_the_request_id_and_what_is_left_of_the_limits() -> None:
    server = with_id()
    mine = exchange(server)
    mine.rate = RateState(limit_requests=5, remaining_requests=4)
    await mine.start(200, [(b"content-type", b"text/plain")])
    assert server.headers == {
        b"content-type": b"text/plain",
        b"x-ratelimit-limit-requests": b"5",
        b"x-ratelimit-remaining-requests": b"4",
        b"x-request-id": b"mine",
    }
    assert mine.has_started and mine.status == 200


async def test_an_engines_refusal_comes_in_our_envelope() -> None:
    server = with_id()
    await exchange(server).refuse(400, "no", "BadRequestError", "messages", 400, None)
    assert server.error() == {"message": "no", "type": "BadRequestError", "param": "messages", "code": 400}
    assert server.headers[b"x-poolgate-error-source"] == b"engine"
    assert server.headers[b"x-request-id"] == b"mine"


async def streamed(*writes: bytes) -> bytes:
    server = Server()
    mine = exchange(server)
    await mine.start(200, [])
    for data in writes:
        await mine.write(data)
    await mine.end_with(b"data: {error}\n\n")
    assert server.is_whole
    return server.body


@pytest.mark.parametrize("before", [b"data: 1\n\n", b"data: 1\r\n\r\n", b"data: 1\r\r"])
async def test_an_error_event_follows_whole_events_directly(before: bytes) -> None:
    assert await streamed(before) == before + b"data: {error}\n\n"
    assert await streamed() == b"data: {error}\n\n"


@pytest.mark.parametrize("before", [b'data: {"cho', b"data: 1\n", b"da", b"data: 1\n\ndata"])
async def test_an_error_event_is_not_swallowed_by_an_event_that_broke_off(before: bytes) -> None:
    body = await streamed(b"data: 0\n\n", before)
    assert body.endswith(b"\n\ndata: {error}\n\n") or body.endswith(b"\n\n\ndata: {error}\n\n")


async def test_headers_are_found_by_name_the_first_one_counts() -> None:
    headers: Headers = [(b"a", b"1"), (b"b", b"2"), (b"b", b"3")]
    mine = exchange(Server(headers=headers))
    assert (mine.header(b"b"), mine.header(b"c")) == (b"2", None)
