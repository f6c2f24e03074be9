"""Front on a transport in memory: which requests it reads from the bytes of a client, and who answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from fakes.client import KEY, request_pieces
from fakes.front_work import AT_ONCE, CHAT, Work, at_once, connected, request
from fakes.waits import loop_turns

from gateway.domain.errors import BadRequest
from gateway.edge.context import Exchange
from gateway.edge.incoming import EARLY_BODY_BYTES


@pytest.mark.parametrize("path", [CHAT, CHAT + "/?a=b", "http://gateway.test:8080" + CHAT])
async def test_a_proxied_path_is_answered_by_its_handler(path: str) -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a", path=path))
    await loop_turns()
    assert len(work.exchanges) == 1
    await work.answer(0)
    assert client.body == b"a"


@pytest.mark.parametrize("path", ["/", CHAT + "/batch"])
async def test_every_other_path_is_answered_by_the_app(path: str) -> None:
    client = connected(Work().handlers)
    client.send(request(path=path + "?q=1", method="GET", body=b""))
    await client.idle()
    assert client.body == path.encode() + b"?q=1"


@pytest.mark.parametrize("target", ["*", "http://", "http://[", "/\xff", "ftp:x"])
async def test_a_target_that_is_no_path_is_answered_and_ends_no_more_than_its_connection(target: str) -> None:
    client = connected(Work().handlers, method="OPTIONS")
    client.send(b"OPTIONS %b HTTP/1.1\r\nHost: x\r\n\r\n" % target.encode("latin-1"))
    await client.idle()
    await loop_turns()
    assert client.status in (200, 400)


async def test_a_head_request_to_a_proxied_path_gets_no_body() -> None:
    client = connected(AT_ONCE, method="HEAD")
    client.send(request("a", b"", method="HEAD") * 2)
    await client.idle()
    assert [reply.headers[b"content-length"] for reply in client.replies()] == [b"1", b"1"]


async def test_header_names_are_small_and_trailers_are_no_headers() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    client.send(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Session-ID: A\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"2\r\n{}\r\n0\r\nX-Api-Key: sk-late\r\nX-Session-Id: B\r\n\r\n"
    )
    await loop_turns()
    (exchange,) = work.exchanges
    assert (b"x-session-id", b"A") in exchange.headers
    assert exchange.header(b"x-api-key") is None and b"sk-late" not in dict(exchange.headers).values()
    assert work.bodies == [b"{}"]


def every_cut(data: bytes) -> Callable[[int], list[bytes]]:
    return lambda size: [data[i : i + size] for i in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 100_000])
async def test_requests_cut_anywhere_are_the_same_requests(size: int) -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    chunked = b"".join(request_pieces([b"one", b"two"], "POST", CHAT + "?x=1", [KEY, (b"x-request-id", b"b")]))
    data = request("a", b"plain") + chunked + request("c", b"")
    for piece in every_cut(data)(size):
        client.send(piece)
    await loop_turns()
    for i in range(3):
        await work.answer(i)
    assert work.bodies == [b"plain", b"onetwo", b""]
    assert [reply.body for reply in client.replies()] == [b"a", b"b", b"c"]


# --- the body ---------------------------------------------------------------------------------------------------


async def test_a_body_behind_an_early_refusal_is_dropped_and_the_next_request_heard() -> None:
    client = connected(AT_ONCE)
    first = request("a", b"x" * 10_000)
    client.send(first[:-9_000])
    await client.idle()
    assert client.body == b"a" and not client.line.is_closed
    client.send(first[-9_000:-100])
    client.send(first[-100:] + request("b"))
    await client.idle()
    assert [reply.body for reply in client.replies()] == [b"a", b"b"]


async def test_an_upload_that_was_held_back_when_it_was_whole_hides_no_end_of_its_caller() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    client.send(request("a", b"x" * 100_000))
    await loop_turns()
    assert len(work.bodies[0]) == 100_000
    assert client.line.is_reading


async def test_a_request_that_was_refused_early_gets_no_second_answer_for_its_broken_body() -> None:
    client = connected(AT_ONCE)
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    await client.idle()
    client.send(b"zz\r\n")
    await loop_turns()
    assert len(client.replies()) == 1 and client.line.is_closed


async def test_an_upload_is_held_back_until_its_handler_asks_for_it() -> None:
    asked = asyncio.Event()
    bodies: list[bytes] = []

    async def slow(exchange: Exchange) -> None:
        await asked.wait()
        bodies.append(await exchange.read_body(1 << 30, 60, 60))
        await at_once(exchange)

    client = connected({CHAT.encode(): slow})
    data = request("a", b"x" * (4 * EARLY_BODY_BYTES))
    client.send(data[: 2 * EARLY_BODY_BYTES])
    await loop_turns()
    assert not client.line.is_reading
    asked.set()
    await loop_turns()
    assert client.line.is_reading
    client.send(data[2 * EARLY_BODY_BYTES :])
    await client.idle()
    assert bodies == [b"x" * (4 * EARLY_BODY_BYTES)]


async def test_an_upload_that_was_held_back_when_it_was_refused_is_taken_and_dropped() -> None:
    work = Work()
    client = connected(work.handlers)
    data = request("a", b"x" * (4 * EARLY_BODY_BYTES))
    client.send(data[: 2 * EARLY_BODY_BYTES])
    assert not client.line.is_reading
    await loop_turns()
    await work.answer(0)
    assert client.line.is_reading
    client.send(data[2 * EARLY_BODY_BYTES :] + request("b"))
    await loop_turns()
    assert len(work.exchanges) == 2


async def test_a_caller_who_waits_for_a_word_before_its_body_gets_it_once() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    client.send(b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n" % CHAT.encode())
    await loop_turns()
    assert [reply.status for reply in client.replies()] == [100]
    client.send(b"{")
    client.send(b"}")
    await loop_turns()
    await work.answer(0)
    assert [reply.status for reply in client.replies()] == [100, 200]
    client.send(request("b"))
    await loop_turns()
    assert [reply.status for reply in client.replies()] == [100, 200], "only the first one asked"


@pytest.mark.parametrize("size", [b"zz", b"0x4d", b"-5", b"1" * 30])
async def test_a_body_whose_chunks_are_broken_is_the_requests_fault_and_answered(size: bytes) -> None:
    found: list[Exception] = []

    async def reading(exchange: Exchange) -> None:
        try:
            await exchange.read_body(1 << 20, 60, 60)
        except BadRequest as exc:
            found.append(exc)
            exchange.reply(400, [], b"no")
        exchange.close()

    client = connected({CHAT.encode(): reading})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    client.send(head + size + b"\r\n{}\r\n")
    await client.idle()
    assert client.status == 400 and client.headers[b"connection"] == b"close" and len(found) == 1


@pytest.mark.parametrize("rest", [b"a" * 70_000, b"x: y\r\n" * 12_000], ids=["one", "many"])
async def test_trailers_without_end_are_cut_off(rest: bytes) -> None:
    client = connected(AT_ONCE)
    client.send(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
    client.send(b"2\r\n{}\r\n0\r\nx-a: ")
    for start in range(0, len(rest), 1000):
        if client.line.is_closed:
            break
        client.send(rest[start : start + 1000])
    assert client.line.is_closed
