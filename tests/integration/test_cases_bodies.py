"""Bodies that broke other gateways, on every proxied path, in front of a real gateway process."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import socket
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.bodies import BOUNDARY, FORM_TYPE, JSON_PATHS, SOUND, any_body, form, json_fields, part, transcription
from fakes.line import KEY, MESSAGES, Gateway, running_gateway, sha256
from fakes.scripted_upstream import Peer, Received
from fakes.stage import USAGE, Stage, ask, connected, head, peak_kib, post, push, to_the_end
from fakes.waits import eventually
from openai import APIStatusError, AsyncOpenAI

from gateway.domain.endpoint import Endpoint, ErrorShape

LIMIT_BYTES = 100_000
ROOM_KIB = 40_000  # more than a request of the limit's size can need, and far below what the bombs unfold to
LIMITED = "sk-test-limited-0123456789"

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Line:
    gateway: Gateway
    stage: Stage

    async def check_alive(self) -> None:
        """The next request is served, by the same process."""
        assert self.gateway.process.returncode is None
        self.stage.reset()
        assert (await self.gateway.chat()).status_code == 200
        assert len(self.stage.requests) == 1
        assert "Traceback" not in self.gateway.log.read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    async with (
        Stage() as stage,
        running_gateway(
            tmp_path_factory.mktemp("bodies"),
            redis_process.url,
            gateway={"max_body_bytes": LIMIT_BYTES, "timeouts": {"body_s": 1}},
            keys={"test": {"sha256": sha256(KEY)}, "one": {"sha256": sha256(LIMITED), "limits": {"in_flight": 1}}},
            pools={"tiny": {"urls": [stage.url], "served_name": "served"}},
        ) as gateway,
    ):
        yield Line(gateway, stage)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    running_line.stage.reset()
    return running_line


def check_shape(endpoint: Endpoint, body: bytes) -> str:
    """The message of an error in the shape of its path."""
    document = json.loads(body)
    if endpoint.rules.errors is ErrorShape.ANTHROPIC:
        assert set(document) == {"type", "error"} and set(document["error"]) == {"type", "message"}
    else:
        assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
    message: str = document["error"]["message"]
    return message


# --- malformed ------------------------------------------------------------------------------------------------------

MALFORMED = {
    "trailing comma": b'{"model": "chat",}',
    "empty": b"",
    "null": b"null",
    "array": b"[]",
    "string": b'"x"',
    "number": b"1",
    "cut off": b'{"model": "chat", "messages": [{"role": "us',
    "byte order mark": b"\xef\xbb\xbf{}",
    "two documents": b'{"model": "chat"} {}',
    "not a number": b'{"model": "chat", "temperature": NaN}',
    "bare control character": b'{"model": "chat", "user": "a\nb"}',
    "bad utf-8 in a text": b'{"model": "chat", "user": "\xc3\x28"}',
    "bad utf-8 in a name": b'{"model": "chat", "us\xc3\x28er": 1}',
    "utf-16": json.dumps({"model": "chat"}).encode("utf-16"),
    "utf-16 without a mark": json.dumps({"model": "chat"}).encode("utf-16-le"),
    "overlong utf-8": b'{"model": "chat", "user": "\xc0\xaf"}',
    "a surrogate as utf-8": b'{"model": "chat", "user": "\xed\xa0\x80"}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_json_or_bad_utf8_is_a_500(line: Line, body: bytes) -> None:
    """It is a 400 in the shape of the path, on every path, and nothing of it reaches an engine."""
    for endpoint in Endpoint:
        content_type = FORM_TYPE if endpoint.rules.is_form else b"application/json"
        reply = await post(line.gateway, endpoint.value, body, b"Content-Type: " + content_type)
        assert reply.status == 400, (endpoint, reply)
        assert reply.all(b"x-poolgate-error-source") == [b"client"]
        assert check_shape(endpoint, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


@pytest.mark.parametrize("content_type", [None, b"text/plain", b"application/x-www-form-urlencoded", b"\xff;;="])
@pytest.mark.parametrize("endpoint", JSON_PATHS)
async def test_json_with_a_wrong_or_missing_content_type_is_read_as_what_it_is(
    line: Line, endpoint: Endpoint, content_type: bytes | None
) -> None:
    body, _ = any_body(endpoint)
    headers = () if content_type is None else (b"Content-Type: " + content_type,)
    assert (await post(line.gateway, endpoint.value, body, *headers)).status == 200
    assert line.stage.requests[-1].header(b"content-type") == [b"application/json"]
    broken = await post(line.gateway, endpoint.value, body[:-1], *headers)
    assert broken.status == 400
    assert len(line.stage.requests) == 1


BAD_FORMS = {
    "json": (b'{"model": "chat"}', b"application/json"),
    "no type": (transcription(), b""),
    "no boundary": (transcription(), b"multipart/form-data"),
    "another boundary": (transcription(), b"multipart/form-data; boundary=other"),
    "cut off": (transcription()[:-20], FORM_TYPE),
    "something in front": (b"x" + transcription(), FORM_TYPE),
    "something behind": (transcription() + b"x", FORM_TYPE),
    "no model": (form(part("file", SOUND, "a.wav")), FORM_TYPE),
    "two models": (form(part("file", SOUND, "a.wav"), part("model", "chat"), part("model", "other")), FORM_TYPE),
    "no file": (form(part("model", "chat")), FORM_TYPE),
    "model with bad utf-8": (form(part("file", SOUND, "a.wav"), part("model", b"ch\xc3\x28t")), FORM_TYPE),
    "a denied field": (transcription(priority="1"), FORM_TYPE),
    "a thousand parts": (form(*[part(f"f{i}", "x") for i in range(1000)]), FORM_TYPE),
    "boundary alone": (f"--{BOUNDARY}--\r\n".encode(), FORM_TYPE),
}


@pytest.mark.parametrize(("body", "content_type"), BAD_FORMS.values(), ids=BAD_FORMS)
async def test_malformed_form_is_a_500_or_is_read_in_two_ways(line: Line, body: bytes, content_type: bytes) -> None:
    headers = (b"Content-Type: " + content_type,) if content_type else ()
    reply = await post(line.gateway, Endpoint.TRANSCRIPTIONS.value, body, *headers)
    assert reply.status == 400
    check_shape(Endpoint.TRANSCRIPTIONS, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


# --- size -----------------------------------------------------------------------------------------------------------


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


# --- compression ----------------------------------------------------------------------------------------------------


def bomb(size: int) -> bytes:
    """That many zeros, packed piece by piece."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    piece = bytes(1 << 20)
    return b"".join([*(packer.compress(piece) for _ in range(size >> 20)), packer.flush()])


@pytest.mark.parametrize("endpoint", [Endpoint.CHAT, Endpoint.EMBEDDINGS, Endpoint.TRANSCRIPTIONS])
async def test_small_gzip_body_becomes_gigabytes(line: Line, endpoint: Endpoint) -> None:
    packed = bomb(96 << 20)
    assert len(packed) < LIMIT_BYTES
    before = peak_kib(line.gateway.pid)
    replies = await asyncio.gather(
        *(post(line.gateway, endpoint.value, packed, b"Content-Encoding: gzip") for _ in range(8))
    )
    assert {reply.status for reply in replies} == {413}
    assert str(LIMIT_BYTES) in check_shape(endpoint, replies[0].body)
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    assert line.stage.requests == []
    await line.check_alive()


BAD_CODINGS: dict[str, tuple[bytes, bytes, int]] = {
    "cut off": (b"gzip", gzip.compress(b"{}" * 100)[:-1], 400),
    "broken checksum": (b"gzip", gzip.compress(b"{}")[:-8] + bytes(8), 400),
    "something behind": (b"gzip", gzip.compress(b"{}") + b"x", 400),
    "no gzip at all": (b"gzip", b'{"model": "chat"}', 400),
    "nothing": (b"gzip", b"", 400),
    "twice, told once": (b"gzip", gzip.compress(gzip.compress(b"{}")), 400),
    "twice, told twice": (b"gzip, gzip", gzip.compress(gzip.compress(b"{}")), 415),
    "unknown": (b"br", b"{}", 415),
    "odd name": (b"\xff\x00x", b"{}", 400),
}


@pytest.mark.parametrize(("coding", "body", "status"), BAD_CODINGS.values(), ids=BAD_CODINGS)
async def test_broken_or_unknown_compression_is_called_bad_json(
    line: Line, coding: bytes, body: bytes, status: int
) -> None:
    for endpoint in (Endpoint.CHAT, Endpoint.MESSAGES, Endpoint.TRANSCRIPTIONS):
        reply = await post(
            line.gateway, endpoint.value, body, b"Content-Encoding: " + coding, b"Content-Type: " + FORM_TYPE
        )
        assert reply.status == status
        if status == 415:
            assert "gzip, deflate, zstd" in check_shape(endpoint, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_compressed_request_is_not_understood(line: Line, endpoint: Endpoint) -> None:
    """It is decoded on every path, and the engine gets it plain, with the length that it then has."""
    body, content_type = any_body(endpoint)
    plain = await post(line.gateway, endpoint.value, body, b"Content-Type: " + content_type)
    packed = await post(
        line.gateway,
        endpoint.value,
        gzip.compress(body),
        b"Content-Encoding: gzip",
        b"Content-Type: " + content_type,
    )
    assert (plain.status, packed.status) == (200, 200)
    one, two = line.stage.requests
    assert one.body == two.body
    assert two.header(b"content-encoding") == []
    assert two.header(b"content-length") == [b"%d" % len(two.body)]


# --- depth ----------------------------------------------------------------------------------------------------------


def deep_object(depth: int) -> bytes:
    return b'{"a":' * depth + b"1" + b"}" * depth


DEEP = {
    "arrays as the body": b"[" * 20_000 + b"]" * 20_000,
    "objects as the body": deep_object(15_000),
    "no end": b"[" * 90_000,
    "a tool's parameters": b'{"model":"chat","messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",'
    b'"function":{"name":"f","parameters":' + deep_object(5_000) + b"}}]}",
    "a field that nobody knows": b'{"model":"chat","messages":[{"role":"user","content":"x"}],"x":'
    + deep_object(5_000)
    + b"}",
    "a message": b'{"model":"chat","messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "a prompt": b'{"model":"chat","prompt":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "an input": b'{"model":"chat","input":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
    "stream options": b'{"model":"chat","stream":true,"stream_options":' + deep_object(5_000) + b"}",
}


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP)
async def test_very_deep_nesting_ends_the_process(line: Line, body: bytes) -> None:
    for endpoint in JSON_PATHS:
        reply = await post(line.gateway, endpoint.value, body)
        assert reply.status == 400, endpoint
        assert len(reply.body) < 1_000
        check_shape(endpoint, reply.body)
    assert line.stage.requests == []
    await line.check_alive()


async def test_nesting_that_the_parser_takes_reaches_the_engine_as_sent(line: Line) -> None:
    deep = deep_object(500)
    body = json.dumps(json_fields(Endpoint.CHAT)).encode()[:-1] + b',"x":' + deep + b"}"
    assert (await post(line.gateway, "/v1/chat/completions", body)).status == 200
    assert deep in line.stage.requests[-1].body


# --- long errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["parts", "messages", "names"])
async def test_validation_error_repeats_the_request_a_hundred_times(line: Line, where: str) -> None:
    """Our own findings on thousands of bad elements: the first one, named, without its text."""
    secret = "the text that no error may repeat"
    body: dict[str, Any] = {
        "parts": {"messages": [{"role": "user", "content": [{"type": 7, "text": secret}] * 1_500}]},
        "messages": {"messages": [{"role": secret, "content": secret}] * 1_000},
        "names": {"messages": MESSAGES, "max_tokens": secret * 2_000},
    }[where]
    reply = await line.gateway.chat(**body)
    assert reply.status_code == 400
    assert len(reply.content) < 1_000
    if where != "names":  # a bad number is shown, cut
        assert secret not in reply.text
    assert secret * 2 not in line.gateway.log.read_text()


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [b"400 Bad Request", b"500 Internal Server Error"])
async def test_engines_error_of_114_megabytes_fills_reply_log_and_memory(
    line: Line, status: bytes, is_stream: bool
) -> None:
    size = 114_000_000
    finding = b'{"type":"literal_error","loc":["body"],"msg":"the whole request again: %b"},' % (b"x" * 900)
    seen: list[int] = []

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % (status, size))
        try:
            await peer.send(b'{"detail": [')
            while peer.sent_bytes < size:
                await peer.send(finding * 64)
        finally:
            seen.append(peer.sent_bytes)

    line.stage.answer = answer
    before = peak_kib(line.gateway.pid)
    reply = await line.gateway.chat(stream=is_stream)
    assert reply.status_code == (400 if status.startswith(b"400") else 502)
    assert len(reply.content) < 6_000
    assert "the whole request again: xxx" in reply.json()["error"]["message"]
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    assert max(map(len, line.gateway.log.read_bytes().splitlines())) < 10_000

    async def is_cut() -> bool:
        return len(seen) == 1

    await eventually(is_cut, "the engine is hung up on")
    assert seen[0] < size // 2
    await line.check_alive()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_error_event_of_megabytes_is_cut_too(line: Line, is_stream: bool) -> None:
    huge = json.dumps({"error": {"message": "y" * 3_000_000, "type": "BadRequestError", "code": 400}}).encode()

    async def answer(peer: Peer, _request: Received) -> None:
        if is_stream:
            data = b"data: " + huge + b"\n\n"
            await peer.send(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await peer.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            await peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(huge), huge))

    line.stage.answer = answer
    before = peak_kib(line.gateway.pid)
    reply = await line.gateway.chat(stream=is_stream)
    assert peak_kib(line.gateway.pid) - before < ROOM_KIB
    if not is_stream:
        assert reply.status_code == 400 and len(reply.content) < 6_000
        assert reply.json()["error"]["message"] == "y" * 4093 + "…"
    await line.check_alive()
