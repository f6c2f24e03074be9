"""One worker's state machine: starting → warming → ready → (backoff → starting | failed) → draining → stopped.

Made by `supervisor.py`. All state changes happen in the task that runs `Worker.run`; others read `record` or call
`request_stop`. One start of the process, from spawn to the last descendant's death, is a `Life` in `life.py`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from gateway.domain.replica import ReplicaRecord, ReplicaState
from workers.errors import GpuBusy, StartRefused
from workers.life import End, Life
from workers.restart import Crash, RestartPolicy, next_delay
from workers.spec import WorkerSpec
from workers.surroundings import Surroundings

logger = logging.getLogger(__name__)

CRASHES_KEPT = 64


class Worker:
    """Keeps one `vllm serve` serving until told to stop."""

    def __init__(
        self,
        spec: WorkerSpec,
        surroundings: Surroundings,
        *,
        policy: RestartPolicy,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._surroundings = surroundings
        self._policy = policy
        self._rng = rng
        self._clock = clock
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._crashes: deque[Crash] = deque(maxlen=CRASHES_KEPT)
        self._record = ReplicaRecord(
            id=spec.id,
            pool=spec.pool,
            url="",
            state=ReplicaState.STARTING,
            served_name=spec.served_name,
            since_s=time.time(),
            detail="waiting for its turn",
            has_priority=spec.has_priority,
        )

    @property
    def record(self) -> ReplicaRecord:
        """The worker now, as it is published."""
        return self._record

    def request_stop(self, *, hurry: bool = False) -> None:
        """In any state: `run` will end with the worker stopped. `hurry`: without waiting for requests in flight."""
        self._stop.set()
        if hurry:
            self._hurry.set()

    async def run(self) -> None:
        """Serves until `request_stop`; when it returns or is cancelled no process of the worker is left.

        A worker that failed for good stays failed until the stop.
        """
        try:
            while not self._stop.is_set():
                end = await self._live_once()
                if end is None:
                    break
                delay_s = self._delay_after(end)
                if delay_s is None:
                    self._enter(ReplicaState.FAILED, end.cause)
                    await self._stop.wait()
                    break
                self._enter(ReplicaState.BACKOFF, f"{end.cause}; next start in {delay_s:.0f} s")
                await self._sleep(delay_s)
                self._record = replace(self._record, restarts=self._record.restarts + 1)
        finally:
            self._enter(ReplicaState.STOPPED, "")

    async def _live_once(self) -> End | None:
        """One start to its end; None when it ended because a stop was asked for."""
        self._update(url="", pid=None, api_key=None, load=None, max_model_len=None, engine_version=None)
        life = Life(
            self.spec,
            self._surroundings,
            enter=self._enter,
            update=self._update,
            stop=self._stop,
            hurry=self._hurry,
        )
        try:
            return await life.run()
        except StartRefused as exc:
            return End(exc.message, was_ready=False, is_final=True)
        except GpuBusy as exc:
            return End(exc.message, was_ready=False)
        except OSError as exc:
            return End(f"{exc}; the state directory must be writable", was_ready=False)
        except Exception as exc:
            logger.exception("worker %s: defect in the supervisor", self.spec.id)
            return End(f"defect in the supervisor: {exc!r}", was_ready=False)

    def _delay_after(self, end: End) -> float | None:
        self._crashes.append(Crash(self._clock(), end.was_ready))
        return None if end.is_final else next_delay(self._policy, list(self._crashes), self._rng)

    async def _sleep(self, delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s):
                await self._stop.wait()
        except TimeoutError:
            pass

    def _enter(self, state: ReplicaState, detail: str) -> None:
        before = self._record.state
        load = self._record.load if state in (ReplicaState.READY, ReplicaState.DRAINING) else None
        self._record = replace(self._record, state=state, detail=detail, since_s=time.time(), load=load)
        level = {ReplicaState.FAILED: logging.ERROR, ReplicaState.BACKOFF: logging.WARNING}.get(state, logging.INFO)
        change = f"{before} → {state}" if before is not state else str(state)
        logger.log(level, "worker %s: %s%s", self.spec.id, change, f" ({detail})" if detail else "")
        self._surroundings.board.changed()

    def _update(self, **facts: object) -> None:
        """New facts without a change of state: url, pid, load, detail …; they go out with the next publication."""
        self._record = replace(self._record, **facts)  # type: ignore[arg-type]
