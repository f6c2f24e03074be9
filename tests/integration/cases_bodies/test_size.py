"""Bodies over the limit, of a wrong length, or without an end."""

from __future__ import annotations

import asyncio
import base64
import json
import socket

import pytest
from fakes.bodies import any_body, transcription
from fakes.line import KEY, LIMITED
from fakes.stage import USAGE, ask, connected, head, peak_kib, post, push, to_the_end
from openai import APIStatusError, AsyncOpenAI

from gateway.domain.endpoint import Endpoint

from .conftest import LIMIT_BYTES, ROOM_KIB, Line, check_shape

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_framework_limit_bites_an_image_below_ours(line: Line) -> None:
    """As text, as a base64 image and as a recording: N-1 and N bytes reach the engine, N+1 is a 413 with the limit."""
    for size, status in ((LIMIT_BYTES - 1, 200), (LIMIT_BYTES, 200), (LIMIT_BYTES + 1, 413)):
        for endpoint in Endpoint:
            body, content_type = any_body(endpoint)
            if endpoint.rules.is_form:
                body = transcription(prompt="")
                body = transcription(prompt="a" * (size - len(body)))
            elif endpoint is Endpoint.CHAT:
                body = with_image(size)
            else:
                body = body.ljust(size)
            assert len(body) == size
            line.stage.requests.clear()
            reply = await post(line.gateway, endpoint.value, body, b"Content-Type: " + content_type)
            assert (endpoint, reply.status) == (endpoint, status)
            assert len(line.stage.requests) == (status == 200)
            if status == 413:
                assert str(LIMIT_BYTES) in check_shape(endpoint, reply.body)
                assert reply.all(b"connection") == [b"close"]
    await line.check_alive()


def with_image(size: int) -> bytes:
    def body(url: str) -> bytes:
        part = {"type": "image_url", "image_url": {"url": url}}
        return json.dumps({"model": "chat", "messages": [{"role": "user", "content": [part]}]}).encode()

    room = size - len(body("data:image/png;base64,"))
    data = base64.b64encode(bytes(room)).decode()[:room]
    return body("data:image/png;base64," + data)


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_endless_chunked_body_passes_a_limit_that_looks_at_content_length(line: Line, endpoint: Endpoint) -> None:
    before = peak_kib(line.gateway.pid)
    _, content_type = any_body(endpoint)
    opening = head(endpoint.value, b"Transfer-Encoding: chunked", b"Content-Type: " + content_type)
    reply, _ = await push(line.gateway, opening, b"4000\r\n" + b"a" * 0x4000 + b"\r\n", most=5_000)
    assert reply.status == 413
    assert str(LIMIT_BYTES) in check_shape(endpoint, reply.body)
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    assert line.stage.requests == []


async def test_announced_body_over_the_limit_is_refused_unread_and_its_sender_sees_why(line: Line) -> None:
    """A client that first writes all, then reads, as most do, gets the 413 all the same."""
    async with AsyncOpenAI(base_url=line.gateway.url + "/v1", api_key=KEY, max_retries=0) as openai:
        with pytest.raises(APIStatusError) as refused:
            await openai.chat.completions.create(model="chat", messages=[{"role": "user", "content": "x" * 20_000_000}])
    assert refused.value.status_code == 413
    assert str(LIMIT_BYTES) in refused.value.message

    def write_then_read() -> bytes:
        host, port = line.gateway.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as caller:
            caller.sendall(head("/v1/chat/completions", b"Content-Length: 8000000"))
            caller.sendall(b"x" * 8_000_000)
            return caller.recv(65_536)

    assert (await asyncio.to_thread(write_then_read)).startswith(b"HTTP/1.1 413 ")
    await line.check_alive()


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_body_shorter_than_announced_holds_its_request_for_ever(line: Line, endpoint: Endpoint) -> None:
    """A stalled upload ends by the read deadline, whatever the path; no engine hears of it."""
    body, content_type = any_body(endpoint)
    opening = head(endpoint.value, b"Content-Length: %d" % (len(body) + 1), b"Content-Type: " + content_type)
    reply = await ask(line.gateway, opening + body)
    assert reply.status == 408
    assert "1 s" in check_shape(endpoint, reply.body)
    assert line.stage.requests == []


async def test_body_that_stalls_holds_a_slot(line: Line) -> None:
    """Its caller has one slot: it is not taken before the body is there."""
    async with connected(line.gateway) as (_, writer):
        writer.write(head("/v1/chat/completions", b"Content-Length: 1000", key=LIMITED) + b"{")
        await writer.drain()
        assert (await line.gateway.chat(LIMITED)).status_code == 200
    assert (await line.gateway.chat(LIMITED)).status_code == 200


@pytest.mark.parametrize("tail", [b"garbage", b"}}}}\r\n\r\n", b"\x00\xff" * 40_000], ids=["text", "lines", "80 kB"])
async def test_more_bytes_than_content_length_become_a_part_of_the_body(line: Line, tail: bytes) -> None:
    """What follows is neither body nor request: it ends the connection, and the engine gets what was announced."""
    body, _ = any_body(Endpoint.CHAT)
    opening = head("/v1/chat/completions", b"Content-Length: %d" % len(body)).replace(b"Connection: close\r\n", b"")
    async with asyncio.timeout(10), connected(line.gateway) as (reader, writer):
        writer.write(opening + body)
        first = await reader.readuntil(json.dumps(USAGE).encode() + b"}")
        assert first.startswith(b"HTTP/1.1 200 ")
        writer.write(tail)
        assert (await to_the_end(reader)).startswith(b"HTTP/1.1 400 ")
    async with asyncio.timeout(10), connected(line.gateway) as (reader, writer):
        writer.write(opening.replace(b"%d" % len(body), b"10") + body + tail)
        assert not (await to_the_end(reader)).startswith(b"HTTP/1.1 200 ")
    assert len(line.stage.requests) == 1
    assert json.loads(line.stage.requests[0].body) == json.loads(body) | {"model": "served"}
    await line.check_alive()


@pytest.mark.parametrize(
    "lengths",
    [
        (b"Content-Length: 10", b"Transfer-Encoding: chunked"),
        (b"Content-Length: 10", b"Content-Length: 11"),
        (b"Content-Length: 10, 11",),
        (b"Content-Length: -1",),
        (b"Content-Length: +10",),
        (b"Content-Length: 0x10",),
        (b"Content-Length: 99999999999999999999999999",),
        (b"Transfer-Encoding: chunked, identity",),
        (b"Transfer-Encoding : chunked",),
        (b"X-Folded: a\r\n\tContent-Length: 10",),
    ],
)
async def test_ambiguous_length_lets_one_request_hide_in_another(line: Line, lengths: tuple[bytes, ...]) -> None:
    hidden = head("/v1/completions", b"Content-Length: 34") + b'{"model": "chat", "prompt": "one"}'
    async with asyncio.timeout(10), connected(line.gateway) as (reader, writer):
        writer.write(head("/v1/chat/completions", *lengths).replace(b"Connection: close\r\n", b""))
        writer.write(b"0\r\n\r\n" + hidden)
        data = await to_the_end(reader)
    assert data.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")), data
    assert data.count(b"HTTP/1.1 ") == 1
    assert line.stage.requests == []
    await line.check_alive()
