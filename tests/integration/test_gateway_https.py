"""A cloud behind the gateway: a real gateway process, and servers in this process that speak TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fakes.certificates import Authority
from fakes.line import KEY, MESSAGES, Gateway, process, running_gateway, write_config
from fakes.ports import free_port
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, ScriptedUpstream, chunk, plain
from fakes.waits import eventually

CLOUD_KEY = "sk-cloud-canary-5e8a"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
ANSWER = json.dumps(
    {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop", "message": {}}], "usage": USAGE}
).encode()


def event(**delta: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode() + b"\n\n"


@dataclass
class Cloud:
    """A server that answers every request; a stream stops after its first event while `hangs`."""

    upstream: ScriptedUpstream
    hangs: bool = False

    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.upstream.requests[-1].body)
        return body


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
async def cloud(authority: Authority) -> AsyncIterator[Cloud]:
    async def serve(peer: Peer) -> None:
        while True:
            request = await peer.request()
            if not json.loads(request.body).get("stream"):
                await peer.send(plain(ANSWER, b"200 OK", b"content-type: application/json"))
                continue
            await peer.send(STREAM_HEAD + chunk(event(content="one")))
            if made.hangs:
                await peer.closed()
                return
            usage = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"
            await peer.send(chunk(event(content="two")) + chunk(usage) + chunk(b"data: [DONE]\n\n") + STREAM_END)

    made = Cloud(ScriptedUpstream(serve, tls=authority.server_context()))
    async with made.upstream:
        yield made


@pytest.fixture
async def gateway(tmp_path: Path, redis_url: str, cloud: Cloud, authority: Authority) -> AsyncIterator[Gateway]:
    """Nobody listens at the route's target; the cloud is its fallback."""
    (tmp_path / "tls").mkdir()
    shutil.copy(authority.certificate, tmp_path / "tls/our-ca.pem")
    async with running_gateway(
        tmp_path,
        redis_url,
        env={"CLOUD_KEY": CLOUD_KEY},
        classes={"default": {"priority": 5}},
        pools={
            "near": {"urls": [f"http://127.0.0.1:{free_port()}"], "scheduling_policy": "priority"},
            "cloud": {
                "engine": "openai",
                "urls": [cloud.upstream.url + "/v1"],
                "key_env": "CLOUD_KEY",
                "tls_ca": "tls/our-ca.pem",
                "served_name": "big-model",
            },
        },
        routes={"chat": {"targets": [{"pool": "near"}], "fallback": ["cloud"]}},
    ) as made:
        yield made


async def test_cloud_answers_when_the_first_pool_is_down(gateway: Gateway, cloud: Cloud) -> None:
    reply = await gateway.chat()
    assert (reply.status_code, reply.headers["x-poolgate-pool"]) == (200, "cloud"), reply.text
    assert reply.json()["usage"] == USAGE
    request = cloud.upstream.requests[-1]
    assert request.line == b"POST /v1/chat/completions HTTP/1.1"
    assert request.header(b"authorization") == [b"Bearer " + CLOUD_KEY.encode()]
    assert cloud.body() == {"model": "big-model", "messages": MESSAGES, "max_tokens": 4}


async def test_stream_of_a_cloud_is_passed_on_and_counted(gateway: Gateway, cloud: Cloud) -> None:
    events = await gateway.events()
    assert [json.loads(e)["choices"][0]["delta"]["content"] for e in events[:-1]] == ["one", "two"]
    assert events[-1] == "[DONE]"
    assert cloud.body()["stream_options"] == {"include_usage": True}

    async def counted() -> list[dict[str, Any]]:
        return [r for r in gateway.access_lines() if r["stream"] and r["completion_tokens"] == 3]

    assert (await eventually(counted, "access record"))[0]["prompt_tokens"] == 7


async def test_neither_key_is_shown_anywhere(gateway: Gateway, cloud: Cloud) -> None:
    reply = await gateway.chat()
    models = await gateway.client.get(gateway.url + "/v1/models", headers={"x-api-key": KEY})
    for text in (reply.text, str(reply.headers), models.text, gateway.log.read_text()):
        assert CLOUD_KEY not in text
    assert KEY.encode() not in b"".join(value for _, value in cloud.upstream.requests[-1].headers)


async def test_caller_that_hangs_up_ends_the_clouds_work(gateway: Gateway, cloud: Cloud) -> None:
    cloud.hangs = True
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"model": "chat", "messages": MESSAGES, "stream": True}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (KEY.encode(), len(body), body)
    )
    await reader.readuntil(b"data: ")
    assert cloud.upstream.open_connections == 1
    writer.transport.abort()
    await eventually(lambda: cloud.upstream.open_connections == 0)


async def test_cloud_with_a_wrong_certificate_is_a_502_that_says_so(
    tmp_path: Path, redis_url: str, cloud: Cloud
) -> None:
    pools = {"cloud": {"urls": [cloud.upstream.url]}}
    async with running_gateway(tmp_path, redis_url, pools=pools) as gateway:
        reply = await gateway.chat()
        assert (reply.status_code, reply.json()["error"]["code"]) == (502, "upstream_connect_failed")
        assert "certificate is not trusted" in reply.json()["error"]["message"]
    assert cloud.upstream.requests == []


@pytest.mark.parametrize("processes", [1, 2])
async def test_gateway_without_the_clouds_key_does_not_start_and_says_why(tmp_path: Path, processes: int) -> None:
    config = write_config(
        tmp_path,
        gateway={"port": free_port(), "processes": processes},
        pools={"cloud": {"urls": ["https://llm.example.com"], "key_env": "NO_SUCH_CLOUD_KEY", "tls_ca": "none.pem"}},
        routes={"chat": {"targets": [{"pool": "cloud"}]}},
    )
    for command in ("serve", "check"):
        async with process([command, "--config", str(config)], tmp_path / f"{command}.log") as (child, log):
            assert await asyncio.wait_for(child.wait(), 30) == 1
            text = log.read_text()
        assert "pools.cloud.key_env" in text and "NO_SUCH_CLOUD_KEY is not set" in text
        assert "pools.cloud.tls_ca" in text and "No such file" in text
        assert "Traceback" not in text
