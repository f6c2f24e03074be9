"""Real clusters and sentinels. A shared cluster, emptied before each test, and groups that a test may break."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from fakes.redis_group import Cluster, Watched, running_cluster, running_sentinels
from redis.asyncio import Redis

from gateway.config.redis_client import client_for
from gateway.config.redis_master import SLOT


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Cluster]:
    """Nothing of it may be stopped."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder, running_cluster(Path(folder), SLOT) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    for server in shared_cluster.masters:
        server.call("FLUSHALL")
    return shared_cluster


@pytest.fixture
def own_cluster() -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder, running_cluster(Path(folder), SLOT) as cluster:
        yield cluster


@pytest.fixture
def watched() -> Iterator[Watched]:
    with tempfile.TemporaryDirectory(prefix="pg-") as folder, running_sentinels(Path(folder)) as group:
        yield group


@pytest.fixture
async def cluster_client(cluster: Cluster) -> AsyncIterator[Redis]:
    client = client_for(cluster.url, 10.0)
    yield client
    await client.aclose()
