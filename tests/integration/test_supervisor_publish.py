"""What the supervisor tells the gateways through a real Redis, and what it does when Redis is away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from fakes.worker_program import SupervisorUnderTest, is_alive, until, write_program
from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.config.load import LoadedConfig
from gateway.domain.replica import FLEET_TTL_S, HOSTS_KEY, FleetDocument, ReplicaState, fleet_key


def supervisor(tmp_path: Path, config_for: Callable[..., LoadedConfig], url: str, client: Redis, **program: str):
    loaded = config_for(
        url,
        workers={"vllm": str(write_program(tmp_path, **program)), "stop_s": 1.0},
        pools={"chat": {"model": "org/m", "scheduling_policy": "priority"}},
        routes={"chat": {"targets": [{"pool": "chat"}]}},
    )
    return loaded, SupervisorUnderTest(loaded, client)


async def document(client: Redis) -> FleetDocument | None:
    raw = await client.get(fleet_key("here"))
    return FleetDocument.from_json(raw) if raw else None


async def test_a_ready_worker_is_published_with_a_ttl_and_withdrawn_at_the_stop(
    tmp_path, config_for, redis_url, redis_client
):
    loaded, run = supervisor(tmp_path, config_for, redis_url, redis_client)

    async def is_published_ready() -> bool:
        published = await document(redis_client)
        return published is not None and published.replicas[0].is_ready()

    async with run:
        await until(is_published_ready)
        published = await document(redis_client)
        assert (published.host, published.revision) == ("here", loaded.revision)
        replica = published.replicas[0]
        assert (replica.id, replica.api_key, replica.has_priority) == ("chat/0@here", run.record.api_key, True)
        assert 0 < await redis_client.pttl(fleet_key("here")) <= FLEET_TTL_S * 1000
        seconds, _ = await redis_client.time()
        assert abs(await redis_client.zscore(HOSTS_KEY, "here") - seconds) < FLEET_TTL_S
        assert await redis_client.ttl(HOSTS_KEY) > 0
        await run.stop()
    assert await document(redis_client) is None
    assert await redis_client.zscore(HOSTS_KEY, "here") is None


async def test_draining_is_published_before_the_worker_is_told_to_end(tmp_path, config_for, redis_url, redis_client):
    _, run = supervisor(tmp_path, config_for, redis_url, redis_client)
    (tmp_path / "busy").touch()

    async def is_published_draining() -> bool:
        published = await document(redis_client)
        return published is not None and published.replicas[0].state is ReplicaState.DRAINING

    async with run:
        pid = (await run.is_in(ReplicaState.READY)).pid
        run.supervisor.request_stop()
        await until(is_published_draining)
        assert is_alive(pid)
        (tmp_path / "busy").unlink()
        await run.stop()


async def test_workers_outlive_redis_and_are_published_again_when_it_is_back(
    tmp_path, config_for, own_redis, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "workers.publish")
    client = Redis.from_url(own_redis.url, socket_timeout=1.0, socket_connect_timeout=1.0, retry=None)
    _, run = supervisor(tmp_path, config_for, own_redis.url, client)

    async def is_published() -> bool:
        try:
            return await document(client) is not None
        except RedisError:
            return False

    async with run:
        pid = (await run.is_in(ReplicaState.READY)).pid
        await until(is_published)
        own_redis.stop()
        await until(lambda: "redis cannot be reached" in caplog.text)
        assert not await run.supervisor._publisher.flush()
        assert run.record.is_ready() and is_alive(pid)
        own_redis.start()
        await until(is_published)
        await until(lambda: "redis is back" in caplog.text)
        assert caplog.text.count("redis cannot be reached") == 1
    await client.aclose()


async def test_a_stop_with_redis_frozen_still_ends(tmp_path, config_for, own_redis):
    client = Redis.from_url(own_redis.url, socket_timeout=0.2, socket_connect_timeout=0.2, retry=None)
    _, run = supervisor(tmp_path, config_for, own_redis.url, client)
    async with run:
        pid = (await run.is_in(ReplicaState.READY)).pid
        own_redis.freeze()
        await run.stop()
        assert not is_alive(pid)
    await client.aclose()
