"""What becomes of a body: unknown fields, defaults, caps, limits, compression."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from fakes.line import KEY, MESSAGES
from fakes.stage import push

from .conftest import LIMIT_BYTES, Line

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_unknown_fields_reach_the_engine_byte_for_byte(line: Line) -> None:
    extra = '"min_p": 0.05, "chat_template_kwargs": {"enable_thinking":  false}, "x_future": [1e3, "\\u00e9", null]'
    body = f'{{"model": "chat", "messages": {json.dumps(MESSAGES)}, {extra}}}'
    reply = await line.gateway.client.post(
        line.gateway.url + "/v1/chat/completions", content=body, headers={"x-api-key": KEY}
    )
    assert reply.status_code == 200
    sent = (await line.big.requests("/v1/chat/completions"))[-1]["body"]
    for value in ('"min_p":0.05', '{"enable_thinking":  false}', '[1e3, "\\u00e9", null]'):
        assert value in sent


async def test_defaults_apply_only_where_the_client_said_nothing(line: Line) -> None:
    await line.gateway.chat(temperature=0)
    sent = (await line.big.bodies())[-1]
    assert (sent["temperature"], sent["top_p"]) == (0, 0.9)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "chat",', "not valid JSON"),
        (b"", "not valid JSON"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"model": "chat", "messages": [{"role": "user", "content": "\xc3\x28"}]}', "UTF-8"),
        (b'{"model": 7}', "'model' must be a string"),
        (b'{"model": "chat"}', "'messages' is missing"),
        (b'{"model": "chat", "messages": [{"role": "king", "content": "x"}]}', "messages[0].role"),
        (b'{"model": "chat", "messages": [{"role": "user", "content": [{"type": 3}]}]}', "messages[0].content[0].type"),
        (b'{"model": "chat", "messages": [{"role": "tool", "content": "x"}]}', "messages[0].tool_call_id"),
        (b'{"model": "chat", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
        (b'{"a":' * 3_000, "nested too deeply"),
    ],
)
async def test_bad_body_is_a_400_that_names_the_element_and_reaches_no_engine(
    line: Line, body: bytes, says: str
) -> None:
    reply = await line.gateway.client.post(
        line.gateway.url + "/v1/chat/completions", content=body, headers={"x-api-key": KEY}
    )
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert reply.headers["x-poolgate-error-source"] == "client"
    assert await line.big.requests("/v1/chat/completions") == []
    assert (await line.gateway.chat()).status_code == 200


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"max_tokens": 0}, "at least 1"),
        ({"max_tokens": -1}, "at least 1"),
        ({"max_tokens": 1.5}, "whole number"),
        ({"max_tokens": "10"}, "whole number"),
        ({"max_tokens": True}, "whole number"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "send one of them"),
        ({"priority": 1}, "cannot be set"),
        ({"kv_transfer_params": {}}, "cannot be set"),
        ({"n": 500}, "at most 128"),
    ],
)
async def test_bad_parameter_is_a_400_that_names_it(line: Line, fields: dict[str, Any], says: str) -> None:
    reply = await line.gateway.chat(**fields)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert await line.big.requests("/v1/chat/completions") == []


async def test_null_means_absent(line: Line) -> None:
    assert (await line.gateway.chat(max_tokens=None, stop=None, stream=None)).status_code == 200
    assert (await line.big.bodies())[-1]["max_tokens"] == 100  # the route's cap


async def test_output_over_the_routes_cap_is_clamped_and_said_or_refused(line: Line) -> None:
    clamped = await line.gateway.chat(max_tokens=10**12)
    assert clamped.status_code == 200
    assert clamped.headers["x-poolgate-clamped"] == "max_tokens"
    assert (await line.big.bodies())[-1]["max_tokens"] == 100
    refused = await line.gateway.chat(model="small/model", max_tokens=51)
    assert refused.status_code == 400
    assert "51" in refused.json()["error"]["message"] and "50" in refused.json()["error"]["message"]


async def test_over_long_prompt_is_refused_before_the_engine_with_all_three_numbers(line: Line) -> None:
    reply = await line.gateway.chat(
        model="small/model", messages=[{"role": "user", "content": "word " * 600}], max_tokens=20
    )
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (400, "context_length_exceeded")
    counted = json.loads((await line.small.requests("/tokenize"))[-1]["body"])["messages"][0]["content"].count("word")
    assert "512" in error["message"] and "20" in error["message"] and str(counted // 100) in error["message"]
    assert await line.small.requests("/v1/chat/completions") == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_body_of_exactly_the_limit_passes_and_one_byte_more_is_413(line: Line, path: str) -> None:
    for size, status in ((LIMIT_BYTES - 1, 200), (LIMIT_BYTES, 200), (LIMIT_BYTES + 1, 413)):
        body = json.dumps({"model": "chat", "messages": MESSAGES, "prompt": "x", "max_tokens": 2, "pad": ""})
        body = body.replace('"pad": ""', f'"pad": "{"a" * (size - len(body))}"')
        reply = await line.gateway.client.post(line.gateway.url + path, content=body, headers={"x-api-key": KEY})
        assert (len(body), reply.status_code) == (size, status)
    assert str(LIMIT_BYTES) in reply.json()["error"]["message"]


async def test_endless_chunked_body_is_cut_at_the_limit(line: Line) -> None:
    opening = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"1000\r\n" + b"a" * 4096 + b"\r\n"
    reply, _ = await push(line.gateway, opening.encode(), piece, 100 * LIMIT_BYTES // 4096)
    assert reply.status == 413


async def test_compressed_request_is_understood_and_reaches_the_engine_plain(line: Line) -> None:
    body = json.dumps({"model": "chat", "messages": MESSAGES, "max_tokens": 4}).encode()
    for encoding, packed in (("gzip", gzip.compress(body)), ("deflate", zlib.compress(body))):
        reply = await line.gateway.client.post(
            line.gateway.url + "/v1/chat/completions",
            content=packed,
            headers={"x-api-key": KEY, "Content-Encoding": encoding},
        )
        assert reply.status_code == 200, reply.text
        seen = (await line.big.requests())[-1]
        assert json.loads(seen["body"])["messages"] == MESSAGES
        assert "content-encoding" not in {name.lower() for name, _ in seen["headers"]}


async def test_compressed_body_of_another_kind_is_a_415_that_says_what_is_accepted(line: Line) -> None:
    reply = await line.gateway.chat(headers={"Content-Encoding": "br"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_content_encoding")
    assert "gzip, deflate, zstd" in reply.json()["error"]["message"]
