"""`poolgate serve` on a cluster and behind sentinels: it serves, counts, knows run-time keys, also after a failover."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from fakes.engine import running_fake_engine
from fakes.line import BATCH_KEY, KEY, Gateway, running_gateway, sha256
from fakes.redis_group import Cluster, Watched
from fakes.scrape import read
from fakes.waits import eventually

KEYS = {
    "test": {"sha256": sha256(KEY), "user": "u", "limits": {"requests_per_min": 5}},
    "other": {"sha256": sha256(BATCH_KEY), "user": "u"},
}
USERS = {"u": {"limits": {"requests_per_min": 100_000, "tokens_per_min": 100_000, "in_flight": 10}}}


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
async def test_a_gateway_serves_counts_and_goes_on_after_its_master_died(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    group: Cluster | Watched = request.getfixturevalue("own_cluster" if kind == "cluster" else "watched")
    first = group.keeper if isinstance(group, Cluster) else group.master
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            group.url,
            gateway={"processes": 2},
            keys=KEYS,
            users=USERS,
            pools={"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}},
        ) as gateway,
    ):
        made = await run(gateway, "keys", "create", "ci", "--user", "u")
        replies = await asyncio.gather(*(gateway.chat() for _ in range(12)))
        assert sorted(reply.status_code for reply in replies) == [200] * 5 + [429] * 7
        assert (await gateway.chat(made)).status_code == 200
        assert (await gateway.chat("sk-pg-00000000-" + "x" * 43)).status_code == 401

        await asyncio.to_thread(first.stop)
        assert [(await gateway.chat(BATCH_KEY)).status_code for _ in range(8)] == [200] * 8

        async def is_away() -> bool:
            return read((await gateway.client.get(gateway.url + "/metrics")).text).sum("redis_away") > 0

        async def is_back() -> bool:
            assert (await gateway.chat(BATCH_KEY)).status_code == 200
            return not await is_away()

        async def makes_a_key() -> str:
            try:
                return await run(gateway, "keys", "create", "later", "--rpm", "3")
            except AssertionError:
                return ""

        await eventually(is_away, "the outage is seen", 30)
        later = await eventually(makes_a_key, "another master keeps keys", 40)
        await eventually(is_back, "both processes use it", 40)
        replies = await asyncio.gather(*(gateway.chat(later) for _ in range(8)))
        assert sorted(reply.status_code for reply in replies) == [200] * 3 + [429] * 5
        assert (await gateway.chat(made)).status_code == 200
        text = gateway.log.read_text()
        assert text.count("Redis is away") == text.count("Redis is back") <= 2


async def run(gateway: Gateway, *words: str) -> str:
    """A poolgate command with the gateway's config."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", *words, "--config", str(gateway.config)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0, err.decode()
    return out.decode().strip()
