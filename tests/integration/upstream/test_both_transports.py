"""What every transport promises, tried on each: deadlines, cancellation, broken replies, back-pressure, reuse."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, chunk, eventually, plain

from gateway.domain.errors import ConnectFailed, InternalError, ShuttingDown, UpstreamBroken, UpstreamTimeout
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


async def expect_timeout(sending: Awaitable[object], deadline: str) -> None:
    with pytest.raises(UpstreamTimeout, match=f"the {deadline} deadline") as caught:
        await sending
    assert caught.value.deadline == deadline


async def cancel(task: asyncio.Task[object], times: int) -> None:
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


TIMES = pytest.mark.parametrize("times", [1, 2])


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


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_line_break_in_a_header_sends_nothing(both: Pair, value: bytes) -> None:
    async with both.upstream(answer_ok) as upstream:
        with pytest.raises(InternalError):
            await both.transport.send(upstream.url, UpstreamRequest(b"POST", b"/", ((b"x-a", value),), b""), PATIENT)
        assert upstream.accepted == 0


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


async def test_a_big_body_arrives_whole_through_a_slow_reader(both: Pair) -> None:
    async def slow(peer: Peer) -> None:
        await asyncio.sleep(0.05)
        await answer_ok(peer)

    async with both.upstream(slow) as upstream:
        body = bytes(range(256)) * 20_000
        assert await fetch(both, upstream.url, UpstreamRequest(b"POST", b"/", (), body)) == b"hello"
        assert upstream.requests[0].body == body


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (plain(b"hello"), b"hello"),
        (STREAM_HEAD + b"5;name=value\r\nhello\r\n" + STREAM_END, b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + plain(b"hello"), b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello until the end", b"hello until the end"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_every_form_of_a_whole_reply_is_read_to_its_end(both: Pair, data: bytes, body: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)

    async with both.upstream(script) as upstream:
        for _ in range(2):
            reply = await both.transport.send(upstream.url, POST, PATIENT)
            assert await reply.read_all(1000) == body
            assert await reply.read() == b""


async def test_a_reply_byte_by_byte(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.trickle(STREAM_HEAD + chunk(b"one") + chunk(b"two") + STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read_all(100) == b"onetwo"


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


async def test_one_connection_serves_request_after_request(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        for _ in range(10):
            assert await fetch(both, upstream.url) == b"hello"
        assert (upstream.accepted, both.transport.active, both.transport.idle) == (1, 0, 1)


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


async def stale(peer: Peer) -> None:
    """Closes the moment the second request has come, as a server whose idle time just passed."""
    await peer.request()
    await peer.send(plain(b"hello"))
    await peer.request()
    peer.reset()


async def test_a_stale_connection_is_replaced_once_and_the_body_sent_again(both: Pair) -> None:
    async with both.upstream(stale, answer_ok) as upstream:
        await fetch(both, upstream.url)
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 2
        assert [r.body for r in upstream.requests] == [POST.body] * 3


async def test_a_fresh_connection_that_breaks_is_not_tried_again(both: Pair) -> None:
    async def reset(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with both.upstream(stale, reset) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert not caught.value.response_began
        assert upstream.accepted == 2


async def test_no_second_try_once_a_byte_of_the_reply_has_come(both: Pair) -> None:
    async def half(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await peer.request()
        await peer.send(b"H")
        await asyncio.sleep(0.02)
        peer.reset()

    async with both.upstream(half) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert caught.value.response_began
        assert upstream.accepted == 1


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
        await peer.request()  # httpx finds out only after it has asked; or the client closes, which ends the script
        await peer.closed()

    async with both.upstream(script, answer_ok) as upstream:
        assert await fetch(both, upstream.url) == b"hello"
        assert await fetch(both, upstream.url) == b"hello"


# --- failures -------------------------------------------------------------------------------------------------------


async def test_connect_refused_is_told_in_words_without_the_address(both: Pair) -> None:
    scheme = "https" if both.is_tls else "http"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, and not listening
        port = sock.getsockname()[1]
        with pytest.raises(ConnectFailed, match="Connection refused") as caught:
            await both.transport.send(f"{scheme}://127.0.0.1:{port}", POST, PATIENT)
    assert str(port) not in caught.value.message and "127.0.0.1" not in caught.value.message


async def test_unknown_host_is_told_in_words_without_its_name(both: Pair) -> None:
    scheme = "https" if both.is_tls else "http"
    with pytest.raises(ConnectFailed, match="does not resolve") as caught:
        await both.transport.send(f"{scheme}://no-such-host.invalid:8000", POST, PATIENT)
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


@pytest.mark.parametrize(
    "data",
    [
        plain(b"hello")[:-1],
        STREAM_HEAD + chunk(b"hello"),
        STREAM_HEAD + b"ff\r\nhello",
        STREAM_HEAD + chunk(b"hello") + b"0\r\n",
    ],
)
async def test_a_truncated_body_is_no_clean_end(both: Pair, data: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        received = b""
        with pytest.raises(UpstreamBroken) as caught:
            while True:
                received += await reply.read()
                assert received, "the end was taken for a clean one"
        assert received in (b"hello", b"hell")
        assert caught.value.response_began


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    ],
    ids=lambda data: repr(data[:30]),
)
async def test_a_malformed_head_is_told_as_such_and_nothing_stays_open(both: Pair, data: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)

    async with both.upstream(script) as upstream:
        with pytest.raises(UpstreamBroken) as caught:
            await both.transport.send(upstream.url, POST, PATIENT)
        assert caught.value.response_began
        await eventually(lambda: upstream.open_connections == 0)
        assert (both.transport.active, both.transport.idle) == (0, 0)


async def test_a_reply_over_the_limit_is_cut_and_the_engine_sees_it(both: Pair) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x" * 1000))

    async with both.upstream(endless) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        with pytest.raises(UpstreamBroken, match="longer than 50000 bytes"):
            await reply.read_all(50_000)
        await eventually(lambda: upstream.open_connections == 0)


# --- deadlines ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deadlines", "name"),
    [(Deadlines(0.05, LONG, LONG, LONG), "connect"), (Deadlines(LONG, LONG, LONG, 0.05), "total")],
)
async def test_a_connect_that_hangs_ends_by_its_deadline(both: Pair, deadlines: Deadlines, name: str) -> None:
    async with both.deaf() as url:
        with pytest.raises(UpstreamTimeout) as caught:
            await both.transport.send(url, POST, deadlines)
        assert caught.value.deadline == name


async def test_one_hung_worker_ends_by_first_byte_timeout_and_does_not_touch_the_others(both: Pair) -> None:
    async with both.upstream(silent) as hung, both.upstream(answer_ok) as healthy:
        brief = Deadlines(LONG, 1.0, LONG, LONG)
        stuck = [asyncio.create_task(both.transport.send(hung.url, POST, brief)) for _ in range(30)]
        await eventually(lambda: len(hung.requests) == 30)
        for _ in range(5):
            assert await fetch(both, healthy.url) == b"hello"
        for task in stuck:
            await expect_timeout(task, "first byte")
        await eventually(lambda: hung.open_connections == 0)


async def test_a_head_without_a_first_byte_of_body_ends_by_the_first_byte_deadline(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        await peer.closed()

    async with both.upstream(script) as upstream:

        async def run() -> None:
            reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.3, 0.001, LONG))
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
        await peer.send(chunk(b"two") + STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 0.3, LONG))
        assert await reply.read() == b"one"
        await asyncio.sleep(0.4)
        go_on.set()
        assert await reply.read() == b"two"
        assert await reply.read() == b""


async def test_a_stream_that_never_pauses_ends_by_the_total_deadline(both: Pair) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.002)

    async with both.upstream(endless) as upstream:

        async def run() -> None:
            reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, LONG, 0.3))
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
        big = UpstreamRequest(b"POST", b"/", (), b"x" * 30_000_000)
        await expect_timeout(both.transport.send(upstream.url, big, Deadlines(LONG, 0.3, LONG, LONG)), "first byte")


# --- cancellation ---------------------------------------------------------------------------------------------------


@TIMES
async def test_cancelled_while_connecting(both: Pair, times: int) -> None:
    async with both.deaf() as url:
        task: asyncio.Task[object] = asyncio.create_task(both.transport.send(url, POST, PATIENT))
        await eventually(lambda: both.transport.active == 1)
        await asyncio.sleep(0.01)
        await cancel(task, times)
        assert both.transport.active == 0


async def test_cancelled_at_each_turn_of_the_loop_leaves_nothing_open(both: Pair) -> None:
    async with both.upstream(silent) as upstream:
        for turns in range(60):
            task: asyncio.Task[object] = asyncio.create_task(both.transport.send(upstream.url, POST, PATIENT))
            for _ in range(turns):
                await asyncio.sleep(0)
            await cancel(task, 1)
            assert both.transport.active == 0
        await eventually(lambda: upstream.open_connections == 0)


@TIMES
async def test_cancelled_while_the_body_is_going_out(both: Pair, times: int) -> None:
    async def deaf(peer: Peer) -> None:
        await eventually(lambda: both.transport.active == 0)

    async with both.upstream(deaf) as upstream:
        big = UpstreamRequest(b"POST", b"/", (), b"x" * 30_000_000)
        task: asyncio.Task[object] = asyncio.create_task(both.transport.send(upstream.url, big, PATIENT))
        await eventually(lambda: upstream.accepted == 1)
        await asyncio.sleep(0.05)
        await cancel(task, times)


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


async def test_a_reply_closed_before_its_end_takes_its_connection_along(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert both.transport.active == 1
        reply.close()
        reply.close()
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)
        with pytest.raises(UpstreamBroken):
            await reply.read()


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
        await eventually(lambda: upstream.open_connections == 0)


async def test_after_aclose_nothing_is_sent(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        await fetch(both, upstream.url)
        await both.transport.aclose()
        await eventually(lambda: upstream.open_connections == 0)
        with pytest.raises(ShuttingDown):
            await both.transport.send(upstream.url, POST, PATIENT)
        assert upstream.accepted == 1


# --- back-pressure and leftovers ------------------------------------------------------------------------------------


async def test_slow_reader_does_not_fill_memory_the_engine_stalls_instead(both: Pair) -> None:
    size = 20_000_000
    peers: list[Peer] = []

    async def flood(peer: Peer) -> None:
        peers.append(peer)
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        await peer.send(bytes(size))
        await peer.closed()

    async with both.upstream(flood) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        sent = -1
        while sent != peers[0].sent_bytes:  # until the engine's writes stand still
            sent = peers[0].sent_bytes
            await asyncio.sleep(0.1)
        assert sent < size
        most = received = 0
        while data := await reply.read():
            received += len(data)
            most = max(most, len(data))
            await asyncio.sleep(0)
        assert received == size
        assert most < 400_000


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
