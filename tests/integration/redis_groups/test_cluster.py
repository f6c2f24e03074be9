"""A real Redis Cluster: limits, keys and fleet documents in it, and what happens when its masters change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from fakes.budget_world import budgets, held, limit_keys, refused, reserve, scope, second_of, settle, used
from fakes.line import write_config
from fakes.outages import told_of, uses_redis
from fakes.redis_group import Cluster, Server
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.admission.account import Ticket
from gateway.admission.key_record import digest_of
from gateway.admission.key_ring import KeyRing
from gateway.admission.link import RedisLink
from gateway.cli import main
from gateway.config.load import LoadedConfig
from gateway.config.redis_client import client_for
from gateway.config.redis_master import SLOT
from gateway.domain.errors import LimitExceeded
from gateway.fleet.sources.supervisor import SupervisorSource
from workers.publish import Publisher

SCOPES = [
    scope("key:a", rpm=20, tpm=10_000, slots=50),
    scope("user:u", rpm=12, tpm=10_000, slots=50),
    scope("route:chat", rpm=30, tpm=10_000),
]


# --- in a cluster that is well ----------------------------------------------------------------------------------------
async def test_limits_of_key_user_and_route_are_exact_over_two_gateways(cluster: Cluster) -> None:
    async with budgets(cluster.url, 2, started=True) as pair:
        calls = [reserve(pair[number % 2], SCOPES, 1) for number in range(40)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        tickets = [result for result in results if isinstance(result, Ticket)]
        assert len(tickets) == 12
        assert all(isinstance(result, LimitExceeded) for result in results if result not in tickets)
        assert all(second_of(ticket) is not None for ticket in tickets)
        for ticket in tickets:
            ticket.settle(used(1))


async def test_all_keys_lie_where_one_script_may_take_them(cluster: Cluster, cluster_client: Redis) -> None:
    async with budgets(cluster.url) as [budget]:
        ticket = await reserve(budget, SCOPES, 5)
        assert len(await limit_keys(cluster_client)) == 8
        assert await held(cluster_client) == 1
        assert cluster.keeper.call("DBSIZE") == 10  # and the set of gateways, and what this one sent last
        await settle(budget, ticket, 3)
        assert [server.call("DBSIZE") for server in cluster.others] == [0, 0]


async def test_scripts_flushed_on_the_node_are_loaded_again(cluster: Cluster) -> None:
    async with budgets(cluster.url) as [budget]:
        for _ in range(3):
            cluster.keeper.call("SCRIPT", "FLUSH")
            (await reserve(budget, SCOPES)).settle(used(0))
            await budget.flush()


async def test_a_key_that_the_command_made_is_found_listed_and_revoked(
    cluster: Cluster, tmp_path: Path, config_for: Callable[..., LoadedConfig]
) -> None:
    pools, routes = {"p": {"urls": ["http://127.0.0.1:9"]}}, {"chat": {"targets": [{"pool": "p"}]}}
    config = write_config(tmp_path, redis={"url": cluster.url}, pools=pools, routes=routes)

    async def run(*words: str) -> str:
        arguments = ["keys", *words, "--config", str(config)]
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments)
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    clear = await run("create", "ci", "--expires", "1d")
    assert "ci" in await run("list")
    loaded = config_for(cluster.url)
    link = RedisLink.open(loaded)
    try:
        ring = KeyRing(loaded.config, link)
        record, _ = await ring.find(digest_of(clear.encode()))
        assert record is not None and record.name == "ci"
        await run("revoke", "ci")
        record, now_s = await ring.find(digest_of(clear.encode()))
        assert record is not None and not record.is_live(now_s)
    finally:
        await link.aclose()


async def test_what_supervisors_publish_is_read(cluster_client: Redis) -> None:
    source = SupervisorSource(cluster_client)
    publishers = [Publisher(cluster_client, host, "rev", tuple) for host in ("h1", "h2", "h{3}")]
    assert all([await publisher.flush() for publisher in publishers])
    assert sorted(document.host for document in await source.documents()) == ["h1", "h2", "h{3}"]
    await publishers[0].withdraw()
    assert len(await source.documents()) == 2


async def test_any_node_of_the_url_will_do(cluster: Cluster) -> None:
    for server in [*cluster.masters, cluster.replica]:
        client = client_for(f"redis+cluster://127.0.0.1:1,{server.address}", 10.0)
        assert await client.set("{poolgate}:x", "1", ex=60)
        await client.aclose()


# --- when its masters change ------------------------------------------------------------------------------------------
async def test_a_slot_that_moved_to_another_master_is_followed(own_cluster: Cluster) -> None:
    async with budgets(own_cluster.url, timeout_s=5.0) as [budget]:
        ticket = await reserve(budget, SCOPES, 1)
        move_slot(own_cluster.keeper, own_cluster.others[0])
        await eventually(lambda: uses_redis(budget), "the new master is used", 20)
        ticket.settle(used(1))
        await budget.flush()
        for _ in range(11):
            await reserve(budget, SCOPES, 1)
        assert (await refused(budget, SCOPES, 1)).kind == "requests_per_min"
        assert own_cluster.keeper.call("DBSIZE") == 0


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_replica_takes_over_and_the_outage_is_told_once(
    own_cluster: Cluster, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with budgets(own_cluster.url, timeout_s=0.3, on_outage="share") as [budget]:
        await eventually(lambda: uses_redis(budget), "the first master is used")
        if how == "killed":
            await asyncio.to_thread(own_cluster.keeper.stop)
        else:
            own_cluster.keeper.freeze()
        results = await asyncio.gather(*(reserve(budget, [scope("key:b", rpm=10**6)]) for _ in range(20)))
        assert all(isinstance(result, Ticket) for result in results)
        await eventually(lambda: uses_redis(budget), "the replica is used", 40)
        assert own_cluster.replica.is_master()
        if how == "frozen":
            own_cluster.keeper.thaw()
            for _ in range(20):
                assert await uses_redis(budget)
        assert told_of(caplog) == ["away", "back"]


async def test_a_failover_that_is_ordered_costs_no_caller_an_error(own_cluster: Cluster) -> None:
    async with budgets(own_cluster.url, timeout_s=5.0, on_outage="share") as [budget]:
        results: list[Ticket] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                results.append(await reserve(budget, [scope("key:b", rpm=10**6)]))
                await asyncio.sleep(0.01)

        loads = [asyncio.create_task(load()) for _ in range(4)]
        await eventually(lambda: bool(results), "the load has begun")
        own_cluster.replica.call("CLUSTER", "FAILOVER")
        await eventually(own_cluster.replica.is_master, "the replica is promoted", 30)
        await eventually(lambda: uses_redis(budget), "it is used", 20)
        stop.set()
        await asyncio.gather(*loads)


def move_slot(source: Server, target: Server) -> None:
    """As `redis-cli --cluster reshard` does it."""
    source_id, target_id = (server.call("CLUSTER", "MYID").decode() for server in (source, target))
    target.call("CLUSTER", "SETSLOT", SLOT, "IMPORTING", source_id)
    source.call("CLUSTER", "SETSLOT", SLOT, "MIGRATING", target_id)
    while keys := source.call("CLUSTER", "GETKEYSINSLOT", SLOT, 100):
        source.call("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)
    for server in (target, source):
        server.call("CLUSTER", "SETSLOT", SLOT, "NODE", target_id)
