"""Pools with `urls`: servers that somebody else runs, known from config.toml alone."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.config.outside import engine_keys
from gateway.config.rules import replica_url
from gateway.config.schema import Config
from gateway.domain.replica import ReplicaRecord, ReplicaState


class StaticSource:
    """Always says `ready`: whether such a server answers shows when it is called."""

    name = "config"

    def __init__(self, config: Config, now_s: float) -> None:
        keys = engine_keys(config)
        self._replicas = [
            ReplicaRecord(
                id=f"{pool}/{number}@static",
                pool=pool,
                url=replica_url(url),
                state=ReplicaState.READY,
                served_name=section.served_name or pool,
                since_s=now_s,
                max_model_len=section.max_model_len,
                api_key=keys.get(pool),
                has_priority=section.scheduling_policy == "priority",
                engine=section.engine,
            )
            for pool, section in config.pools.items()
            for number, url in enumerate(section.urls or [])
        ]

    async def replicas(self) -> Sequence[ReplicaRecord]:
        return self._replicas
