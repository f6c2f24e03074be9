"""A real master with a replica behind sentinels: after any failover the other one is used, without a restart."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

import pytest
from fakes.budget_world import budgets, refused, reserve, scope
from fakes.outages import told_of, uses_redis
from fakes.redis_group import Watched, running_sentinels, watch_anew
from fakes.waits import eventually

from gateway.admission.account import Ticket
from gateway.config.redis_client import client_for
from gateway.config.redis_master import MasterUnknown


async def test_an_ordered_failover_costs_no_caller_an_error_and_counts_go_on(watched: Watched) -> None:
    async with budgets(watched.url, 2, timeout_s=5.0, on_outage="share", started=True) as [budget, other]:
        for _ in range(5):
            await reserve(budget, [scope("key:a", rpm=10)])
        await budget.flush()
        results: list[Ticket] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                results.append(await reserve(budget, [scope("key:b", rpm=10**6)]))
                await asyncio.sleep(0.01)

        loads = [asyncio.create_task(load()) for _ in range(4)]
        await eventually(lambda: bool(results), "the load has begun")
        old = watched.master
        await asyncio.to_thread(watched.fail_over)
        await eventually(lambda: not old.is_master(), "the old master is a replica", 30)
        await eventually(lambda: uses_redis(budget), "the new master is used", 20)
        await eventually(lambda: uses_redis(other), "by the other gateway too", 20)
        stop.set()
        await asyncio.gather(*loads)
        for number in range(5):
            await reserve((budget, other)[number % 2], [scope("key:a", rpm=10)])
        assert (await refused(other, [scope("key:a", rpm=10)])).kind == "requests_per_min"


async def test_a_master_that_dies_with_the_first_sentinel_is_replaced(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    """As when their host loses its power: neither refuses a connection, both are silent."""
    caplog.set_level(logging.INFO)
    async with budgets(watched.url, timeout_s=0.3, on_outage="share") as [budget]:
        await eventually(lambda: uses_redis(budget), "the first master is used")
        old = watched.master
        watched.sentinels[0].freeze()
        # of two sentinels one cannot be elected: the one that is left is told that it is alone
        watched.sentinels[1].call("SENTINEL", "RESET", "*")
        await eventually(lambda: watched.knows_replica(watched.sentinels[1]), "it knows the replica again", 30)
        old.freeze()
        results = await asyncio.gather(*(reserve(budget, [scope("key:b", rpm=10**6)]) for _ in range(20)))
        assert all(isinstance(result, Ticket) for result in results)
        await asyncio.to_thread(watched.has_other_master, old)
        await eventually(lambda: uses_redis(budget), "the new master is used", 20)
        assert told_of(caplog) == ["away", "back"]


async def test_a_master_that_became_a_replica_is_left_though_it_keeps_its_connections(
    watched: Watched, tmp_path: Path
) -> None:
    async with budgets(watched.url, timeout_s=5.0) as [budget]:
        await reserve(budget, [scope("key:a", rpm=10)])
        old, new = watched.servers
        for sentinel in watched.sentinels:
            sentinel.stop()
        new.call("REPLICAOF", "NO", "ONE")
        old.call("REPLICAOF", "127.0.0.1", new.port)
        assert not await uses_redis(budget)  # READONLY
        watch_anew(watched, new)
        await eventually(lambda: uses_redis(budget), "the new master is used", 20)


async def test_while_nobody_tells_the_master_the_policy_decides_and_later_it_is_back(watched: Watched) -> None:
    async with (
        budgets(watched.url, timeout_s=0.5, on_outage="share") as [sharing],
        budgets(watched.url, timeout_s=0.5, on_outage="closed") as [closed],
    ):
        for budget in (sharing, closed):
            await eventually(lambda budget=budget: uses_redis(budget), "Redis is used")
        for server in watched.servers:
            server.freeze()
        await reserve(sharing, [scope("key:a", rpm=10)])
        assert not await uses_redis(closed)
        for server in watched.servers:
            server.thaw()
        for budget in (sharing, closed):
            await eventually(lambda budget=budget: uses_redis(budget), "Redis is used again", 60)


async def test_sentinels_and_data_servers_with_passwords_of_their_own() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="pg-") as folder,
        running_sentinels(Path(folder), password="data pw", sentinel_password="sent/pw") as group,
    ):
        right = f"{group.url.replace('://', '://:data%20pw@')}/3?sentinel_password=sent%2Fpw"
        client = client_for(right, 10.0)
        assert await client.set("{poolgate}:x", "1")
        await client.aclose()
        assert b"db3:keys=1" in group.master.call("INFO", "keyspace")
        client = client_for(group.url, 10.0)
        with pytest.raises(MasterUnknown):
            await client.ping()
        await client.aclose()
