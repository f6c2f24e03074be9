"""Redis frozen, killed, restarted, its scripts flushed: what callers get meanwhile, and that counting goes on after."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from fakes.budget_world import budgets, held, in_window, reserve, scope, second_of, tokens_in_window, used
from fakes.outages import uses_redis
from fakes.redis_process import RedisProcess
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.admission.account import Ticket
from gateway.admission.budget import Budget
from gateway.domain.errors import LimitExceeded, StoreUnavailable
from gateway.domain.request import NO_RATE

Policy = Literal["share", "open", "closed"]
HANGS_S = 30.0  # a decision that takes this long waits for Redis without a deadline


@contextlib.asynccontextmanager
async def frozen(server: RedisProcess) -> AsyncIterator[None]:
    server.freeze()
    try:
        yield
    finally:
        server.thaw()


async def decide(budget: Budget, count: int, **limits: int) -> list[Ticket | BaseException]:
    async with asyncio.timeout(HANGS_S):
        calls = [reserve(budget, [scope(**limits)], 1) for _ in range(count)]
        return await asyncio.gather(*calls, return_exceptions=True)


async def test_scripts_flushed_under_load_are_loaded_again(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url, timeout_s=20.0) as [budget]:
        for _ in range(5):
            results, _ = await asyncio.gather(decide(budget, 20, rpm=100), redis_client.script_flush())
            assert all(isinstance(result, Ticket) for result in results)
        with pytest.raises(LimitExceeded):
            await reserve(budget, [scope(rpm=100)], 0)


async def test_a_restart_under_load_costs_no_caller_an_error_and_counting_goes_on(own_redis: RedisProcess) -> None:
    async with budgets(own_redis.url, timeout_s=5.0, on_outage="share") as [budget]:
        stop = asyncio.Event()
        results: list[Ticket | BaseException] = []

        async def load() -> None:
            while not stop.is_set():
                results.extend(await decide(budget, 1, rpm=10**6))
                await asyncio.sleep(0.01)

        loads = [asyncio.create_task(load()) for _ in range(5)]
        first = await reserve(budget, [scope("key:b", rpm=2)], 0)
        await eventually(lambda: any_by_redis(results), "the load has begun")
        await asyncio.to_thread(own_redis.stop)
        await eventually(lambda: no_redis(budget), "the outage is seen")
        await asyncio.to_thread(own_redis.start)
        await eventually(lambda: uses_redis(budget), "Redis is used again")
        stop.set()
        await asyncio.gather(*loads)
        assert [result for result in results if not isinstance(result, Ticket)] == []
        assert second_of(first) is not None
        assert {type(second_of(result)) for result in results if isinstance(result, Ticket)} == {int, type(None)}
        # the append-only file kept what was charged before the restart
        assert (await reserve(budget, [scope("key:b", rpm=2)], 0)).rate.remaining_requests == 0


async def any_by_redis(results: list[Ticket | BaseException]) -> bool:
    return any(isinstance(result, Ticket) and second_of(result) is not None for result in results)


async def no_redis(budget: Budget) -> bool:
    return not await uses_redis(budget)


@pytest.mark.parametrize("policy", ["share", "open", "closed"])
async def test_frozen_every_request_is_decided_by_the_policy_and_thawed_all_is_as_before(
    own_redis: RedisProcess, policy: Policy
) -> None:
    async with budgets(own_redis.url, timeout_s=0.5, on_outage=policy) as [budget]:
        assert await uses_redis(budget)
        async with frozen(own_redis):
            results = await decide(budget, 20, rpm=5)
            results += await decide(budget, 20, rpm=5)
        passed = [result for result in results if isinstance(result, Ticket)]
        if policy == "share":
            assert len(passed) == 5
            assert all(isinstance(result, Ticket | LimitExceeded) for result in results)
        elif policy == "open":
            assert len(passed) == 40
            assert {ticket.rate for ticket in passed} == {NO_RATE}
        else:
            assert all(isinstance(result, StoreUnavailable) and result.retry_after_s for result in results)
        await eventually(lambda: uses_redis(budget), "Redis is used again")


async def test_while_redis_is_away_a_gateway_uses_its_share_and_counts_what_it_admitted_before(
    own_redis: RedisProcess,
) -> None:
    async with budgets(own_redis.url, 3, timeout_s=0.5, on_outage="share") as [first, second, third]:
        for budget in (first, second, third, first, second):
            await budget.renew()
        await decide(first, 2, rpm=12, tpm=10**6)
        async with frozen(own_redis):
            passed = [
                sum(isinstance(result, Ticket) for result in await decide(budget, 10, rpm=12, tpm=10**6))
                for budget in (first, second, third)
            ]
        assert passed == [2, 4, 4]


async def test_while_redis_is_away_a_day_goes_on_from_what_was_known_of_it_and_redis_learns_of_it_afterwards(
    own_redis: RedisProcess,
) -> None:
    async with (
        budgets(own_redis.url, 2, timeout_s=0.5, on_outage="share") as [first, second],
        Redis.from_url(own_redis.url) as client,
    ):
        for budget in (first, second, first):
            await budget.renew()
        await reserve(first, [scope(day=100)], 40)
        mine = await reserve(second, [scope(day=100)], 10)
        async with frozen(own_redis):
            by_first = tickets(await decide(first, 60, day=100))
            by_second = tickets(await decide(second, 60, day=100))
            # the first knows of its own 40 and may use half; the second of both, and half of what the first left
            assert (len(by_first), len(by_second)) == (50 - 40, (100 - 40) // 2 - 10)
            for ticket in by_first:
                ticket.settle(used(2))
            mine.settle(used(0))
            assert len(tickets(await decide(second, 60, day=100))) == 10
        for budget in (first, second):
            await eventually(lambda budget=budget: uses_redis(budget), "Redis is used again")
            await budget.renew()
        # also what Redis took when it thawed, for requests that were decided without it by then, is given back
        assert await in_window(client, "tokens_per_day:key:a") == 40 + 2 * 10 + 20 + 10
        with pytest.raises(LimitExceeded):
            await reserve(first, [scope(day=100)], 11)
        assert second_of(await reserve(second, [scope(day=100)], 10)) is not None


def tickets(results: list[Ticket | BaseException]) -> list[Ticket]:
    return [result for result in results if isinstance(result, Ticket)]


async def test_a_frozen_redis_does_not_hold_slots_of_requests_that_ended_meanwhile(own_redis: RedisProcess) -> None:
    async with (
        budgets(own_redis.url, timeout_s=0.5, on_outage="share") as [budget],
        Redis.from_url(own_redis.url) as client,
    ):
        running = await reserve(budget, [scope(slots=1, tpm=100)], 100)
        async with frozen(own_redis):
            await decide(budget, 1, rpm=1)
            await decide(budget, 1, rpm=1)  # away by now
            running.settle(used(10))
            assert isinstance((await decide(budget, 1, slots=1))[0], Ticket)  # free in this process at once
        budget.start()
        await eventually(lambda: comes_down_to(client, slots=1, tokens=10), "Redis knows what ended meanwhile")


async def comes_down_to(client: Redis, slots: int, tokens: int) -> bool:
    return await held(client) == slots and await tokens_in_window(client) == tokens


async def test_slots_taken_while_redis_was_away_are_known_to_it_afterwards(own_redis: RedisProcess) -> None:
    async with (
        budgets(own_redis.url, 2, timeout_s=0.5, on_outage="share") as [first, second],
        Redis.from_url(own_redis.url) as client,
    ):
        await first.renew()
        async with frozen(own_redis):
            [running] = await decide(first, 1, slots=1)
            assert isinstance(running, Ticket)
        await eventually(lambda: uses_redis(first), "Redis is used again")
        await first.renew()
        with pytest.raises(LimitExceeded):
            await reserve(second, [scope(slots=1)], 0)
        running.settle(used(0))
        await eventually(lambda: comes_down_to(client, slots=0, tokens=0), "the slot is free")


async def test_an_outage_is_logged_once_and_so_is_its_end(
    own_redis: RedisProcess, caplog: pytest.LogCaptureFixture
) -> None:
    async with budgets(own_redis.url, timeout_s=2.0, on_outage="share") as [budget]:
        await uses_redis(budget)
        with caplog.at_level(logging.DEBUG):
            await asyncio.to_thread(own_redis.stop)
            for _ in range(20):
                await decide(budget, 50, rpm=10**6)
                await asyncio.sleep(0.05)
            assert [record.levelname for record in caplog.records if "gateway" in record.name] == ["WARNING"]
            await asyncio.to_thread(own_redis.start)
            await eventually(lambda: uses_redis(budget), "Redis is used again")
        messages = [record.message for record in caplog.records if "gateway" in record.name]
        assert len(messages) == 2
        assert messages[0].startswith("Redis is away")
        assert messages[1].startswith("Redis is back")


async def test_closing_while_redis_is_frozen_ends(own_redis: RedisProcess) -> None:
    async with budgets(own_redis.url, timeout_s=0.5, on_outage="share") as [budget]:
        running = await reserve(budget, [scope(slots=1)], 0)
        budget.start()
        async with frozen(own_redis), asyncio.timeout(HANGS_S):
            running.settle(used(0))
            await asyncio.sleep(0)
            await budget.aclose(deadline_s=0.1)
