"""What an exchange promises, plain and in TLS, beside what the files of the wire's parts say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, chunk, eventually, plain

from gateway.domain.errors import ConnectFailed, UpstreamBroken
from gateway.upstream.transport import Deadlines, UpstreamRequest

from .conftest import Pair

LONG = 60.0  # longer than the fake upstream waits: a deadline that does not come when it should fails the test
PATIENT = Deadlines(LONG, LONG, LONG, LONG)
POST = UpstreamRequest(b"POST", b"/v1/chat/completions", ((b"content-type", b"application/json"),), b'{"a":1}')


async def answer_ok(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(plain(b"hello"))


async def silent(peer: Peer) -> None:
    await peer.request()
    await peer.closed()


async def tell_and_hang(peer: Peer) -> None:
    await peer.request()
    await peer.send(STREAM_HEAD + chunk(b"one"))
    await peer.closed()


async def fetch(both: Pair, url: str, request: UpstreamRequest = POST) -> bytes:
    reply = await both.transport.send(url, request, PATIENT)
    try:
        return await reply.read_all(1 << 20)
    finally:
        reply.close()


async def cancel(task: asyncio.Task[object], times: int) -> None:
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


# --- what travels ---------------------------------------------------------------------------------------------------


async def test_request_arrives_as_it_is_meant_to(both: Pair) -> None:
    headers = (
        (b"connection", b"close, X-Secret-Hop"),
        (b"x-secret-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"Keep-Alive", b"timeout=5"),
        (b"proxy-authorization", b"Basic x"),
        (b"expect", b"100-continue"),
        (b"accept-encoding", b"gzip"),
        (b"content-length", b"5"),
        (b"host", b"elsewhere"),
        (b"authorization", b"Bearer engine-key"),
        (b"x-request-id", b"r1"),
    )
    async with both.upstream(answer_ok) as upstream:
        request = UpstreamRequest(b"POST", b"/v1/x?a=%20b", headers, b"x" * 77)
        assert await fetch(both, upstream.url + "/prefix/", request) == b"hello"
        received = upstream.requests[0]
        assert received.line == b"POST /prefix/v1/x?a=%20b HTTP/1.1"
        assert received.body == b"x" * 77
        assert {name.lower(): value for name, value in received.headers} == {
            b"host": upstream.url.rpartition("/")[2].encode(),
            b"accept-encoding": b"identity",
            b"content-length": b"77",
            b"authorization": b"Bearer engine-key",
            b"x-request-id": b"r1",
        }
        assert len(received.headers) == 5


async def test_reply_headers_have_small_names_and_none_that_is_hop_by_hop(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(
            b"HTTP/1.1 429 Slow down\r\nX-Request-Id: r1\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
            b"Keep-Alive: timeout=5\r\nTransfer-Encoding: chunked\r\nX-Twice: a\r\nX-Twice: b\r\n\r\n"
            + chunk(b"x")
            + b"0\r\nX-Trailer: t\r\n\r\n"
        )
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read_all(10) == b"x"
        assert reply.status == 429
        assert reply.headers == [(b"x-request-id", b"r1"), (b"x-twice", b"a"), (b"x-twice", b"b")]


@pytest.mark.parametrize("status", [b"301 Moved", b"307 Temporary Redirect"])
async def test_redirect_is_a_reply_like_any_other(both: Pair, status: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"go", status, b"location: http://127.0.0.1:1/"))
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert (reply.status, await reply.read_all(10)) == (int(status[:3]), b"go")


async def test_a_read_does_not_wait_for_more_than_is_there(both: Pair) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await go_on.wait()
        await peer.send(chunk(b"two") + STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"one"
        go_on.set()
        assert await reply.read() == b"two"
        assert await reply.read() == b""


# --- reuse ----------------------------------------------------------------------------------------------------------


async def test_many_at_once_have_a_connection_each_and_get_their_own_reply(both: Pair) -> None:
    async def echo(peer: Peer) -> None:
        while True:
            request = await peer.request()
            await peer.send(plain(request.body))

    async with both.upstream(echo) as upstream:

        async def one(i: int) -> bool:
            body = b"%d" % i * 100
            return await fetch(both, upstream.url, UpstreamRequest(b"POST", b"/", (), body)) == body

        for _ in range(3):
            assert all(await asyncio.gather(*(one(i) for i in range(40))))
        assert upstream.accepted == both.transport.idle == 40


async def test_a_connection_that_the_engine_closed_while_idle_costs_nothing(both: Pair) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))

    async with both.upstream(once) as upstream:
        for _ in range(5):
            assert await fetch(both, upstream.url) == b"hello"
            await eventually(lambda: upstream.open_connections == 0)


async def test_bytes_behind_a_reply_are_nobodys_reply(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello") + plain(b"a reply to nothing"))
        await peer.closed()

    async with both.upstream(script, answer_ok) as upstream:
        assert await fetch(both, upstream.url) == b"hello"
        assert await fetch(both, upstream.url) == b"hello"


# --- failures -------------------------------------------------------------------------------------------------------


async def test_connect_refused_is_told_in_words_without_the_address(both: Pair) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, and not listening
        port = sock.getsockname()[1]
        with pytest.raises(ConnectFailed, match="Connection refused") as caught:
            await both.transport.send(f"{both.scheme}://127.0.0.1:{port}", POST, PATIENT)
    assert str(port) not in caught.value.message and "127.0.0.1" not in caught.value.message


async def test_unknown_host_is_told_in_words_without_its_name(both: Pair) -> None:
    with pytest.raises(ConnectFailed, match="does not resolve") as caught:
        await both.transport.send(f"{both.scheme}://no-such-host.invalid:8000", POST, PATIENT)
    assert "invalid" not in caught.value.message


async def test_reset_after_the_first_bytes_is_broken_not_a_short_success(both: Pair) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await go_on.wait()
        peer.reset()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"one"
        go_on.set()
        for _ in range(2):
            with pytest.raises(UpstreamBroken) as caught:
                await reply.read()
            assert caught.value.response_began


# --- deadlines ------------------------------------------------------------------------------------------------------


# --- cancellation ---------------------------------------------------------------------------------------------------


async def test_close_while_somebody_reads_ends_the_read(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"one"
        reading = asyncio.create_task(reply.read())
        await asyncio.sleep(0.01)
        reply.close()
        with pytest.raises(UpstreamBroken):
            await reading
        await eventually(lambda: upstream.open_connections == 0)


# --- back-pressure and leftovers ------------------------------------------------------------------------------------


async def test_a_hundred_broken_exchanges_leave_the_open_files_as_they_were(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        before = 0
        for n in range(21):
            if n == 1:  # in the first round a loop opens descriptors of its own
                await eventually(lambda: upstream.open_connections == 0)
                before = len(os.listdir("/proc/self/fd"))
            replies = await asyncio.gather(*(both.transport.send(upstream.url, POST, PATIENT) for _ in range(5)))
            for reply in replies:
                reply.close()
        await eventually(lambda: upstream.open_connections == 0 and len(os.listdir("/proc/self/fd")) <= before)
