"""Request ids, trace headers and log lines that are made of what somebody sent."""

from __future__ import annotations

import pytest
from fakes.stage import ask, error, head, says
from fakes.waits import eventually

from .conftest import ID, Line, names

pytestmark = pytest.mark.asyncio(loop_scope="module")


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
