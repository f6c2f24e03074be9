"""Bodies that broke other gateways, in front of a real gateway process: each file here has one, with a low limit."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from fakes.line import KEY, LIMITED, Gateway, running_gateway, sha256
from fakes.stage import Stage

from gateway.domain.endpoint import Endpoint, ErrorShape

LIMIT_BYTES = 100_000
ROOM_KIB = 40_000  # more than a request of the limit's size can need, and far below what the bombs unfold to


@dataclass
class Line:
    gateway: Gateway
    stage: Stage

    async def check_alive(self) -> None:
        """The next request is served, by the same process."""
        assert self.gateway.process.returncode is None
        self.stage.reset()
        assert (await self.gateway.chat()).status_code == 200
        assert len(self.stage.requests) == 1
        assert "Traceback" not in self.gateway.log.read_text()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_line(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[Line]:
    async with (
        Stage() as stage,
        running_gateway(
            tmp_path_factory.mktemp("bodies"),
            redis_process.url,
            gateway={"max_body_bytes": LIMIT_BYTES, "timeouts": {"body_s": 1}},
            keys={"test": {"sha256": sha256(KEY)}, "one": {"sha256": sha256(LIMITED), "limits": {"in_flight": 1}}},
            pools={"tiny": {"urls": [stage.url], "served_name": "served"}},
        ) as gateway,
    ):
        yield Line(gateway, stage)


@pytest_asyncio.fixture(loop_scope="module")
async def line(running_line: Line) -> Line:
    running_line.stage.reset()
    return running_line


def check_shape(endpoint: Endpoint, body: bytes) -> str:
    """The message of an error in the shape of its path."""
    document = json.loads(body)
    if endpoint.rules.errors is ErrorShape.ANTHROPIC:
        assert set(document) == {"type", "error"} and set(document["error"]) == {"type", "message"}
    else:
        assert set(document) == {"error"} and set(document["error"]) == {"message", "type", "param", "code"}
    message: str = document["error"]["message"]
    return message
