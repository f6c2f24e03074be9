"""Bodies of megabytes through a real gateway, beside a stream that runs on: all are answered, nothing is mixed up."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import httpx
from fakes.engine import running_fake_engine
from fakes.line import KEY, Gateway, running_gateway, sha256

SIZE = 5_000_000
WORDS = " ".join(f"word{i}" for i in range(300))
TEXT = json.dumps(
    {"model": "chat", "messages": [{"role": "user", "content": "你好 " * (SIZE // 7)}]}, ensure_ascii=False
)
MANY = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "x" * 60}] * 50_000})
DEEP = json.dumps({"model": "chat", "messages": [{"role": "user", "content": "x"}]})[:-1] + ',"x":' + "[" * SIZE
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * SIZE}}
WITH_IMAGE = json.dumps({"model": "chat", "messages": [{"role": "user", "content": [IMAGE]}], "max_tokens": 4})


async def post(gateway: Gateway, body: bytes, **headers: str) -> httpx.Response:
    sent = {"Authorization": f"Bearer {KEY}", "content-type": "application/json"} | headers
    return await gateway.client.post(gateway.url + "/v1/chat/completions", content=body, headers=sent)


async def test_a_stream_goes_on_while_large_bodies_are_read(tmp_path: Path, redis_process: Any) -> None:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_process.url,
            pools={"tiny": {"urls": [engine.url], "max_model_len": 2048, "image_tokens": 500}},
            keys={"test": {"sha256": sha256(KEY), "limits": {"tokens_per_min": 3000}}},
        ) as gateway,
    ):
        stream = asyncio.create_task(gateway.events(max_tokens=None, x_fake={"text": WORDS, "itl_ms": 5}))
        bodies = [TEXT.encode(), MANY.encode(), DEEP.encode()]
        replies = await asyncio.gather(
            *(post(gateway, body) for body in bodies),
            *(post(gateway, gzip.compress(body, 1), **{"content-encoding": "gzip"}) for body in bodies),
        )
        codes = [reply.json()["error"]["code"] for reply in replies]
        assert codes == ["context_length_exceeded", "context_length_exceeded", "invalid_request"] * 2
        *events, done = await stream
        assert done == "[DONE]"
        told = [json.loads(event) for event in events]
        text = "".join(choice["delta"].get("content") or "" for event in told for choice in event["choices"])
        assert text == WORDS
        # an image of 5 MB is 500 tokens of the 3000, and reaches the engine whole, which is none for images
        reply = await post(gateway, WITH_IMAGE.encode())
        assert (reply.status_code, reply.headers["x-poolgate-error-source"]) == (400, "engine"), reply.text
        (seen,) = [each for each in await engine.requests("/v1/chat/completions") if "image_url" in each["body"]]
        assert json.loads(seen["body"])["messages"][0]["content"] == [IMAGE]
