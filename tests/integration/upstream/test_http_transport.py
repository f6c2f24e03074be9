"""What only the TLS transport has: certificates, the handshake, bounds of its pool, and a taker of its bytes."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, ScriptedUpstream, chunk, eventually, plain

from gateway.domain.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from gateway.upstream import http
from gateway.upstream.http import HttpTransport
from gateway.upstream.transport import Deadlines

from .conftest import Pair
from .test_both_transports import LONG, PATIENT, POST, answer_ok, cancel, fetch, silent, tell_and_hang

# --- certificates and the handshake ---------------------------------------------------------------------------------


async def refusal(https: Pair, tls: ssl.SSLContext) -> str:
    """What is said of a server with these certificates; it must not have seen a request."""
    async with ScriptedUpstream(answer_ok, tls=tls) as upstream:
        with pytest.raises(ConnectFailed) as caught:
            await https.transport.send(upstream.url, POST, PATIENT)
        assert upstream.requests == []
        assert "127.0.0.1" not in caught.value.message
        await eventually(lambda: upstream.open_connections == 0)
        return caught.value.message


async def test_certificate_for_another_host_is_refused_in_words(https: Pair) -> None:
    for names in ("DNS:llm.example.com", "IP:127.0.0.2"):
        message = await refusal(https, https.authority.server_context(names))
        assert message == "No connection to the engine: its certificate is for another host name."


async def test_expired_certificate_is_refused_in_words(https: Pair) -> None:
    message = await refusal(https, https.authority.server_context(days="-1"))
    assert "its certificate is not trusted (certificate has expired)" in message


async def test_certificate_of_an_unknown_authority_is_refused_in_words(https: Pair) -> None:
    public = HttpTransport(lambda url: ssl.create_default_context())
    message = await refusal(Pair(public, https.authority), https.authority.server_context())
    assert "its certificate is not trusted (" in message
    await public.aclose()


async def test_server_without_tls_is_refused_in_words(https: Pair) -> None:
    async def plain_http(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    async with ScriptedUpstream(plain_http) as upstream:
        with pytest.raises(ConnectFailed, match="TLS could not be agreed on"):
            await https.transport.send(upstream.url.replace("http:", "https:"), POST, PATIENT)


async def test_server_that_hangs_up_in_the_handshake_is_refused_in_words(https: Pair) -> None:
    async def leave(peer: Peer) -> None:
        pass

    async with ScriptedUpstream(leave) as upstream:
        with pytest.raises(ConnectFailed):
            await https.transport.send(upstream.url.replace("http:", "https:"), POST, PATIENT)


async def mute(peer: Peer) -> None:
    """Takes the connection and says nothing to the client's hello."""
    with contextlib.suppress(ConnectionError):
        while await peer._recv():
            pass


async def test_handshake_that_hangs_ends_by_the_connect_deadline(https: Pair) -> None:
    async with ScriptedUpstream(mute) as upstream:
        with pytest.raises(UpstreamTimeout) as caught:
            await https.transport.send(upstream.url.replace("http:", "https:"), POST, Deadlines(0.2, LONG, LONG, LONG))
        assert caught.value.deadline == "connect"
        await eventually(lambda: upstream.open_connections == 0)


async def test_cancelled_within_the_handshake_closes_the_socket(https: Pair) -> None:
    async with ScriptedUpstream(mute) as upstream:
        task: asyncio.Task[object] = asyncio.create_task(
            https.transport.send(upstream.url.replace("http:", "https:"), POST, PATIENT)
        )
        await eventually(lambda: upstream.accepted == 1)
        await asyncio.sleep(0.02)
        await cancel(task, 2)
        await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.usefixtures("misleading_environment")
async def test_no_proxy_of_the_environment_is_asked(https: Pair) -> None:
    async with https.upstream(answer_ok) as upstream:
        assert await fetch(https, upstream.url) == b"hello"


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:1", "h:1", "https://", "https://h:99999", "https://[::1", "https://u:p@h", "https://h?q=1", ""],
)
async def test_a_url_of_another_form_is_refused(https: Pair, url: str) -> None:
    with pytest.raises(ConnectFailed, match="url"):
        await https.transport.send(url, POST, PATIENT)


# --- bounds of the pool ---------------------------------------------------------------------------------------------


async def test_more_connections_than_allowed_are_refused_at_once(https: Pair) -> None:
    context = https.authority.client_context()
    transport = HttpTransport(lambda url: context, max_connections=2)
    async with https.upstream(tell_and_hang) as upstream:
        replies = [await transport.send(upstream.url, POST, PATIENT) for _ in range(2)]
        with pytest.raises(ConnectFailed, match="as many open as it may"):
            await transport.send(upstream.url, POST, PATIENT)
        replies[0].close()
        (await transport.send(upstream.url, POST, PATIENT)).close()
        replies[1].close()
        await eventually(lambda: upstream.open_connections == 0)
        await transport.aclose()


async def test_idle_connections_are_bounded_and_closed_after_their_time(
    https: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = https.authority.client_context()
    transport = HttpTransport(lambda url: context, max_idle_per_replica=2)
    pair = Pair(transport, https.authority)
    async with https.upstream(answer_ok) as upstream:
        await asyncio.gather(*(fetch(pair, upstream.url) for _ in range(6)))
        assert transport.idle == 2
        await eventually(lambda: upstream.open_connections == 2)
        monkeypatch.setattr(http, "IDLE_S", 0.05)
        await eventually(lambda: transport.idle == 0 and upstream.open_connections == 0)
        await eventually(lambda: transport._sweeper is None)
        await transport.aclose()


# --- a taker --------------------------------------------------------------------------------------------------------


class Taker:
    """Takes what it is handed; has room for `room` bytes until `resume`."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.data = b""
        self.calls = 0
        self.room = room
        self.on_take: Callable[[], None] | None = None

    def __call__(self, data: bytes) -> bool:
        self.data += data
        self.calls += 1
        if self.on_take is not None:
            self.on_take()
        return len(self.data) < self.room


async def test_taker_gets_every_read_to_the_end(https: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for i in range(20):
            await peer.send(chunk(b"%02d" % i))
            await asyncio.sleep(0.001)
        await peer.send(STREAM_END)
        await peer.closed()

    async with https.upstream(script) as upstream:
        reply = await https.transport.send(upstream.url, POST, PATIENT)
        first = await reply.read()
        taker = Taker()
        await reply.relay(taker)
        assert first + taker.data == b"".join(b"%02d" % i for i in range(20))
        assert taker.calls > 1
        assert https.transport.idle == 1


async def test_slow_taker_pauses_the_engine_and_goes_on_after_resume(https: Pair) -> None:
    size = 20_000_000
    peers: list[Peer] = []

    async def flood(peer: Peer) -> None:
        peers.append(peer)
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        await peer.send(bytes(size))
        await peer.closed()

    async with https.upstream(flood) as upstream:
        # a gap deadline that would pass if a taker without room counted as silence of the engine
        reply = await https.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 1.0, LONG))
        taker = Taker(room=1)
        relaying = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.calls == 1)
        sent = -1
        while sent != peers[0].sent_bytes:  # until the engine's writes stand still
            sent = peers[0].sent_bytes
            await asyncio.sleep(0.2)
        assert sent < size
        await asyncio.sleep(1.2)
        assert taker.calls == 1 and not relaying.done()
        before = len(taker.data)
        taker.room = before + 1
        reply.resume()
        assert taker.calls == 2 and len(taker.data) - before < 400_000
        taker.room = 1 << 30
        reply.resume()
        await relaying
        assert len(taker.data) == size


async def test_taker_that_closes_ends_the_relay_and_the_connection(https: Pair) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.001)

    async with https.upstream(endless) as upstream:
        for at_once in (True, False):
            reply = await https.transport.send(upstream.url, POST, PATIENT)
            if at_once:
                await asyncio.sleep(0.02)  # bytes are there: the taker is called from `relay` itself
            taker = Taker()
            taker.on_take = reply.close
            with pytest.raises(UpstreamBroken, match="closed before its end"):
                await reply.relay(taker)
            assert taker.calls == 1
            assert https.transport.active == 0
            await eventually(lambda: upstream.open_connections == 0)


async def test_each_piece_puts_off_the_gap_deadline_of_a_relay(https: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        for _ in range(4):
            await peer.send(chunk(b"x"))
            await asyncio.sleep(0.3)
        await peer.closed()

    async with https.upstream(script) as upstream:
        reply = await https.transport.send(upstream.url, POST, Deadlines(LONG, LONG, 0.8, LONG))
        taker = Taker()
        with pytest.raises(UpstreamTimeout) as caught:
            await reply.relay(taker)
        assert (caught.value.deadline, taker.data) == ("gap", b"xxxx")
        await eventually(lambda: upstream.open_connections == 0)


async def test_silence_before_the_first_byte_ends_a_relay(https: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        await peer.closed()

    async with https.upstream(script) as upstream:
        reply = await https.transport.send(upstream.url, POST, Deadlines(LONG, 0.3, 0.001, LONG))
        with pytest.raises(UpstreamTimeout) as caught:
            await reply.relay(Taker())
        assert caught.value.deadline == "first byte"


async def test_broken_reply_ends_a_relay_after_the_bytes_that_had_come(https: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        peer.reset()

    async with https.upstream(script) as upstream:
        reply = await https.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: upstream.open_connections == 0 and https.transport.active == 0)
        taker = Taker()
        with pytest.raises(UpstreamBroken) as caught:
            await reply.relay(taker)
        assert taker.data in (b"one", b"") and caught.value.response_began


async def test_bytes_that_wait_for_a_taker_come_before_the_error(https: Pair) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one"))
        await go_on.wait()
        await peer.send(chunk(b"two"))
        await asyncio.sleep(0.05)
        peer.reset()

    async with https.upstream(script) as upstream:
        reply = await https.transport.send(upstream.url, POST, PATIENT)
        taker = Taker(room=1)
        relaying = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.data == b"one")
        go_on.set()
        await eventually(lambda: https.transport.active == 0)
        assert not relaying.done()
        taker.room = 1 << 30
        reply.resume()
        with pytest.raises(UpstreamBroken):
            await relaying
        assert taker.data == b"onetwo"


async def test_taker_that_never_has_room_again_ends_by_the_total_deadline(https: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"x" * 300_000))
        await peer.closed()

    for long_reply in (script, tell_and_hang):
        async with https.upstream(long_reply) as upstream:
            reply = await https.transport.send(upstream.url, POST, Deadlines(LONG, LONG, LONG, 0.5))
            with pytest.raises(UpstreamTimeout) as caught:
                await reply.relay(Taker(room=1))
            assert caught.value.deadline == "total"
            await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("is_paused", [False, True])
async def test_cancelled_relay_closes_the_engine_connection(https: Pair, is_paused: bool) -> None:
    async with https.upstream(tell_and_hang) as upstream:
        reply = await https.transport.send(upstream.url, POST, PATIENT)
        taker = Taker(room=1 if is_paused else 100)
        task: asyncio.Task[object] = asyncio.create_task(reply.relay(taker))
        await eventually(lambda: taker.calls == 1)
        await cancel(task, 2)
        assert https.transport.active == 0
        await eventually(lambda: upstream.open_connections == 0)


async def test_close_of_a_relay_by_somebody_else_ends_it(https: Pair) -> None:
    async with https.upstream(silent, tell_and_hang) as upstream:
        waiting = asyncio.create_task(https.transport.send(upstream.url, POST, PATIENT))
        await eventually(lambda: len(upstream.requests) == 1)
        reply = await https.transport.send(upstream.url, POST, PATIENT)
        relaying = asyncio.create_task(reply.relay(Taker()))
        await asyncio.sleep(0.02)
        reply.close()
        with pytest.raises(UpstreamBroken):
            await relaying
        await cancel(waiting, 1)
        await eventually(lambda: upstream.open_connections == 0)
