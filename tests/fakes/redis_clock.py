"""A date that a test sets, for budgets over a real Redis: days and months do not end while a test waits."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from redis.asyncio import Redis

from gateway.admission.budget import Budget

KEY = "test:clock"  # second, microsecond: what TIME returns


class RedisClock:
    """What the governed budgets' script reads in place of Redis' TIME; `local` is their own clock, in step with it."""

    def __init__(self, redis: Redis, at: str) -> None:
        self._redis = redis
        self.utc_s = utc_s(at)
        self._began_s = self.utc_s

    def local(self) -> float:
        return 1000.0 + self.utc_s - self._began_s

    async def govern(self, *budgets: Budget) -> None:
        for budget in budgets:
            text = budget._script._text.replace("redis.call('TIME')", f"redis.call('LRANGE', '{KEY}', 0, 1)")
            assert text != budget._script._text
            budget._script._text = text
            budget._script._sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        await self.move_to(self.utc_s)

    async def move_to(self, at: str | float) -> None:
        self.utc_s = utc_s(at) if isinstance(at, str) else at
        await self._redis.delete(KEY)
        await self._redis.rpush(KEY, int(self.utc_s), int(self.utc_s % 1 * 1_000_000))


def utc_s(at: str) -> float:
    """ "2026-02-28 23:59:59.5" → seconds since the epoch."""
    return datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
