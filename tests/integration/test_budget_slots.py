"""Slots in flight in a real Redis: renewed while a request runs, free when it ends, however it ends."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from fakes.budget_world import (
    budgets,
    held,
    let_time_pass,
    refused,
    reserve,
    scope,
    settle,
    slow_wire,
    tokens_in_window,
    used,
)
from fakes.redis_process import RedisProcess
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.admission.budget import Budget


async def test_a_running_request_keeps_its_slot_by_renewal(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        reservation = await reserve(budget, [scope(slots=1), scope("user:u", slots=1)], 0)
        for _ in range(4):
            await let_time_pass(redis_client, 20, budget)
            await budget.renew()
        await refused(budget, [scope(slots=1)])
        await refused(budget, [scope("user:u", slots=1)])
        await settle(budget, reservation, 0)
        await reserve(budget, [scope(slots=1)], 0)


async def test_a_slot_settled_while_its_renewal_is_on_the_way_comes_free_soon(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with budgets(redis_url) as [budget]:
        reservation = await reserve(budget, [scope(slots=1), scope("user:u", slots=1)], 0)
        call, is_settled = budget._link.call, asyncio.Event()

        async def overtaken(what: Any, *, timeout_s: float | None = None) -> Any:
            await is_settled.wait()
            return await call(what, timeout_s=timeout_s)

        with monkeypatch.context() as patch:
            patch.setattr(budget._link, "call", overtaken)
            renewing = asyncio.create_task(budget.renew())
            await asyncio.sleep(0)
        reservation.settle(used(0))
        is_settled.set()
        await renewing
        assert (await held(redis_client), await held(redis_client, "user:u")) == (1, 1)  # as it was sent
        await eventually(lambda: is_free(redis_client), "the slots are free")


async def is_free(redis: Redis) -> bool:
    return await held(redis) == 0 and await held(redis, "user:u") == 0


async def test_cancelled_at_any_moment_nothing_stays_held_or_charged(
    redis_process: RedisProcess, redis_client: Redis
) -> None:
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    spent = 0

    async def one(budget: Budget) -> None:
        nonlocal spent
        ticket = await reserve(budget, [scope(tpm=10**9, slots=10**5), scope("user:u", slots=10**5)], 100)
        spent += 7
        ticket.settle(used(7))

    async with (
        slow_wire(redis_process.socket, redis_process.directory, 0.02) as url,
        budgets(url) as [budget],
    ):
        for _ in range(20):
            calls = [asyncio.create_task(one(budget)) for _ in range(50)]
            for call in calls:
                asyncio.get_running_loop().call_later(rng.uniform(0, 0.25), call.cancel)
            await asyncio.gather(*calls, return_exceptions=True)
        await budget.aclose()
        assert await held(redis_client) == 0, f"seed {seed}"
        assert await held(redis_client, "user:u") == 0
        assert await tokens_in_window(redis_client) == spent
