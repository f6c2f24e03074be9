"""When Redis counts as away, who may ask it meanwhile, and what is logged of it. `Redis` here is any awaitable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError

from gateway.admission.link import MAX_CONNECTIONS, PROBE_S, RedisLink
from gateway.domain.errors import StoreUnavailable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def link(clock: Clock) -> RedisLink:
    return RedisLink(cast(Redis, None), timeout_s=60.0, clock=clock)


async def answer(_: Redis) -> str:
    return "yes"


def fail_with(error: Exception) -> Callable[[Redis], Any]:
    async def fail(_: Redis) -> str:
        raise error

    return fail


async def make_away(link: RedisLink, clock: Clock) -> None:
    for _ in range(2):
        clock.now += 0.01
        with pytest.raises(StoreUnavailable):
            await link.call(fail_with(ConnectionError("refused")))
    assert link.is_away


@pytest.mark.parametrize("error", [ConnectionError("gone"), ResponseError("OOM"), OSError(2, "no socket")])
async def test_whatever_redis_raises_becomes_our_error(link: RedisLink, error: Exception) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        await link.call(fail_with(error))
    assert caught.value.retry_after_s is not None
    assert caught.value.__cause__ is error


async def test_silence_ends_at_the_deadline(link: RedisLink) -> None:
    with pytest.raises(StoreUnavailable):
        await link.call(lambda _: asyncio.Event().wait(), timeout_s=0.01)


async def test_many_failures_of_one_moment_are_no_outage(link: RedisLink, clock: Clock) -> None:
    gate = asyncio.Event()

    async def stalled(_: Redis) -> None:
        await gate.wait()
        clock.now += 0.01
        raise ConnectionError("stalled")

    calls = [asyncio.create_task(link.call(stalled)) for _ in range(10)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert not link.is_away


async def test_a_success_between_two_failures_is_no_outage(link: RedisLink, clock: Clock) -> None:
    for _ in range(5):
        clock.now += 1
        with pytest.raises(StoreUnavailable):
            await link.call(fail_with(ConnectionError("lost")))
        assert await link.call(answer) == "yes"
    assert not link.is_away


async def test_while_away_only_one_probe_per_half_second_asks(link: RedisLink, clock: Clock) -> None:
    await make_away(link, clock)
    asked = 0

    async def count(_: Redis) -> None:
        nonlocal asked
        asked += 1
        raise ConnectionError("still away")

    for _ in range(100):
        with pytest.raises(StoreUnavailable):
            await link.call(count)
    assert asked == 0
    for _ in range(3):
        clock.now += PROBE_S
        for _ in range(100):
            with pytest.raises(StoreUnavailable):
                await link.call(count)
    assert asked == 3


async def test_others_do_not_wait_for_a_probe(link: RedisLink, clock: Clock) -> None:
    await make_away(link, clock)
    clock.now += PROBE_S
    gate = asyncio.Event()
    probe = asyncio.create_task(link.call(lambda _: gate.wait()))
    await asyncio.sleep(0)
    with pytest.raises(StoreUnavailable):
        await link.call(answer)
    gate.set()
    await probe
    assert await link.call(answer) == "yes"


async def test_a_cancelled_probe_does_not_stop_the_next_one(link: RedisLink, clock: Clock) -> None:
    await make_away(link, clock)
    clock.now += PROBE_S
    probe = asyncio.create_task(link.call(lambda _: asyncio.Event().wait()))
    await asyncio.sleep(0)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    assert await link.call(answer) == "yes"


async def test_going_and_coming_back_are_logged_once_each(
    link: RedisLink, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        await make_away(link, clock)
        for _ in range(500):
            clock.now += 0.02
            with pytest.raises(StoreUnavailable):
                await link.call(fail_with(ConnectionError("refused")))
        clock.now += PROBE_S
        for _ in range(10):
            await link.call(answer)
    assert [record.message.partition(" (")[0].partition(" after")[0] for record in caplog.records] == [
        "Redis is away",
        "Redis is back",
    ]
    assert link.refused_calls > 400


async def test_calls_at_once_are_bounded(link: RedisLink) -> None:
    running = most = 0

    async def busy(_: Redis) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await asyncio.gather(*(link.call(busy) for _ in range(5 * MAX_CONNECTIONS)))
    assert most == MAX_CONNECTIONS
