from __future__ import annotations

import pytest
from redis.crc import key_slot

from gateway.admission.limits import Kind, Limit, Reading, Scope, limits_of, rate_state, refusal
from gateway.domain.request import NO_RATE, Limits, RateState


def reading(
    scope: str, kind: Kind, value: int, used: int, *, wait_s: float | None = 0.0, reset_s: float = 9.0, share: int = 1
) -> Reading:
    return Reading(Limit(scope, kind, value), value // share, used, wait_s, reset_s)


def test_only_limits_that_are_set_count() -> None:
    scopes = [
        Scope("key:a", Limits(requests_per_min=3, tokens_per_month=8)),
        Scope("user:b", Limits(in_flight=1, tokens_per_min=9, tokens_per_day=7)),
    ]
    assert limits_of(scopes) == (
        Limit("key:a", Kind.REQUESTS, 3),
        Limit("key:a", Kind.MONTH, 8),
        Limit("user:b", Kind.TOKENS, 9),
        Limit("user:b", Kind.IN_FLIGHT, 1),
        Limit("user:b", Kind.DAY, 7),
    )


def test_keys_of_one_decision_share_a_cluster_slot_whatever_the_names() -> None:
    names = ["key:a", "user:b", "route:org/model{x}", "route:{poolgate}:"]
    keys = {limit.key for name in names for limit in limits_of([Scope(name, Limits(1, 1, 1, 1, 1))])}
    assert len(keys) == 5 * len(names)
    assert len({key_slot(key.encode()) for key in keys}) == 1


def test_the_headers_show_the_tightest_limit_of_each_kind() -> None:
    state = rate_state(
        [
            reading("key:a", Kind.REQUESTS, 100, 10),
            reading("user:b", Kind.REQUESTS, 50, 45, reset_s=3.0),
            reading("key:a", Kind.TOKENS, 10, 12),
            reading("key:a", Kind.IN_FLIGHT, 1, 1),
            reading("key:a", Kind.DAY, 1, 1),
        ]
    )
    assert state == RateState(50, 5, 3.0, 10, 0, 9.0)


def test_no_limit_of_a_kind_shows_nothing() -> None:
    others = [Kind.IN_FLIGHT, Kind.DAY, Kind.MONTH]  # the headers are about minutes
    assert rate_state([reading("key:a", kind, 1, 1) for kind in others]) == NO_RATE


def test_a_refusal_names_the_limit_to_wait_for_and_for_how_long() -> None:
    error = refusal(
        [
            reading("key:a", Kind.REQUESTS, 5, 5, wait_s=2.0),
            reading("user:b", Kind.TOKENS, 100, 95, wait_s=12.34),
            reading("route:chat", Kind.IN_FLIGHT, 1, 0),
        ],
        tokens=20,
    )
    assert (error.scope, error.kind, error.retry_after_s) == ("user:b", "tokens_per_min", 12.34)
    assert error.message == (
        "The limit of user 'b', 100 tokens a minute, is used up: 95 used, 20 asked. Try again in 12.4 s."
    )
    assert error.rate.remaining_tokens == 5


def test_what_never_passes_wins_over_any_wait_and_tells_so() -> None:
    error = refusal(
        [reading("key:a", Kind.REQUESTS, 5, 5, wait_s=2.0), reading("route:m", Kind.TOKENS, 100, 0, wait_s=None)], 200
    )
    assert error.retry_after_s is None
    assert error.message == (
        "The limit of model 'm', 100 tokens a minute, is less than the 200 that this request asks for; "
        "waiting does not help: ask for less."
    )


@pytest.mark.parametrize(("kind", "period"), [(Kind.DAY, "day"), (Kind.MONTH, "month")])
def test_a_refusal_that_lasts_for_weeks_is_exact_to_the_end(kind: Kind, period: str) -> None:
    error = refusal([reading("key:a", kind, 10**9, 10**9, wait_s=2_678_399.5)], 1)
    assert error.message == (
        f"The limit of key 'a', 1000000000 tokens a {period}, is used up: 1000000000 used, 1 asked. "
        "Try again in 2678399.5 s."
    )


@pytest.mark.parametrize("share", [1, 4])
def test_a_share_is_told_apart_from_the_limit(share: int) -> None:
    error = refusal([reading("key:a", Kind.REQUESTS, 8, 8, wait_s=1.0, share=share)], 0)
    assert ("2 through this process for now" in error.message) == (share == 4)
