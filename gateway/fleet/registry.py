"""What this process knows of the fleet: polls the sources, counts its own requests, hands out snapshots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.domain.replica import ReplicaRecord, ReplicaState
from gateway.fleet.snapshot import Snapshot
from gateway.fleet.sources.base import Source, SourceUnavailable

log = logging.getLogger(__name__)
POLL_S = 0.5
ASIDE_S = 2.0  # a replica that failed like that is left out until its source has had time to notice


class Registry:
    """Owned by the runtime: `run()` polls until cancelled; all other methods are synchronous and cheap."""

    def __init__(self, sources: Sequence[Source], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = sources
        self._clock = clock
        self._known: dict[str, Sequence[ReplicaRecord]] = {}
        self._silent: set[str] = set()
        self._in_flight: dict[str, int] = {}
        self._aside: dict[str, tuple[float, str]] = {}  # until when, and why
        self._snapshot = Snapshot((), self._in_flight)

    async def refresh(self) -> None:
        """Asks every source once, side by side; each has its own deadline."""
        await asyncio.gather(*(self._ask(source) for source in self._sources))
        self._rebuild()

    async def run(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(POLL_S)

    async def _ask(self, source: Source) -> None:
        try:
            self._known[source.name] = await source.replicas()
        except Exception as exc:  # a task's top: a defect of one source must not end the polling of all
            if source.name not in self._silent:
                self._silent.add(source.name)
                defect = None if isinstance(exc, SourceUnavailable) else exc
                log.warning("replica source %s is silent, its last word stands: %s", source.name, exc, exc_info=defect)
        else:
            if source.name in self._silent:
                self._silent.discard(source.name)
                log.info("replica source %s answers again", source.name)

    def _rebuild(self) -> None:
        now = self._clock()
        self._aside = {id_: aside for id_, aside in self._aside.items() if aside[0] > now}
        replicas = [
            replace(r, state=ReplicaState.BACKOFF, detail=self._aside[r.id][1]) if r.id in self._aside else r
            for records in self._known.values()
            for r in records
        ]
        self._snapshot = Snapshot(replicas, self._in_flight)

    def snapshot(self) -> Snapshot:
        return self._snapshot

    def set_aside(self, replica: ReplicaRecord, why: str, words: str = "") -> None:
        """Nobody is alive there: leave it out for a moment. A server with a fixed URL has no one to mend its record.

        `words`: more for the log, in words of ours.
        """
        if replica.id not in self._aside:
            log.warning("replica %s (%s) is left out for %g s: %s. %s", replica.id, replica.url, ASIDE_S, why, words)
        self._aside[replica.id] = (self._clock() + ASIDE_S, why)
        self._rebuild()

    def begin(self, replica: ReplicaRecord) -> None:
        self._in_flight[replica.id] = self._in_flight.get(replica.id, 0) + 1

    def end(self, replica: ReplicaRecord) -> None:
        left = self._in_flight.get(replica.id, 0) - 1
        if left > 0:
            self._in_flight[replica.id] = left
        else:
            self._in_flight.pop(replica.id, None)

    def in_flight_by_pool(self) -> dict[str, int]:
        """Pools whose replicas this process has sent requests to that still run. An id is "<pool>/<number>@<host>"."""
        found: dict[str, int] = {}
        for id_, requests in self._in_flight.items():
            pool = id_.rpartition("/")[0]
            found[pool] = found.get(pool, 0) + requests
        return found
