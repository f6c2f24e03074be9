"""Which failure may be mended by another replica, and how many further attempts the budget allows."""

from __future__ import annotations

import pytest

from gateway.config.schema import RetrySection
from gateway.domain import errors
from gateway.domain.errors import (
    ConnectFailed,
    EngineBusy,
    EngineDied,
    EngineFailed,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.upstream.retry import BURST, RetryBudget, never_connected, other_may_mend

NEVER, ALWAYS, IF_TOLD = (False, False), (True, True), (False, True)
RULES = [
    (ConnectFailed("refused"), ALWAYS),
    (UpstreamTimeout("no connection", deadline="connect"), ALWAYS),
    (UpstreamBroken("closed before it had the request", request_sent=False), ALWAYS),
    (EngineFailed("500"), ALWAYS),
    (EngineBusy("503", retry_after_s=2), ALWAYS),
    (UpstreamBroken("reset"), IF_TOLD),
    (UpstreamBroken("reset", response_began=True), IF_TOLD),
    (EngineDied("EngineCore"), IF_TOLD),
    (UpstreamTimeout("silent", deadline="first byte"), NEVER),
    (UpstreamTimeout("silent", deadline="gap"), NEVER),
    (UpstreamTimeout("slow", deadline="total"), NEVER),
    (UpstreamError("any other"), NEVER),
]


@pytest.mark.parametrize(("error", "expected"), RULES, ids=str)
def test_only_what_another_replica_may_mend_goes_to_one(error: UpstreamError, expected: tuple[bool, bool]) -> None:
    assert tuple(other_may_mend(error, replay_in_flight=told) for told in (False, True)) == expected


def test_every_failure_of_an_engine_has_a_rule() -> None:
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UpstreamError)}
    assert kinds == {type(error) for error, _ in RULES}


def test_no_engine_saw_a_request_whose_connection_was_never_made() -> None:
    seen_by_nobody = [error for error, _ in RULES if never_connected(error)]
    assert [type(error) for error in seen_by_nobody] == [ConnectFailed, UpstreamTimeout]
    assert not never_connected(ValueError("x"))


def taken(budget: RetryBudget, most: int = 1000) -> int:
    return sum(budget.take() for _ in range(most))


def test_a_quiet_process_may_try_a_few_times_at_once() -> None:
    assert taken(RetryBudget(RetrySection(share=0.2))) == BURST


def test_after_that_further_attempts_are_a_share_of_all_requests() -> None:
    budget = RetryBudget(RetrySection(share=0.25))
    taken(budget)
    attempts = 0
    for _ in range(400):
        budget.request()
        attempts += budget.take()
    assert attempts == 100


def test_saved_attempts_do_not_pile_up() -> None:
    budget = RetryBudget(RetrySection(share=1))
    for _ in range(1000):
        budget.request()
    assert taken(budget) == BURST


def test_a_share_of_nothing_is_no_attempt_at_all() -> None:
    budget = RetryBudget(RetrySection(share=0))
    for _ in range(1000):
        budget.request()
    assert taken(budget) == 0
