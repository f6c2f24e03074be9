"""What the transport writes and what it makes of every kind of reply, byte by byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, ScriptedUpstream, chunk, eventually, plain

from gateway.domain.errors import ConnectFailed, InternalError, ShuttingDown, UpstreamBroken
from gateway.upstream.transport import Deadlines, UpstreamRequest
from gateway.upstream.wire import WireTransport

PATIENT = Deadlines(connect_s=10, first_byte_s=10, gap_s=10, total_s=20)
JSON = (b"content-type", b"application/json")


def post(body: bytes = b"{}", *headers: tuple[bytes, bytes]) -> UpstreamRequest:
    return UpstreamRequest(b"POST", b"/v1/chat/completions", (JSON, *headers), body)


async def answer_ok(peer: Peer) -> None:
    while True:
        await peer.request()
        await peer.send(plain(b"hello"))


async def fetch(transport: WireTransport, url: str, request: UpstreamRequest | None = None) -> bytes:
    reply = await transport.send(url, request or post(), PATIENT)
    try:
        return await reply.read_all(1 << 20)
    finally:
        reply.close()


def raw(data: bytes, *, then_close: bool = True) -> ScriptedUpstream:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)
        if not then_close:
            await peer.closed()

    return ScriptedUpstream(script)


# --- requests -------------------------------------------------------------------------------------------------------


async def sent_by(transport: WireTransport, request: UpstreamRequest, path: str = "") -> Received:
    async with ScriptedUpstream(answer_ok) as upstream:
        assert await fetch(transport, upstream.url + path, request) == b"hello"
        return upstream.requests[0]


async def test_length_is_that_of_the_body_sent_whatever_the_caller_said(transport: WireTransport) -> None:
    received = await sent_by(transport, post(b"x" * 77, (b"content-length", b"5"), (b"Content-Length", b"6")))
    assert received.header(b"content-length") == [b"77"]
    assert received.body == b"x" * 77


async def test_hop_by_hop_headers_and_those_named_in_connection_stay_here(transport: WireTransport) -> None:
    headers = [
        (b"connection", b"close, X-Secret-Hop"),
        (b"x-secret-hop", b"1"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"trailers"),
        (b"upgrade", b"h2c"),
        (b"Keep-Alive", b"timeout=5"),
        (b"proxy-authorization", b"Basic x"),
        (b"expect", b"100-continue"),
        (b"accept-encoding", b"gzip"),
        (b"host", b"elsewhere"),
        (b"x-request-id", b"r1"),
    ]
    received = await sent_by(transport, post(b"{}", *headers))
    names = [name.lower() for name, _ in received.headers]
    assert sorted(names) == [b"accept-encoding", b"content-length", b"content-type", b"host", b"x-request-id"]
    assert received.header(b"accept-encoding") == [b"identity"]


async def test_the_request_line_and_host_are_those_of_the_url(transport: WireTransport) -> None:
    async with ScriptedUpstream(answer_ok) as upstream:
        await fetch(transport, upstream.url + "/prefix/")
        received = upstream.requests[0]
        assert received.line == b"POST /prefix/v1/chat/completions HTTP/1.1"
        assert received.header(b"host") == [upstream.url.removeprefix("http://").encode()]


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_line_break_in_a_header_sends_nothing(transport: WireTransport, value: bytes) -> None:
    async with ScriptedUpstream(answer_ok) as upstream:
        with pytest.raises(InternalError):
            await transport.send(upstream.url, post(b"{}", (b"x-a", value)), PATIENT)
        assert upstream.accepted == 0


async def test_a_unix_socket_is_an_address_too(transport: WireTransport, tmp_path: Path) -> None:
    async with ScriptedUpstream(answer_ok, socket_path=str(tmp_path / "s")) as upstream:
        assert await fetch(transport, upstream.url) == b"hello"
        assert await fetch(transport, upstream.url) == b"hello"
        assert upstream.accepted == 1


async def test_a_big_body_arrives_whole_through_a_slow_reader(transport: WireTransport) -> None:
    async def slow(peer: Peer) -> None:
        await asyncio.sleep(0.05)
        await answer_ok(peer)

    async with ScriptedUpstream(slow) as upstream:
        body = bytes(range(256)) * 40_000
        assert await fetch(transport, upstream.url, post(body)) == b"hello"
        assert upstream.requests[0].body == body
        assert await fetch(transport, upstream.url) == b"hello"
        assert upstream.accepted == 1


async def test_an_answer_before_the_body_was_taken_counts_and_ends_the_connection(transport: WireTransport) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.send(plain(b"too long", b"413 Content Too Large"))
        await eventually(lambda: transport.active == 0)

    async with ScriptedUpstream(refuse) as upstream:
        reply = await transport.send(upstream.url, post(b"x" * 50_000_000), PATIENT)
        assert reply.status == 413
        assert await reply.read_all(100) == b"too long"
        assert transport.idle == 0


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1:1",
        "127.0.0.1:8000",
        "http://",
        "http://h:99999",
        "http://[::1",
        "unix:relative",
        "",
        "http://u:p@h",
    ],
)
async def test_a_url_of_another_form_is_refused(transport: WireTransport, url: str) -> None:
    with pytest.raises(ConnectFailed):
        await transport.send(url, post(), PATIENT)


# --- replies --------------------------------------------------------------------------------------------------------


async def test_a_reply_byte_by_byte(transport: WireTransport) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.trickle(STREAM_HEAD + chunk(b"one") + chunk(b"two") + STREAM_END)
        await peer.closed()

    async with ScriptedUpstream(script) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        assert reply.status == 200
        assert await reply.read_all(100) == b"onetwo"
        assert transport.idle == 1


async def test_a_read_gives_what_is_there_without_waiting_for_more(transport: WireTransport) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(b"one") + chunk(b"two"))
        await go_on.wait()
        await peer.send(chunk(b"three") + STREAM_END)
        await peer.closed()

    async with ScriptedUpstream(script) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        assert await reply.read() == b"onetwo"
        go_on.set()
        assert await reply.read() == b"three"
        assert await reply.read() == b""
        assert await reply.read() == b""


async def test_headers_have_small_names_and_none_that_is_hop_by_hop(transport: WireTransport) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nX-Request-Id: r1\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
        b"Transfer-Encoding: chunked\r\nX-Twice: a\r\nX-Twice: b\r\n\r\n"
    )
    async with raw(head + chunk(b"x") + b"0\r\nX-Trailer: t\r\n\r\n", then_close=False) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        assert await reply.read_all(10) == b"x"
        assert reply.headers == [(b"x-request-id", b"r1"), (b"x-twice", b"a"), (b"x-twice", b"b")]
        assert transport.idle == 1


@pytest.mark.parametrize(
    ("data", "body"),
    [
        (plain(b"hello"), b"hello"),
        (STREAM_HEAD + b"5;name=value\r\nhello\r\n" + STREAM_END, b"hello"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + plain(b"hello"), b"hello"),
        (b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" * 2 + plain(b"hello"), b"hello"),
        (b"HTTP/1.0 200 OK\r\n\r\nhello until the end", b"hello until the end"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b""),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n", b""),
    ],
)
async def test_every_form_of_a_whole_reply_is_read_to_its_end(
    transport: WireTransport, data: bytes, body: bytes
) -> None:
    async with raw(data) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        assert await reply.read_all(1000) == body
        assert not any(name == b"link" for name, _ in reply.headers)
        await eventually(lambda: transport.idle == 0)


@pytest.mark.parametrize(
    "data",
    [
        plain(b"hello", b"200 OK", b"connection: close") + b"and more than was announced",
        plain(b"hello") + b"garbage",
        plain(b"hello") + plain(b"a reply to nothing"),
    ],
)
async def test_bytes_behind_the_reply_are_not_its_own_and_end_the_connection(
    transport: WireTransport, data: bytes
) -> None:
    async with raw(data, then_close=False) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        assert await reply.read_all(1000) == b"hello"
        assert transport.idle == 0
        await eventually(lambda: upstream.open_connections == 0)


async def test_head_has_headers_and_no_body(transport: WireTransport) -> None:
    async with raw(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n", then_close=False) as upstream:
        reply = await transport.send(upstream.url, UpstreamRequest(b"HEAD", b"/health", (), b""), PATIENT)
        assert (reply.status, await reply.read()) == (200, b"")
        assert transport.idle == 0


@pytest.mark.parametrize(
    "data",
    [
        plain(b"hello")[:-1],
        STREAM_HEAD + chunk(b"hello"),
        STREAM_HEAD + b"ff\r\nhello",
        STREAM_HEAD + chunk(b"hello") + b"0\r\n",
    ],
)
async def test_a_truncated_body_is_no_clean_end(transport: WireTransport, data: bytes) -> None:
    async with raw(data) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        received = b""
        with pytest.raises(UpstreamBroken) as caught:
            while True:
                received += await reply.read()
                assert received, "the end was taken for a clean one"
        assert received in (b"hello", b"hell")
        assert caught.value.response_began
        with pytest.raises(UpstreamBroken):
            await reply.read()


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"\x16\x03\x01\x02\x00",
    ],
)
async def test_a_malformed_head_is_told_as_such_and_nothing_stays_open(transport: WireTransport, data: bytes) -> None:
    async with raw(data) as upstream:
        with pytest.raises(UpstreamBroken) as caught:
            await transport.send(upstream.url, post(), PATIENT)
        assert caught.value.response_began
        assert (transport.active, transport.idle) == (0, 0)


async def test_a_malformed_chunk_breaks_the_reply_after_the_good_ones(transport: WireTransport) -> None:
    async with raw(STREAM_HEAD + chunk(b"good") + b"zz\r\n", then_close=False) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        assert await reply.read() == b"good"
        with pytest.raises(UpstreamBroken):
            await reply.read()
        await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("one_header", [True, False])
async def test_a_head_without_end_is_cut_off(transport: WireTransport, one_header: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nx: ")
        while True:
            await peer.send(b"y" * 8192 if one_header else b"y\r\nx: " * 1000)

    async with ScriptedUpstream(script) as upstream:
        with pytest.raises(UpstreamBroken, match="longer than 65536 bytes"):
            await transport.send(upstream.url, post(), PATIENT)
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_huge_head_is_refused_even_if_it_comes_at_once(transport: WireTransport) -> None:
    async with raw(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 65_600 + b"\r\ncontent-length: 0\r\n\r\n") as upstream:
        with pytest.raises(UpstreamBroken, match="longer than 65536 bytes"):
            await transport.send(upstream.url, post(), PATIENT)


async def test_a_head_of_just_under_the_limit_is_fine_with_a_long_body_behind_it(transport: WireTransport) -> None:
    data = b"HTTP/1.1 200 OK\r\nx: " + b"y" * 65_000 + b"\r\ncontent-length: 100000\r\n\r\n" + bytes(100_000)
    async with raw(data) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        assert await reply.read_all(100_000) == bytes(100_000)


async def test_a_reply_over_the_limit_is_cut_and_the_engine_sees_it(transport: WireTransport) -> None:
    async def endless(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD)
        while True:
            await peer.send(chunk(b"x" * 1000))

    async with ScriptedUpstream(endless) as upstream:
        reply = await transport.send(upstream.url, post(), PATIENT)
        with pytest.raises(UpstreamBroken, match="longer than 50000 bytes"):
            await reply.read_all(50_000)
        await eventually(lambda: upstream.open_connections == 0)
        assert transport.active == 0


async def test_after_aclose_nothing_is_sent(transport: WireTransport) -> None:
    async with ScriptedUpstream(answer_ok) as upstream:
        await fetch(transport, upstream.url)
        await transport.aclose()
        await eventually(lambda: upstream.open_connections == 0)
        with pytest.raises(ShuttingDown):
            await transport.send(upstream.url, post(), PATIENT)
        assert upstream.accepted == 1
