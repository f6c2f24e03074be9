"""What only TLS has: certificates, and all that can go wrong in the handshake."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import warnings

import pytest
from fakes.scripted_upstream import Peer, ScriptedUpstream, plain
from fakes.waits import eventually

from gateway.domain.errors import ConnectFailed, UpstreamTimeout
from gateway.upstream.transport import Deadlines
from gateway.upstream.trust import Trust
from gateway.upstream.wire import WireTransport

from .conftest import Pair
from .exchanges import LONG, PATIENT, POST, answer_ok, cancel, fetch

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
    public = WireTransport(Trust({}))
    message = await refusal(Pair(public, https.authority, True), https.authority.server_context())
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


class Mute:
    """Takes the connection and says nothing to the client's hello."""

    def __init__(self) -> None:
        self.heard = b""

    async def __call__(self, peer: Peer) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await peer._recv():
                self.heard += data


async def test_handshake_that_hangs_ends_by_the_connect_deadline(https: Pair) -> None:
    async with ScriptedUpstream(Mute()) as upstream:
        with pytest.raises(UpstreamTimeout) as caught:
            await https.transport.send(upstream.url.replace("http:", "https:"), POST, Deadlines(0.2, LONG, LONG, LONG))
        assert caught.value.deadline == "connect"
        await eventually(lambda: upstream.open_connections == 0)


async def test_cancelled_within_the_handshake_closes_the_socket(https: Pair) -> None:
    mute = Mute()
    async with ScriptedUpstream(mute) as upstream:
        task: asyncio.Task[object] = asyncio.create_task(
            https.transport.send(upstream.url.replace("http:", "https:"), POST, PATIENT)
        )
        await eventually(lambda: bool(mute.heard))
        await cancel(task, 2)
        await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.usefixtures("misleading_environment")
async def test_no_proxy_of_the_environment_is_asked(https: Pair) -> None:
    async with https.upstream(answer_ok) as upstream:
        assert await fetch(https, upstream.url) == b"hello"


async def test_server_that_speaks_before_the_handshake_is_refused(https: Pair) -> None:
    async def greet(peer: Peer) -> None:
        await peer.send(b"SSH-2.0-OpenSSH_9.6\r\n" * 100)
        await Mute()(peer)

    async with ScriptedUpstream(greet) as upstream:
        with pytest.raises(ConnectFailed):
            await https.transport.send(upstream.url.replace("http:", "https:"), POST, PATIENT)
        await eventually(lambda: upstream.open_connections == 0)


async def test_aclose_within_the_handshake_closes_the_socket_at_once(https: Pair) -> None:
    mute = Mute()
    async with ScriptedUpstream(mute) as upstream:
        task = asyncio.create_task(https.transport.send(upstream.url.replace("http:", "https:"), POST, PATIENT))
        await eventually(lambda: bool(mute.heard))
        await https.transport.aclose()
        with pytest.raises(ConnectFailed):
            await task
        await eventually(lambda: upstream.open_connections == 0)


async def test_only_http_1_1_over_tls_1_2_or_later_is_offered(https: Pair) -> None:
    context = https.authority.server_context()
    context.set_alpn_protocols(["h2", "http/1.1"])
    chosen: list[str | None] = []

    async def script(peer: Peer) -> None:
        chosen.append(peer.alpn)
        await answer_ok(peer)

    async with ScriptedUpstream(script, tls=context) as upstream:
        await fetch(https, upstream.url)
        assert chosen == ["http/1.1"]
    old = https.authority.server_context()
    with warnings.catch_warnings(action="ignore"):
        old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    assert "TLS could not be agreed on" in await refusal(https, old)


async def test_idle_connection_that_the_server_ends_in_order_is_closed(https: Pair) -> None:
    async def farewell(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await peer.end_tls()
        await peer.closed()

    async with https.upstream(farewell) as upstream:
        for n in (1, 2):
            assert await fetch(https, upstream.url) == b"hello"
            await eventually(lambda: https.transport.idle == 0 and upstream.open_connections == 0)
            assert upstream.accepted == n


@pytest.mark.parametrize("in_order", [True, False])
async def test_slow_reader_gets_all_of_a_reply_whose_connection_is_closed_behind_it(both: Pair, in_order: bool) -> None:
    """A loop that is told to stop handing over bytes may have taken in more, and with them the end."""
    piece = bytes(range(256)) * 150

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % (len(piece) * 6))
        for _ in range(6):
            await peer.send(piece)
            await asyncio.sleep(0.02)
        if in_order:
            await peer.end_tls()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: upstream.open_connections == 0)
        received = b""
        while data := await reply.read():
            received += data
            await asyncio.sleep(0.02)
        assert received == piece * 6
