"""What the transport writes and what it makes of every kind of reply, byte by byte."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, ScriptedUpstream, chunk, plain
from fakes.waits import eventually

from gateway.domain.errors import ConnectFailed, InternalError, ShuttingDown, UpstreamBroken
from gateway.upstream.transport import UpstreamRequest

from .conftest import Pair
from .exchanges import PATIENT, POST, answer_ok, fetch, goes_on_when_told, is_stuck

JSON = (b"content-type", b"application/json")


def post(body: bytes = b"{}", *headers: tuple[bytes, bytes]) -> UpstreamRequest:
    return UpstreamRequest(b"POST", b"/v1/chat/completions", (JSON, *headers), body)


def raw(both: Pair, data: bytes, *, then_close: bool = True) -> ScriptedUpstream:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)
        if not then_close:
            await peer.closed()

    return both.upstream(script)


# --- requests -------------------------------------------------------------------------------------------------------


async def sent_by(both: Pair, request: UpstreamRequest, path: str = "") -> Received:
    async with both.upstream(answer_ok) as upstream:
        assert await fetch(both, upstream.url + path, request) == b"hello"
        return upstream.requests[0]


async def test_length_is_that_of_the_body_sent_whatever_the_caller_said(both: Pair) -> None:
    received = await sent_by(both, post(b"x" * 77, (b"content-length", b"5"), (b"Content-Length", b"6")))
    assert received.header(b"content-length") == [b"77"]
    assert received.body == b"x" * 77


async def test_hop_by_hop_headers_and_those_named_in_connection_stay_here(both: Pair) -> None:
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
        (b"authorization", b"Bearer engine-key"),
        (b"x-request-id", b"r1"),
    ]
    received = await sent_by(both, UpstreamRequest(b"POST", b"/", tuple(headers), b"{}"))
    assert sorted((name.lower(), value) for name, value in received.headers if name.lower() != b"host") == [
        (b"accept-encoding", b"identity"),
        (b"authorization", b"Bearer engine-key"),
        (b"content-length", b"2"),
        (b"x-request-id", b"r1"),
    ]
    assert len(received.header(b"host")) == 1 and received.header(b"host") != [b"elsewhere"]


async def test_the_request_line_and_host_are_those_of_the_url(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        await fetch(both, upstream.url + "/prefix/", UpstreamRequest(b"POST", b"/v1/x?a=%20b", (), b"{}"))
        received = upstream.requests[0]
        assert received.line == b"POST /prefix/v1/x?a=%20b HTTP/1.1"
        assert received.header(b"host") == [upstream.url.rpartition("/")[2].encode()]


@pytest.mark.parametrize("value", [b"a\r\nx-evil: 1", b"a\nb", b"a\rb", b"a\0b"])
async def test_a_line_break_in_a_header_sends_nothing(both: Pair, value: bytes) -> None:
    async with both.upstream(answer_ok) as upstream:
        with pytest.raises(InternalError):
            await both.transport.send(upstream.url, post(b"{}", (b"x-a", value)), PATIENT)
        assert upstream.accepted == 0


async def test_a_unix_socket_is_an_address_too(plain_only: Pair, tmp_path: Path) -> None:
    async with ScriptedUpstream(answer_ok, socket_path=str(tmp_path / "s")) as upstream:
        assert await fetch(plain_only, upstream.url) == b"hello"
        assert await fetch(plain_only, upstream.url) == b"hello"
        assert upstream.accepted == 1


async def test_a_big_body_arrives_whole_through_a_slow_reader(both: Pair) -> None:
    async def slow(peer: Peer) -> None:
        await eventually(lambda: is_stuck(both))
        await answer_ok(peer)

    async with both.upstream(slow) as upstream:
        body = bytes(range(256)) * 40_000
        assert await fetch(both, upstream.url, post(body)) == b"hello"
        assert upstream.requests[0].body == body
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 1


async def test_an_answer_before_the_body_was_taken_counts_and_ends_the_connection(both: Pair) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.send(plain(b"too long", b"413 Content Too Large"))
        await eventually(lambda: both.transport.active == 0)

    async with both.upstream(refuse) as upstream:
        reply = await both.transport.send(upstream.url, post(b"x" * 50_000_000), PATIENT)
        assert reply.status == 413
        assert await reply.read_all(100) == b"too long"
        assert both.transport.idle == 0


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1:1",
        "https://",
        "https://h:99999",
        "https://u:p@h",
        "https://h?q=1",
        "127.0.0.1:8000",
        "http://",
        "http://h:99999",
        "http://[::1",
        "unix:relative",
        "",
        "http://u:p@h",
    ],
)
async def test_a_url_of_another_form_is_refused(plain_only: Pair, url: str) -> None:
    with pytest.raises(ConnectFailed, match="url"):
        await plain_only.transport.send(url, POST, PATIENT)


# --- replies --------------------------------------------------------------------------------------------------------


async def test_a_reply_byte_by_byte(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.trickle(STREAM_HEAD + chunk(b"one") + chunk(b"two") + STREAM_END)
        await peer.closed()

    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert reply.status == 200
        assert await reply.read_all(100) == b"onetwo"
        assert both.transport.idle == 1


async def test_a_read_gives_what_is_there_without_waiting_for_more(both: Pair) -> None:
    go_on = asyncio.Event()
    script = goes_on_when_told(go_on, chunk(b"one") + chunk(b"two"), chunk(b"three") + STREAM_END)
    async with both.upstream(script) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"onetwo"
        go_on.set()
        assert await reply.read() == b"three"
        assert await reply.read() == b""
        assert await reply.read() == b""


async def test_headers_have_small_names_and_none_that_is_hop_by_hop(both: Pair) -> None:
    head = (
        b"HTTP/1.1 429 Slow down\r\nX-Request-Id: r1\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n"
        b"Keep-Alive: timeout=5\r\nTransfer-Encoding: chunked\r\nX-Twice: a\r\nX-Twice: b\r\n\r\n"
    )
    async with raw(both, head + chunk(b"x") + b"0\r\nX-Trailer: t\r\n\r\n", then_close=False) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert (reply.status, await reply.read_all(10)) == (429, b"x")
        assert reply.headers == [(b"x-request-id", b"r1"), (b"x-twice", b"a"), (b"x-twice", b"b")]
        assert both.transport.idle == 1


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
async def test_every_form_of_a_whole_reply_is_read_to_its_end(both: Pair, data: bytes, body: bytes) -> None:
    async with raw(both, data) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read_all(1000) == body
        assert not any(name == b"link" for name, _ in reply.headers)
        await eventually(lambda: both.transport.idle == 0)


@pytest.mark.parametrize(
    "data",
    [
        plain(b"hello", b"200 OK", b"connection: close") + b"and more than was announced",
        plain(b"hello") + b"garbage",
        plain(b"hello") + plain(b"a reply to nothing"),
    ],
)
async def test_bytes_behind_the_reply_are_not_its_own_and_end_the_connection(both: Pair, data: bytes) -> None:
    async with raw(both, data, then_close=False) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read_all(1000) == b"hello"
        assert both.transport.idle == 0
        await eventually(lambda: upstream.open_connections == 0)
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 2


@pytest.mark.parametrize("status", [b"301 Moved", b"307 Temporary Redirect"])
async def test_redirect_is_a_reply_like_any_other(both: Pair, status: bytes) -> None:
    async with raw(both, plain(b"go", status, b"location: http://127.0.0.1:1/"), then_close=False) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert (reply.status, await reply.read_all(10)) == (int(status[:3]), b"go")


async def test_head_has_headers_and_no_body(both: Pair) -> None:
    async with raw(both, b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n", then_close=False) as upstream:
        reply = await both.transport.send(upstream.url, UpstreamRequest(b"HEAD", b"/health", (), b""), PATIENT)
        assert (reply.status, await reply.read()) == (200, b"")
        assert both.transport.idle == 0


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
    async with raw(both, data) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
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
async def test_a_malformed_head_is_told_as_such_and_nothing_stays_open(both: Pair, data: bytes) -> None:
    async with raw(both, data) as upstream:
        with pytest.raises(UpstreamBroken) as caught:
            await both.transport.send(upstream.url, POST, PATIENT)
        assert caught.value.response_began
        assert (both.transport.active, both.transport.idle) == (0, 0)


async def test_a_malformed_chunk_breaks_the_reply_after_the_good_ones(both: Pair) -> None:
    async with raw(both, STREAM_HEAD + chunk(b"good") + b"zz\r\n", then_close=False) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"good"
        with pytest.raises(UpstreamBroken):
            await reply.read()
        await eventually(lambda: upstream.open_connections == 0)


@pytest.mark.parametrize("one_header", [True, False])
async def test_a_head_without_end_is_cut_off(both: Pair, one_header: bool) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\nx: ")
        while True:
            await peer.send(b"y" * 8192 if one_header else b"y\r\nx: " * 1000)

    async with both.upstream(script) as upstream:
        with pytest.raises(UpstreamBroken, match="longer than 65536 bytes"):
            await both.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: upstream.open_connections == 0)


async def test_a_huge_head_is_refused_even_if_it_comes_at_once(both: Pair) -> None:
    async with raw(both, b"HTTP/1.1 200 OK\r\nx: " + b"y" * 65_600 + b"\r\ncontent-length: 0\r\n\r\n") as upstream:
        with pytest.raises(UpstreamBroken, match="longer than 65536 bytes"):
            await both.transport.send(upstream.url, POST, PATIENT)


async def test_a_head_of_just_under_the_limit_is_fine_with_a_long_body_behind_it(both: Pair) -> None:
    data = b"HTTP/1.1 200 OK\r\nx: " + b"y" * 65_000 + b"\r\ncontent-length: 100000\r\n\r\n" + bytes(100_000)
    async with raw(both, data) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read_all(100_000) == bytes(100_000)


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
        assert both.transport.active == 0


async def test_after_aclose_nothing_is_sent(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        await fetch(both, upstream.url)
        await both.transport.aclose()
        await eventually(lambda: upstream.open_connections == 0)
        with pytest.raises(ShuttingDown):
            await both.transport.send(upstream.url, POST, PATIENT)
        assert upstream.accepted == 1
