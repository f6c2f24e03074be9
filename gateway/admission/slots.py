"""The slots of pools: how many requests may run on each, and who waits for one. dispatch.py takes and gives back.

A pool has `max_in_flight` slots for each ready replica; how many of them are this process's, capacity.py says. A pool
without that setting has no bound, and nobody waits for it here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from gateway.admission.drain import Drain
from gateway.admission.queue import AGED_EVERY, Queue, Waiter
from gateway.config.schema import ClassSection
from gateway.domain.errors import PoolFull, QueueTimeout

BEFORE_ALL = -1_000_000  # no class has such a priority
MOVE_S = 1.0  # within which a request that failed gets a slot of another pool, or none
HOLD_S = 3.0  # a process that does not tell of itself for so long holds nothing any more


class PoolSlots:
    """One bounded pool in this process."""

    __slots__ = (
        "_clock",
        "drain",
        "granted",
        "held",
        "is_short",
        "name",
        "per_replica",
        "processes",
        "queue",
        "replicas",
        "running",
        "until_s",
    )

    def __init__(self, name: str, per_replica: int, replicas: Callable[[str], int], clock: Callable[[], float]) -> None:
        """`replicas`: how many of the pool are ready."""
        self._clock = clock
        self.name = name
        self.per_replica = per_replica
        self.replicas = replicas
        self.granted = 0  # this process's part, as last told
        self.until_s = -math.inf  # so long that holds: a process that stood still longer than that has lost it
        self.is_short = False  # that is less than it asked for
        self.processes = 1  # that ask for slots of this pool
        self.running: dict[int, int] = {}  # requests that hold a slot, by priority; no zeros
        self.held = 0  # all of those
        self.queue = Queue()
        self.drain = Drain()

    @property
    def capacity(self) -> int:
        """Of the pool as a whole."""
        return self.per_replica * self.replicas(self.name)

    @property
    def usable(self) -> int:
        """Slots that this process may use now."""
        return min(self.granted, self.capacity) if self._clock() < self.until_s else 0

    @property
    def free(self) -> int:
        return self.usable - self.held

    @property
    def has_room(self) -> bool:
        """For one that comes now: nobody is overtaken."""
        return self.free > 0 and not self.queue

    def add(self, priority: int) -> None:
        self.running[priority] = self.running.get(priority, 0) + 1
        self.held += 1

    def remove(self, priority: int) -> None:
        self.held -= 1
        left = self.running[priority] - 1
        if left:
            self.running[priority] = left
        else:
            del self.running[priority]

    @property
    def may_grow(self) -> bool:
        """More may be had by asking for it."""
        return (not self.is_short and self.granted < self.capacity) or self._clock() >= self.until_s

    def asks(self, now_s: float) -> list[tuple[int, int]]:
        """(priority, requests that run or wait). For a tenth of the slots, or one, aged ones go before all others."""
        asks = dict(self.running)
        for priority, waiting in self.queue.by_priority():
            asks[priority] = asks.get(priority, 0) + waiting
        for aged in self.queue.aged(now_s, max(1, self.capacity // AGED_EVERY)):
            asks[aged.priority] -= 1
            asks[BEFORE_ALL] = asks.get(BEFORE_ALL, 0) + 1
        return list(asks.items())


class Slot:
    """The right to run one request on `pool`. Owned by whoever got it, who gives it back; twice does no harm."""

    __slots__ = ("_bound", "_owner", "_since_s", "class_name", "pool")

    def __init__(self, owner: Slots, pool: str, bound: PoolSlots | None, class_name: str, since_s: float) -> None:
        """`bound` None: the pool has no bound."""
        self.pool = pool
        self.class_name = class_name
        self._owner = owner
        self._bound = bound
        self._since_s = since_s

    def release(self) -> None:
        bound, self._bound = self._bound, None
        if bound is not None:
            self._owner.give_back(bound, self.class_name, self._since_s)

    async def move(self, pool: str) -> bool:
        """The request goes on at another pool, if that has a slot for it within MOVE_S; else nothing changes."""
        if pool == self.pool:
            return True
        other = await self._owner.other(pool, self.class_name)
        if other is None:
            return False
        self.release()
        self.pool, self._bound, self._since_s = pool, other._bound, other._since_s
        return True


class Slots:
    """One per process. `kick` is called when capacity.py should ask for more, or has something to give back."""

    def __init__(
        self,
        bounds: Mapping[str, int],
        classes: Mapping[str, ClassSection],
        replicas: Callable[[str], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bounds`: `max_in_flight` by pool, of those that have it; `replicas`: how many of a pool are ready."""
        self._pools = {name: PoolSlots(name, bound, replicas, clock) for name, bound in bounds.items()}
        self._classes = classes
        self._clock = clock
        self.kick: Callable[[], None] = lambda: None

    @classmethod
    def unbounded(cls) -> Slots:
        """No pool has a bound."""
        return cls({}, {}, lambda pool: 0)

    def pools(self) -> Iterator[PoolSlots]:
        return iter(self._pools.values())

    def facts(self) -> tuple[dict[str, int], dict[tuple[str, str], int]]:
        """Slots of this process by pool, and requests that wait by pool and class; for metrics."""
        slots = {pool.name: max(0, min(pool.granted, pool.capacity)) for pool in self._pools.values()}
        waiting = {(pool.name, name): n for pool in self._pools.values() for name, n in pool.queue.by_class()}
        return slots, waiting

    def take(self, pools: Sequence[str], class_name: str) -> Slot | None:
        """A slot of the first of these pools that has one for whoever comes now; None where one has to wait."""
        for name in pools:
            pool = self._pools.get(name)
            if pool is None:
                return Slot(self, name, None, class_name, 0.0)
            if pool.has_room:
                pool.add(self._classes[class_name].priority)
                return Slot(self, name, pool, class_name, self._clock())
        return None

    async def wait(self, pools: Sequence[str], class_name: str, user: str, cost: int) -> Slot:
        """The slot that comes free first, in turn: of pools that all have a bound. `cost` in tokens.

        Raises PoolFull when too many of the class wait, QueueTimeout after its `queue_s`; both know when to come back.
        """
        rules = self._classes[class_name]
        places = [self._pools[name] for name in pools]
        room = sum(max(0, pool.capacity - pool.granted) for pool in places if pool.may_grow)
        if all(pool.queue.waiting(class_name) >= self._queue_max(pool, class_name) + room for pool in places):
            self._make_place(places, class_name, user)
        waiter = Waiter(class_name, rules.priority, user, cost, self._clock(), rules.queue_s)
        slot = await self._turn(places, waiter, rules.queue_s)
        if slot is None:
            raise self._timeout(places, class_name, rules.queue_s)
        return slot

    async def other(self, name: str, class_name: str) -> Slot | None:
        """A slot of that pool for a request that has failed at its own; None when it has none to give within MOVE_S."""
        taken = self.take([name], class_name)
        if taken is not None or not (pool := self._pools[name]).may_grow:
            return taken
        waiter = Waiter(class_name, self._classes[class_name].priority, "", 1, self._clock(), MOVE_S)
        try:
            return await self._turn([pool], waiter, MOVE_S)
        except PoolFull:  # others have them
            return None

    async def _turn(self, places: Sequence[PoolSlots], waiter: Waiter, within_s: float) -> Slot | None:
        """Stands in the queues of these pools until one has a slot; None when none had within that time."""
        for pool in places:
            pool.queue.add(waiter)
            self._pump(pool)
        if any(pool.may_grow for pool in places):
            self.kick()
        try:
            async with asyncio.timeout(within_s):
                return self._given(await waiter.future, waiter.class_name)
        except TimeoutError:
            return self._given_meanwhile(waiter)
        except BaseException:
            if (late := self._given_meanwhile(waiter)) is not None:
                late.release()
            raise
        finally:
            waiter.leave()

    def granted(self, pool: PoolSlots, slots: int, processes: int, *, is_short: bool) -> None:
        """This process's part, for HOLD_S: those whose turn it is go, and who came in vain is told."""
        pool.granted, pool.processes, pool.is_short = slots, max(1, processes), is_short
        pool.until_s = self._clock() + HOLD_S
        self._pump(pool)
        if pool.may_grow:
            return
        for class_name, waiting in list(pool.queue.by_class()):
            for waiter in pool.queue.newest(class_name, waiting - self._queue_max(pool, class_name)):
                if len(waiter.queues) == 1:  # else another pool may still take it
                    waiter.leave()
                    if not waiter.future.done():
                        waiter.future.set_exception(self._full([pool], class_name))

    # --- for a slot ---------------------------------------------------------------------------------------------------

    def give_back(self, pool: PoolSlots, class_name: str, since_s: float) -> None:
        pool.remove(self._classes[class_name].priority)
        pool.drain.held(self._clock() - since_s)
        if pool.held >= pool.granted:
            self.kick()  # it is another process's now
        elif pool.queue:
            self._pump(pool)

    # --- within -------------------------------------------------------------------------------------------------------

    def _given(self, name: str, class_name: str) -> Slot:
        """`_pump` has counted it already."""
        return Slot(self, name, self._pools[name], class_name, self._clock())

    def _given_meanwhile(self, waiter: Waiter) -> Slot | None:
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            return self._given(future.result(), waiter.class_name)
        return None

    def _pump(self, pool: PoolSlots) -> None:
        now_s = self._clock()
        while pool.free > 0 and (waiter := pool.queue.pop(now_s)) is not None:
            if waiter.future.done():
                continue  # it has left, and has not been here since to say so
            pool.add(waiter.priority)
            pool.drain.moved(waiter.class_name, now_s)
            waiter.future.set_result(pool.name)

    def _make_place(self, places: Sequence[PoolSlots], class_name: str, user: str) -> None:
        """Refuses the last request of whoever has most of them waiting, or raises PoolFull for the one at hand."""
        for pool in places:
            hoarded = pool.queue.hoarded(class_name, user)
            if hoarded is not None:
                refused = self._full([pool], class_name)
                hoarded.leave()
                if not hoarded.future.done():
                    hoarded.future.set_exception(refused)
                return
        raise self._full(places, class_name)

    def _queue_max(self, pool: PoolSlots, class_name: str) -> int:
        """This process's part of it."""
        return -(-self._classes[class_name].queue_max // pool.processes)

    def _full(self, places: Sequence[PoolSlots], class_name: str) -> PoolFull:
        waiting = min(pool.queue.waiting(class_name) for pool in places)
        return PoolFull(
            f"All {_slots_of(places)} are taken, and {waiting} requests of class '{class_name}' wait already. "
            "Try again later.",
            param="model",
            retry_after_s=self._retry_s(places, class_name),
        )

    def _timeout(self, places: Sequence[PoolSlots], class_name: str, queue_s: float) -> QueueTimeout:
        return QueueTimeout(
            f"None of the {_slots_of(places)} came free within {queue_s:g} s, as long as class '{class_name}' waits. "
            "Try again later.",
            param="model",
            retry_after_s=self._retry_s(places, class_name),
        )

    def _retry_s(self, places: Sequence[PoolSlots], class_name: str) -> float:
        """When somebody who came now would have its turn, where that is soonest."""
        now_s, priority = self._clock(), self._classes[class_name].priority
        return min(
            pool.drain.wait_s(
                class_name,
                pool.queue.waiting(class_name),
                sum(waiting for other, waiting in pool.queue.by_priority() if other <= priority),
                pool.usable,
                pool.queue.longest_s(class_name, now_s),
                now_s,
            )
            for pool in places
        )


def _slots_of(places: Sequence[PoolSlots]) -> str:
    pools = ", ".join(f"'{pool.name}'" for pool in places)
    return f"slots of pool{'s' if len(places) > 1 else ''} {pools}"
