"""One budget over many gateway processes: limits hold exactly, a dead process counts no more."""

from __future__ import annotations

import asyncio
import sys

from fakes.budget_world import budgets, held, let_time_pass, refused, reserve, scope, second_of
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.admission.account import Ticket
from gateway.admission.exchange import SLOTS_S
from gateway.domain.errors import LimitExceeded


async def test_three_processes_share_one_limit_exactly(redis_url: str) -> None:
    async with budgets(redis_url, 3) as processes:
        calls = [reserve(processes[number % 3], [scope(rpm=10)], 0) for number in range(30)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, Ticket) for result in results) == 10
        assert sum(isinstance(result, LimitExceeded) for result in results) == 20


async def test_more_requests_at_once_than_redis_connections_are_all_decided_by_redis(redis_url: str) -> None:
    async with budgets(redis_url) as [budget]:
        results = await asyncio.gather(*(reserve(budget, [scope(rpm=10**6)], 0) for _ in range(300)))
        assert {type(second_of(result)) for result in results} == {int}


WORKER = """
import asyncio, sys
from redis.asyncio import Redis
from gateway.admission.budget import Budget
from gateway.admission.limits import Scope
from gateway.admission.link import RedisLink
from gateway.domain.errors import LimitExceeded
from gateway.domain.outcome import Ending, Outcome
from gateway.domain.request import Limits

async def one(budget, redis):
    try:
        ticket = await budget.admit(budget.account([Scope("key:a", Limits(in_flight=5))]), 0)
    except LimitExceeded:
        return
    await redis.rpush("upstream", await redis.incr("active"))
    await asyncio.sleep(1.0)
    await redis.decr("active")
    ticket.settle(Outcome(Ending.COMPLETED, 200, None))

async def main():
    redis = Redis.from_url(sys.argv[1])
    link = RedisLink(Redis.from_url(sys.argv[1], socket_timeout=20), timeout_s=20)
    budget = Budget(link, on_outage="closed")
    await redis.rpush("ready", 1)
    await redis.blpop(["go"], timeout=30)
    await asyncio.gather(*(one(budget, redis) for _ in range(50)))
    await budget.aclose()
    await link.aclose()
    await redis.aclose()

asyncio.run(main())
"""


async def test_a_burst_over_four_processes_never_has_more_upstream_than_the_limit(
    redis_url: str, redis_client: Redis
) -> None:
    command = [sys.executable, "-c", WORKER, redis_url]
    workers = [await asyncio.create_subprocess_exec(*command) for _ in range(4)]
    try:
        await eventually(lambda: at_least(redis_client, "ready", 4), "four workers are up", within_s=60)
        await redis_client.rpush("go", 1, 1, 1, 1)
        async with asyncio.timeout(60):
            assert [await worker.wait() for worker in workers] == [0, 0, 0, 0]
    finally:
        for worker in workers:
            if worker.returncode is None:
                worker.kill()
                await worker.wait()
    upstream = [int(active) for active in await redis_client.lrange("upstream", 0, -1)]
    assert len(upstream) >= 5
    assert max(upstream) <= 5
    assert await held(redis_client) == 0


async def at_least(redis: Redis, key: str, count: int) -> bool:
    return int(await redis.llen(key)) >= count


HOLDER = """
import asyncio, sys
from redis.asyncio import Redis
from gateway.admission.budget import Budget
from gateway.admission.limits import Scope
from gateway.admission.link import RedisLink
from gateway.domain.request import Limits

async def main():
    link = RedisLink(Redis.from_url(sys.argv[1], socket_timeout=20), timeout_s=20)
    budget = Budget(link, on_outage="closed")
    budget.start()
    account = budget.account([Scope("key:a", Limits(in_flight=3))])
    running = [await budget.admit(account, 0) for _ in range(3)]
    print("holds", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_slots_of_a_killed_process_lapse_by_themselves(redis_url: str, redis_client: Redis) -> None:
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLDER, redis_url, stdout=asyncio.subprocess.PIPE
    )
    assert holder.stdout is not None
    try:
        assert await holder.stdout.readline() == b"holds\n"
    finally:
        holder.kill()
        await holder.wait()
    async with budgets(redis_url) as [budget]:
        await refused(budget, [scope(slots=3)])
        await let_time_pass(redis_client, int(SLOTS_S), budget)
        await reserve(budget, [scope(slots=3)], 0)
        assert await held(redis_client) == 1


async def test_gateways_know_how_many_they_are(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url, 3) as [first, second, third]:
        for budget in (first, second, third, first, second):
            await budget.renew()
        assert (first.processes, second.processes, third.processes) == (3, 3, 3)
        await third.aclose()
        await first.renew()
        assert first.processes == 2
        assert 0 < await redis_client.ttl("{poolgate}:gateways") <= 31


async def test_a_dead_gateway_is_no_longer_counted(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url, 2) as [first, second]:
        await second.renew()
        await redis_client.zincrby("{poolgate}:gateways", -1000 * SLOTS_S, second.process_id)
        await first.renew()
        assert first.processes == 1
