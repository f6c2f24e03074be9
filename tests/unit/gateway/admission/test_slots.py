"""Slots of pools in one process: taking, waiting, giving back, being refused, leaving."""

from __future__ import annotations

import asyncio

import pytest

from gateway.admission.slots import HOLD_S, PoolSlots, Slot, Slots
from gateway.config.schema import ClassSection
from gateway.domain.errors import PoolFull, QueueTimeout

CLASSES = {
    "interactive": ClassSection(priority=0, queue_s=30, queue_max=4),
    "batch": ClassSection(priority=10, queue_s=600, queue_max=2),
    "hasty": ClassSection(priority=5, queue_s=0.02, queue_max=4),
    "impatient": ClassSection(priority=5, queue_s=30, queue_max=0),
}


class World:
    """Slots with all of their pools granted whole, unless a test says otherwise; two slots a replica."""

    def __init__(self, *pools: str, bound: int = 2, replicas: int = 1) -> None:
        self.now_s = 100.0
        self.replicas = replicas
        self.kicks = 0
        names = pools or ("chat",)
        self.slots = Slots(dict.fromkeys(names, bound), CLASSES, lambda pool: self.replicas, clock=lambda: self.now_s)
        self.slots.kick = self.kick
        for pool in self.slots.pools():
            self.grant(pool, pool.capacity)

    def kick(self) -> None:
        self.kicks += 1

    def grant(self, pool: PoolSlots, slots: int, processes: int = 1, *, is_short: bool = False) -> None:
        self.slots.granted(pool, slots, processes, is_short=is_short)

    @property
    def pool(self) -> PoolSlots:
        return next(self.slots.pools())

    def take(self, class_name: str = "interactive", *pools: str) -> Slot:
        slot = self.slots.take(pools or ("chat",), class_name)
        assert slot is not None
        return slot

    async def waiting(self, class_name: str = "interactive", *pools: str, user: str = "user:a") -> asyncio.Task[Slot]:
        """One that stands in the queue now."""
        task = asyncio.create_task(self.slots.wait(pools or ("chat",), class_name, user, 1000))
        await asyncio.sleep(0)
        return task


async def test_a_pool_gives_as_many_slots_as_it_has_and_each_back_once() -> None:
    world = World()
    first, second = world.take(), world.take()
    assert world.slots.take(["chat"], "interactive") is None
    first.release()
    first.release()
    third = world.take()
    assert world.slots.take(["chat"], "interactive") is None
    second.release()
    third.release()
    assert world.pool.held == 0


async def test_a_pool_without_a_bound_always_has_one() -> None:
    world = World()
    for _ in range(1000):
        assert world.take("batch", "cloud").pool == "cloud"


async def test_the_next_pool_is_taken_when_the_first_is_full() -> None:
    world = World("a", "b", bound=1)
    assert [world.take("batch", "a", "b").pool for _ in range(2)] == ["a", "b"]


async def test_who_waits_goes_when_a_slot_comes_back_those_of_higher_classes_first() -> None:
    world = World()
    taken = [world.take(), world.take()]
    batch = await world.waiting("batch")
    interactive = await world.waiting("interactive")
    taken[0].release()
    slot = await interactive
    assert not batch.done() and slot.pool == "chat"
    slot.release()
    (await batch).release()
    taken[1].release()
    assert world.pool.held == 0 and not world.pool.queue


async def test_nobody_overtakes_those_who_wait() -> None:
    world = World()
    taken = [world.take(), world.take()]
    first = await world.waiting()
    world.grant(world.pool, 1)  # another process has taken the other one
    taken[0].release()
    taken[1].release()
    assert world.slots.take(["chat"], "interactive") is None
    assert (await first).pool == "chat"


async def test_a_full_queue_refuses_with_the_time_to_come_back_and_keeps_nothing() -> None:
    world = World()
    taken = [world.take(), world.take()]
    world.now_s += 2.0
    taken.pop().release()  # so long does a slot last
    taken.append(world.take())
    waiting = [await world.waiting("batch") for _ in range(2)]
    with pytest.raises(PoolFull, match="2 requests of class 'batch' wait already") as caught:
        await world.slots.wait(["chat"], "batch", "user:a", 1)
    assert caught.value.retry_after_s == pytest.approx(3 * 2.0 / 2)  # two are ahead, two slots of 2 s each
    assert len(world.pool.queue) == 2
    interactive = await world.waiting("interactive")  # another class has places of its own
    for task in [*waiting, interactive]:
        task.cancel()


async def test_a_class_that_may_not_wait_is_refused_at_once_and_only_when_the_pool_is_really_full() -> None:
    world = World()
    world.grant(world.pool, 0)  # nothing is known yet: there may be room
    task = await world.waiting("impatient")
    assert not task.done() and world.kicks == 1
    world.grant(world.pool, 2)
    slots = [await task, world.take("impatient")]
    with pytest.raises(PoolFull):
        await world.slots.wait(["chat"], "impatient", "user:a", 1)
    for slot in slots:
        slot.release()


async def test_who_came_while_nothing_was_known_is_refused_when_others_have_it_all() -> None:
    world = World()
    world.grant(world.pool, 0)
    tasks = [await world.waiting("impatient") for _ in range(2)]
    world.grant(world.pool, 0, 2, is_short=True)
    for task in tasks:
        with pytest.raises(PoolFull):
            await task
    assert not world.pool.queue


async def test_waiting_too_long_is_refused_and_leaves_the_queue() -> None:
    world = World()
    taken = [world.take(), world.take()]
    with pytest.raises(QueueTimeout, match="as long as class 'hasty' waits") as caught:
        await world.slots.wait(["chat"], "hasty", "user:a", 1)
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    assert not world.pool.queue
    for slot in taken:
        slot.release()
    assert world.pool.held == 0


async def test_who_leaves_while_waiting_leaves_the_queue_at_once() -> None:
    world = World()
    taken = [world.take(), world.take()]
    first, second = await world.waiting(), await world.waiting()
    first.cancel()
    await asyncio.sleep(0)
    assert len(world.pool.queue) == 1
    taken[0].release()
    assert (await second).pool == "chat"


async def test_who_leaves_in_the_moment_of_its_turn_loses_no_slot() -> None:
    world = World()
    taken = [world.take(), world.take()]
    first, second = await world.waiting(), await world.waiting()
    taken[0].release()  # it is the first one's now
    first.cancel()
    assert (await second).pool == "chat"  # which has passed it on
    assert world.pool.held == 2


async def test_who_left_before_it_could_say_so_is_passed_over() -> None:
    world = World()
    taken = [world.take(), world.take()]
    first, second = await world.waiting(), await world.waiting()
    first.cancel()  # it has not run since
    taken[0].release()
    assert (await second).pool == "chat"
    with pytest.raises(asyncio.CancelledError):
        await first
    assert world.pool.held == 2


async def test_one_that_may_go_to_two_pools_takes_the_slot_that_comes_first() -> None:
    world = World("a", "b", bound=1)
    taken = {name: world.take("batch", name) for name in ("a", "b")}
    task = await world.waiting("batch", "a", "b")
    taken["b"].release()
    slot = await task
    assert slot.pool == "b"
    assert all(not pool.queue for pool in world.slots.pools())


async def test_a_replica_that_goes_takes_its_slots_along_and_brings_them_back() -> None:
    world = World(replicas=2)
    taken = [world.take() for _ in range(4)]
    world.replicas = 1
    taken[0].release()
    taken[1].release()
    assert world.slots.take(["chat"], "interactive") is None
    task = await world.waiting()
    world.replicas = 2
    world.grant(world.pool, 4)
    assert (await task).pool == "chat"


async def test_slots_that_are_another_processs_now_are_given_back_not_handed_on() -> None:
    world = World()
    taken = [world.take(), world.take()]
    task = await world.waiting()
    world.grant(world.pool, 0, 2, is_short=True)
    kicks = world.kicks
    taken[0].release()
    await asyncio.sleep(0)
    assert not task.done() and world.kicks == kicks + 1
    task.cancel()


async def test_processes_share_the_places_in_the_queue() -> None:
    world = World()
    world.grant(world.pool, 2, 2)
    taken = [world.take(), world.take()]
    waiting = [await world.waiting() for _ in range(2)]  # of four, by two processes
    with pytest.raises(PoolFull):
        await world.slots.wait(["chat"], "interactive", "user:a", 1)
    for task in waiting:
        task.cancel()
    for slot in taken:
        slot.release()


async def test_a_request_that_goes_on_at_another_pool_takes_a_slot_there_and_leaves_its_own() -> None:
    world = World("a", "b", bound=1)
    slot = world.take("batch", "a")
    assert await slot.move("a") and await slot.move("b")
    assert [pool.held for pool in world.slots.pools()] == [0, 1]
    assert await slot.move("cloud")
    slot.release()
    assert [pool.held for pool in world.slots.pools()] == [0, 0]


async def test_a_request_cannot_go_on_at_a_pool_that_is_full() -> None:
    world = World("a", "b", bound=1)
    slot, other = world.take("batch", "a"), world.take("batch", "b")
    assert not await slot.move("b") and slot.pool == "a"
    other.release()
    task = await world.waiting("batch", "a", "b")
    assert (await task).pool == "b"
    slot.release()
    assert [pool.held for pool in world.slots.pools()] == [0, 1]


async def test_a_queue_that_one_user_has_filled_is_open_to_others() -> None:
    world = World()
    taken = [world.take(), world.take()]
    hoard = [await world.waiting(user="user:hoard") for _ in range(4)]
    modest = [await world.waiting(user="user:modest") for _ in range(2)]
    for crowded_out in (hoard[3], hoard[2]):
        with pytest.raises(PoolFull, match="4 requests"):
            await crowded_out
    for user in ("user:hoard", "user:modest"):  # two each: nobody has to make room
        with pytest.raises(PoolFull):
            await world.slots.wait(["chat"], "interactive", user, 1)
    taken[0].release()
    taken[1].release()
    assert {task.done() for task in (hoard[0], modest[0])} == {False}  # they have not run since
    assert [(await task).pool for task in (hoard[0], modest[0])] == ["chat", "chat"]
    for task in (hoard[1], modest[1]):
        task.cancel()


async def test_a_process_that_stood_still_gives_no_slots_until_it_has_asked_again() -> None:
    world = World()
    world.now_s += HOLD_S  # others may have them by now
    assert world.slots.take(["chat"], "interactive") is None
    task = await world.waiting()
    assert not task.done() and world.kicks == 1
    world.grant(world.pool, 2)
    assert (await task).pool == "chat"


async def test_who_waits_for_a_pool_that_is_full_for_sure_makes_no_calls() -> None:
    world = World()
    taken = [world.take(), world.take()]
    tasks = [await world.waiting() for _ in range(3)]
    assert world.kicks == 0
    world.grant(world.pool, 1, 2, is_short=True)
    tasks.append(await world.waiting("batch"))
    assert world.kicks == 0
    for task in tasks:
        task.cancel()
    for slot in taken:
        slot.release()


async def test_a_request_that_goes_on_at_a_pool_that_nobody_has_asked_for_yet_asks() -> None:
    world = World("a", "b", bound=1)
    first, second = world.slots.pools()
    world.grant(second, 0)
    slot = world.take("batch", "a")
    moving = asyncio.create_task(slot.move("b"))
    await asyncio.sleep(0)
    assert world.kicks == 1 and slot.pool == "a"
    world.grant(second, 1)
    assert await moving and slot.pool == "b"
    assert (first.held, second.held) == (0, 1)


async def test_a_batch_request_that_comes_from_a_pool_without_a_bound_stays_one_of_batch() -> None:
    world = World()
    slot = world.take("batch", "cloud")
    assert await slot.move("chat")
    assert world.pool.asks(world.now_s) == [(10, 1)]
    slot.release()
