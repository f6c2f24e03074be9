"""A real redis-server on a Unix socket, emptied before each test; and small configs for it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes.redis_process import RedisProcess
from redis.asyncio import Redis

from gateway.config.load import LoadedConfig, parse


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisProcess]:
    """The shared server; not to be stopped or frozen (take `own_redis` for that)."""
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        server = RedisProcess(Path(directory))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def own_redis() -> Iterator[RedisProcess]:
    """A server of this test's own, to be frozen, killed and started again."""
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        server = RedisProcess(Path(directory))
        server.start()
        yield server
        server.stop()


@pytest.fixture
async def redis_client(redis_process: RedisProcess) -> AsyncIterator[Redis]:
    """A client of the shared server, which is empty when the test begins."""
    client = Redis.from_url(redis_process.url)
    await client.flushall()
    await client.script_flush()
    yield client
    await client.aclose()


@pytest.fixture
async def redis_url(redis_process: RedisProcess, redis_client: Redis) -> str:
    """Where the shared, empty server listens, as `redis.url` wants it."""
    return redis_process.url


def make_config(url: str, directory: Path, **sections: Any) -> LoadedConfig:
    """A small sound config: one pool elsewhere, one route "chat"; `sections` replace or add whole sections."""
    data: dict[str, Any] = {
        "gateway": {"state_dir": "state"},
        "redis": {"url": url, "timeout_s": 5.0},
        "pools": {"elsewhere": {"urls": ["http://127.0.0.1:9"]}},
        "routes": {"chat": {"targets": [{"pool": "elsewhere"}]}},
    }
    return parse(data | sections, directory / "config.toml")


@pytest.fixture
def config_for(tmp_path: Path) -> Callable[..., LoadedConfig]:
    """`config_for(url, users=…)`: a sound config with its state directory in this test's folder."""

    def make(url: str, **sections: Any) -> LoadedConfig:
        return make_config(url, tmp_path, **sections)

    return make
