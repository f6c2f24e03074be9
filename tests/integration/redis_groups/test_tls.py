"""rediss+sentinel:// and rediss+cluster://: every connection is encrypted, and no certificate of others is believed."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.certificates import Authority
from fakes.redis_group import Cluster, Watched, running_cluster, running_sentinels
from redis.exceptions import ConnectionError

from gateway.config.redis_client import client_for
from gateway.config.redis_master import SLOT


@pytest.fixture(params=["cluster", "sentinel"])
def group(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster | Watched]:
    authority = Authority(tmp_path)
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        if request.param == "cluster":
            with running_cluster(Path(folder), SLOT, authority=authority) as cluster:
                yield cluster
        else:
            with running_sentinels(Path(folder), authority=authority) as watched:
                yield watched


async def test_all_of_it_is_encrypted(group: Cluster | Watched, tmp_path: Path) -> None:
    url = group.url.replace("redis+", "rediss+")
    client = client_for(f"{url}?ssl_ca_certs={tmp_path / 'ca.pem'}", 10.0)
    assert await client.set("{poolgate}:x", "1")
    await client.aclose()
    for other in (url, group.url):  # the system's authorities, and no TLS
        client = client_for(other, 2.0)
        with pytest.raises(ConnectionError):
            await client.ping()
        await client.aclose()
