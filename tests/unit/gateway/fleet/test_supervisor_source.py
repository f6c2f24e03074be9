"""SupervisorSource over a Redis that is a dictionary: broken documents are ignored, outages are the registry's."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
import redis.asyncio as redis_asyncio
from fakes.story import replica
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from gateway.domain.replica import HOSTS_KEY, FleetDocument, fleet_key
from gateway.fleet.sources.base import SourceUnavailable
from gateway.fleet.sources.supervisor import LAST_WORD_S, SupervisorSource


class Store:
    """The two commands that the source uses."""

    def __init__(self, hosts: list[bytes], documents: dict[str, bytes], failure: Exception | None = None) -> None:
        self.hosts, self.documents, self.failure = hosts, documents, failure

    async def zrange(self, key: str, start: int, end: int) -> list[bytes]:
        assert (key, start, end) == (HOSTS_KEY, 0, -1)
        if self.failure:
            raise self.failure
        return self.hosts

    async def mget(self, keys: list[str]) -> list[bytes | None]:
        return [self.documents.get(key) for key in keys]


def source(store: Store) -> SupervisorSource:
    return SupervisorSource(cast(redis_asyncio.Redis, store))


def document(host: str, *ids: str) -> bytes:
    return FleetDocument(host, "rev", 1.0, tuple(replica(id_) for id_ in ids)).to_json()


async def test_the_replicas_of_all_hosts_are_read() -> None:
    store = Store(
        [b"h1", b"h2"], {fleet_key("h1"): document("h1", "a/0@h1"), fleet_key("h2"): document("h2", "a/0@h2")}
    )
    assert [r.id for r in await source(store).replicas()] == ["a/0@h1", "a/0@h2"]


async def test_replicas_of_a_host_whose_document_is_missing_stay_known_for_a_while(caplog) -> None:
    now = 100.0
    both = {fleet_key("h1"): document("h1", "a/0@h1"), fleet_key("h2"): document("h2", "a/0@h2")}
    store = Store([b"h1", b"h2"], both)
    watched = SupervisorSource(cast(redis_asyncio.Redis, store), clock=lambda: now)
    await watched.replicas()
    store.hosts, store.documents = [b"h2"], {fleet_key("h2"): document("h2", "a/0@h2")}  # emptied, or full
    now += LAST_WORD_S
    for _ in range(2):
        assert sorted(r.id for r in await watched.replicas()) == ["a/0@h1", "a/0@h2"]
    assert [r.message for r in caplog.records if "h1" in r.message] == [
        "host h1 publishes nothing; its last word stands for 600 s"
    ]
    now += 1
    assert [r.id for r in await watched.replicas()] == ["a/0@h2"]


async def test_a_new_document_takes_the_place_of_the_last_one() -> None:
    store = Store([b"h1"], {fleet_key("h1"): document("h1", "a/0@h1", "a/1@h1")})
    watched = source(store)
    await watched.replicas()
    store.documents[fleet_key("h1")] = document("h1", "a/1@h1")
    assert [r.id for r in await watched.replicas()] == ["a/1@h1"]


def altered(**facts: Any) -> bytes:
    whole = json.loads(document("h1", "a/0@h1"))
    whole["replicas"][0].update(facts)
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    "broken",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"replicas": 5}',
        b"\xff",
        altered(state="flying"),
        altered(from_the_future=1),
    ],
)
async def test_a_broken_document_is_ignored_and_told_once(broken: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = Store([b"h1", b"h2"], {fleet_key("h1"): broken, fleet_key("h2"): document("h2", "a/0@h2")})
    reader = source(store)
    for _ in range(3):
        assert [r.id for r in await reader.replicas()] == ["a/0@h2"]
    assert len(caplog.records) == 1 and "h1" in caplog.text
    store.documents[fleet_key("h1")] = document("h1", "a/0@h1")
    assert len(await reader.replicas()) == 2
    store.documents[fleet_key("h1")] = broken
    await reader.replicas()
    assert sum("ignored" in message for message in caplog.messages) == 2


async def test_a_host_name_that_is_no_text_hides_no_other_host() -> None:
    store = Store([b"\xff\xfe", b"h2"], {fleet_key("h2"): document("h2", "a/0@h2")})
    assert [r.id for r in await source(store).replicas()] == ["a/0@h2"]


@pytest.mark.parametrize("failure", [RedisConnectionError("x"), RedisTimeoutError("x"), OSError("x"), TimeoutError()])
async def test_an_outage_says_that_the_source_cannot_tell_now(failure: Exception) -> None:
    with pytest.raises(SourceUnavailable, match=type(failure).__name__):
        await source(Store([], {}, failure)).replicas()
