"""What travels to the engine: no header of one hop, no length of the old body, no caller's key."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.bodies import any_body
from fakes.line import KEY, running_gateway
from fakes.stage import ask, post

from gateway.domain.endpoint import Endpoint

from .conftest import ENGINE_KEY, Line, names

pytestmark = pytest.mark.asyncio(loop_scope="module")

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
