"""The `/v1` paths through a real gateway process, real Redis and fake engines as processes; each file here has them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.engine import FakeEngine, running_fake_engine
from fakes.line import BATCH_KEY, KEY, Gateway, running_gateway, sha256
from openai import AsyncOpenAI

ONE_MODEL_KEY = "sk-test-one-model-012345"
LIMIT_BYTES = 20_000


class Seen:
    """What one fake engine received since this test began."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self._before: dict[str, int] = {}

    async def begin(self) -> None:
        self._before = (await self.engine.state())["calls"]

    async def requests(self, path: str = "/v1/chat/completions") -> list[dict[str, Any]]:
        calls = (await self.engine.state())["calls"]
        new = calls.get(f"POST {path}", 0) - self._before.get(f"POST {path}", 0)
        return (await self.engine.requests(path))[-new:] if new else []

    async def bodies(self) -> list[dict[str, Any]]:
        """Of the chats."""
        return [json.loads(request["body"]) for request in await self.requests()]


@dataclass
class Line:
    gateway: Gateway
    big: Seen
    small: Seen
    openai: AsyncOpenAI


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    """Two pools, two routes, two classes; shared by the tests of one file, none of which breaks it."""
    async with (
        running_fake_engine("--max-model-len", "2048", name="big", key="") as big,
        running_fake_engine("--max-model-len", "512", name="small", key="") as small,
        running_gateway(
            tmp_path_factory.mktemp("line"),
            redis_process.url,
            gateway={"max_body_bytes": LIMIT_BYTES},
            classes={"interactive": {"priority": 0}, "batch": {"priority": 10}},
            keys={
                "test": {"sha256": sha256(KEY), "class": "interactive"},
                "night": {"sha256": sha256(BATCH_KEY), "class": "batch"},
                "one": {"sha256": sha256(ONE_MODEL_KEY), "models": ["small/model"], "class": "batch"},
            },
            pools={
                "big": {"urls": [big.url], "served_name": "big", "max_model_len": 2048},
                "small": {
                    "urls": [small.url],
                    "served_name": "small",
                    "max_model_len": 512,
                    "scheduling_policy": "priority",
                },
            },
            routes={
                "chat": {
                    "aliases": ["gpt-4o-mini"],
                    "targets": [{"pool": "big"}],
                    "fallback": ["small"],
                    "by_class": {"batch": {"targets": [{"pool": "small"}], "fallback": ["big"]}},
                    "max_output_tokens": 100,
                    "defaults": {"temperature": 0.5, "top_p": 0.9},
                },
                "small/model": {"targets": [{"pool": "small"}], "max_output_tokens": 50, "on_max_output": "refuse"},
            },
        ) as gateway,
        AsyncOpenAI(base_url=gateway.url + "/v1", api_key=KEY, max_retries=0) as openai,
    ):
        yield Line(gateway, Seen(big), Seen(small), openai)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    await running_line.big.begin()
    await running_line.small.begin()
    return running_line
