"""A real redis-server on a Unix socket, emptied before each test; small configs; how to wait for something."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from gateway.config.load import LoadedConfig, parse
from workers.redis_binary import find_binary

START_S = 30.0


@dataclass
class RedisProcess:
    """A redis-server that a test may freeze, kill and start again; its data (an append-only file) stays."""

    directory: Path
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def socket(self) -> Path:
        return self.directory / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "yes"]
        options += ["--appendfsync", "no", "--dir", str(self.directory)]
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen([find_binary(), *options], stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < until, "redis-server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith(b"+PONG")
            except OSError:
                return False


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


@pytest.fixture
def eventually() -> Callable[..., Awaitable[None]]:
    """`await eventually(condition)`: until the (async or plain) condition holds; fails after `within_s`."""

    async def wait(condition: Callable[[], Any], within_s: float = 15.0) -> None:
        until = time.monotonic() + within_s
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return
            assert time.monotonic() < until, "the condition did not come true in time"
            await asyncio.sleep(0.02)

    return wait
