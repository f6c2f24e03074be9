"""Errors, request ids and access records as clients and operators see them."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from fakes.line import KEY, MESSAGES
from fakes.waits import eventually
from openai import AsyncOpenAI, AuthenticationError, BadRequestError

from .conftest import Line

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_openai_client_maps_our_errors_to_its_own(line: Line) -> None:
    with pytest.raises(BadRequestError):
        await line.openai.chat.completions.create(model="chat", messages=[], max_tokens=3)
    async with AsyncOpenAI(base_url=line.gateway.url + "/v1", api_key="sk-wrong", max_retries=0) as stranger:
        with pytest.raises(AuthenticationError):
            await stranger.chat.completions.create(model="chat", messages=MESSAGES)


async def test_engines_refusal_is_passed_on_once_in_our_envelope(line: Line) -> None:
    reply = await line.gateway.chat(messages=[{"role": "assistant", "content": None}], x_fake={"status": 422})
    assert reply.status_code == 422
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-poolgate-error-source"] == "engine"
    assert len(await line.big.requests("/v1/chat/completions")) == 1


async def test_sane_request_id_is_kept_everywhere_and_an_odd_one_replaced(line: Line) -> None:
    kept = await line.gateway.chat(headers={"X-Request-Id": "customer-42.a"})
    assert kept.headers["x-request-id"] == "customer-42.a"
    headers = dict((await line.big.requests("/v1/chat/completions"))[-1]["headers"])
    assert {name.lower(): value for name, value in headers.items()}["x-request-id"] == "customer-42.a"
    for odd in ("customer 42/ä", "a" * 5000, ""):
        reply = await line.gateway.chat(model="nope", headers={"X-Request-Id": odd.encode()})
        assert reply.status_code == 404
        assert reply.headers["x-request-id"].startswith("req-")
    for path in ("/health", "/v1/models", "/nowhere"):
        assert (await line.gateway.client.get(line.gateway.url + path)).headers["x-request-id"]


async def test_head_get_and_half_requests_leave_the_gateway_well(line: Line) -> None:
    for method in ("GET", "HEAD", "PUT", "OPTIONS"):
        reply = await line.gateway.client.request(method, line.gateway.url + "/v1/chat/completions")
        assert reply.status_code == 405
        assert reply.headers["allow"] == "POST"
    host, port = line.gateway.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as half:
        half.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Le" % KEY.encode())
    assert (await line.gateway.chat()).status_code == 200
    assert "Traceback" not in line.gateway.log.read_text()


async def test_access_record_tells_the_story_without_key_or_text(line: Line) -> None:
    secret = "the prompt that nobody may read"
    await line.gateway.chat(messages=[{"role": "user", "content": secret}], headers={"X-Request-Id": "story"})

    async def written() -> list[dict[str, Any]]:
        return [r for r in line.gateway.access_lines() if r["request_id"] == "story"]

    record = (await eventually(written, "access record"))[-1]
    assert (record["route"], record["pool"], record["status"], record["key_id"]) == ("chat", "big", 200, "test")
    assert record["completion_tokens"] == 4 and record["prompt_tokens"] > 0
    log = line.gateway.log.read_text()
    assert secret not in log and KEY not in log
