"""All workers of this host: clears leftovers, runs one task per worker, publishes, stops them in order.

Made and run by `cli.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import redis.asyncio as redis_asyncio

from gateway.config.load import LoadedConfig
from gateway.config.tasks import end_task
from gateway.domain.replica import ReplicaRecord
from workers import leftovers
from workers.gpu import GpuDesk
from workers.life import FLUSH_S
from workers.ports import Ports
from workers.publish import PUBLISH_S, Publisher
from workers.restart import RestartPolicy
from workers.spec import WorkerSpec
from workers.surroundings import PortSource, Surroundings
from workers.worker import Worker

logger = logging.getLogger(__name__)


class Supervisor:
    """Use once: `run`, then it is over. The Redis client stays the caller's."""

    def __init__(
        self,
        loaded: LoadedConfig,
        specs: Sequence[WorkerSpec],
        store: redis_asyncio.Redis,
        *,
        host: str,
        gpus: GpuDesk,
        ports: PortSource | None = None,
        policy: RestartPolicy | None = None,
        rng: random.Random | None = None,
        parent_env: Mapping[str, str] | None = None,
    ) -> None:
        rng = rng or random.Random()
        ports = ports or Ports(rng)
        self._state_dir = loaded.state_dir.resolve()
        self._stop = asyncio.Event()
        self._publisher = Publisher(store, host, loaded.revision, self.records)
        self._workers = [
            Worker(
                spec,
                Surroundings(
                    slot=slot,
                    ports=ports,
                    gpus=gpus,
                    board=self._publisher,
                    temp_folder=Path(tempfile.gettempdir()),
                    parent_env=os.environ if parent_env is None else parent_env,
                    drain_s=loaded.config.gateway.drain_s,
                    settle_s=PUBLISH_S,
                ),
                policy=policy or RestartPolicy(),
                rng=rng,
            )
            for slot, spec in enumerate(specs)
        ]

    def records(self) -> tuple[ReplicaRecord, ...]:
        """All workers of this host now."""
        return tuple(worker.record for worker in self._workers)

    def request_stop(self, *, hurry: bool = False) -> None:
        """Makes `run` stop all workers and return; `hurry`: without waiting for requests in flight."""
        for worker in self._workers:
            worker.request_stop(hurry=hurry)
        self._stop.set()

    async def run(self) -> None:
        """Serves until `request_stop`. When it returns or is cancelled, no process of any worker is left.

        Raises SupervisorBusy when another supervisor has the state directory.
        """
        with contextlib.closing(leftovers.lock(self._state_dir)):
            for line in await asyncio.to_thread(leftovers.end_leftovers, self._state_dir):
                logger.warning("leftover %s", line)
            publishing = asyncio.create_task(self._publisher.run(), name="publish")
            working = [asyncio.create_task(worker.run(), name=worker.spec.id) for worker in self._workers]
            try:
                await self._stop.wait()
                for result in await asyncio.gather(*working, return_exceptions=True):
                    if isinstance(result, BaseException):
                        logger.error("a worker's task ended with a defect", exc_info=result)
            finally:
                for task in working:
                    await end_task(task)
                self._publisher.finish()
                await end_task(publishing, patience_s=FLUSH_S)
                await self._publisher.withdraw()
