"""The gate over a Redis that must not be asked, or that fails the test when it is."""

from __future__ import annotations

from typing import cast

import pytest
from redis.asyncio import Redis

from gateway.admission import gate as gate_module
from gateway.admission.budget import Budget
from gateway.admission.gate import Gate
from gateway.admission.link import RedisLink
from gateway.domain.errors import LimitExceeded
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.request import NO_LIMITS, NO_RATE, Limits, Principal


class Away(RedisLink):
    """A link that counts who asked and never has an answer."""

    asked = 0

    def __init__(self) -> None:
        super().__init__(cast(Redis, self), timeout_s=1.0)

    def __getattr__(self, name: str) -> object:
        self.asked += 1
        raise ConnectionRefusedError(name)


def principal(key_limits: Limits = NO_LIMITS, user: str | None = "alice", user_limits: Limits = NO_LIMITS) -> Principal:
    return Principal("k", user, "default", ("*",), key_limits, user_limits)


COMPLETED = Outcome(Ending.COMPLETED, 200, Usage(3, 4))


async def test_a_request_without_limits_never_asks_redis() -> None:
    link = Away()
    gate = Gate(Budget(link, on_outage="closed"))
    ticket = await gate.admit(principal(), "chat", NO_LIMITS, 10**9)
    ticket.settle(COMPLETED)
    assert ticket.rate == NO_RATE
    assert link.asked == 0


async def test_key_user_and_route_are_limited_each_on_its_own() -> None:
    for blocked, (key, user, route) in {
        "key:k": (Limits(requests_per_min=1), NO_LIMITS, NO_LIMITS),
        "user:alice": (NO_LIMITS, Limits(requests_per_min=1), NO_LIMITS),
        "route:chat": (NO_LIMITS, NO_LIMITS, Limits(requests_per_min=1)),
    }.items():
        gate = Gate(Budget(Away(), on_outage="share"))
        await gate.admit(principal(key, user_limits=user), "chat", route, 0)
        with pytest.raises(LimitExceeded) as caught:
            await gate.admit(principal(key, user_limits=user), "chat", route, 0)
        assert caught.value.scope == blocked


@pytest.mark.parametrize("limits", [Limits(tokens_per_day=100), Limits(tokens_per_month=100)])
async def test_a_day_or_a_month_alone_limits_too(limits: Limits) -> None:
    gate = Gate(Budget(Away(), on_outage="share"))
    caller = principal(limits)
    ticket = await gate.admit(caller, "chat", NO_LIMITS, 90)
    assert ticket.rate == NO_RATE
    with pytest.raises(LimitExceeded) as caught:
        await gate.admit(caller, "chat", NO_LIMITS, 20)
    assert "tokens a " in caught.value.message
    ticket.settle(COMPLETED)
    await gate.admit(caller, "chat", NO_LIMITS, 20)


async def test_a_second_settle_gives_nothing_back() -> None:
    gate = Gate(Budget(Away(), on_outage="share"))
    limits = Limits(in_flight=2)
    first = await gate.admit(principal(limits), "chat", NO_LIMITS, 0)
    await gate.admit(principal(limits), "chat", NO_LIMITS, 0)
    first.settle(COMPLETED)
    first.settle(COMPLETED)
    await gate.admit(principal(limits), "chat", NO_LIMITS, 0)
    with pytest.raises(LimitExceeded):
        await gate.admit(principal(limits), "chat", NO_LIMITS, 0)


async def test_a_ticket_shows_what_is_left_and_a_refusal_too() -> None:
    gate = Gate(Budget(Away(), on_outage="share"))
    caller = principal(Limits(requests_per_min=2, tokens_per_min=100))
    ticket = await gate.admit(caller, "chat", NO_LIMITS, 60)
    assert (ticket.rate.limit_requests, ticket.rate.remaining_requests) == (2, 1)
    assert (ticket.rate.limit_tokens, ticket.rate.remaining_tokens) == (100, 40)
    with pytest.raises(LimitExceeded) as caught:
        await gate.admit(caller, "chat", NO_LIMITS, 60)
    assert (caught.value.rate.remaining_requests, caught.value.rate.remaining_tokens) == (1, 40)
    assert caught.value.kind == "tokens_per_min"


async def test_nothing_generated_gives_the_whole_reservation_back() -> None:
    gate = Gate(Budget(Away(), on_outage="share"))
    caller = principal(Limits(tokens_per_min=100))
    ticket = await gate.admit(caller, "chat", NO_LIMITS, 90)
    ticket.settle(Outcome(Ending.UPSTREAM_ERROR, 502, None))
    assert (await gate.admit(caller, "chat", NO_LIMITS, 90)).rate.remaining_tokens == 10


async def test_only_redis_refuses_so_nothing_is_admitted_or_refused_without_a_lease() -> None:
    link = Away()
    gate = Gate(Budget(link, on_outage="share"))
    assert gate.try_admit(principal(Limits(requests_per_min=5)), "chat", NO_LIMITS, 0) is None
    assert gate.try_admit(principal(), "chat", NO_LIMITS, -5) is not None
    assert link.asked == 0


async def test_callers_are_bounded_and_what_they_hold_outlives_being_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate_module, "MAX_CALLERS", 2)
    gate = Gate(Budget(Away(), on_outage="share"))
    caller = principal(Limits(in_flight=1))
    ticket = await gate.admit(caller, "chat", NO_LIMITS, 0)
    for _ in range(5):
        await gate.admit(principal(Limits(requests_per_min=100), user=None), "chat", NO_LIMITS, 0)
    with pytest.raises(LimitExceeded):
        await gate.admit(caller, "chat", NO_LIMITS, 0)
    ticket.settle(COMPLETED)
    await gate.admit(caller, "chat", NO_LIMITS, 0)


async def test_two_principals_of_one_key_spend_from_one_limit() -> None:
    gate = Gate(Budget(Away(), on_outage="share"))
    await gate.admit(principal(Limits(requests_per_min=1)), "chat", NO_LIMITS, 0)
    with pytest.raises(LimitExceeded):
        await gate.admit(principal(Limits(requests_per_min=1)), "chat", NO_LIMITS, 0)
