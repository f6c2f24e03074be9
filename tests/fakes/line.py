"""Runs `poolgate serve`, `workers` and `up` as real processes; integration tests call them through HTTP.

from fakes.line import running_gateway

async with running_gateway(tmp_path, redis_url, pools={"tiny": {"urls": [engine.url]}}) as gateway:
    reply = await gateway.chat(model="chat")
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fakes.ports import free_port
from fakes.scrape import read
from fakes.waits import eventually

KEY = "sk-test-0123456789abcdef"
LIMITED = "sk-test-limited-0123456789"  # a second one, for tests that set it limits
BATCH_KEY = "sk-test-batch-0123456789"  # one of a lower class
START_S = 30.0
STOP_S = 40.0
MESSAGES = [{"role": "user", "content": "Say hi."}]


def sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def toml(value: Any) -> str:
    """Any JSON-like value as TOML."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def write_config(folder: Path, **sections: Any) -> Path:
    """config.toml in `folder`; a section is a dict of its keys or of its named tables."""
    lines: list[str] = []
    for name, section in sections.items():
        if name in ("pools", "routes", "keys", "users", "classes"):
            for item, body in section.items():
                lines += [f"[{name}.{json.dumps(item)}]", *(f"{json.dumps(k)} = {toml(v)}" for k, v in body.items())]
        else:
            lines += [f"[{name}]", *(f"{json.dumps(k)} = {toml(v)}" for k, v in section.items())]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


@dataclass(slots=True)
class Gateway:
    """A running `poolgate serve`; its process is ended by the context manager."""

    url: str
    config: Path
    process: asyncio.subprocess.Process
    log: Path
    client: httpx.AsyncClient

    @property
    def pid(self) -> int:
        return self.process.pid

    async def chat(self, key: str = KEY, headers: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
        """A plain chat request; `fields` replace or add fields of the body."""
        body = {"model": "chat", "messages": MESSAGES, "max_tokens": 4} | fields
        return await self.post("/v1/chat/completions", body, key, headers)

    async def post(self, path: str, body: Any, key: str = KEY, headers: dict[str, Any] | None = None) -> httpx.Response:
        return await self.client.post(
            self.url + path, json=body, headers={"Authorization": f"Bearer {key}"} | (headers or {})
        )

    async def events(self, key: str = KEY, path: str = "/v1/chat/completions", **fields: Any) -> list[str]:
        """The `data:` payloads of a streamed request."""
        body = {"model": "chat", "messages": MESSAGES, "max_tokens": 4, "stream": True} | fields
        if path == "/v1/completions":
            body["prompt"] = body.pop("messages") and "Say hi."
        async with self.client.stream(
            "POST", self.url + path, json=body, headers={"Authorization": f"Bearer {key}"}
        ) as reply:
            assert reply.status_code == 200, await reply.aread()
            # not aiter_lines: httpx ends lines at U+2028 and the like too, which may stand inside an event
            lines = (await reply.aread()).split(b"\n")
        return [line.removeprefix(b"data: ").decode() for line in lines if line.startswith(b"data: ")]

    def access_lines(self) -> list[dict[str, Any]]:
        """The access records written so far."""
        lines = self.log.read_text(errors="replace").split("\n")[:-1]  # the last one may be half written
        return [json.loads(line) for line in lines if line.startswith('{"log":"access"')]

    async def at_rest(self) -> int:
        """Until nothing is in flight and all of it has its access record; how many of those there are.

        Records are written in the order in which requests end, so that of one more request is the last.
        """

        async def is_idle() -> bool:
            return read((await self.client.get(self.url + "/metrics")).text).sum("open_exchanges") == 0

        await eventually(is_idle, "nothing is in flight")
        last = f"the-last-{random.getrandbits(64)}"
        await self.chat(model="no-such-model", headers={"X-Request-Id": last})

        async def is_written() -> bool:
            return any(line["request_id"] == last for line in self.access_lines())

        await eventually(is_written, "the records of all requests are written")
        return len(self.access_lines())


@asynccontextmanager
async def running_gateway(
    folder: Path,
    redis_url: str,
    *,
    env: dict[str, str] | None = None,
    stdout: int | None = None,
    **sections: Any,
) -> AsyncIterator[Gateway]:
    """`poolgate serve` on a free port; unless told otherwise one static key KEY and a route `chat` to all pools.

    `stdout` is a descriptor that gets the access records in place of the log file.
    """
    port = free_port()
    given = sections.pop("gateway", {})
    sections.setdefault("keys", {"test": {"sha256": sha256(KEY)}})
    sections.setdefault("routes", {"chat": {"targets": [{"pool": pool} for pool in sections["pools"]]}})
    config = write_config(
        folder, gateway={"port": port, "drain_s": 5} | given, redis={"url": redis_url, "timeout_s": 2.0}, **sections
    )
    async with process(["serve", "--config", str(config)], folder / "gateway.log", env, stdout) as (child, log):
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
            await eventually(lambda: _is_healthy(client, url, child, log), "the gateway is healthy", START_S)
            yield Gateway(url, config, child, log, client)


async def _is_healthy(client: httpx.AsyncClient, url: str, child: asyncio.subprocess.Process, log: Path) -> bool:
    assert child.returncode is None, f"ended with {child.returncode}:\n{log.read_text(errors='replace')[-3000:]}"
    try:
        return (await client.get(url + "/health")).status_code == 200
    except httpx.TransportError:
        return False


@asynccontextmanager
async def process(
    arguments: list[str], log: Path, env: dict[str, str] | None = None, stdout: int | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Path]]:
    """A `poolgate` command in a session of its own; ended with SIGTERM, then SIGKILL of its session."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "gateway",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output if stdout is None else stdout,
            stderr=output,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | (env or {}),
            start_new_session=True,
        )
    try:
        yield child, log
    finally:
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), STOP_S)
        if child.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
