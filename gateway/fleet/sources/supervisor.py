"""The workers of all hosts, as their supervisors publish them in Redis."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError

from gateway.domain.replica import HOSTS_KEY, FleetDocument, ReplicaRecord, fleet_key
from gateway.fleet.sources.base import SourceUnavailable

log = logging.getLogger(__name__)


# How long a host's last document stands when none is there any more. A supervisor that stops says so in its last one;
# so a missing one means that Redis was emptied, takes no writes (full disk, no memory), or that the host died, and then
# its replicas refuse connections. Forgetting healthy replicas would be the worst of these.
LAST_WORD_S = 600.0


class SupervisorSource:
    """Reads every host's document, and remembers the last one of each host for LAST_WORD_S."""

    name = "supervisors"

    def __init__(self, redis: redis_asyncio.Redis, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._clock = clock
        self._last: dict[str, tuple[float, FleetDocument]] = {}  # by host: when it was read, what it said
        self._silent: set[str] = set()
        self._ignored: set[str] = set()  # hosts whose document cannot be read; told once

    async def replicas(self) -> Sequence[ReplicaRecord]:
        now = self._clock()
        self._last |= {document.host: (now, document) for document in await self.documents()}
        self._last = {host: word for host, word in self._last.items() if now - word[0] <= LAST_WORD_S}
        silent = {host for host, (read_at, _) in self._last.items() if read_at < now}
        for host in silent - self._silent:
            log.warning("host %s publishes nothing; its last word stands for %.0f s", host, LAST_WORD_S)
        self._silent = silent
        return [replica for _, document in self._last.values() for replica in document.replicas]

    async def documents(self) -> list[FleetDocument]:
        """Raises SourceUnavailable when Redis does not answer in time."""
        try:
            known = cast(list[bytes], await self._redis.zrange(HOSTS_KEY, 0, -1))
            hosts = [str(host, "utf-8", "replace") for host in known]
            raw = await self._redis.mget([fleet_key(host) for host in hosts]) if hosts else []
        except (RedisError, OSError, TimeoutError) as exc:
            raise SourceUnavailable(f"Redis: {type(exc).__name__}") from exc
        documents = []
        ignored: set[str] = set()
        for host, text in zip(hosts, raw, strict=True):
            if text is None:
                continue
            try:
                documents.append(FleetDocument.from_json(text))
            except ValueError as exc:
                if host not in self._ignored:
                    log.warning("fleet document of host %s ignored: %s", host, exc)
                ignored.add(host)
        self._ignored = ignored
        return documents
