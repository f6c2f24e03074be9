"""Failures of a replica in front of a real gateway process that could ask two others; each file here has one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from fakes.line import Gateway, running_gateway
from fakes.redis_process import RedisProcess
from fakes.scripted_upstream import STREAM_HEAD, Peer, Received, chunk, plain
from fakes.stage import ANSWER, Answer, Stage, error, event, hang_up, stream
from fakes.waits import eventually

BUSY = error("full", b"503 Service Unavailable", b"retry-after: 1")
GOOD = stream(event(content="from b"))


@dataclass
class Pair:
    """`chat` asks `a`, then `b`, then `c`."""

    gateway: Gateway
    a: Stage
    b: Stage
    c: Stage
    records: int = 0

    async def last_record(self) -> dict[str, Any]:
        """Of the first request since the last call, or since the test began."""

        async def written() -> list[dict[str, Any]]:
            return self.gateway.access_lines()[self.records :]

        record: dict[str, Any] = (await eventually(written, "the access record is written"))[0]
        return record


@asynccontextmanager
async def running_pair(folder: Path, redis_url: str, **section: Any) -> AsyncIterator[Pair]:
    """Further attempts are not short unless told otherwise: `share` is 1."""
    section["retry"] = {"share": 1} | section.get("retry", {})
    async with AsyncExitStack() as stack:
        stages = [await stack.enter_async_context(Stage()) for _ in range(3)]
        pools = {name: {"urls": [stage.url]} for name, stage in zip("abc", stages, strict=True)}
        gateway = await stack.enter_async_context(
            running_gateway(
                folder,
                redis_url,
                gateway=section,
                pools=pools,
                routes={"chat": {"targets": [{"pool": "a"}], "fallback": ["b", "c"]}},
            )
        )
        yield Pair(gateway, *stages)


@pytest.fixture(scope="module")
def redis_url(redis_process: RedisProcess) -> str:
    """The shared server as it is: no test here keeps anything there."""
    return redis_process.url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_pair(tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> AsyncIterator[Pair]:
    async with running_pair(tmp_path_factory.mktemp("pair"), redis_url) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def pair(one_pair: Pair) -> Pair:
    """Shared by the tests that need nothing set; none of them breaks it."""
    for stage in (one_pair.a, one_pair.b, one_pair.c):
        stage.reset()
    one_pair.records = await one_pair.gateway.at_rest()
    return one_pair


def after(delay_s: float, reply: bytes) -> Answer:
    async def answer(peer: Peer, _request: Received) -> None:
        await asyncio.sleep(delay_s)
        await peer.send(reply)

    return answer


async def dies(peer: Peer, _request: Received) -> None:
    hang_up(peer)


async def resets_after_head(peer: Peer, request: Received) -> None:
    is_stream = b'"stream":true' in request.body.replace(b" ", b"")
    await peer.send(STREAM_HEAD if is_stream else plain(ANSWER)[: -len(ANSWER)])
    hang_up(peer)


async def resets_half_way(peer: Peer, request: Received) -> None:
    is_stream = b'"stream":true' in request.body.replace(b" ", b"")
    await peer.send(STREAM_HEAD + chunk(b"data: {") if is_stream else plain(ANSWER)[:-9])
    hang_up(peer)


async def closes(_peer: Peer, _request: Received) -> None:
    raise ConnectionResetError("closes")
