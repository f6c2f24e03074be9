"""Days and months of tokens in a real Redis, whose date the tests set: what counts for which, and until when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from fakes.budget_world import budgets, in_window, kill, limit_keys, refused, reserve, scope, settle, used
from fakes.redis_clock import RedisClock, utc_s
from fakes.redis_process import RedisProcess
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.admission.account import Ticket
from gateway.admission.budget import Budget
from gateway.admission.limits import Kind, Limit
from gateway.admission.period import DAY_S, period_at
from gateway.domain.errors import LimitExceeded, StoreUnavailable

DAY, MONTH = Limit("key:a", Kind.DAY, 100), Limit("key:a", Kind.MONTH, 100)
NOON = "2026-03-10 12:00"


@contextlib.asynccontextmanager
async def dated(redis: Redis, url: str, at: str = NOON, count: int = 1) -> AsyncIterator[tuple[RedisClock, Any]]:
    """The clock, and as many budgets that go by it."""
    clock = RedisClock(redis, at)
    async with budgets(url, count, clock=clock.local) as made:
        await clock.govern(*made)
        yield clock, made


async def spent(redis: Redis, kind: Kind, name: str = "key:a") -> int:
    return await in_window(redis, f"{kind}:{name}")


# --- the calendar -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "limits", "ends"),
    [
        (NOON, {"day": 100}, "2026-03-11 00:00"),
        ("2026-03-10 23:59:59.5", {"day": 100}, "2026-03-11 00:00"),
        ("2026-03-10 00:00", {"day": 100}, "2026-03-11 00:00"),
        (NOON, {"month": 100}, "2026-04-01 00:00"),
        ("2026-12-31 23:59:59", {"month": 100}, "2027-01-01 00:00"),
        ("2027-02-28 23:00", {"month": 100}, "2027-03-01 00:00"),
        ("2028-02-28 23:00", {"month": 100}, "2028-03-01 00:00"),
        ("2028-02-28 23:00", {"day": 100}, "2028-02-29 00:00"),
        ("2100-02-28 23:00", {"month": 100}, "2100-03-01 00:00"),
        (NOON, {"month": 100, "day": 100}, "2026-04-01 00:00"),  # the one that takes longest
    ],
)
async def test_a_refusal_tells_the_exact_time_to_the_end_and_then_all_is_free(
    redis_url: str, redis_client: Redis, now: str, limits: dict[str, int], ends: str
) -> None:
    async with dated(redis_client, redis_url, now) as (clock, [budget]):
        await reserve(budget, [scope(**limits)], 90)
        error = await refused(budget, [scope(**limits)], 11)
        assert error.kind == ("tokens_per_month" if "month" in limits else "tokens_per_day")
        assert error.retry_after_s == utc_s(ends) - utc_s(now)
        await clock.move_to(utc_s(ends) - 0.001)
        await refused(budget, [scope(**limits)], 11)
        await clock.move_to(ends)
        await reserve(budget, [scope(**limits)], 100)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(second=st.integers(0, 32_503_680_000))  # until the year 3000
def test_redis_and_the_local_calendar_agree(redis_process: RedisProcess, second: int) -> None:
    async def run() -> None:
        async with Redis.from_url(redis_process.url) as client:
            await client.flushall()
            async with dated(client, redis_process.url) as (clock, [budget]):
                await clock.move_to(second)
                await reserve(budget, [scope(day=100, month=100)], 1)
                for limit in (DAY, MONTH):
                    period = period_at(limit.kind, second)
                    assert await client.hgetall(limit.key) == {b"%d" % period.number: b"1"}
                    assert 0 < await client.ttl(limit.key) - (period.ends_s - second) < 120

    asyncio.run(run())


async def test_nothing_is_kept_of_the_days_and_months_before(redis_url: str, redis_client: Redis) -> None:
    async with dated(redis_client, redis_url) as (clock, [budget]):
        for day in range(3):
            await clock.move_to(utc_s("2026-03-31 12:00") + day * DAY_S)
            await settle(budget, await reserve(budget, [scope(day=100, month=1000)], 60), 50 + day)
        assert await redis_client.hvals(DAY.key) == [b"52"]
        assert await redis_client.hvals(MONTH.key) == [b"103"]


async def test_a_clock_of_redis_that_is_set_back_does_not_limit_for_ever(redis_url: str, redis_client: Redis) -> None:
    async with dated(redis_client, redis_url) as (clock, [budget]):
        await reserve(budget, [scope(day=100, month=100)], 100)
        await clock.move_to("2026-02-10 12:00")
        await reserve(budget, [scope(day=100, month=100)], 100)


# --- what a request costs ---------------------------------------------------------------------------------------------


async def test_real_tokens_replace_the_reserved_ones_hours_later_too(redis_url: str, redis_client: Redis) -> None:
    async with dated(redis_client, redis_url, "2026-03-10 00:00") as (clock, [budget]):
        for hours, tokens in ((1, 10), (13, 0), (23.9, 200)):
            ticket = await reserve(budget, [scope(day=100, month=1000)], 80)
            await clock.move_to(utc_s("2026-03-10 00:00") + hours * 3600)
            await settle(budget, ticket, tokens)
        assert await spent(redis_client, Kind.DAY) == await spent(redis_client, Kind.MONTH) == 210
        await refused(budget, [scope(day=100, month=1000)], 1)


async def test_the_last_second_of_a_day_does_not_bleed_over_midnight(redis_url: str, redis_client: Redis) -> None:
    """B035: the first request of a new period inherited the count of the last; a late refund hit the new one."""
    limits = [scope(day=100, month=1000)]
    async with dated(redis_client, redis_url, "2026-03-10 23:59:58.7") as (clock, [budget]):
        early, other = await reserve(budget, limits, 60), await reserve(budget, limits, 40)
        await refused(budget, limits, 1)
        await clock.move_to("2026-03-11 00:00:00.2")
        await reserve(budget, limits, 70)
        await settle(budget, early, 0)
        await settle(budget, other, 500)
        assert await spent(redis_client, Kind.DAY) == 70
        assert await spent(redis_client, Kind.MONTH) == 70 + 500  # it is the same month
        assert (await refused(budget, limits, 31)).kind == "tokens_per_day"


async def test_a_refund_after_the_end_of_the_month_leaves_nothing_behind(redis_url: str, redis_client: Redis) -> None:
    async with dated(redis_client, redis_url, "2026-03-31 23:59:59") as (clock, [budget]):
        for tokens in (0, 200):
            await clock.move_to("2026-03-31 23:59:59")
            ticket = await reserve(budget, [scope(day=1000, month=1000)], 60)
            await clock.move_to("2026-04-01 00:00")
            await settle(budget, ticket, tokens)
            assert await limit_keys(redis_client) == []


async def test_refused_by_one_limit_is_charged_by_none(redis_url: str, redis_client: Redis) -> None:
    async with dated(redis_client, redis_url) as (_, [budget]):
        scopes = [scope(rpm=5, tpm=100, slots=1, day=100, month=50), scope("user:u", day=40)]
        assert (await refused(budget, scopes, 41)).scope == "user:u"
        assert await limit_keys(redis_client) == []
        await reserve(budget, scopes, 10)
        assert (await refused(budget, scopes, 10)).kind == "in_flight"
        names = [(kind, "key:a") for kind in (Kind.TOKENS, Kind.DAY, Kind.MONTH)] + [(Kind.DAY, "user:u")]
        assert [await spent(redis_client, kind, name) for kind, name in names] == [10, 10, 10, 10]


async def test_an_ask_beyond_the_whole_limit_never_passes(redis_url: str, redis_client: Redis) -> None:
    async with dated(redis_client, redis_url) as (_, [budget]):
        error = await refused(budget, [scope(day=100, month=10**14)], 101)
        assert error.retry_after_s is None
        assert "100 tokens a day, is less than the 101 that this request asks for" in error.message


async def test_a_give_back_that_redis_confirmed_to_nobody_is_sent_for_an_hour_and_counts_once(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with dated(redis_client, redis_url) as (clock, [budget]):
        call = budget._link.call

        async def reply_lost(what: Any, *, timeout_s: float | None = None) -> Any:
            await call(what, timeout_s=timeout_s)
            raise StoreUnavailable("lost")

        async def lost(what: Any, *, timeout_s: float | None = None) -> Any:
            raise StoreUnavailable("lost")

        tickets = [await reserve(budget, [scope(day=1000)], 100) for _ in range(2)]
        for ticket, call_fails in zip(tickets, (reply_lost, lost), strict=True):
            with monkeypatch.context() as patch:
                patch.setattr(budget._link, "call", call_fails)
                ticket.settle(used(10))
                with pytest.raises(StoreUnavailable):
                    await budget.flush()
        await clock.move_to(clock.utc_s + 3599)
        assert await redis_client.ttl(f"{{poolgate}}:process:{budget.process_id}") > 3600  # so long it is known
        await budget.flush()
        assert await spent(redis_client, Kind.DAY) == 20


# --- leases -----------------------------------------------------------------------------------------------------------


async def test_two_processes_never_exceed_a_day_together_and_leave_nothing_of_it(
    redis_url: str, redis_client: Redis
) -> None:
    limits = [scope(day=10_000)]
    async with dated(redis_client, redis_url, count=2) as (clock, processes):
        passed = by_redis = 0

        async def spend(budget: Budget) -> None:
            nonlocal passed, by_redis
            account = budget.account(limits)
            while passed * 7 < 20_000:
                ticket = account.admit(7)
                by_redis += ticket is None
                try:
                    ticket = ticket or await budget.admit(account, 7)
                except LimitExceeded:
                    return
                passed += 1
                ticket.settle(used(7))
                await asyncio.sleep(0)

        for budget in processes:
            await budget.renew()
        await asyncio.gather(*(spend(budget) for budget in processes for _ in range(3)))
        assert passed * 7 <= 10_000
        assert by_redis < passed / 3, "most are spent from leases"
        for budget in processes:
            await budget.flush()
        assert await spent(redis_client, Kind.DAY) == passed * 7
        await spend(processes[0])
        await spend(processes[1])
        assert 10_000 - passed * 7 < 7
        await clock.move_to("2026-03-11 00:00")
        await reserve(processes[1], limits, 10_000)


async def test_what_was_taken_ahead_before_midnight_counts_for_the_day_before(
    redis_url: str, redis_client: Redis
) -> None:
    async with dated(redis_client, redis_url, "2026-03-10 23:59:59.5") as (clock, [budget]):
        account = budget.account([scope(day=10_000)])
        for _ in range(20):
            (account.admit(10) or await budget.admit(account, 10)).settle(used(10))
        assert account.lease.tokens > 0
        await clock.move_to("2026-03-11 00:00:00.2")
        ticket = await budget.admit(account, 10_000)  # all of the new day
        assert await spent(redis_client, Kind.DAY) == 10_000
        assert cast(dict[bytes, bytes], await redis_client.hgetall(DAY.key)).keys() == {
            b"%d" % period_at(Kind.DAY, clock.utc_s).number
        }
        await settle(budget, ticket, 1)
        assert await spent(redis_client, Kind.DAY) == 1


steps = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 2), st.integers(1, 12), st.sampled_from([0, 10, 90])),
    st.tuples(st.just("settle"), st.integers(0, 9), st.integers(1, 12), st.integers(0, 100)),
    st.tuples(st.just("kill"), st.integers(0, 2), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.sampled_from([0.3, 1.0, 62.0, 3600.0, 40_000.0]), st.just(0), st.just(0)),
)


@dataclass
class Held:
    process: int
    ticket: Ticket
    day: int
    tokens: int
    is_running: bool = True


@dataclass
class World:
    """Three processes on one Redis, and all that was ever admitted by them."""

    clock: RedisClock
    processes: list[Budget]
    past: list[Held] = field(default_factory=list)

    async def step(self, name: str, first: Any, second: int, third: int) -> None:
        match name:
            case "admit":
                await asyncio.gather(*(self.admit(first, third) for _ in range(second)))
            case "settle":
                for entry in [entry for entry in self.past if entry.is_running][first : first + second]:
                    entry.is_running = False
                    entry.tokens = entry.tokens * third // 100
                    entry.ticket.settle(used(entry.tokens))
            case "kill":
                await kill(self.processes[first])
                for entry in self.past:
                    entry.is_running = entry.is_running and entry.process != first
            case "wait":
                await self.clock.move_to(self.clock.utc_s + first)
                for process in self.processes:
                    process._tick()  # the looks at the leases go by real time

    async def admit(self, process: int, tokens: int) -> None:
        with contextlib.suppress(LimitExceeded, StoreUnavailable):
            ticket = await reserve(self.processes[process], [scope(day=600), scope("user:u", month=1500)], tokens)
            assert ticket._lease.bucket_s is not None
            self.past.append(Held(process, ticket, ticket._lease.bucket_s // DAY_S, tokens))
        per_day: dict[int, int] = {}
        for entry in self.past:
            per_day[entry.day] = per_day.get(entry.day, 0) + entry.tokens
        assert max(per_day.values(), default=0) <= 600
        assert sum(per_day.values()) <= 1500


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=st.lists(steps, max_size=25))
def test_whatever_happens_the_processes_together_never_admit_more_than_a_day_or_a_month(
    redis_process: RedisProcess, plan: list[tuple[str, Any, int, int]]
) -> None:
    async def run() -> None:
        async with Redis.from_url(redis_process.url) as client:
            await client.flushall()
            async with dated(client, redis_process.url, "2026-03-01 12:00", 3) as (clock, processes):
                world = World(clock, processes)
                for step in plan:
                    await world.step(*step)

    asyncio.run(run())
