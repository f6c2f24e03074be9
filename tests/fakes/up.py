"""A running `poolgate up`, with what tests want to know of it: what it says, its processes, its commands."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fakes.line import process
from fakes.waits import eventually

READY_S = 40.0
READY = "Stop: Ctrl-C"  # the end of the ready block


@dataclass
class Running:
    child: asyncio.subprocess.Process
    log: Path
    config: Path
    state: Path
    seen: set[psutil.Process] = field(default_factory=set)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    async def says(self, words: str, within_s: float = READY_S) -> str:
        async def found() -> bool:
            return words in self.text()

        await eventually(found, f"up says {words!r}; it said:\n{self.text()[-2000:]}", within_s)
        return self.text()

    def family(self) -> list[psutil.Process]:
        """Every living process of this installation, whoever its parent is now.

        vLLM's engine processes overwrite their command line and environment, so they are known as descendants of
        `up`, and once seen they are remembered.
        """
        for found in psutil.process_iter():
            try:
                texts = [*found.cmdline(), found.environ().get("TMPDIR", "")]
                if any(str(self.config.parent) in text for text in texts):
                    self.seen.add(found)
                if found.pid == self.child.pid:
                    self.seen.update(found.children(recursive=True))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        self.seen = {process for process in self.seen if lives(process)}
        return sorted(self.seen, key=lambda process: process.pid)

    def address(self) -> tuple[str, str]:
        """Base URL and first key, from the ready block."""
        url, key = (re.search(rf"{name} +(\S+)", self.text()) for name in ("base URL", "API key"))
        assert url is not None and key is not None
        return url[1], key[1]

    async def interrupt(self) -> int:
        self.child.send_signal(signal.SIGINT)
        return await asyncio.wait_for(self.child.wait(), 40)

    async def cli(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gateway", *arguments, "--config", str(self.config)]
        return await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)


@asynccontextmanager
async def running_up(config: Path, ready_s: float | None = READY_S) -> AsyncIterator[Running]:
    """`poolgate up`; waits for the ready block unless `ready_s` is None; in the end nothing of it may be left."""
    async with process(["up", "--config", str(config)], config.with_name("up.log")) as (child, log):
        running = Running(child, log, config, config.parent / ".poolgate")
        if ready_s is not None:
            await running.says(READY, ready_s)
        yield running
    await eventually(lambda: is_gone(running), "every process of the installation is gone", 20)


async def is_gone(running: Running) -> bool:
    return not running.family()


def lives(process: psutil.Process) -> bool:
    """That very process, not another that has got its pid since."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
