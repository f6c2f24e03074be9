"""What comes back from the engine: its headers, lengths, keys and ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fakes.bodies import SOUND, form, part
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, chunk, plain
from fakes.stage import ANSWER, DONE, connected, error, event, post, says, stream, to_the_end

from gateway.domain.endpoint import Endpoint

from .conftest import ENGINE_KEY, FORM_OF_TEXT, ID, Line, names

pytestmark = pytest.mark.asyncio(loop_scope="module")

OURS = {b"date", b"content-type", b"x-request-id", b"x-poolgate-pool"}
OF_STREAMS = OURS | {b"cache-control", b"x-accel-buffering", b"transfer-encoding"}
OF_ERRORS = {b"date", b"content-type", b"content-length", b"x-request-id", b"x-poolgate-error-source"}

OF_THE_ENGINE = (
    b"date: Thu, 01 Jan 1970 00:00:00 GMT",
    b"Date: Thu, 01 Jan 1970 00:00:01 GMT",
    b"server: uvicorn",
    b"set-cookie: a=b",
    b"x-request-id: of-the-engine",
    b"authorization: Bearer " + ENGINE_KEY.encode(),
    b"www-authenticate: Basic",
    b"x-poolgate-pool: other",
    b"x-poolgate-error-source: nobody",
    b"x-ratelimit-remaining-tokens: 7",
    b"access-control-allow-origin: *",
    b"connection: keep-alive, x-secret",
    b"x-secret: 1",
    b"keep-alive: timeout=5",
    b"trailer: x-late",
    b"upgrade: h2c",
    b"location: http://elsewhere/",
    b"content-language: en",
)


async def test_headers_of_the_engine_come_back(line: Line) -> None:
    line.first.answer = says(plain(ANSWER, b"200 OK", *OF_THE_ENGINE))
    reply = await line.chat()
    assert set(names(reply.headers)) == OURS | {b"content-length", b"connection"}
    assert reply.body == ANSWER
    assert reply.all(b"x-poolgate-pool") == [b"first"] and ID.fullmatch(reply.all(b"x-request-id")[0])
    assert len(names(reply.headers)) == len(set(names(reply.headers)))
    assert b"1970" not in reply.all(b"date")[0]

    more = b"\r\n".join(OF_THE_ENGINE) + b"\r\n\r\n"
    line.first.answer = says(stream(event(content="x")).replace(b"\r\n\r\n", b"\r\n" + more, 1))
    reply = await line.chat(is_stream=True)
    assert set(names(reply.headers)) == OF_STREAMS | {b"connection"}
    assert reply.all(b"content-type") == [b"text/event-stream; charset=utf-8"]

    for status, shown in ((b"400 Bad Request", 400), (b"500 Oops", 502), (b"401 Unauthorized", 502)):
        line.first.answer = says(error("no", status, *OF_THE_ENGINE))
        reply = await line.chat()
        assert (reply.status, set(names(reply.headers))) == (shown, OF_ERRORS | {b"connection"})
        assert reply.all(b"x-poolgate-error-source") == [b"engine"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    "status", [b"204 No Content", b"304 Not Modified", b"302 Found", b"206 Partial", b"201 Created"]
)
async def test_reply_without_a_body_or_of_an_odd_status_has_a_wrong_length(
    line: Line, status: bytes, is_stream: bool
) -> None:
    has_none = status[:3] in (b"204", b"304")
    line.first.answer = says(b"HTTP/1.1 " + status + b"\r\nserver: x\r\n\r\n" if has_none else plain(ANSWER, status))
    reply = await line.chat(is_stream=is_stream)
    assert (reply.status, reply.error()["code"]) == (502, "engine_failed")
    line.first.reset()
    assert (await line.chat()).status == 200


async def test_a_head_request_is_answered_with_a_body(line: Line) -> None:
    async with asyncio.timeout(10), connected(line.gateway) as (reader, writer):
        for endpoint in Endpoint:
            writer.write(b"HEAD %b HTTP/1.1\r\nHost: x\r\n\r\n" % endpoint.value.encode())
            data = await reader.readuntil(b"\r\n\r\n")
            assert data.startswith(b"HTTP/1.1 405 ") and b"allow: POST\r\n" in data and b"x-request-id: " in data
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await to_the_end(reader)).startswith(b"HTTP/1.1 200 ")
    assert line.first.requests == []


LENGTHS: dict[str, bytes] = {
    "both kinds": b"content-length: 5\r\ntransfer-encoding: chunked\r\n",
    "both kinds, the other way": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n",
    "two": b"content-length: %d\r\ncontent-length: 5\r\n" % len(ANSWER),
    "a list": b"content-length: %d, 5\r\n" % len(ANSWER),
    "negative": b"content-length: -1\r\n",
    "no number": b"content-length: 0x10\r\n",
    "beyond all measure": b"content-length: 99999999999999999999999\r\n",
    "folded": b"content-length:\r\n %d\r\n" % len(ANSWER),
    "a folded header that hides another": b"x-a: b\r\n\tcontent-length: 5\r\n",
    "a blank before the colon": b"content-length : 5\r\n",
    "chunked, not last": b"transfer-encoding: chunked, identity\r\n",
    "too long for what comes": b"content-length: %d\r\n" % (len(ANSWER) + 5),
    "a bare line feed": b"x-a: b\nset-cookie: c=d\r\ncontent-length: %d\r\n" % len(ANSWER),
    "a bare carriage return": b"x-a: b\rset-cookie: c=d\r\ncontent-length: %d\r\n" % len(ANSWER),
    "a zero byte": b"x-a: b\0c\r\ncontent-length: %d\r\n" % len(ANSWER),
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("lines", LENGTHS.values(), ids=LENGTHS)
async def test_engines_ambiguous_length_makes_half_a_reply_a_success(line: Line, lines: bytes, is_stream: bool) -> None:
    """A whole answer or a 502, never something in between; and nothing of it is left for the next request."""
    body = event(content="x") + DONE if is_stream else ANSWER
    lines = lines.replace(b"%d" % len(ANSWER), b"%d" % len(body))

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(b"HTTP/1.1 200 OK\r\n" + lines + b"\r\n")
        await peer.send(chunk(body) + STREAM_END if b"chunked" in lines else body)
        raise ConnectionResetError("closes")

    line.first.answer = answer
    reply = await line.chat(is_stream=is_stream)
    if reply.status == 200 and not is_stream:
        assert reply.body == ANSWER
    elif reply.status == 200:
        assert b'"content": "x"' in reply.body and (b"[DONE]" in reply.body) != (b'"error"' in reply.body)
    else:
        assert reply.status == 502 and reply.error()["code"] in ("upstream_broken", "engine_failed")
    assert b"set-cookie" not in names(reply.headers)
    line.first.reset()
    assert (await line.chat()).body == ANSWER


async def test_bytes_behind_a_reply_become_the_next_callers_reply(line: Line) -> None:
    stolen = plain(b'{"id": "of somebody else"}')

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(plain(ANSWER) + stolen)

    line.first.answer = answer
    for _ in range(5):
        assert (await line.chat()).body == ANSWER

    async def late(peer: Peer, _request: Received) -> None:
        await peer.send(plain(ANSWER))
        await peer.send(stolen)

    line.first.answer = late
    for _ in range(5):
        reply = await line.chat()
        assert reply.body == ANSWER


@pytest.mark.parametrize("content_type", [b"text/plain;\r\n x-injected: 1", b"text/plain; a=\xff", b"text/html", b""])
async def test_content_type_of_the_engine_writes_a_header(line: Line, content_type: bytes) -> None:
    """The one header of an engine whose value is passed on: the type of a transcript."""
    body = form(part("file", SOUND, "a.wav"), part("model", "one"))
    line.first.answer = says(plain(b"text", b"200 OK", b"content-type: " + content_type))
    reply = await post(line.gateway, "/v1/audio/transcriptions", body, FORM_OF_TEXT)
    assert reply.status == (200 if content_type == b"text/plain; a=\xff" else 502)
    assert b"x-injected" not in names(reply.headers)
    assert len(reply.all(b"content-type")) == 1


@pytest.mark.parametrize(
    "status", [b"400 Bad Request", b"401 Unauthorized", b"403 Forbidden", b"500 Oops", b"503 Busy"]
)
@pytest.mark.parametrize("shape", ["error", "detail", "text", "event"])
async def test_engines_key_comes_back_in_an_error_that_repeats_it(line: Line, status: bytes, shape: str) -> None:
    echo = f"Bearer {ENGINE_KEY} is no good, said {ENGINE_KEY}"
    document: dict[str, Any] = {"error": {"message": echo, "param": ENGINE_KEY, "code": ENGINE_KEY, "type": ENGINE_KEY}}
    if shape == "event":
        document["error"]["code"] = int(status[:3])
        answer = says(stream(b"data: " + json.dumps(document).encode() + b"\n\n"))
    elif shape == "text":
        answer = says(plain(echo.encode(), status, b"content-type: text/plain"))
    else:
        answer = says(plain(json.dumps({"detail": echo} if shape == "detail" else document).encode(), status))
    line.first.answer = line.second.answer = answer
    reply = await line.chat(is_stream=shape == "event", model="chat")
    assert reply.status == {b"400": 400, b"503": 503}.get(status[:3], 502)
    assert ENGINE_KEY.encode() not in reply.body + b"".join(value for _, value in reply.headers)
    assert ENGINE_KEY not in line.gateway.log.read_text()
    if status[:3] in (b"401", b"403"):  # said of our key: no business of the caller's
        assert "is no good" not in reply.error()["message"]


async def test_stream_that_the_engine_ends_by_its_connection_has_no_end_mark_of_ours(line: Line) -> None:
    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(STREAM_HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + event(content="x"))
        raise ConnectionResetError("closes")

    line.first.answer = answer
    reply = await line.chat(is_stream=True)
    assert reply.status == 200 and b"[DONE]" not in reply.body
    assert b'"upstream_broken"' in reply.body.rstrip(b"0\r\n").split(b"data: ")[-1]
