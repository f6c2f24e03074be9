"""Publishes this host's fleet document to Redis: at each change, and every second so that it does not lapse.

Made by `supervisor.py`, which runs `Publisher.run` as a task. Redis away costs nothing but a log line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError

from gateway.domain.replica import FLEET_TTL_S, HOSTS_KEY, FleetDocument, ReplicaRecord, fleet_key

logger = logging.getLogger(__name__)

PUBLISH_S = 1.0
HOSTS_TTL_S = 86_400  # a host that was silent for this long is forgotten


class Publisher:
    """Owns nothing but its own state; the client is the supervisor's and carries the deadline of each call."""

    def __init__(
        self,
        store: redis_asyncio.Redis,
        host: str,
        revision: str,
        replicas: Callable[[], tuple[ReplicaRecord, ...]],
    ) -> None:
        self._store = store
        self._host = host
        self._revision = revision
        self._replicas = replicas
        self._change = asyncio.Event()
        self._is_over = False
        self._one_at_a_time = asyncio.Lock()  # so that an older document never lands after a newer one
        self._is_reachable: bool | None = None

    def changed(self) -> None:
        self._change.set()

    async def flush(self) -> bool:
        """Publishes the state of this moment; False when Redis did not take it."""
        async with self._one_at_a_time:
            document = FleetDocument(self._host, self._revision, time.time(), self._replicas())
            try:
                await self._write(document.to_json())
            except (RedisError, OSError) as exc:
                self._note(False, exc)
                return False
            self._note(True, None)
            return True

    async def run(self) -> None:
        """Until `finish`, or until cancelled."""
        while True:
            self._change.clear()
            await self.flush()
            if self._is_over:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUBLISH_S):
                    await self._change.wait()

    def finish(self) -> None:
        """Ends `run` at its next turn; a cancellation can get lost inside a call to Redis (see `tasks.end_task`)."""
        self._is_over = True
        self._change.set()

    async def withdraw(self) -> None:
        """At a clean stop: this host has no replicas any more. `run` must have ended."""
        async with self._one_at_a_time:
            try:
                async with self._store.pipeline(transaction=False) as pipe:
                    pipe.delete(fleet_key(self._host))
                    pipe.zrem(HOSTS_KEY, self._host)
                    await pipe.execute()
            except (RedisError, OSError) as exc:
                self._note(False, exc)

    async def _write(self, document: bytes) -> None:
        seconds, microseconds = await self._store.time()
        now_s = seconds + microseconds / 1e6
        async with self._store.pipeline(transaction=False) as pipe:
            pipe.set(fleet_key(self._host), document, px=int(FLEET_TTL_S * 1000))
            pipe.zadd(HOSTS_KEY, {self._host: now_s})
            pipe.zremrangebyscore(HOSTS_KEY, "-inf", now_s - HOSTS_TTL_S)
            pipe.expire(HOSTS_KEY, HOSTS_TTL_S)
            await pipe.execute()

    def _note(self, is_reachable: bool, exc: Exception | None) -> None:
        """Logs a change of Redis's state once; the calls between two changes are silent."""
        if is_reachable is self._is_reachable:
            return
        if not is_reachable:
            logger.warning("redis cannot be reached, workers go on unpublished: %s", exc)
        elif self._is_reachable is False:
            logger.info("redis is back, workers are published again")
        self._is_reachable = is_reachable
