"""Exact prompt counts that engines gave: kept for a while, and asked once where several callers want the same one.

Called by attempt.py. A prompt is known by a hash of the request that makes an engine count it; its text is not kept.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

MAX_KEPT = 4096  # counts; about 0.2 kB each
KEPT_S = 600.0  # after that an engine is asked again: a server with a fixed URL may have got another tokenizer
HASH_ASIDE_BYTES = 1_048_576  # from here on hashing is worth a hop to a thread; hashlib lets go of the GIL

Count = Callable[[], Awaitable[int | None]]


class _Flight:
    """A count on its way, and how many wait for it."""

    __slots__ = ("task", "waiters")

    task: asyncio.Task[int | None]

    def __init__(self) -> None:
        self.waiters = 0


class Counts:
    """One per runtime. A count that failed is not kept; each of its waiters gets its error, or its None."""

    def __init__(
        self, *, max_kept: int = MAX_KEPT, kept_s: float = KEPT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_kept = max_kept
        self._kept_s = kept_s
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[int, float]] = (
            OrderedDict()
        )  # the tokens, and until when; oldest use first
        self._flights: dict[bytes, _Flight] = {}  # each has a waiter at least, so there are no more than requests

    async def of(self, key: bytes, count: Count) -> int | None:
        """The tokens that are known under `key` (`key_of`), else what `count` says; it has deadlines of its own.

        `count` runs in a task that ends with the last of those who wait for it: one of them may leave, the others
        still get theirs. Raises what `count` raises.
        """
        known = self._kept.get(key)
        if known is not None and self._clock() < known[1]:
            self._kept.move_to_end(key)
            return known[0]
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = asyncio.create_task(self._run(key, flight, count))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters:
                self._ended(key, flight)  # one that is cancelled before it began cannot say so itself
                flight.task.cancel()

    async def _run(self, key: bytes, flight: _Flight, count: Count) -> int | None:
        try:
            tokens = await count()
        finally:
            self._ended(key, flight)  # whoever asks after a failure asks anew
        if tokens is not None:
            self._kept[key] = (tokens, self._clock() + self._kept_s)
            self._kept.move_to_end(key)
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        return tokens

    def _ended(self, key: bytes, flight: _Flight) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]


async def key_of(pool: str, path: bytes, body: bytes) -> bytes:
    """`body` names the model as it is served, so one prompt has a key for each of those; and one for each pool."""
    if len(body) < HASH_ASIDE_BYTES:
        return _digest(pool, path, body)
    return await asyncio.to_thread(_digest, pool, path, body)


def _digest(pool: str, path: bytes, body: bytes) -> bytes:
    found = hashlib.sha256(b"%b %b " % (pool.encode(), path))  # no pool's name and no path holds a blank
    found.update(body)
    return found.digest()
