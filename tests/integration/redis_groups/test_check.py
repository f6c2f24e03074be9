"""`poolgate check` on sentinels and clusters: what is wrong with redis.url, the way out, and no password of it."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fakes.budget_world import budgets, reserve, scope, second_of
from fakes.line import write_config
from fakes.ports import free_port
from fakes.redis_group import Cluster, Watched, running_cluster, running_sentinels

from gateway.config.redis_client import client_for
from gateway.config.redis_master import SLOT
from gateway.fleet.sources.supervisor import SupervisorSource
from workers.check_cli import check
from workers.publish import Publisher

CANARY = "canary-5e0b7d"


async def findings(folder: Path, url: str) -> list[dict[str, Any]]:
    config = write_config(
        folder,
        gateway={"port": free_port(), "state_dir": "state"},
        redis={"url": url},
        pools={"p": {"urls": ["http://127.0.0.1:9"]}},
        routes={"chat": {"targets": [{"pool": "p"}]}},
    )
    result = await asyncio.to_thread(CliRunner().invoke, check, ["--json", "--config", str(config)])
    assert CANARY not in result.output
    return [finding for finding in json.loads(result.stdout)["findings"] if finding["key"] == "redis.url"]


async def the_finding(folder: Path, url: str) -> dict[str, Any]:
    (finding,) = await findings(folder, url)
    assert finding["severity"] == "error"
    return finding


async def test_a_cluster_that_is_well_is_no_finding(tmp_path: Path, cluster: Cluster) -> None:
    assert await findings(tmp_path, cluster.url) == []


async def test_one_node_of_a_cluster_is_no_server(tmp_path: Path, cluster: Cluster) -> None:
    finding = await the_finding(tmp_path, f"redis://{cluster.others[0].address}")
    assert "is a node of a Redis Cluster" in finding["fact"]
    assert "redis+cluster://" in finding["way_out"]


async def test_a_server_is_no_cluster_and_no_sentinel(tmp_path: Path, cluster: Cluster, watched: Watched) -> None:
    finding = await the_finding(tmp_path, f"redis+cluster://{watched.master.address}")
    assert "is no Redis Cluster" in finding["fact"] and "redis://" in finding["way_out"]
    finding = await the_finding(tmp_path, f"redis+sentinel://{watched.master.address}/main")
    assert "is no sentinel" in finding["fact"] and "redis+sentinel://" in finding["way_out"]


async def test_sentinels_that_are_well_and_a_service_that_they_do_not_know(tmp_path: Path, watched: Watched) -> None:
    assert await findings(tmp_path, watched.url) == []
    finding = await the_finding(tmp_path, watched.url + "x")
    assert 'know no service "poolgate-testx"' in finding["fact"] and "sentinel monitor" in finding["way_out"]


@pytest.mark.parametrize("url", ["redis+cluster://:{}@127.0.0.1:1,127.0.0.1:2", "redis+sentinel://:{}@127.0.0.1:1/s"])
async def test_nobody_there(tmp_path: Path, url: str) -> None:
    finding = await the_finding(tmp_path, url.format(CANARY))
    assert "127.0.0.1:1" in finding["fact"] and "cannot be reached (Connection refused)" in finding["fact"]


async def test_a_frozen_master_is_told_within_the_deadline(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder, running_sentinels(Path(folder)) as group:
        for server in group.servers:
            server.freeze()
        assert "cannot be reached" in (await the_finding(tmp_path, group.url))["fact"]


async def test_passwords_that_are_missing_or_wrong(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="pg-") as folder,
        running_sentinels(Path(folder), password=CANARY, sentinel_password=f"{CANARY}-s") as group,
    ):
        data, own = f"://:{CANARY}@", f"?sentinel_password={CANARY}-s"
        good = group.url.replace("://", data) + own
        assert await findings(tmp_path, good) == []
        finding = await the_finding(tmp_path, group.url.replace("://", data))
        assert "sentinel_password" in finding["way_out"]
        finding = await the_finding(tmp_path, group.url + own)
        assert "password" in finding["fact"] and "USER:PASSWORD@" in finding["way_out"]
        finding = await the_finding(tmp_path, good.replace(data, f"://:{CANARY}-wrong@"))
        assert "refuses the user or password" in finding["fact"]


async def test_a_cluster_with_a_password(tmp_path: Path) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="pg-") as folder,
        running_cluster(Path(folder), SLOT, password=CANARY) as group,
    ):
        assert await findings(tmp_path, group.url.replace("://", f"://:{CANARY}@")) == []
        finding = await the_finding(tmp_path, group.url)
        assert "password" in finding["fact"] and "redis+cluster://USER:PASSWORD@HOST" in finding["way_out"]


async def test_a_user_with_the_rights_that_the_docs_name_will_do(tmp_path: Path, own_cluster: Cluster) -> None:
    rights = [
        "~{poolgate}:*",
        "+@read",
        "+@write",
        "+@scripting",
        "+ping",
        "+hello",
        "+time",
        "+cluster|slots",
        "+cluster|nodes",
    ]
    for server in [*own_cluster.masters, own_cluster.replica]:
        server.call("ACL", "SETUSER", "few", "on", f">{CANARY}", *rights)
    url = own_cluster.url.replace("://", f"://few:{CANARY}@")
    assert await findings(tmp_path, url) == []
    async with budgets(url) as [budget]:
        ticket = await reserve(budget, [scope("key:a", rpm=5, tpm=100, slots=2)], 5)
        assert second_of(ticket) is not None
    client = client_for(url, 10.0)
    publisher = Publisher(client, "h", "rev", tuple)
    assert await publisher.flush()
    assert [document.host for document in await SupervisorSource(client).documents()] == ["h"]
    await publisher.withdraw()
    await client.aclose()
