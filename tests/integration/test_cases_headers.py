"""Headers, lengths, keys and ids that went astray in other gateways; in front of a real gateway process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.bodies import BOUNDARY, SOUND, any_body, form, part
from fakes.line import KEY, MESSAGES, Gateway, running_gateway
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, chunk, plain
from fakes.stage import ANSWER, DONE, Reply, Stage, ask, connected, error, event, head, post, says, stream, to_the_end
from fakes.waits import eventually

from gateway.domain.endpoint import Endpoint

ENGINE_KEY = "sk-engine-canary-77b1"
FORM_OF_TEXT = b"Content-Type: multipart/form-data; boundary=" + BOUNDARY.encode()
ID = re.compile(rb"req-[0-9a-f]{16,}")
OURS = {b"date", b"content-type", b"x-request-id", b"x-poolgate-pool"}
OF_STREAMS = OURS | {b"cache-control", b"x-accel-buffering", b"transfer-encoding"}
OF_ERRORS = {b"date", b"content-type", b"content-length", b"x-request-id", b"x-poolgate-error-source"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Line:
    """Two replicas behind a key of the engine's own; `chat` asks the first and falls back to the second."""

    gateway: Gateway
    first: Stage
    second: Stage

    async def chat(self, *headers: bytes, is_stream: bool = False, model: str = "one") -> Reply:
        body = json.dumps({"model": model, "messages": MESSAGES, "stream": is_stream}).encode()
        return await post(self.gateway, "/v1/chat/completions", body, *headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    async with (
        Stage() as first,
        Stage() as second,
        running_gateway(
            tmp_path_factory.mktemp("headers"),
            redis_process.url,
            env={"ENGINE_KEY": ENGINE_KEY},
            pools={
                "first": {"urls": [first.url], "served_name": "served", "key_env": "ENGINE_KEY"},
                "second": {"urls": [second.url], "served_name": "served", "key_env": "ENGINE_KEY"},
            },
            routes={
                "one": {"targets": [{"pool": "first"}]},
                "chat": {"targets": [{"pool": "first"}], "fallback": ["second"]},
            },
        ) as gateway,
    ):
        yield Line(gateway, first, second)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    running_line.first.reset()
    running_line.second.reset()
    return running_line


def names(headers: tuple[tuple[bytes, bytes], ...]) -> list[bytes]:
    return sorted(name.lower() for name, _ in headers)


# --- what travels to the engine ---------------------------------------------------------------------------------------

STRAYS = (
    b"Connection: x-hop, keep-alive",
    b"X-Hop: 1",
    b"Keep-Alive: timeout=5",
    b"Proxy-Connection: keep-alive",
    b"Proxy-Authorization: Basic eDp5",
    b"TE: trailers",
    b"Trailer: x-late",
    b"Upgrade: websocket",
    b"Cookie: session=1",
    b"Forwarded: for=1.2.3.4",
    b"X-Forwarded-For: 1.2.3.4",
    b"Accept-Encoding: gzip, br",
    b"X-Vllm-Priority: -5",
    b"X-Data-Parallel-Rank: 3",
    b"OpenAI-Organization: org",
    b"User-Agent: x",
)


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_headers_of_one_hop_or_of_the_caller_reach_the_engine(line: Line, endpoint: Endpoint) -> None:
    body, content_type = any_body(endpoint, "one")
    reply = await post(line.gateway, endpoint.value, body, b"Content-Type: " + content_type, *STRAYS)
    assert reply.status == 200, reply.body
    request = line.first.requests[-1]
    expected = [b"accept-encoding", b"authorization", b"content-length", b"content-type", b"host", b"x-request-id"]
    assert names(request.headers) == expected
    assert request.header(b"accept-encoding") == [b"identity"]
    assert request.header(b"content-type") == [content_type]


@pytest.mark.parametrize("model", ["a", "a-much-longer-name-than-the-served-one-has" * 3])
async def test_length_of_the_old_body_is_told_for_the_new_one(
    line: Line, model: str, tmp_path_factory: pytest.TempPathFactory, redis_process: Any
) -> None:
    """The name becomes longer or shorter on its way; the length is that of the bytes, on every path."""
    async with running_gateway(
        tmp_path_factory.mktemp("alias"),
        redis_process.url,
        pools={"tiny": {"urls": [line.first.url], "served_name": "served/name"}},
        routes={model: {"targets": [{"pool": "tiny"}]}},
    ) as gateway:
        for endpoint in Endpoint:
            body, content_type = any_body(endpoint, model)
            reply = await post(gateway, endpoint.value, body, b"Content-Type: " + content_type)
            assert reply.status == 200
            request = line.first.requests[-1]
            assert request.header(b"content-length") == [b"%d" % len(request.body)]
            assert request.header(b"transfer-encoding") == []
            assert request.body.count(b"served/name") == 1 and model.encode() * 3 not in request.body


@pytest.mark.parametrize("endpoint", Endpoint)
async def test_callers_key_arrives_at_the_engine(line: Line, endpoint: Endpoint) -> None:
    body, content_type = any_body(endpoint, "one")
    credentials = [
        [b"Authorization: Bearer " + KEY.encode()],
        [b"authorization: bearer  " + KEY.encode()],
        [b"X-Api-Key: " + KEY.encode()],
        [b"Authorization: Bearer " + KEY.encode(), b"x-api-key: " + KEY.encode()],
        [b"Authorization: Bearer " + KEY.encode(), b"Authorization: Bearer other", b"Cookie: k=" + KEY.encode()],
    ]
    for headers in credentials:
        lines = [b"POST %b HTTP/1.1" % endpoint.value.encode(), b"Host: x", b"Connection: close", *headers]
        lines += [b"Content-Type: " + content_type, b"Content-Length: %d" % len(body)]
        reply = await ask(line.gateway, b"\r\n".join(lines) + b"\r\n\r\n" + body)
        assert reply.status == 200, headers
        request = line.first.requests[-1]
        assert request.header(b"authorization") == [b"Bearer " + ENGINE_KEY.encode()]
        assert KEY.encode() not in request.line + request.body + b"".join(b"%b%b" % pair for pair in request.headers)


# --- what comes back --------------------------------------------------------------------------------------------------

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


# --- the engine's key -------------------------------------------------------------------------------------------------


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


# --- ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
async def test_sane_request_id_is_lost_on_some_replies(line: Line, is_stream: bool) -> None:
    """Kept on successes, errors and streams; at the engine and in the log it is the same."""
    for id_, status in ((b"customer-42.a", 200), (b"0" * 128, 400), (b"A", 502)):
        answers = {400: says(error("no", b"400 Bad Request")), 502: says(error("no", b"500 Oops"))}
        line.first.reset()
        line.first.answer = answers.get(status, line.first.answer)
        reply = await line.chat(b"X-Request-Id: " + id_, is_stream=is_stream)
        assert (reply.status, reply.all(b"x-request-id")) == (status, [id_])
        assert line.first.requests[-1].header(b"x-request-id") == [id_]

        async def written(id_: bytes = id_) -> bool:
            return any(record["request_id"] == id_.decode() for record in line.gateway.access_lines())

        await eventually(written, "the access record has the same id")


ODD_IDS: dict[str, tuple[bytes, ...]] = {
    "blank and umlaut": ("X-Request-Id: customer 42/ä".encode(),),
    "5 kB": (b"X-Request-Id: " + b"a" * 5_000,),
    "129 characters": (b"X-Request-Id: " + b"a" * 129,),
    "empty": (b"X-Request-Id:",),
    "twice": (b"X-Request-Id: a", b"X-Request-Id: b"),
    "twice the same": (b"X-Request-Id: a", b"x-request-id: a"),
    "log line": (b'X-Request-Id: a\\n{"log":"access"}',),
    "option": (b"X-Request-Id: -rf",),
    "raw bytes": (b"X-Request-Id: a\xff\xfe",),
}


@pytest.mark.parametrize("headers", ODD_IDS.values(), ids=ODD_IDS)
async def test_odd_request_id_is_passed_on_or_cut_into_shape(line: Line, headers: tuple[bytes, ...]) -> None:
    for is_stream in (False, True):
        reply = await line.chat(*headers, is_stream=is_stream)
        assert reply.status == 200
        (id_,) = reply.all(b"x-request-id")
        assert ID.fullmatch(id_)
        assert line.first.requests[-1].header(b"x-request-id") == [id_]


@pytest.mark.parametrize(
    "header", [b"X-Request-Id: a\r\n b", b"X-Request-Id: a\rb", b"X-Request-Id: a\nX-Evil: 1", b"X-Request-Id: a\0b"]
)
async def test_line_break_in_a_request_id_writes_a_header(line: Line, header: bytes) -> None:
    reply = await line.chat(header)
    assert len(reply.all(b"x-request-id")) == 1 and ID.fullmatch(reply.all(b"x-request-id")[0])
    assert reply.all(b"x-evil") == []
    for request in line.first.requests:
        assert b"x-evil" not in names(request.headers)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x00\xff no http\r\n\r\n", 400),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 80_000, 431),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 401),
        (b"DELETE /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 405),
    ],
)
async def test_reply_that_no_request_led_to_has_no_id(line: Line, data: bytes, status: int) -> None:
    reply = await ask(line.gateway, data)
    assert reply.status == status
    assert ID.fullmatch(reply.all(b"x-request-id")[0])


VALID = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ((VALID,), True),
        ((b"customer 42/a",), False),
        ((VALID.replace(b"4bf9", b"4BF9"),), False),
        ((b"00-" + b"0" * 32 + b"-00f067aa0ba902b7-01",), False),
        ((VALID[:-1],), False),
        ((VALID, VALID), False),
        ((b"a" * 5_000,), False),
    ],
)
async def test_trace_header_is_made_of_a_request_id_or_passed_on_broken(
    line: Line, given: tuple[bytes, ...], passed: bool
) -> None:
    headers = [b"traceparent: " + value for value in given]
    reply = await line.chat(*headers, b"tracestate: a=b", b"X-Request-Id: customer-42")
    assert reply.status == 200
    request = line.first.requests[-1]
    assert request.header(b"traceparent") == ([VALID] if passed else [])
    assert request.header(b"tracestate") == ([b"a=b"] if passed else [])


async def test_caller_or_engine_writes_a_line_into_the_log(line: Line) -> None:
    """A line break in a model, a path, a class, an engine's words: one record for each request, and no other line."""
    forged = '\n{"log":"access","at_s":0,"forged":true}\n'
    line.first.answer = says(error("failed" + forged, b"500 Oops"))
    line.second.answer = says(error("failed" + forged, b"500 Oops"))
    replies = [
        await line.chat(model="no such model" + forged),
        await line.chat(b'X-Poolgate-Class: x\\n{"log":"access"}'),
        await line.chat(model="chat"),
        await line.chat(b"X-Request-Id: end-of-the-test"),
    ]
    assert [reply.status for reply in replies] == [404, 400, 502, 502]
    quoted = forged.encode().hex()
    path = "/v1/models/" + "".join(f"%{quoted[i : i + 2]}" for i in range(0, len(quoted), 2))
    assert (await ask(line.gateway, head(path).replace(b"POST", b"GET"))).status == 404

    async def written() -> bool:
        return any(record["request_id"] == "end-of-the-test" for record in line.gateway.access_lines())

    await eventually(written, "the last record is written")
    lines = line.gateway.log.read_text().splitlines()
    assert not [text for text in lines if text.startswith('{"log":"access","at_s":0,') or '"forged":true' in text[:60]]


async def test_text_of_a_request_that_an_engine_repeats_stands_in_the_log(line: Line) -> None:
    secret = "the prompt that nobody may read"
    line.first.answer = says(error(f"cannot do {secret}", b"500 Oops"))
    assert (await line.chat(b"X-Request-Id: goes-on", model="chat")).status == 200
    assert len(line.second.requests) == 1
    log = line.gateway.log.read_text()
    assert "request goes-on goes on" in log and "engine_failed" in log
    assert secret not in log


async def test_stream_that_the_engine_ends_by_its_connection_has_no_end_mark_of_ours(line: Line) -> None:
    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(STREAM_HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + event(content="x"))
        raise ConnectionResetError("closes")

    line.first.answer = answer
    reply = await line.chat(is_stream=True)
    assert reply.status == 200 and b"[DONE]" not in reply.body
    assert b'"upstream_broken"' in reply.body.rstrip(b"0\r\n").split(b"data: ")[-1]
