"""Runs the fake engine as a real process; integration and contract tests use it in place of `vllm serve`.

from fakes.engine import running_fake_engine

async with running_fake_engine("--fake-itl-ms", "20", name="tiny") as engine:
    ...  # engine.url, engine.key, engine.pid, await engine.requests()
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from fakes.waits import eventually

START_S = 15.0  # far above what it needs; a busy machine must not fail a test
STOP_S = 5.0
TERM_S = 1.0  # from SIGTERM to SIGKILL


@dataclass(slots=True)
class FakeEngine:
    """A running fake engine; its process is ended by the context manager, whatever state it is in."""

    url: str
    key: str
    name: str
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def headers(self) -> dict[str, str]:
        """What a caller of the guarded paths must send."""
        return {"Authorization": f"Bearer {self.key}"}

    async def requests(self, path: str | None = None) -> list[dict[str, Any]]:
        """The last 100 POSTs as received: method, path, headers (pairs), body (text); of one path if given."""
        seen = (await self._get("/fake/requests")).json()
        return [request for request in seen if path in (None, request["path"])]

    async def state(self) -> dict[str, Any]:
        """pid, children, running, most_running (at once), waiting, aborted, calls (per method and path)."""
        state: dict[str, Any] = (await self._get("/fake/state")).json()
        return state

    async def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        text = (await self._get("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line))

    async def post(self, path: str, body: dict[str, Any], within_s: float = 30.0) -> httpx.Response:
        """The answer to a request that has the engine's key."""
        async with httpx.AsyncClient(timeout=within_s, trust_env=False) as client:
            return await client.post(self.url + path, json=body, headers=self.headers)

    async def chat(self, **fields: Any) -> httpx.Response:
        """The answer to a short chat; fields add to its body or replace what is in it."""
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say hi."}]} | fields)

    async def exit_code(self, within_s: float = STOP_S) -> int:
        """Waits for the process to end by itself; TimeoutError if it does not."""
        return await asyncio.wait_for(self.process.wait(), within_s)

    async def _get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(timeout=STOP_S, trust_env=False) as client:
            return (await client.get(self.url + path)).raise_for_status()


@asynccontextmanager
async def running_fake_engine(
    *flags: str, name: str = "tiny", key: str = "engine-key", port: int = 0, env: dict[str, str] | None = None
) -> AsyncIterator[FakeEngine]:
    """A fake engine that listens on loopback, on a port of its own choice when `port` is 0.

    `flags` are those of `vllm serve` and of `python -m workers.fake_engine --help`. AssertionError with its log when
    it does not listen in time; for one that never shall, start the module yourself.
    """
    with tempfile.TemporaryDirectory(prefix="fake-engine-") as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "workers.fake_engine", "serve", "/models/fake", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--served-model-name", name, *flags]
        with log.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"VLLM_API_KEY": key} | (env or {}),
                start_new_session=True,
            )
        children: list[int] = []
        try:
            engine = FakeEngine(await _url(process, log), key, name, process, log)
            children = (await engine.state())["children"]
            yield engine
        finally:
            await _end(process)
            for pid in children:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def loading_fake_engine(*flags: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A fake engine that has bound its port, and its address; it need not ever listen. Its stdout is a pipe."""
    command = [sys.executable, "-m", "workers.fake_engine", "serve", "/models/fake", "--host", "127.0.0.1"]
    process = await asyncio.create_subprocess_exec(*command, "--port", "0", *flags, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        yield process, line.split()[-1]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def _url(process: asyncio.subprocess.Process, log: Path) -> str:
    async def listening() -> re.Match[str] | None:
        text = _text(log)
        assert process.returncode is None, f"the fake engine ended with {process.returncode}:\n{text[-2000:]}"
        found = re.search(r"Starting vLLM server on (http://\S+)", text)
        return found if "startup complete" in text else None

    url: str = (await eventually(listening, "fake engine listens", START_S))[1]
    return url


def _text(log: Path) -> str:
    return log.read_text(errors="replace")


async def _end(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, then SIGKILL; by the pid that we started, and reaped."""
    for end, within_s in ((process.terminate, TERM_S), (process.kill, STOP_S)):
        if process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            end()
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), within_s)
