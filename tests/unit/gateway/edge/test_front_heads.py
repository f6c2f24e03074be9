"""Front and heads that are none, are too long, or wish for another protocol."""

from __future__ import annotations

import asyncio

import pytest
from fakes.front_work import AT_ONCE, Work, connected, request
from fakes.waits import loop_turns

from gateway.edge.front import HEAD_BYTES


@pytest.mark.parametrize(("size", "status"), [(HEAD_BYTES - 200, 200), (HEAD_BYTES + 10, 431)])
async def test_a_head_that_comes_in_one_read_is_measured_without_what_is_behind_it(size: int, status: int) -> None:
    client = connected(AT_ONCE)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nx-a: " + b"a" * size + b"\r\ncontent-length: 9000\r\n\r\n"
    client.send(head + b"x" * 9000)
    await client.idle()
    assert client.status == status


@pytest.mark.parametrize("piece", [1000, 50_000])
async def test_a_head_without_end_is_refused(piece: int) -> None:
    client = connected(AT_ONCE)
    client.send(b"POST / HTTP/1.1\r\nX-Long: ")
    while not client.line.is_closed:
        assert not client.line.written and client.state.total_requests == 0
        client.send(b"a" * piece)
        assert client.front._head_bytes <= HEAD_BYTES + piece
    reply = client.reply
    assert (reply.status, reply.error()["code"]) == (431, "request_head_too_large")
    assert reply.headers[b"connection"] == b"close"
    assert reply.headers[b"x-poolgate-error-source"] == b"client"
    assert reply.headers[b"x-request-id"].startswith(b"req-")


async def test_a_body_does_not_count_as_a_head() -> None:
    work = Work(reads=True)
    client = connected(work.handlers)
    data = request("a", b"x" * (4 * HEAD_BYTES))
    for start in range(0, len(data), 10_000):
        client.send(data[start : start + 10_000])
        await asyncio.sleep(0)
    await loop_turns()
    await work.answer(0)
    assert client.status == 200 and len(work.bodies[0]) == 4 * HEAD_BYTES


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff no http\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nA : b\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_answered_in_the_error_envelope(data: bytes) -> None:
    client = connected(Work().handlers)
    client.send(data)
    await loop_turns()
    replies = client.replies()
    assert client.line.is_closed
    if replies:
        assert (replies[-1].status, replies[-1].error()["code"]) == (400, "invalid_request")


async def test_garbage_behind_a_request_ends_the_connection_after_its_reply() -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a") + b"\x00 garbage\r\n\r\n")
    await loop_turns()
    assert not client.line.is_closed
    await work.answer(0)
    (reply,) = client.replies()
    assert (reply.body, reply.headers[b"connection"]) == (b"a", b"close")
    assert client.line.is_closed and work.cancelled == 0


@pytest.mark.parametrize(
    "behind",
    [
        b"POST /a HTTP/1.1\r\nX-Long: " + b"a" * (HEAD_BYTES + 10) + b"\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n",
    ],
    ids=["too long", "connect"],
)
async def test_a_head_that_is_refused_does_not_cut_off_the_reply_ahead_of_it(behind: bytes) -> None:
    work = Work()
    client = connected(work.handlers)
    client.send(request("a"))
    await loop_turns()
    client.send(behind)
    await loop_turns()
    assert not client.line.is_closed
    await work.answer(0)
    (reply,) = client.replies()
    assert reply.body == b"a" and client.line.is_closed and work.cancelled == 0


# --- another protocol -------------------------------------------------------------------------------------------

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("reads", ["one", "head first", "bytes"])
async def test_the_wish_for_another_protocol_loses_no_body_and_starts_no_other_request(reads: str) -> None:
    inner = b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(inner)
    whole = head + inner + request("b")
    work = Work(reads=True)
    client = connected(work.handlers)
    pieces = [whole[i : i + 1] for i in range(len(whole))]
    cuts = {"one": [whole], "head first": [head, whole[len(head) :]], "bytes": pieces}
    for data in cuts[reads]:
        client.send(data)
    await loop_turns()
    await work.answer(0)
    await work.answer(1)
    assert work.bodies == [inner, b"{}"]
    assert len(client.replies()) == 2 and not client.line.is_closed


async def test_a_proxys_connect_is_refused() -> None:
    client = connected(AT_ONCE)
    client.send(b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
    assert client.status == 400 and client.line.is_closed
