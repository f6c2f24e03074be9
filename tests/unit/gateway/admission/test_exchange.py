"""What an exchange asks for, and what is read from its reply."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import pytest

from gateway.admission.account import Account, Lease, Told, Waiter
from gateway.admission.exchange import MAX_AHEAD, MAX_ASKS, Exchange, GiveBack, Grant, reading, told, wish_of
from gateway.admission.limits import Kind, Limit
from gateway.admission.local import Ledgers

REQUESTS = Limit("key:a", Kind.REQUESTS, 10)
TOKENS = Limit("key:a", Kind.TOKENS, 100)
SLOTS = Limit("key:a", Kind.IN_FLIGHT, 2)
DAY = Limit("key:a", Kind.DAY, 100)
NOW_MS = 1_000_000_500  # half a second into second 1,000,000


def an_account(*limits: Limit) -> Account:
    return Account(limits, Ledgers().of(limits), cast(Any, None), lambda: 0.0)


def spent(account: Account, count: int, at_s: float) -> None:
    account.lease = Lease(1, at_s, at_s + 1, 1000, 1000, None)
    account.lease.requests -= count


async def waiting(account: Account, *tokens: int) -> None:
    for asked in tokens:
        account.waiters.append(Waiter(asyncio.get_running_loop().create_future(), asked))


async def test_an_occasional_request_takes_nothing_ahead() -> None:
    account = an_account(REQUESTS, SLOTS)
    spent(account, 50, at_s=0.0)
    await waiting(account, 7)
    wish = wish_of(account, 10.0, 1.25)
    assert (len(wish.waiters), wish.ahead, wish.slots) == (1, 0, 0)


async def test_what_was_spent_lately_is_taken_ahead_twice() -> None:
    account = an_account(REQUESTS, TOKENS)
    spent(account, 50, at_s=9.0)
    await waiting(account, 7, 30)
    wish = wish_of(account, 10.0, 1.25)
    assert (wish.ahead, wish.unit) == (102, 30)
    spent(account, 10**6, at_s=9.9)
    assert wish_of(account, 10.0, 1.25).ahead == MAX_AHEAD


async def test_who_left_is_not_asked_for_and_a_queue_is_taken_in_parts() -> None:
    account = an_account(REQUESTS)
    await waiting(account, *range(MAX_ASKS + 5))
    account.waiters[1].future.cancel()
    assert [waiter.tokens for waiter in wish_of(account, 0.0, 1.25).waiters] == [0, *range(2, MAX_ASKS)]
    assert [waiter.tokens for waiter in account.waiters] == list(range(MAX_ASKS, MAX_ASKS + 5))


def test_a_key_is_sent_once_however_often_it_is_meant() -> None:
    account = an_account(REQUESTS, SLOTS)
    [slots] = account.slot_ledgers
    slots.held = 3
    give = GiveBack(7, 0.0, [(REQUESTS.key, 100, -2, -1)])
    exchange = Exchange("p", 8, 7, 2, [give], [slots], [wish_of(account, 0.0, 1.25)])
    keys, body = exchange.encode()
    assert keys == ["{poolgate}:gateways", "{poolgate}:process:p", REQUESTS.key, SLOTS.key]
    sent = json.loads(body)
    assert sent["gives"] == [{"first": 7, "entries": [[3, 100, -2, -1]]}]
    assert sent["slots"] == [[4, 3]]
    assert sent["takes"][0]["limits"] == [[3, "requests_per_min", 10], [4, "in_flight", 2]]


@pytest.mark.parametrize(
    ("limit", "reply", "ask", "wait_s"),
    [
        (SLOTS, [1, 0, 0], 1, 0.0),
        (SLOTS, [2, 0, 0], 1, 1.0),
        (TOKENS, [0, 0, 0], 101, None),
        (TOKENS, [90, 0, 999_990, 999_990, 60, 999_950, 30], 10, 0.0),
        (TOKENS, [90, 0, 999_990, 999_990, 60, 999_950, 30], 40, 11.5),  # the older bucket is enough
        (TOKENS, [90, 0, 999_990, 999_990, 60, 999_950, 30], 41, 51.5),
        (TOKENS, [90, 25, 999_999, 999_999, 60, 999_950, 30], 35, 1.0),  # lies idle elsewhere
        (TOKENS, [90, 24, 999_999, 999_999, 60, 999_950, 30], 35, 11.5),
        (DAY, [90, 0, 1_036_800], 10, 0.0),
        (DAY, [90, 0, 1_036_800], 11, 36_799.5),  # its end
        (DAY, [90, 1, 1_036_800], 11, 1.0),
        (DAY, [90, 1, 1_000_001], 11, 0.5),
        (DAY, [90, 90, 1_036_800], 101, None),
    ],
)
def test_how_long_a_refused_request_has_to_wait(limit: Limit, reply: list[int], ask: int, wait_s: float | None) -> None:
    assert reading(limit, reply, ask, NOW_MS).wait_s == wait_s


def test_days_learn_what_all_have_used_and_of_the_lease_what_is_spent() -> None:
    account = an_account(DAY)
    account.ledgers[0].window.add(0, 13)  # as far as this process knew
    grant = Grant([1], 1, 0, 0, 0, [[80, 20, 1_036_800]])
    lease = Lease(1_000_000, 0.0, 1.0, 2, 40, None)
    grant.tell(account, lease)
    assert account.ledgers[0].window.used == 40


def test_the_tightest_limit_of_each_kind_is_told() -> None:
    user = Limit("user:u", Kind.REQUESTS, 8)
    replies = [3, 0, 999_999], [0, 0, 0], [1, 0, 0], [1, 0, 999_990], [99, 0, 1_036_800]
    state = told((REQUESTS, TOKENS, SLOTS, user, DAY), replies, 5.0, NOW_MS)
    assert state == Told(8, 7, 5.0 + 51.5, 100, 100, 5.0)  # of equal ones the smaller
