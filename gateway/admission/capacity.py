"""Divides the slots of pools among the gateway processes through Redis (capacity.lua). Started by app.py, for slots.py.

Each process tells what it runs and has waiting, and learns its part: by priority, then in equal parts up to what each
asks for. It asks at once when somebody has to wait, and while anything runs every second, oftener while others want
more. While Redis is away a process goes on with the capacity divided by the processes it knew: that holds for each
`redis.on_outage`, since it is the engines that the slots protect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from gateway.admission.link import PATIENT_S, PROBE_S, RedisLink
from gateway.admission.slots import HOLD_S, PoolSlots, Slots
from gateway.config.tasks import end_task
from gateway.domain.errors import StoreUnavailable
from gateway.domain.store_keys import TAG

log = logging.getLogger(__name__)
TICK_S = 1.0  # between two calls while a pool is in use
SHARED_S = 0.25  # while other processes use it too
WANTED_S = 0.05  # while somebody waits for what others may give back
QUIET_S = 10.0  # a pool that nobody has asked for so long is let go: a quiet gateway asks nobody anything


def key_of(pool: str) -> str:
    """Where Redis keeps which process holds how many slots of the pool."""
    return f"{TAG}:slots:{pool}"


def use_in(fields: Mapping[bytes, bytes], now_ms: int) -> tuple[int, int]:
    """(running, waiting): requests of all processes, from what is under `key_of`; `now_ms` by Redis' clock."""
    running = asked = 0
    for told in fields.values():
        _, ends_ms, runs, _, asks = told.split(b";")
        if int(ends_ms) > now_ms:
            running += int(runs)
            asked += sum(int(each.partition(b":")[2]) for each in asks.split(b",") if each)
    return running, max(0, asked - running)


class Capacity:
    """One per process, for the pools of `slots`. `start()` begins, `aclose()` ends and gives everything back."""

    def __init__(
        self,
        link: RedisLink,
        slots: Slots,
        *,
        expected_processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expected_processes`: how many to assume until Redis has told."""
        self._link = link
        self._slots = slots
        self._clock = clock
        self._expected = max(1, expected_processes)
        self._process = uuid.uuid4().hex
        self._text = files("gateway.admission").joinpath("capacity.lua").read_text()
        self._sha = hashlib.sha1(self._text.encode(), usedforsecurity=False).hexdigest()
        self._used_at: dict[str, float] = {}  # by pool, of those that are not let go
        self._kicked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        slots.kick = self._kicked.set

    def start(self) -> None:
        """In a running event loop, once."""
        self._task = asyncio.create_task(self._run(), name="slots-of-pools")

    async def aclose(self) -> None:
        if self._task is not None:
            await end_task(self._task)
            self._task = None
        with contextlib.suppress(StoreUnavailable):  # what it holds ends by itself after HOLD_S
            await self._ask([pool for pool in self._slots.pools() if pool.name in self._used_at], is_leaving=True)

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._pause_s()):
                    await self._kicked.wait()
            except TimeoutError:
                pass
            self._kicked.clear()
            try:
                await self.exchange()
            except Exception:
                log.exception("dividing the slots of pools failed; the next try is in %g s", PROBE_S)
                await asyncio.sleep(PROBE_S)

    def _pause_s(self) -> float | None:
        """Until the next call, if nobody asks for one before; None: nobody needs any."""
        used = [pool for pool in self._slots.pools() if pool.name in self._used_at]
        if not used:
            return None
        if self._link.is_away:
            return PROBE_S
        if any(pool.queue and pool.granted < pool.capacity for pool in used):
            return WANTED_S
        return SHARED_S if any(pool.processes > 1 for pool in used) else TICK_S

    async def exchange(self) -> None:
        """One call for all pools that are in use, or have just been; each learns its part."""
        now_s = self._clock()
        asking: list[PoolSlots] = []
        for pool in self._slots.pools():
            if pool.held or pool.queue:
                self._used_at[pool.name] = now_s
            if pool.name in self._used_at:
                asking.append(pool)
        if not asking:
            return
        try:
            await self._ask(asking)
        except StoreUnavailable:  # the link has logged it
            for pool in asking:
                processes = max(pool.processes, self._expected)
                share = max(1, pool.capacity // processes)
                # one call that failed is no outage: others may still go by what Redis told them
                slots = share if self._link.is_away else min(pool.granted, share)
                self._slots.granted(pool, slots, processes, is_short=True)

    async def _ask(self, pools: Sequence[PoolSlots], *, is_leaving: bool = False) -> None:
        """Raises StoreUnavailable."""
        if not pools:
            return
        now_s = self._clock()
        body = []
        for pool in pools:
            asks = pool.asks(now_s)
            if not asks and now_s - self._used_at[pool.name] <= QUIET_S:
                asks = [(0, 0)]  # its part of what nobody asks for stays with it
            running = pool.held
            had = pool.usable
            if is_leaving:
                asks, running, had = [], 0, 0
            body.append({"capacity": pool.capacity, "running": running, "had": had, "asks": asks})
        keys = [key_of(pool.name) for pool in pools]
        request = msgspec.json.encode({"process": self._process, "hold_ms": int(HOLD_S * 1000), "pools": body})

        async def run(redis: Redis) -> Any:
            try:
                return await redis.evalsha(self._sha, len(keys), *keys, cast(Any, request))
            except NoScriptError:  # EVAL caches it again
                return await redis.eval(self._text, len(keys), *keys, cast(Any, request))

        answer = await self._link.call(run, timeout_s=PATIENT_S if is_leaving else None)
        for pool, told, (granted, processes, is_short) in zip(pools, body, answer, strict=True):
            if not told["asks"] and not told["running"]:
                self._used_at.pop(pool.name, None)
            self._slots.granted(pool, granted, processes, is_short=is_short == 1)
            if granted < told["had"]:  # what it had is free for others as soon as it says that it knows
                self._kicked.set()
