"""Leases over a real Redis: few calls, fair to the other processes, and together never more than a limit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes.budget_world import aged, budgets, held, in_window, kill, let_time_pass, reserve, scope, used
from fakes.redis_process import RedisProcess
from fakes.waits import eventually
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from gateway.admission.account import Ticket
from gateway.admission.budget import Budget
from gateway.admission.gate import Gate
from gateway.admission.limits import Scope
from gateway.domain.errors import LimitExceeded
from gateway.domain.request import NO_LIMITS, Limits, Principal

LARGE = Limits(requests_per_min=100_000, tokens_per_min=10**8, in_flight=64)


def counted(budget: Budget, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows by one with each call to Redis."""
    calls: list[None] = []
    call = budget._link.call

    async def counting(what: Callable[[Redis], Awaitable[Any]], *, timeout_s: float | None = None) -> Any:
        calls.append(None)
        return await call(what, timeout_s=timeout_s)

    monkeypatch.setattr(budget._link, "call", counting)
    return calls


async def by_redis_or_not(gate: Gate, caller: Principal, tokens: int = 10) -> tuple[Ticket, bool]:
    ticket = gate.try_admit(caller, "chat", NO_LIMITS, tokens)
    if ticket is not None:
        return ticket, False
    return await gate.admit(caller, "chat", NO_LIMITS, tokens), True


# --- few calls --------------------------------------------------------------------------------------------------------


async def test_a_thousand_requests_cost_a_handful_of_calls(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with budgets(redis_url) as [budget]:
        calls, gate = counted(budget, monkeypatch), Gate(budget)
        caller = Principal("k", "alice", "default", ("*",), LARGE, LARGE)
        by_redis = 0
        for _ in range(1000):
            ticket, is_slow = await by_redis_or_not(gate, caller)
            ticket.settle(used(7))
            by_redis += is_slow
        assert by_redis <= 40
        assert len(calls) <= 60  # those of a machine that takes seconds for it; else about ten
        await budget.flush()
        assert await in_window(redis_client, "requests_per_min:user:alice") == 1000
        assert await in_window(redis_client, "tokens_per_min:key:k") == 7000
        assert await held(redis_client, "user:alice") == 0


async def test_a_burst_shares_one_call(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with budgets(redis_url) as [budget]:
        calls = counted(budget, monkeypatch)
        limits = [scope(rpm=1000, tpm=10**6), scope("user:u", rpm=1000)]
        tickets = await asyncio.gather(*(reserve(budget, limits, 5) for _ in range(100)))
        assert len(tickets) == 100
        assert len(calls) == 1


async def test_settling_long_requests_costs_no_call_each(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with budgets(redis_url) as [budget]:
        limits = [scope(tpm=10**6, slots=500)]
        tickets = await asyncio.gather(*(reserve(budget, limits, 100) for _ in range(200)))
        await budget.flush()  # as if their lease had ended long ago
        calls = counted(budget, monkeypatch)
        for ticket in tickets:
            ticket.settle(used(30))
        await eventually(lambda: is_down_to(redis_client, 200 * 30), "the refunds are in Redis")
        assert len(calls) <= 10


async def is_down_to(redis: Redis, tokens: int) -> bool:
    return await in_window(redis, "tokens_per_min:key:a") == tokens


async def test_what_is_left_is_told_exactly_while_one_process_spends(redis_url: str) -> None:
    async with budgets(redis_url) as [budget]:
        gate, caller = Gate(budget), Principal("k", None, "default", ("*",), Limits(5000, 10**6))
        for number in range(1, 300):
            ticket, _ = await by_redis_or_not(gate, caller, 10)
            assert ticket.rate.remaining_requests == 5000 - number
            assert ticket.rate.remaining_tokens == 10**6 - number * 10


# --- what lies idle ---------------------------------------------------------------------------------------------------


async def test_what_is_taken_ahead_is_not_spent_after_a_second(redis_url: str) -> None:
    late_s = [0.0]
    async with budgets(redis_url, clock=lambda: time.monotonic() + late_s[0]) as [budget]:
        gate, caller = Gate(budget), Principal("k", None, "default", ("*",), Limits(5000))
        for _ in range(50):
            await gate.admit(caller, "chat", NO_LIMITS, 0)
        assert gate.try_admit(caller, "chat", NO_LIMITS, 0) is not None
        late_s[0] = 1.0
        assert gate.try_admit(caller, "chat", NO_LIMITS, 0) is None


async def test_a_caller_who_paused_for_a_moment_is_not_kept_waiting_for_redis(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reply after the other of half a second each: there are looks at the lease between which nothing is spent."""
    late_s = [0.0]
    async with budgets(redis_url, clock=lambda: late_s[0]) as [budget]:
        gate, caller = Gate(budget), Principal("k", None, "default", ("*",), Limits(5000))
        account = budget.account([scope("key:k", rpm=5000)])
        monkeypatch.setattr(budget, "_arm", lambda _: None)  # the looks come when this test wants them

        async def look(now_s: float) -> None:
            late_s[0] = now_s
            budget._tick()
            while budget._pump is not None:
                await budget._pump

        for _ in range(3):
            await gate.admit(caller, "chat", NO_LIMITS, 0)
        for now_s in (0.25, 0.5, 0.75):
            await look(now_s)
            if now_s == 0.25:
                assert gate.try_admit(caller, "chat", NO_LIMITS, 0) is not None
        late_s[0] = 1.1  # the first lease is over
        assert gate.try_admit(caller, "chat", NO_LIMITS, 0) is not None
        for now_s in (1.2, 1.3, 1.4, 1.5):
            await look(now_s)
        assert gate.try_admit(caller, "chat", NO_LIMITS, 0) is None, "who comes no more keeps nothing from others"
        assert account.lease.requests == 0
        assert await in_window(redis_client, "requests_per_min:key:k") == 5


async def test_idle_units_and_slots_come_back_by_themselves(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        for _ in range(20):
            (await reserve(budget, [scope(rpm=1000, tpm=10**6, slots=50)], 10)).settle(used(10))
        assert await in_window(redis_client, "requests_per_min:key:a") > 20
        await eventually(lambda: lies_idle(redis_client, 0), "nothing lies idle")
        assert await in_window(redis_client, "requests_per_min:key:a") == 20
        assert await in_window(redis_client, "tokens_per_min:key:a") == 200


async def test_what_a_request_did_not_use_comes_back_by_itself(redis_url: str, redis_client: Redis) -> None:
    async with budgets(redis_url) as [budget]:
        ticket = await reserve(budget, [scope(tpm=10**6)], 100)
        await budget.flush()  # as if its lease had ended long ago
        ticket.settle(used(30))
        await eventually(lambda: is_down_to(redis_client, 30), "the refund is in Redis, though nobody else comes")


async def test_what_is_owed_near_a_limit_does_not_get_lost_behind_a_call_that_is_on_its_way(
    redis_url: str, redis_client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with budgets(redis_url) as [budget]:
        first, second = [await reserve(budget, [scope(tpm=220)], 100) for _ in range(2)]
        await eventually(lambda: rests(budget), "no look at the leases is to come")
        send, is_on_its_way, may_go = budget._script.send, asyncio.Event(), asyncio.Event()

        async def slow(exchange: Any, timeout_s: float | None) -> Any:
            is_on_its_way.set()
            await may_go.wait()
            return await send(exchange, timeout_s)

        monkeypatch.setattr(budget._script, "send", slow)
        first.settle(used(30))
        async with asyncio.timeout(10):
            await is_on_its_way.wait()
        second.settle(used(30))
        may_go.set()
        await eventually(lambda: is_down_to(redis_client, 60), "both refunds are in Redis", 5)


async def rests(budget: Budget) -> bool:
    return budget._timer is None


async def lies_idle(redis: Redis, slots: int) -> bool:
    ahead = [key for key in await redis.hkeys("{poolgate}:requests_per_min:key:a") if key.startswith(b"p")]
    return not ahead and await held(redis) == slots


async def test_refused_by_what_lies_idle_elsewhere_says_that_it_comes_back_in_a_second(redis_url: str) -> None:
    async with budgets(redis_url, 2) as [first, second]:
        running = [await reserve(first, [scope(rpm=100)]) for _ in range(55)]
        taken = 100 - 45
        with pytest.raises(LimitExceeded) as caught:
            for _ in range(46):
                running.append(await reserve(second, [scope(rpm=100)]))
        assert len(running) - taken < 45  # the first one has some of them
        assert caught.value.retry_after_s is not None
        assert caught.value.retry_after_s <= 1.0
        await eventually(lambda: passes(second), "what the first one did not use is there for the second")


async def passes(budget: Budget) -> bool:
    try:
        await reserve(budget, [scope(rpm=100)])
    except LimitExceeded:
        return False
    return True


async def test_keys_of_one_user_in_one_process_do_not_hold_units_from_one_another(redis_url: str) -> None:
    async with budgets(redis_url) as [budget]:
        shared = scope("user:u", rpm=100, slots=3)
        admitted = 0
        for number in range(100):
            for _ in range(2):
                own = scope(f"key:{number % 3}", rpm=1000)
                if admitted < 100:
                    (await reserve(budget, [own, shared])).settle(used(0))
                    admitted += 1
        with pytest.raises(LimitExceeded) as caught:
            await reserve(budget, [scope("key:9", rpm=1000), shared])
        assert (caught.value.retry_after_s or 0) > 30


# --- near a limit -----------------------------------------------------------------------------------------------------


async def test_asked_one_after_another_exactly_the_limit_passes_whichever_process_is_asked(redis_url: str) -> None:
    async with budgets(redis_url, 4, started=True) as processes:
        passed = 0
        for number in range(16):
            try:
                (await reserve(processes[number % 4], [scope(rpm=10, tpm=10**6)], 100)).settle(used(10))
            except LimitExceeded as error:
                assert passed == 10
                assert (error.retry_after_s or 0) > 30
            else:
                passed += 1
        assert passed == 10


@pytest.mark.parametrize("slots", [1, 2])
async def test_calls_one_after_another_over_four_processes_are_never_refused(redis_url: str, slots: int) -> None:
    async with budgets(redis_url, 4, started=True) as processes:
        for number in range(60):
            ticket = await reserve(processes[number % 4], [scope(slots=slots, tpm=1000)], 500)
            ticket.settle(used(1))


async def test_two_hundred_at_once_over_four_processes_never_hold_more_slots_than_the_limit(
    redis_url: str, redis_client: Redis
) -> None:
    async with budgets(redis_url, 4, started=True) as processes:
        running, most, served = 0, 0, 0

        async def one(budget: Budget) -> None:
            nonlocal running, most, served
            try:
                ticket = await reserve(budget, [scope(slots=5)])
            except LimitExceeded:
                return
            running += 1
            most, served = max(most, running), served + 1
            await asyncio.sleep(0.01)
            running -= 1
            ticket.settle(used(0))

        await asyncio.gather(*(one(processes[number % 4]) for number in range(200)))
        assert most <= 5
        assert served >= 5
        await eventually(lambda: is_free(redis_client), "all slots are back")


async def is_free(redis: Redis) -> bool:
    return await held(redis) == 0


# --- the sum over all processes ---------------------------------------------------------------------------------------

tight_limits = st.sampled_from(
    [Limits(20, 10**6, 100), Limits(200, 600, 100), Limits(200, 10**6, 7), Limits(20, 600, 7)]
)

steps = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 3), st.integers(1, 12), st.sampled_from([0, 10, 90])),
    st.tuples(st.just("settle"), st.integers(0, 9), st.integers(1, 12), st.integers(0, 100)),
    st.tuples(st.just("kill"), st.integers(0, 3), st.just(0), st.just(0)),
    st.tuples(st.just("idle"), st.sampled_from([0, 10, 300]), st.just(0), st.just(0)),
    st.tuples(st.just("age"), st.sampled_from([1, 29, 31, 58, 61]), st.just(0), st.just(0)),
)


@dataclass
class Held:
    """One ticket that was admitted: what it counts as, and when."""

    process: int
    ticket: Ticket
    at_s: float
    tokens: int
    is_running: bool = True


@dataclass
class World:
    """Four processes on one Redis, and all that was ever admitted by them."""

    redis: Redis
    processes: list[Budget]
    limits: Limits
    fresh: Callable[[], Awaitable[Budget]]
    past: list[Held] = field(default_factory=list)
    aged_s: float = 0.0

    def now_s(self) -> float:
        return time.monotonic() + self.aged_s

    async def step(self, name: str, first: int, second: int, third: int) -> None:
        match name:
            case "admit":
                await asyncio.gather(*(self.admit(first, third) for _ in range(second)))
            case "settle":
                for held_ticket in [entry for entry in self.past if entry.is_running][first : first + second]:
                    held_ticket.is_running = False
                    held_ticket.tokens = held_ticket.tokens * third // 100
                    held_ticket.ticket.settle(used(held_ticket.tokens))
            case "kill":
                await kill(self.processes[first])
                self.processes[first] = await self.fresh()
                for entry in self.past:
                    entry.is_running = entry.is_running and entry.process != first
            case "idle":
                await asyncio.sleep(first / 1000)
            case "age":
                await let_time_pass(self.redis, first, *self.processes)
                for lease in {id(entry.ticket._lease): entry.ticket for entry in self.past}.values():
                    aged(lease, first)
                self.aged_s += first
                for process in self.processes:
                    await process.renew()
        self.check()

    async def admit(self, process: int, tokens: int) -> None:
        limits = [Scope("key:a", self.limits), scope("user:u", rpm=300, slots=80)]
        try:
            ticket = await reserve(self.processes[process], limits, tokens)
        except LimitExceeded:
            return
        self.past.append(Held(process, ticket, self.now_s(), tokens))
        self.check()

    def check(self) -> None:
        recent = [entry for entry in self.past if self.now_s() - entry.at_s < 60]
        assert len(recent) <= (self.limits.requests_per_min or 0)
        assert sum(entry.tokens for entry in recent) <= (self.limits.tokens_per_min or 0)
        assert sum(entry.is_running for entry in self.past) <= (self.limits.in_flight or 0)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(
    limits=Limits(20, 10**6, 100),
    plan=[("admit", 0, 12, 10), ("admit", 0, 12, 10), ("age", 58, 0, 0), ("admit", 2, 12, 10), ("age", 5, 0, 0)] * 2,
)
@given(limits=tight_limits, plan=st.lists(steps, max_size=25))
def test_whatever_happens_the_processes_together_never_admit_more_than_a_limit(
    redis_process: RedisProcess, limits: Limits, plan: list[tuple[str, int, int, int]]
) -> None:
    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack, Redis.from_url(redis_process.url) as client:
            await client.flushall()

            async def fresh() -> Budget:
                [budget] = await stack.enter_async_context(budgets(redis_process.url))
                return budget

            world = World(client, [await fresh() for _ in range(4)], limits, fresh)
            for step in plan:
                await world.step(*step)
            for process in world.processes:
                await process.flush()
            # what dead processes held may still count; all that runs does
            assert await held(client) >= sum(entry.is_running for entry in world.past)

    asyncio.run(run())
