"""A Redis that answers, but with errors: full, or with commands forbidden. No caller gets an error for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fakes.engine import running_fake_engine
from fakes.line import KEY, Gateway, running_gateway, sha256
from fakes.redis_process import RedisProcess
from fakes.scrape import read
from fakes.waits import eventually
from redis.asyncio import Redis

Change = Callable[[Redis], Awaitable[object]]
FAULTS: dict[str, tuple[Change, Change]] = {
    "full": (lambda redis: redis.config_set("maxmemory", "1"), lambda redis: redis.config_set("maxmemory", "0")),
    "scripts forbidden": (
        lambda redis: redis.execute_command("ACL", "SETUSER", "default", "-evalsha", "-eval"),
        lambda redis: redis.execute_command("ACL", "SETUSER", "default", "+@all"),
    ),
    "writes forbidden": (
        lambda redis: redis.execute_command("ACL", "SETUSER", "default", "-@write"),
        lambda redis: redis.execute_command("ACL", "SETUSER", "default", "+@all"),
    ),
}


async def is_away(gateway: Gateway) -> bool:
    return read((await gateway.client.get(gateway.url + "/metrics")).text).sum("redis_away") == 1


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_redis_that_refuses_what_we_ask_costs_no_caller_an_error_and_is_used_again_when_it_is_well(
    tmp_path: Path, own_redis: RedisProcess, fault: str
) -> None:
    breaks, mends = FAULTS[fault]
    limits = {"requests_per_min": 1000, "tokens_per_min": 10**6, "in_flight": 50}
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            own_redis.url,
            keys={"test": {"sha256": sha256(KEY), "limits": limits}},
            pools={"tiny": {"urls": [engine.url], "served_name": "tiny", "max_in_flight": 4}},
        ) as gateway,
        Redis.from_url(own_redis.url) as redis,
    ):
        assert (await gateway.chat()).status_code == 200
        await breaks(redis)

        async def until(state: bool) -> bool:
            replies = await asyncio.gather(*(gateway.chat() for _ in range(4)))
            assert {reply.status_code for reply in replies} == {200}
            return await is_away(gateway) is state

        await eventually(lambda: until(True), "the outage is noticed", 30)
        await mends(redis)
        await eventually(lambda: until(False), "Redis is used again", 30)
        log = gateway.log.read_text()
        assert (log.count("Redis is away"), log.count("Redis is back")) == (1, 1)
        assert "Traceback" not in log
