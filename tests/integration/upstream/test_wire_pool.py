"""Connections: how long they live, when one is used again, and that a broken or unwanted one is gone at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Awaitable

import pytest
from fakes.scripted_upstream import (
    STREAM_END,
    STREAM_HEAD,
    Peer,
    chunk,
    eventually,
    plain,
)

from gateway.domain.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from gateway.upstream import wire
from gateway.upstream.connection import HIGH_WATER_BYTES
from gateway.upstream.reply import WireReply
from gateway.upstream.transport import Deadlines, UpstreamRequest

from .conftest import Pair, wire_transport

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


async def fetch(both: Pair, url: str) -> bytes:
    reply = await both.transport.send(url, POST, PATIENT)
    try:
        return await reply.read_all(1 << 20)
    finally:
        reply.close()


# --- reuse ----------------------------------------------------------------------------------------------------------


async def test_one_connection_serves_request_after_request(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        for _ in range(20):
            assert await fetch(both, upstream.url) == b"hello"
        assert (upstream.accepted, both.transport.active, both.transport.idle) == (1, 0, 1)


async def test_two_requests_at_once_have_a_connection_each(both: Pair) -> None:
    pair = asyncio.Barrier(2)

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await pair.wait()
            await peer.send(plain(b"hello"))

    async with both.upstream(script) as upstream:
        for _ in range(3):
            assert await asyncio.gather(fetch(both, upstream.url), fetch(both, upstream.url)) == [b"hello"] * 2
        assert (upstream.accepted, both.transport.idle) == (2, 2)


async def test_a_whole_reply_frees_its_connection_before_it_is_read(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        first = await both.transport.send(upstream.url, POST, PATIENT)
        assert both.transport.active == 0
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 1
        assert await first.read_all(10) == b"hello"


@pytest.mark.parametrize(
    "reply", [plain(b"x", b"200 OK", b"connection: close"), b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx"]
)
async def test_a_connection_that_the_engine_wants_to_close_is_not_kept(both: Pair, reply: bytes) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(reply)
        await peer.closed()

    async with both.upstream(script) as upstream:
        for n in (1, 2):
            assert await fetch(both, upstream.url) == b"x"
            assert (upstream.accepted, both.transport.idle) == (n, 0)


async def test_a_reply_closed_before_its_end_takes_its_connection_along(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert both.transport.active == 1
        reply.close()
        reply.close()
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)
        with pytest.raises(UpstreamBroken):
            await reply.read()


async def test_an_idle_connection_that_speaks_unasked_is_dropped(both: Pair) -> None:
    speak = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await speak.wait()
        await peer.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await peer.closed()

    async with both.upstream(script, answer_ok) as upstream:
        await fetch(both, upstream.url)
        speak.set()
        await eventually(lambda: both.transport.idle == 0)
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 2


async def test_an_idle_connection_closed_by_the_engine_leaves_the_pool(both: Pair) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))

    async with both.upstream(once) as upstream:
        await fetch(both, upstream.url)
        await eventually(lambda: both.transport.idle == 0 and not both.transport._open)
        assert await fetch(both, upstream.url) == b"hello"


async def test_idle_connections_are_closed_before_the_engine_does(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "IDLE_TLS_S" if both.is_tls else "IDLE_S", 0.05)
    monkeypatch.setattr(wire, "SWEEP_S", 0.02)
    async with both.upstream(answer_ok) as upstream, both.upstream(answer_ok) as other:
        await asyncio.gather(*(fetch(both, url) for url in (upstream.url, upstream.url, other.url)))
        assert both.transport.idle == 3
        await eventually(lambda: both.transport.idle == 0 and upstream.open_connections + other.open_connections == 0)
        await eventually(lambda: both.transport._sweeper is None)
        assert await fetch(both, upstream.url) == b"hello"


async def test_a_connection_idle_too_long_is_not_used_even_before_the_sweep(
    both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both.upstream(answer_ok) as upstream:
        await fetch(both, upstream.url)
        monkeypatch.setattr(wire, "IDLE_TLS_S" if both.is_tls else "IDLE_S", -1.0)
        await fetch(both, upstream.url)
        assert upstream.accepted == 2


async def test_idle_connections_and_their_addresses_are_bounded(both: Pair) -> None:
    transport = wire_transport(both.authority, max_idle_per_replica=2, max_idle_replicas=1)
    bounded = Pair(transport, both.authority, both.is_tls)
    async with both.upstream(answer_ok) as upstream, both.upstream(answer_ok) as other:
        await asyncio.gather(*(fetch(bounded, upstream.url) for _ in range(5)))
        await fetch(bounded, other.url)
        assert transport.idle == 2
        await eventually(lambda: upstream.open_connections == 2 and other.open_connections == 0)
        await transport.aclose()


# --- a stale connection ---------------------------------------------------------------------------------------------


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


async def test_an_engine_that_died_after_working_on_a_request_is_not_given_it_again(both: Pair) -> None:
    async def works_then_dies(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await peer.request()
        await asyncio.sleep(3 * wire.STALE_S)
        peer.reset()

    async with both.upstream(works_then_dies, answer_ok) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert caught.value.request_sent and not caught.value.response_began
        assert len(upstream.requests) == 2


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


async def test_an_engine_that_died_with_a_request_and_takes_no_other_one_may_have_seen_it(
    both: Pair,
) -> None:
    """Told as a connection that could not be made, the request would be given to the next engine to die of."""
    async with both.upstream(stale) as upstream:
        await fetch(both, upstream.url)
        assert upstream._listener is not None and upstream._acceptor is not None
        upstream._acceptor.cancel()
        await asyncio.wait({upstream._acceptor})
        upstream._listener.close()
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert caught.value.request_sent and not caught.value.response_began
        assert isinstance(caught.value.__cause__, ConnectFailed)


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


async def test_a_timeout_on_a_used_connection_is_not_tried_again(both: Pair) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await silent(peer)

    async with both.upstream(once) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamTimeout):
            await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.05, LONG, LONG))
        assert upstream.accepted == 1


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://no-such-host.invalid:8000", "does not resolve"),
        ("http://no-such-host.invalid:8000", "does not resolve"),
        (f"http://{'a' * 70}.invalid:8000", "does not resolve"),
        ("unix:/nonexistent/vllm.sock", "No such file"),
    ],
)
async def test_no_connection_is_told_in_words_without_the_address(plain_only: Pair, url: str, words: str) -> None:
    with pytest.raises(ConnectFailed, match=words) as caught:
        await plain_only.transport.send(url, POST, PATIENT)
    assert url.rpartition("//")[2].removeprefix("unix:") not in caught.value.message


async def test_connect_refused(both: Pair) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, and not listening
        with pytest.raises(ConnectFailed, match="Connection refused"):
            await both.transport.send(f"{both.scheme}://127.0.0.1:{sock.getsockname()[1]}", POST, PATIENT)
    assert not both.transport._open


async def test_no_file_descriptor_left_is_named_as_our_own_trouble(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        await fetch(both, upstream.url)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        busy = await both.transport.send(upstream.url, POST, PATIENT)
        held = [os.open(os.devnull, os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 8, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(ConnectFailed, match="no free file descriptor"):
                await both.transport.send(f"{both.scheme}://127.0.0.1:1", POST, PATIENT)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
        busy.close()


async def test_reset_before_the_head_is_broken_and_no_byte_had_come(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with both.upstream(script) as upstream:
        with pytest.raises(UpstreamBroken) as caught:
            await both.transport.send(upstream.url, POST, PATIENT)
        assert not caught.value.response_began
        assert not both.transport._open


async def test_reset_after_the_head_is_broken_not_a_short_success(both: Pair) -> None:
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
        with pytest.raises(UpstreamBroken) as caught:
            await reply.read()
        assert caught.value.response_began


async def test_an_engine_that_hangs_up_on_accept_is_broken(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        peer.reset()

    async with both.upstream(script) as upstream:
        for _ in range(20):
            with pytest.raises((UpstreamBroken, ConnectFailed)):
                await both.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: not both.transport._open)


# --- deadlines ------------------------------------------------------------------------------------------------------


async def expect_timeout(sending: Awaitable[object], deadline: str) -> None:
    with pytest.raises(UpstreamTimeout, match=f"the {deadline} deadline") as caught:
        await sending
    assert caught.value.deadline == deadline


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
    # a hung vLLM answers a stream with 200 and headers at once, and then nothing
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        await peer.closed()

    async with both.upstream(script) as upstream:

        async def run() -> None:
            reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.2, 0.001, LONG))
            await reply.read()

        await expect_timeout(run(), "first byte")
        await eventually(lambda: upstream.open_connections == 0)


async def tell_and_hang(peer: Peer) -> None:
    await peer.request()
    await peer.send(STREAM_HEAD + chunk(b"one"))
    await peer.closed()


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
        await asyncio.sleep(0.01)
        go_on.set()
        assert await waiting == b"two"
        await asyncio.sleep(0.7)
        go_on.set()
        assert await reply.read() == b"three"
        assert await reply.read() == b""


async def test_each_piece_of_a_stream_starts_the_gap_anew(both: Pair) -> None:
    # the last wait begins before the timer of the first one fires: it must be armed again then
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(3):
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.2)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 0.6, LONG))
        for _ in range(3):
            assert await reply.read() == b"x"
        await expect_timeout(reply.read(), "gap")
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_stream_that_never_pauses_ends_by_the_total_deadline(both: Pair) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.002)

    async with both.upstream(endless) as upstream:

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
        await asyncio.sleep(0.7)
        await peer.send(plain(b"later"))
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.5, LONG, LONG))
        assert await reply.read_all(10) == b"hello"
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read_all(10) == b"later"
        assert upstream.accepted == 1


# --- cancellation ---------------------------------------------------------------------------------------------------


async def cancel(task: asyncio.Task[object], times: int) -> None:
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


TIMES = pytest.mark.parametrize("times", [1, 2])


@TIMES
async def test_cancelled_while_connecting(both: Pair, times: int) -> None:
    async with both.deaf() as url:
        task: asyncio.Task[object] = asyncio.create_task(both.transport.send(url, POST, PATIENT))
        await eventually(lambda: both.transport.active == 1)
        await asyncio.sleep(0.01)
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
        await eventually(lambda: upstream.accepted == 1)
        await asyncio.sleep(0.05)
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


# --- back-pressure --------------------------------------------------------------------------------------------------


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
        assert isinstance(reply, WireReply)
        await eventually(lambda: reply.unread_bytes > HIGH_WATER_BYTES)
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
        assert most < HIGH_WATER_BYTES + 300_000  # a read of the loop takes at most 256 kB from the kernel
        assert both.transport.idle == 1


async def test_a_reply_that_ends_while_paused_leaves_a_connection_that_reads(both: Pair) -> None:
    body = bytes(HIGH_WATER_BYTES * 8)

    async def script(peer: Peer) -> None:
        for _ in range(2):
            await peer.request()
            await peer.send(plain(body))
        await peer.closed()

    async with both.upstream(script) as upstream:
        for _ in range(2):
            reply = await both.transport.send(upstream.url, POST, PATIENT)
            await asyncio.sleep(0.05)
            assert await reply.read_all(1 << 20) == body
        assert upstream.accepted == 1


async def test_five_hundred_broken_exchanges_leave_the_open_files_as_they_were(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        before = 0
        for n in range(101):
            if n == 1:  # in the first round a loop opens descriptors of its own
                await eventually(lambda: not both.transport._open and upstream.open_connections == 0)
                before = len(os.listdir("/proc/self/fd"))
            replies = await asyncio.gather(*(both.transport.send(upstream.url, POST, PATIENT) for _ in range(5)))
            for reply in replies:
                reply.close()
        await eventually(lambda: upstream.open_connections == 0 and not both.transport._open)
        assert len(os.listdir("/proc/self/fd")) == before
