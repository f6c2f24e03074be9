"""Headers that went astray in other gateways, in front of a real gateway process: each file here has one."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.bodies import BOUNDARY
from fakes.line import MESSAGES, Gateway, running_gateway
from fakes.stage import Reply, Stage, post

ENGINE_KEY = "sk-engine-canary-77b1"
FORM_OF_TEXT = b"Content-Type: multipart/form-data; boundary=" + BOUNDARY.encode()
ID = re.compile(rb"req-[0-9a-f]{16,}")


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
