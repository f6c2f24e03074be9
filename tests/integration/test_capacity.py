"""A pool's slots over many gateway processes: never more than there are, and where they are wanted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random

import pytest
from fakes.redis_process import RedisProcess
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.admission.capacity import Capacity
from gateway.admission.link import RedisLink
from gateway.admission.slots import PoolSlots, Slot, Slots
from gateway.config.schema import ClassSection
from gateway.config.tasks import end_task

CLASSES = {
    "interactive": ClassSection(priority=0, queue_s=60, queue_max=1000),
    "batch": ClassSection(priority=10, queue_s=60, queue_max=1000),
}


class Process:
    """The slots of one gateway process, with a connection of its own."""

    def __init__(self, url: str, bound: int, timeout_s: float, expected: int) -> None:
        self.link = RedisLink(Redis.from_url(url, socket_timeout=20.0, retry=None), timeout_s=timeout_s)
        self.slots = Slots({"chat": bound}, CLASSES, lambda pool: 1)
        self.capacity = Capacity(self.link, self.slots, expected_processes=expected)
        self.capacity.start()

    @property
    def pool(self) -> PoolSlots:
        return next(self.slots.pools())

    async def slot(self, class_name: str = "batch") -> Slot:
        taken = self.slots.take(["chat"], class_name)
        return taken or await self.slots.wait(["chat"], class_name, "user:a", 1)

    async def kill(self) -> None:
        """As SIGKILL would: it gives nothing back and says nothing more."""
        if self.capacity._task is not None:
            await end_task(self.capacity._task)
        self.capacity._task = None
        self.capacity._used_at.clear()


@contextlib.asynccontextmanager
async def processes(
    url: str, count: int, bound: int, *, timeout_s: float = 10.0, expected: int = 1
) -> AsyncIterator[list[Process]]:
    made = [Process(url, bound, timeout_s, expected) for _ in range(count)]
    try:
        yield made
    finally:
        for process in made:
            await process.capacity.aclose()
            await process.link.aclose()


async def test_a_process_alone_has_the_whole_pool_after_one_call(redis_url: str) -> None:
    async with processes(redis_url, 1, 64) as [alone]:
        slots = [await alone.slot() for _ in range(64)]
        assert alone.pool.granted == 64 and alone.slots.take(["chat"], "batch") is None
        for slot in slots:
            slot.release()


async def test_four_processes_never_run_more_than_there_are_slots_and_all_of_them_are_used(
    redis_url: str, redis_client: Redis
) -> None:
    """Each request is counted in Redis itself, the moment it has its slot."""
    highest = finished = 0
    async with processes(redis_url, 4, 8) as made:

        async def one(process: Process, rng: Random) -> None:
            nonlocal highest, finished
            slot = await process.slot(rng.choice(["interactive", "batch"]))
            highest = max(highest, await redis_client.incr("running"))
            await asyncio.sleep(rng.uniform(0.001, 0.02))
            await redis_client.decr("running")
            slot.release()
            finished += 1

        rng = Random(4)
        await asyncio.wait_for(asyncio.gather(*(one(made[rng.randrange(4)], rng) for _ in range(800))), 60)
    assert highest == 8
    assert finished == 800


async def test_slots_go_where_they_are_wanted(redis_url: str) -> None:
    async with processes(redis_url, 2, 16) as [first, second]:
        slots = [await first.slot() for _ in range(12)]
        assert len([await second.slot() for _ in range(4)]) == 4
        waiting = [asyncio.create_task(second.slot()) for _ in range(8)]
        for slot in slots:  # the first process has less and less to do
            slot.release()
        await asyncio.wait_for(asyncio.gather(*waiting), 20)
        assert second.pool.held == 12


async def test_a_process_that_has_all_of_them_gives_its_share_to_one_that_comes_later(redis_url: str) -> None:
    async with processes(redis_url, 2, 4) as [first, second]:
        running = [await first.slot() for _ in range(4)]
        queued = [asyncio.create_task(first.slot()) for _ in range(4)]
        late = [asyncio.create_task(second.slot()) for _ in range(4)]
        await eventually(lambda: first.pool.granted == 2, "the first to hear of the second")
        for slot in running[:2]:
            slot.release()
        await asyncio.wait_for(asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED), 20)
        await eventually(lambda: second.pool.held == 2, "the second to get half")
        assert sum(task.done() for task in queued) == 0
        for task in [*queued, *late]:
            task.cancel()


async def test_a_higher_class_of_one_process_goes_before_a_lower_one_of_another(redis_url: str) -> None:
    async with processes(redis_url, 2, 4) as [bulk, desk]:
        running = [await bulk.slot("batch") for _ in range(4)]
        queued = [asyncio.create_task(bulk.slot("batch")) for _ in range(20)]
        urgent = [asyncio.create_task(desk.slot("interactive")) for _ in range(4)]
        await eventually(lambda: bulk.pool.granted == 0, "the batch process to hear that all is wanted elsewhere")
        for slot in running:
            slot.release()
        await asyncio.wait_for(asyncio.gather(*urgent), 20)
        assert not any(task.done() for task in queued)
        for task in queued:
            task.cancel()


async def test_processes_take_turns_where_there_is_less_than_one_slot_for_each(redis_url: str) -> None:
    async with processes(redis_url, 3, 1) as made:
        served = [0, 0, 0]

        async def caller(number: int) -> None:
            while min(served) < 3:
                slot = await made[number].slot()
                served[number] += 1
                await asyncio.sleep(0.01)
                slot.release()

        await asyncio.wait_for(asyncio.gather(*(caller(number) for number in (0, 1, 1, 2, 2, 2))), 30)


async def test_an_aged_request_of_one_process_is_not_forgotten_for_a_higher_class_of_another(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CLASSES, "batch", ClassSection(priority=10, queue_s=4.0, queue_max=1000))
    async with processes(redis_url, 2, 4) as [desk, bulk]:
        is_over = False

        async def caller() -> None:
            while not is_over:
                slot = await desk.slot("interactive")
                await asyncio.sleep(0.01)
                slot.release()

        callers = [asyncio.create_task(caller()) for _ in range(10)]
        await eventually(lambda: desk.pool.held == 4, "all slots to be taken")
        try:
            (await bulk.slot("batch")).release()  # else QueueTimeout
        finally:
            is_over = True
            await asyncio.gather(*callers)


async def test_one_call_that_fails_gives_nobody_more_than_it_had(own_redis: RedisProcess) -> None:
    async with processes(own_redis.url, 2, 8, timeout_s=0.1, expected=2) as [first, second]:
        taken = [await first.slot() for _ in range(8)]
        waiting = asyncio.create_task(second.slot())
        await eventually(lambda: first.pool.granted == 7, "the first to hear of the second")
        own_redis.freeze()
        await second.capacity.exchange()
        assert not second.link.is_away and second.pool.granted == 0 and not waiting.done()
        own_redis.thaw()
        taken[0].release()
        assert (await asyncio.wait_for(waiting, 20)).pool == "chat"


async def test_slots_of_a_killed_process_come_back(redis_url: str) -> None:
    async with processes(redis_url, 2, 4) as [dead, alive]:
        for _ in range(4):
            await dead.slot()
        waiting = [asyncio.create_task(alive.slot()) for _ in range(4)]
        await eventually(lambda: dead.pool.granted == 2, "the first to hear of the second")
        assert not any(task.done() for task in waiting)
        await dead.kill()
        await asyncio.wait_for(asyncio.gather(*waiting), 20)


async def test_a_process_that_ends_gives_all_back_at_once(redis_url: str) -> None:
    async with processes(redis_url, 1, 4) as [alive]:
        async with processes(redis_url, 1, 4) as [ending]:
            for _ in range(4):
                await ending.slot()
        assert len([await alive.slot() for _ in range(4)]) == 4


async def test_a_pool_that_nobody_uses_is_let_go(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.admission.capacity.QUIET_S", 0.0)
    async with processes(redis_url, 1, 4) as [process]:
        (await process.slot()).release()

        async def is_gone() -> bool:
            return not await redis_client.exists("{poolgate}:slots:chat")

        await eventually(is_gone, "the pool to be let go")
        assert process.pool.granted == 0 and process.capacity._pause_s() is None
        assert (await process.slot()).pool == "chat"


async def test_without_redis_each_process_goes_on_with_its_share_and_takes_part_again_later(
    own_redis: RedisProcess,
) -> None:
    async with processes(own_redis.url, 2, 8, timeout_s=0.2, expected=2) as [first, second]:
        for process in (first, second):
            (await process.slot()).release()
        own_redis.stop()
        slots = [await asyncio.wait_for(process.slot(), 10) for process in (first, second) for _ in range(4)]
        await eventually(lambda: [p.pool.granted for p in (first, second)] == [4, 4], "half of the slots each")
        for process in (first, second):
            assert process.slots.take(["chat"], "batch") is None
        for slot in slots:
            slot.release()
        own_redis.start()
        held = [await asyncio.wait_for(first.slot(), 20) for _ in range(5)]
        assert len(held) == 5


async def test_scripts_flushed_and_keys_lost_are_nobodys_error(redis_url: str, redis_client: Redis) -> None:
    async with processes(redis_url, 1, 4) as [process]:
        slots = [await process.slot() for _ in range(2)]
        await redis_client.script_flush()
        await redis_client.flushall()
        slots += [await process.slot() for _ in range(2)]
        waiting = asyncio.create_task(process.slot())
        await process.capacity.exchange()
        assert process.pool.granted == 4 and not waiting.done()
        slots[0].release()
        assert (await asyncio.wait_for(waiting, 10)).pool == "chat"
