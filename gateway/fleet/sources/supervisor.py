"""The workers of all hosts, as their supervisors publish them in Redis."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import cast

import redis.asyncio as redis_asyncio
from redis.exceptions import RedisError

from gateway.domain.replica import HOSTS_KEY, FleetDocument, ReplicaRecord, fleet_key
from gateway.fleet.sources.base import SourceUnavailable

log = logging.getLogger(__name__)


class SupervisorSource:
    """Reads every host's document; one whose TTL ran out is gone, and its host leaves the index."""

    name = "supervisors"

    def __init__(self, redis: redis_asyncio.Redis) -> None:
        self._redis = redis
        self._ignored: set[str] = set()  # hosts whose document cannot be read; told once

    async def replicas(self) -> Sequence[ReplicaRecord]:
        return [replica for document in await self.documents() for replica in document.replicas]

    async def documents(self) -> list[FleetDocument]:
        """Raises SourceUnavailable when Redis does not answer in time."""
        try:
            known = cast(list[bytes], await self._redis.zrange(HOSTS_KEY, 0, -1))
            hosts = [str(host, "utf-8", "replace") for host in known]
            # one GET per host in a pipeline, not one MGET: in a Redis Cluster the keys lie in different slots
            pipeline = self._redis.pipeline(transaction=False)
            for host in hosts:
                pipeline.get(fleet_key(host))
            raw = await pipeline.execute() if hosts else []
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
