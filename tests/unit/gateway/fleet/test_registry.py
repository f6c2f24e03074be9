"""Registry: a silent source keeps its last word, a replica that refuses connections is left out for a moment."""

from __future__ import annotations

import asyncio
import logging

import pytest
from fakes.story import FixedSource, replica

from gateway.domain.replica import ReplicaState
from gateway.fleet.registry import ASIDE_S, Registry
from gateway.fleet.sources.base import SourceUnavailable

A, B = replica("a/0@h"), replica("b/0@h")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def ids(registry: Registry) -> set[str]:
    return {r.id for r in registry.snapshot().all()}


def ready(registry: Registry) -> set[str]:
    return {r.id for r in registry.snapshot().all() if r.is_ready()}


async def test_all_sources_are_one_fleet() -> None:
    registry = Registry([FixedSource([A], "one"), FixedSource([B], "two")])
    assert ids(registry) == set()
    await registry.refresh()
    assert ids(registry) == {A.id, B.id}


async def test_a_replica_that_its_source_forgets_is_gone() -> None:
    source = FixedSource([A, B])
    registry = Registry([source])
    await registry.refresh()
    source.answer = [B]
    await registry.refresh()
    assert ids(registry) == {B.id}


@pytest.mark.parametrize("failure", [SourceUnavailable("Redis: TimeoutError"), RuntimeError("a defect")])
async def test_a_silent_source_keeps_its_last_word_and_is_logged_once_each_way(
    failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    silent, other = FixedSource([A], "silent"), FixedSource([B], "other")
    registry = Registry([silent, other])
    await registry.refresh()
    silent.answer, other.answer = failure, []
    for _ in range(3):
        await registry.refresh()
    assert ids(registry) == {A.id}
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "silent" in caplog.text and str(failure) in caplog.text
    silent.answer = [A]
    for _ in range(3):
        await registry.refresh()
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"]


async def test_only_a_defect_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    await Registry([FixedSource(SourceUnavailable("away"))]).refresh()
    assert caplog.records[-1].exc_info is None
    await Registry([FixedSource(RuntimeError("a defect"))]).refresh()
    assert "Traceback" in caplog.text


async def test_polling_goes_on_after_a_source_failed_unexpectedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.fleet.registry.POLL_S", 0)
    polled_again = asyncio.Event()

    class Broken(FixedSource):
        async def replicas(self):  # type: ignore[no-untyped-def]
            if isinstance(self.answer, Exception):
                failure, self.answer = self.answer, [A]
                raise failure
            polled_again.set()
            return self.answer

    registry = Registry([Broken(KeyError("x"))])
    polling = asyncio.create_task(registry.run())
    try:
        await asyncio.wait_for(polled_again.wait(), 10)
    finally:
        polling.cancel()
    assert not polling.done() or polling.cancelled()


async def test_a_replica_that_is_set_aside_is_left_out_for_a_moment_and_says_why() -> None:
    clock = Clock()
    registry = Registry([FixedSource([A, B])], clock=clock)
    await registry.refresh()
    registry.set_aside(A, "its engine died")
    assert ready(registry) == {B.id}
    (aside,) = registry.snapshot().replicas("a")
    assert (aside.state, aside.detail) == (ReplicaState.BACKOFF, "its engine died")
    clock.now += ASIDE_S - 0.1
    await registry.refresh()
    assert ready(registry) == {B.id}
    clock.now += 0.2
    await registry.refresh()
    assert ready(registry) == {A.id, B.id}


async def test_a_replica_that_fails_again_is_left_out_from_then_on() -> None:
    clock = Clock()
    registry = Registry([FixedSource([A, B])], clock=clock)
    await registry.refresh()
    registry.set_aside(A, "refused a connection")
    clock.now += ASIDE_S - 0.1
    registry.set_aside(A, "its engine died")
    clock.now += ASIDE_S - 0.1
    await registry.refresh()
    assert ready(registry) == {B.id}
    assert registry.snapshot().replicas("a")[0].detail == "its engine died"


async def test_the_log_says_why_a_replica_is_left_out_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    registry = Registry([FixedSource([A, B])], clock=clock)
    await registry.refresh()
    for _ in range(2):
        for _ in range(5):
            registry.set_aside(A, "refused a connection", "Its certificate is not trusted.")
        clock.now += ASIDE_S + 0.1
        await registry.refresh()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all(A.id in line and A.url in line and "Its certificate is not trusted." in line for line in told)


async def test_requests_in_flight_are_counted_and_never_fall_below_zero() -> None:
    registry = Registry([FixedSource([A, B])])
    registry.begin(A)
    registry.begin(A)
    registry.begin(B)
    snapshot = registry.snapshot()
    assert (snapshot.in_flight(A.id), snapshot.in_flight(B.id), registry.in_flight_by_pool()) == (
        2,
        1,
        {A.pool: 2, B.pool: 1},
    )
    for _ in range(3):
        registry.end(A)
    assert (snapshot.in_flight(A.id), registry.in_flight_by_pool()) == (0, {B.pool: 1})
    registry.begin(A)
    assert registry.snapshot().in_flight(A.id) == 1


async def test_requests_in_flight_are_told_by_pool_whatever_a_pool_is_called() -> None:
    registry = Registry([])
    for id_ in ("a/0@h", "a/1@h", "org/model/0@h", "org/model/0@h"):
        registry.begin(replica(id_))
    assert registry.in_flight_by_pool() == {"a": 2, "org/model": 2}
