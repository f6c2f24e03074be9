"""The one road to Redis for keys and budgets: deadlines, what counts as an outage, and Redis' errors made ours.

Two failures in a row, the second call begun after the first one failed, make Redis "away": one stall of this process
fails many calls at once and is no outage. While Redis is away a call is refused at once, except one probe per 0.5 s.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.config.load import LoadedConfig
from gateway.config.store import connect
from gateway.domain.errors import StoreUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

PROBE_S = 0.5
PATIENT_S = 2.0  # calls that nobody waits for with a request in hand: give-backs, renewals, administration
MAX_CONNECTIONS = 32  # redis-py 8 fails the 101st connection of a pool instead of waiting


class RedisLink:
    """Owned by the composition root, shared by everything in one process that needs Redis. Close with `aclose()`."""

    def __init__(self, client: Redis, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`client` is closed by this link; its own socket timeout must not be shorter than PATIENT_S."""
        self._client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._failures = 0  # in a row
        self._failed_at = float("-inf")
        self._away_since: float | None = None
        self._is_probing = False
        self.refused_calls = 0  # decided without Redis since it went away

    @classmethod
    def open(cls, loaded: LoadedConfig, *, timeout_s: float | None = None) -> RedisLink:
        """A link as the config wants it; `timeout_s` replaces `redis.timeout_s` (administration is patient)."""
        deadline = loaded.config.redis.timeout_s if timeout_s is None else timeout_s
        return cls(connect(loaded, timeout_s=max(PATIENT_S, deadline)), timeout_s=deadline)

    @property
    def is_away(self) -> bool:
        return self._away_since is not None

    async def call(self, what: Callable[[Redis], Awaitable[T]], *, timeout_s: float | None = None) -> T:
        """The result of `what(client)`. Raises StoreUnavailable: after the deadline, or at once while Redis is away."""
        started = self._clock()
        is_probe = self.is_away
        if is_probe:
            if self._is_probing or started - self._failed_at < PROBE_S:
                self.refused_calls += 1
                raise unavailable()
            self._is_probing = True
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                async with self._slots:
                    result = await what(self._client)
        except (RedisError, OSError) as exc:
            self._fail(started, exc)
            raise unavailable() from exc
        finally:
            if is_probe:
                self._is_probing = False
        self._succeed()
        return result

    async def aclose(self) -> None:
        await self._client.aclose()

    def _fail(self, started: float, exc: Exception) -> None:
        if started >= self._failed_at or self.is_away:
            self._failures += 1
            self._failed_at = self._clock()
        if self._failures >= 2 and self._away_since is None:
            self._away_since = self._failed_at
            self.refused_calls = 0
            log.warning("Redis is away (%s: %s); going on without it until it answers", type(exc).__name__, exc)

    def _succeed(self) -> None:
        self._failures = 0
        if self._away_since is not None:
            away_s = self._clock() - self._away_since
            self._away_since = None
            log.warning("Redis is back after %.1f s; %d calls were decided without it", away_s, self.refused_calls)


def unavailable() -> StoreUnavailable:
    return StoreUnavailable("The gateway's store does not answer; try again in a moment.", retry_after_s=1.0)
