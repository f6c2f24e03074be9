"""Two fake engines behind a real gateway, in each test anew: what gets in the way breaks them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from fakes.engine import FakeEngine, running_fake_engine
from fakes.line import KEY, LIMITED, Gateway, running_gateway, sha256


@dataclass
class Pair:
    gateway: Gateway
    first: FakeEngine
    second: FakeEngine


@pytest.fixture
async def pair(tmp_path: Path, redis_url: str) -> AsyncIterator[Pair]:
    """Two pools behind one route, the second as fallback; short deadlines; a key with one request in flight."""
    async with (
        running_fake_engine(
            "--fake-itl-ms", "5", "--fake-tokens", "5000", "--max-model-len", "2048", name="first", key=""
        ) as first,
        running_fake_engine("--max-model-len", "256", name="second", key="") as second,
        running_gateway(
            tmp_path,
            redis_url,
            gateway={"timeouts": {"first_byte_s": 1, "gap_s": 1, "connect_s": 1, "body_s": 1, "write_s": 2}},
            keys={"test": {"sha256": sha256(KEY)}, "one": {"sha256": sha256(LIMITED), "limits": {"in_flight": 1}}},
            pools={
                "first": {"urls": [first.url], "served_name": "first", "max_model_len": 2048},
                "second": {"urls": [second.url], "served_name": "second", "max_model_len": 256},
            },
            routes={"chat": {"targets": [{"pool": "first"}], "fallback": ["second"]}},
        ) as gateway,
    ):
        yield Pair(gateway, first, second)


async def slot_is_free(gateway: Gateway) -> bool:
    return (await gateway.chat(LIMITED)).status_code == 200
