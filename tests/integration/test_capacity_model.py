"""Any order of asking, ending, telling and dying: never more at a pool than it has slots, and none left unused."""

from __future__ import annotations

import asyncio
from typing import cast

from fakes.redis_process import RedisProcess
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.admission.capacity import Capacity
from gateway.admission.link import RedisLink
from gateway.admission.slots import PoolSlots, Slot, Slots
from gateway.config.schema import ClassSection

CLASSES = {"interactive": ClassSection(priority=0, queue_max=1000), "batch": ClassSection(priority=10, queue_max=1000)}
KEY = "{poolgate}:slots:chat"
ROUNDS = 6  # of telling, after which everybody must have what is due to it


class Process:
    """A gateway process that tells Redis only when the test says so."""

    def __init__(self, url: str, bound: int) -> None:
        self.link = RedisLink(Redis.from_url(url, socket_timeout=20.0, retry=None), timeout_s=20.0)
        self.slots = Slots({"chat": bound}, CLASSES, lambda pool: 1)
        self.capacity = Capacity(self.link, self.slots)
        self.tasks: list[asyncio.Task[Slot]] = []

    @property
    def pool(self) -> PoolSlots:
        return next(self.slots.pools())

    async def ask(self, class_name: str) -> None:
        async def slot() -> Slot:
            return self.slots.take(["chat"], class_name) or await self.slots.wait(["chat"], class_name, "user:a", 1)

        self.tasks.append(asyncio.create_task(slot()))
        await asyncio.sleep(0)

    def end_one(self) -> None:
        running = next((task for task in self.tasks if task.done()), None)
        if running is not None:
            self.tasks.remove(running)
            running.result().release()

    def leave_one(self) -> None:
        waiting = next((task for task in reversed(self.tasks) if not task.done()), None)
        if waiting is not None:
            self.tasks.remove(waiting)
            waiting.cancel()

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.link.aclose()


class World:
    def __init__(self, client: Redis, url: str, bound: int) -> None:
        self.client = client
        self.url = url
        self.bound = bound
        self.processes = [Process(url, bound) for _ in range(3)]

    def check(self) -> None:
        assert sum(process.pool.held for process in self.processes) <= self.bound

    async def step(self, what: str, number: int, count: int) -> None:
        process = self.processes[number]
        for _ in range(count):
            match what:
                case "interactive" | "batch":
                    await process.ask(what)
                case "end":
                    process.end_one()
                case "leave":
                    process.leave_one()
                    await asyncio.sleep(0)
                case "tell":
                    await process.capacity.exchange()
                case "ask meanwhile":  # what is asked for between the call and its reply finds what was granted before
                    call = asyncio.create_task(process.capacity.exchange())
                    await asyncio.sleep(0)
                    for _ in range(3):
                        await process.ask("batch")
                    await call
                case _:
                    await self.kill(number)
            await asyncio.sleep(0)
            self.check()

    async def kill(self, number: int) -> None:
        """The engine sees its connections close; Redis forgets it when its time is over, which is now."""
        dead = self.processes[number]
        await dead.close()
        self.processes[number] = Process(self.url, self.bound)
        await self.client.hdel(KEY, dead.capacity._process)

    async def settle(self) -> None:
        for _ in range(ROUNDS):
            for process in self.processes:
                await process.capacity.exchange()
                await asyncio.sleep(0)
                self.check()


steps = st.tuples(
    st.sampled_from(
        ["interactive", "batch", "batch", "end", "end", "leave", "tell", "tell", "tell", "ask meanwhile", "kill"]
    ),
    st.integers(0, 2),
    st.integers(1, 6),
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    bound=4,
    plan=[
        *[("batch", 0, 2), ("tell", 0, 1), ("end", 0, 2), ("batch", 1, 4), ("tell", 1, 1)],
        *[("ask meanwhile", 0, 1), ("tell", 1, 1)],
    ],
)
@given(bound=st.integers(1, 12), plan=st.lists(steps, max_size=40))
def test_never_more_than_the_slots_and_none_unused(
    redis_process: RedisProcess, bound: int, plan: list[tuple[str, int, int]]
) -> None:
    async def run() -> None:
        async with Redis.from_url(redis_process.url) as client:
            await client.flushall()
            world = World(cast(Redis, client), redis_process.url, bound)
            try:
                for step in plan:
                    await world.step(*step)
                await world.settle()
                wanted = sum(len(process.tasks) for process in world.processes)
                assert sum(process.pool.held for process in world.processes) == min(bound, wanted)
            finally:
                for process in world.processes:
                    await process.close()

    asyncio.run(run())
