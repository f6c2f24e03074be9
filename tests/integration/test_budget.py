"""Budgets in a real Redis: what passes, what is charged, what comes back, in one step over all limits."""

from __future__ import annotations

from typing import Any

import pytest
from fakes.budget_world import (
    aged,
    budgets,
    held,
    in_window,
    let_time_pass,
    limit_keys,
    refused,
    reserve,
    scope,
    second_of,
    settle,
    tokens_in_window,
    used,
)
from redis.asyncio import Redis
from redis.crc import key_slot

from gateway.domain.errors import StoreUnavailable
from gateway.domain.outcome import Ending, Outcome
from gateway.domain.request import RateState


# --- windows ----------------------------------------------------------------------------------------------------------
async def test_steady_light_traffic_is_never_limited_and_no_key_lives_for_ever(
    redis_url: str, redis_client: Redis
) -> None:
    async with budgets(redis_url) as [budget]:
        for _ in range(30):  # 5 tokens every 10 s for 5 minutes: 150 in all, at most 35 in a minute
            await settle(budget, await reserve(budget, [scope(rpm=10, tpm=100, slots=2)], 6), 5)
            for key in await redis_client.keys("*"):
                assert 0 < await redis_client.ttl(key) <= (3660 if b":process:" in key else 63), key
            await let_time_pass(redis_client, 10, budget)
        assert await tokens_in_window(redis_client) <= 40


async def test_what_was_used_counts_for_a_minute_and_a_refusal_tells_when_it_ends(
    redis_url: str, redis_client: Redis
) -> None:
    async with budgets(redis_url) as [budget]:
        await reserve(budget, [scope(tpm=100)], 30)
        await let_time_pass(redis_client, 20, budget)
        await reserve(budget, [scope(tpm=100)], 70)
        small, large = await refused(budget, [scope(tpm=100)], 30), await refused(budget, [scope(tpm=100)], 31)
        assert small.retry_after_s is not None
        assert large.retry_after_s is not None
        # the older 30 leave 20 s before the younger 70; a bucket counts until its last spending can be 60 s old
        assert 38 < small.retry_after_s <= 42
        assert 58 < large.retry_after_s <= 62
        await let_time_pass(redis_client, 42, budget)
        await reserve(budget, [scope(tpm=100)], 30)


async def test_the_minute_has_no_edge_to_bleed_over(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        await reserve(budget, [scope(rpm=1)], 0)
        await let_time_pass(redis_client, 62, budget)
        reservation = await reserve(budget, [scope(rpm=1)], 0)
        assert reservation.rate.remaining_requests == 0


async def test_a_late_refund_touches_only_its_own_second(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        early = await reserve(budget, [scope(tpm=100)], 60)
        await let_time_pass(redis_client, 62, budget)
        await reserve(budget, [scope(tpm=100)], 60)
        await settle(budget, aged(early, 62), 0)
        assert await tokens_in_window(redis_client) == 60
        assert (await refused(budget, [scope(tpm=100)], 50)).kind == "tokens_per_min"


async def test_a_refund_within_the_minute_takes_effect_at_once(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        early = await reserve(budget, [scope(tpm=100)], 60)
        await let_time_pass(redis_client, 30, budget)
        late = await reserve(budget, [scope(tpm=100)], 40)
        await settle(budget, aged(early, 30), 10)
        await reserve(budget, [scope(tpm=100)], 50)
        await settle(budget, late, 40)
        assert await tokens_in_window(redis_client) == 10 + 40 + 50


async def test_more_used_than_reserved_is_charged_too(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        await settle(budget, await reserve(budget, [scope(tpm=100)], 0), 30)
        await settle(budget, await reserve(budget, [scope(tpm=100)], 10), 120)
        assert await tokens_in_window(redis_client) == 150
        error = await refused(budget, [scope(tpm=100)], 1)
        assert error.rate.remaining_tokens == 0


async def test_settling_twice_gives_back_once(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        first = await reserve(budget, [scope(tpm=100, slots=2)], 50)
        await reserve(budget, [scope(tpm=100, slots=2)], 50)
        await settle(budget, first, 10)
        await settle(budget, first, 10)
        await settle(budget, first, 0)
        assert (await tokens_in_window(redis_client), await held(redis_client)) == (60, 1)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_request_that_was_refused_after_all_counts_for_nothing(
    redis_url: str, redis_client: Redis, is_late: bool
) -> None:
    limits = [scope(rpm=10, tpm=100, slots=2)]
    refusal = Outcome(Ending.REFUSED, 0, None, "queue_timeout")
    async with budgets(redis_url) as [budget]:
        stays = await reserve(budget, limits, 10)
        tickets = [await reserve(budget, limits, 10)]
        if is_late:  # the lease that it was spent from is over
            await budget.flush()
        for ticket in tickets:
            ticket.settle(refusal)
            ticket.settle(refusal)
        await budget.flush()
        assert await in_window(redis_client, "requests_per_min:key:a") == 1
        assert (await tokens_in_window(redis_client), await held(redis_client)) == (10, 1)
        stays.settle(Outcome(Ending.ENGINE_REFUSED, 400, None))  # an engine has looked at it
        await budget.flush()
        assert await in_window(redis_client, "requests_per_min:key:a") == 1


async def test_a_give_back_that_reaches_redis_twice_counts_once(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with budgets(redis_url) as [budget]:
        call = budget._link.call

        async def reply_lost(what: Any, *, timeout_s: float | None = None) -> Any:
            await call(what, timeout_s=timeout_s)
            raise StoreUnavailable("lost")

        ticket = await reserve(budget, [scope(tpm=100, slots=5)], 50)
        other = await reserve(budget, [scope(tpm=100, slots=5)], 50)
        ticket.settle(used(10))
        with monkeypatch.context() as patch:
            patch.setattr(budget._link, "call", reply_lost)
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    await budget.flush()
        await budget.flush()
        assert (await tokens_in_window(redis_client), await held(redis_client)) == (60, 1)
        await settle(budget, other, 20)
        assert (await tokens_in_window(redis_client), await held(redis_client)) == (30, 0)


async def test_what_redis_took_in_an_exchange_whose_answer_was_lost_comes_back_with_the_next(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [scope(rpm=10, tpm=10**15, day=10**14, slots=5)]
    kinds = ["requests_per_min", "tokens_per_min", "tokens_per_day"]
    async with budgets(redis_url) as [budget]:
        call = budget._link.call

        async def reply_lost(what: Any, *, timeout_s: float | None = None) -> Any:
            await call(what, timeout_s=timeout_s)
            raise StoreUnavailable("lost")

        await reserve(budget, limits, 7)
        for tokens in (50, 10**14 - 7):
            with monkeypatch.context() as patch:
                patch.setattr(budget._link, "call", reply_lost)
                with pytest.raises(StoreUnavailable):
                    await reserve(budget, limits, tokens)
            assert await tokens_in_window(redis_client) >= 7 + tokens  # and some ahead
            await budget.renew()
            await budget.renew()
            assert [await in_window(redis_client, f"{kind}:key:a") for kind in kinds] == [1, 7, 7]
        assert await held(redis_client) == 1


async def test_an_exchange_that_redis_executes_after_a_later_one_does_nothing(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with budgets(redis_url) as [budget]:
        call, late = budget._link.call, []

        async def delayed(what: Any, *, timeout_s: float | None = None) -> Any:
            late.append(what)
            raise StoreUnavailable("it lies in a buffer of a frozen Redis")

        await reserve(budget, [scope(tpm=100, slots=2)], 10)
        with monkeypatch.context() as patch:
            patch.setattr(budget._link, "call", delayed)
            with pytest.raises(StoreUnavailable):
                await reserve(budget, [scope(tpm=100, slots=2)], 20)
        await budget.flush()
        for what in late:
            await call(what)
        assert (await tokens_in_window(redis_client), await held(redis_client)) == (10, 1)


async def test_what_comes_too_late_leaves_nothing_behind(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        for spent in (0, 200):
            reservation = await reserve(budget, [scope(tpm=100)], 60)
            await let_time_pass(redis_client, 64, budget)
            await settle(budget, aged(reservation, 64), spent)
            assert await limit_keys(redis_client) == []


async def test_a_refund_finds_a_store_that_lost_its_data_and_does_not_go_below_nothing(
    redis_url: str, redis_client: Redis
) -> None:
    async with budgets(redis_url) as [budget]:
        lost = await reserve(budget, [scope(tpm=100)], 60)
        await redis_client.flushall()
        await settle(budget, lost, 0)
        assert not await redis_client.exists("{poolgate}:tokens_per_min:key:a")
        partly_lost = await reserve(budget, [scope(tpm=100)], 60)
        await redis_client.hset("{poolgate}:tokens_per_min:key:a", str(second_of(partly_lost)), "5")
        await settle(budget, partly_lost, 0)
        assert await tokens_in_window(redis_client) == 0


async def test_a_clock_of_redis_that_is_set_back_does_not_limit_for_ever(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        await reserve(budget, [scope(rpm=1)], 0)
        await let_time_pass(redis_client, -3600, budget)
        await reserve(budget, [scope(rpm=1)], 0)


# --- one step over all limits -----------------------------------------------------------------------------------------


async def test_refused_by_one_limit_is_charged_by_none(redis_url: str, redis_client: Redis) -> None:
    limits = [scope(rpm=2, slots=1)]
    async with budgets(redis_url) as [budget]:
        running = await reserve(budget, limits, 0)
        error = await refused(budget, limits)
        assert (error.kind, error.retry_after_s) == ("in_flight", 1.0)
        assert error.rate.remaining_requests == 1
        await settle(budget, running, 0)
        await reserve(budget, limits, 0)


async def test_a_refusal_by_the_route_leaves_key_and_user_untouched(redis_url: str, redis_client: Redis) -> None:
    scopes = [scope("key:a", rpm=5, tpm=50, slots=5), scope("user:u", tpm=50), scope("route:chat", tpm=20)]
    async with budgets(redis_url) as [budget]:
        error = await refused(budget, scopes, 30)
        assert (error.scope, error.retry_after_s) == ("route:chat", None)
        assert "waiting does not help" in error.message
        assert await limit_keys(redis_client) == []
        await reserve(budget, scopes, 20)
        assert {await tokens_in_window(redis_client, name) for name in ("key:a", "user:u", "route:chat")} == {20}


async def test_the_refusal_names_the_limit_that_takes_longest(redis_url: str, redis_client: Redis) -> None:
    scopes = [scope("key:a", rpm=1), scope("user:u", rpm=1)]
    async with budgets(redis_url) as [budget]:
        await reserve(budget, scopes[:1], 0)
        await let_time_pass(redis_client, 30, budget)
        await reserve(budget, scopes[1:], 0)
        error = await refused(budget, scopes)
        assert error.scope == "user:u"


async def test_headers_tell_the_tightest_limit(redis_url: str) -> None:
    async with budgets(redis_url) as [budget]:
        rate = (await reserve(budget, [scope("key:a", rpm=10, tpm=1000), scope("user:u", rpm=3)], 400)).rate
        assert rate == RateState(3, 2, rate.reset_requests_s, 1000, 600, rate.reset_tokens_s)
        assert rate.reset_requests_s is not None
        assert 60 <= rate.reset_requests_s <= 62


async def test_asks_beyond_any_number_are_refused_and_not_miscounted(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        assert (await refused(budget, [scope(tpm=10**12)], 10**30)).retry_after_s is None
        reservation = await reserve(budget, [scope(tpm=10**12)], 10**12)
        await settle(budget, reservation, 10**12 - 1)
        assert await tokens_in_window(redis_client) == 10**12 - 1
        await settle(budget, await reserve(budget, [scope("key:b", tpm=1)], 0), 10**15)
        assert await tokens_in_window(redis_client, "key:b") == 10**15


async def test_every_key_of_a_script_is_in_one_cluster_slot(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        scopes = [scope("key:{x}a", rpm=9, tpm=9, slots=9), scope("user:u", tpm=9), scope("route:org/m", rpm=9)]
        await settle(budget, await reserve(budget, scopes, 5), 2)
        await reserve(budget, scopes, 1)
        keys = await redis_client.keys("*")
        assert len(keys) == 7  # five limits, the set of gateways, what this one sent last
        assert len({key_slot(key) for key in keys}) == 1
