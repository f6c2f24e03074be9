"""Follows the fleet from the terminal of `poolgate up`: progress while workers load, how to call them, then changes."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.config.load import LoadedConfig
from gateway.domain.replica import FleetDocument, ReplicaRecord, ReplicaState, fleet_key
from workers.progress import ProgressPrinter
from workers.ready_block import base_url, ready_block
from workers.spec import specs_of

FIRST_KEY_FILE = "first.key"
POLL_S = 0.5
LOADING = (ReplicaState.STARTING, ReplicaState.WARMING)


class Watch:
    """`run()` until cancelled; it returns by itself only when every worker has failed before one was ready."""

    def __init__(self, loaded: LoadedConfig, host: str, store: Redis, printer: ProgressPrinter) -> None:
        self._loaded = loaded
        self._host = host
        self._store = store
        self._printer = printer
        self._began = time.monotonic()
        is_default = loaded.path == Path("config.toml").resolve()
        self._config_option = "" if is_default else f" --config {shlex.quote(str(loaded.path))}"
        self._command = command_here()
        self._logs = {spec.id: spec.log_path for spec in specs_of(loaded, host, 0)}  # GPUs do not matter
        self._count = sum(len(pool.replicas) for pool in loaded.config.pools.values() if pool.model)

    async def run(self) -> None:
        workers = f"{self._count} worker{'s' if self._count != 1 else ''}"
        what = f"the gateway and {workers}" if self._count else "the gateway"
        self._printer.say(f"Starting {what}; their output goes to {self._loaded.state_dir / 'logs'}")
        replicas = await self._until_settled()
        self._printer.keep()
        for replica in replicas:
            if not replica.is_ready():
                self._printer.say(f"{replica.id}: {replica.state.value}: {replica.detail or 'no cause known'}")
                if (log := self._logs.get(replica.id)) is not None:
                    self._printer.say(f"  its output is in {log}")
        if self._count and not any(r.is_ready() for r in replicas):
            self._printer.say("No worker could be started.")
            return
        key_file = self._loaded.state_dir / FIRST_KEY_FILE
        config = self._loaded.config
        key = None if config.keys else await asyncio.to_thread(read_key, key_file)
        took_s = time.monotonic() - self._began
        self._printer.say(
            ready_block(config, key, self._loaded.revision, took_s, command=self._command, option=self._config_option)
        )
        await self._tell_changes(replicas)

    async def _until_settled(self) -> list[ReplicaRecord]:
        """Polls until no worker is loading any more, and the gateway has seen that one is ready."""
        async with httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
            while True:
                replicas = await self._replicas()
                self._printer.show(replicas, time.time())
                if len(replicas) >= self._count and not any(r.state in LOADING for r in replicas):
                    if self._count and all(r.state is ReplicaState.FAILED for r in replicas):
                        return replicas
                    if await self._gateway_is_ready(client):
                        return replicas
                await asyncio.sleep(POLL_S)

    async def _gateway_is_ready(self, client: httpx.AsyncClient) -> bool:
        try:
            reply = await client.get(base_url(self._loaded.config).removesuffix("/v1") + "/ready")
        except httpx.HTTPError:
            return False
        return reply.status_code == 200

    async def _tell_changes(self, replicas: Sequence[ReplicaRecord]) -> None:
        states = {r.id: r.state for r in replicas}
        while True:
            await asyncio.sleep(POLL_S)
            for replica in await self._replicas():
                if states.get(replica.id) is not replica.state:
                    states[replica.id] = replica.state
                    why = f": {replica.detail}" if replica.detail else ""
                    self._printer.say(f"{replica.id}: {replica.state.value}{why}")

    async def _replicas(self) -> list[ReplicaRecord]:
        """This host's workers, as its supervisor publishes them; none while Redis or the supervisor is silent."""
        try:
            raw = await self._store.get(fleet_key(self._host))
        except (RedisError, OSError):
            return []
        try:
            return list(FleetDocument.from_json(raw).replicas) if raw else []
        except ValueError:
            return []


def command_here() -> str:
    """How a shell in this folder calls the poolgate that runs here: by name if that finds it, else by its path."""
    own = Path(sys.executable).with_name("poolgate")
    found = shutil.which("poolgate")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "poolgate"
    return shlex.quote(os.path.relpath(own) if own.is_relative_to(Path.cwd()) else str(own))


def read_key(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
