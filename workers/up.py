"""`poolgate up`: Redis, supervisor and gateway on one machine, started and ended in order. Run by up_cli.py."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from gateway.config.load import LoadedConfig
from gateway.config.store import connect
from gateway.config.tasks import end_task
from gateway.domain.errors import WorkerError
from workers.children import Child
from workers.leftovers import end_leftovers
from workers.progress import ProgressPrinter
from workers.redis_server import RedisServer
from workers.watch import Watch

STOP_MARGIN_S = 15.0  # for what a child does at its end beside waiting


class AlreadyUp(WorkerError):
    """Another `poolgate up` owns the state directory."""

    code = "already_up"


class Up:
    """Use once. `run()` gives the exit code: 0 after a wanted stop, 1 when a part could not be kept running."""

    def __init__(self, loaded: LoadedConfig, printer: ProgressPrinter) -> None:
        self._loaded = loaded
        self._say = printer.say
        self._printer = printer
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        logs = loaded.state_dir / "logs"
        config = ["--config", str(loaded.path)]
        self._gateway = self._child("gateway", ["serve", *config], logs)
        has_workers = any(pool.model for pool in loaded.config.pools.values())
        self._supervisor = self._child("supervisor", ["workers", *config], logs) if has_workers else None

    def _child(self, name: str, arguments: list[str], logs: Path) -> Child:
        return Child(name, [sys.executable, "-m", "gateway", *arguments], logs / f"{name}.log", self._say)

    def on_signal(self) -> None:
        """The first one stops in order; the next one does not wait for running requests."""
        if self._stop.is_set():
            self._say("Stopping at once.")
            self._hurry.set()
            if self._supervisor is not None:
                self._supervisor.signal(signal.SIGTERM)  # its second one: it hurries too
        self._stop.set()

    async def run(self) -> int:
        """Raises AlreadyUp, and what RedisServer raises when Redis cannot be started."""
        with locked(self._loaded.state_dir):
            async with self._redis() as store_tasks:
                code = await self._run_children(store_tasks)
        self._say("Stopped; nothing is left running.")
        return code

    async def _run_children(self, others: set[asyncio.Task[None]]) -> int:
        children = [child for child in (self._gateway, self._supervisor) if child is not None]
        parts = {asyncio.create_task(child.run(), name=child.name) for child in children}
        store = connect(self._loaded, timeout_s=1.0)
        watch = Watch(self._loaded, socket.gethostname(), store, self._printer)
        parts.add(asyncio.create_task(watch.run(), name="watch"))
        stopping = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            # each part runs until it is cancelled or has failed: the first that ends by itself ends all
            await asyncio.wait({*parts, *others, stopping}, return_when=asyncio.FIRST_COMPLETED)
            was_wanted = stopping.done()
            defect = next((part.exception() for part in parts if part.done()), None)
        finally:
            stopping.cancel()
            await self._end(parts)
            await store.aclose()
        if defect is not None:
            raise defect
        for child in children:
            if child.gave_up:
                self._say(f"The {child.name} died too often. The end of its log:")
                for line in child.last_lines():
                    self._say(f"  | {line}")
        return 0 if was_wanted else 1

    async def _end(self, parts: set[asyncio.Task[None]]) -> None:
        """Gateway first, so that running requests still find their workers; then the workers."""
        config = self._loaded.config
        [watch] = [part for part in parts if part.get_name() == "watch"]
        await end_task(watch)
        self._printer.keep()
        self._say(f"Stopping: running requests have {config.gateway.drain_s:g} s. Ctrl-C again stops at once.")
        if not await self._gateway.stop(config.gateway.drain_s + STOP_MARGIN_S, self._hurry):
            self._say("The gateway had to be killed.")
        if self._supervisor is not None:
            grace_s = config.gateway.drain_s + config.workers.stop_s + STOP_MARGIN_S
            if not await self._supervisor.stop(grace_s, asyncio.Event()):
                self._say("The supervisor had to be killed.")
            # one that was killed, by us or by others a moment ago, has left its workers running
            for line in await asyncio.to_thread(end_leftovers, self._loaded.state_dir.resolve()):
                self._say(f"Ended a worker that was left: {line}")
        for part in parts:
            await end_task(part)

    @contextlib.asynccontextmanager
    async def _redis(self) -> AsyncIterator[set[asyncio.Task[None]]]:
        """The embedded Redis around everything else: first up, last down. Nothing when the config names a server."""
        if not self._loaded.config.redis.is_embedded:
            yield set()
            return
        async with RedisServer(self._loaded.state_dir) as server:
            guard = asyncio.create_task(self._guard(server), name="redis")
            try:
                yield {guard}
            finally:
                await end_task(guard)

    async def _guard(self, server: RedisServer) -> None:
        code = await server.wait()
        self._say(f"Redis ended by itself (code {code}); stopping.")


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Holds the state directory for this `up`; the kernel lets go of it however we end. Raises AlreadyUp."""
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(os.open(state_dir / "up.lock", os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = file.read().strip() or "unknown"
            raise AlreadyUp(
                f"poolgate up runs already on {state_dir} (pid {holder}); stop it first, or set another "
                "gateway.state_dir"
            ) from exc
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
