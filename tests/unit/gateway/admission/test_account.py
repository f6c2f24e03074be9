"""What one account does with the lease and the slots that it was given, and what its tickets tell."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gateway.admission.account import FOREVER, MAX_TOKENS, Account, Lease, Told
from gateway.admission.limits import Kind, Limit
from gateway.admission.local import Ledgers
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.request import NO_RATE, RateState

ALL = (Limit("key:a", Kind.REQUESTS, 50), Limit("key:a", Kind.TOKENS, 1000), Limit("key:a", Kind.IN_FLIGHT, 5))


@dataclass
class World:
    """An account with a lease, a clock, and what it told its keeper."""

    limits: tuple[Limit, ...] = ALL
    now_s: float = 0.0
    owed: list[Lease] = field(default_factory=list)
    released: int = 0

    def __post_init__(self) -> None:
        self.account = Account(self.limits, Ledgers().of(self.limits), self, lambda: self.now_s)

    def owe(self, account: Account, lease: Lease) -> None:
        self.owed.append(lease)

    def release(self, account: Account) -> None:
        self.released += 1

    def give(self, requests: int = 10, tokens: int = 100, slots: int = 2, idle: int = 2) -> Lease:
        lease = self.account.lease = Lease(100, self.now_s, self.now_s + 1.0, requests, tokens, None)
        lease.is_open = True
        lease.told = Told(50, 30, 61.5, 1000, 700, 61.0)
        self.account.slots, self.account.idle = slots, idle
        return lease


def used(tokens: int) -> Outcome:
    return Outcome(Ending.COMPLETED, 200, Usage(0, tokens))


def test_nothing_given_admits_nothing() -> None:
    assert World().account.admit(0) is None


@pytest.mark.parametrize(
    ("given", "asked", "passes"),
    [
        ({"requests": 3, "tokens": 30, "slots": 5}, 10, 3),
        ({"requests": 9, "tokens": 35, "slots": 5}, 10, 3),
        ({"requests": 9, "tokens": 99, "slots": 4}, 10, 4),
    ],
)
def test_what_is_given_is_spent_and_no_more(given: dict[str, int], asked: int, passes: int) -> None:
    world = World()
    world.give(**given)
    assert sum(world.account.admit(asked) is not None for _ in range(9)) == passes


def test_a_lease_is_not_spent_after_its_time() -> None:
    world = World()
    world.give()
    world.now_s = 0.999
    assert world.account.admit(1) is not None
    world.now_s = 1.0
    assert world.account.admit(1) is None


def test_who_waits_for_redis_is_not_overtaken() -> None:
    world = World()
    world.give()
    world.account.waiters.append(object())  # type: ignore[arg-type]
    assert world.account.admit(1) is None


def test_a_settled_slot_and_unspent_tokens_are_there_for_the_next() -> None:
    world = World()
    lease = world.give(tokens=100, slots=1)
    for _ in range(5):
        ticket = world.account.admit(80)
        assert ticket is not None
        ticket.settle(used(5))
        ticket.settle(used(0))
    assert (lease.tokens, lease.requests, world.account.running) == (75, 5, 0)
    assert (world.owed, world.released) == ([], 0)
    assert world.account.admit(90) is None


def test_more_used_than_reserved_comes_out_of_the_lease_or_is_owed() -> None:
    world = World()
    lease = world.give(tokens=100)
    first, second = world.account.admit(10), world.account.admit(10)
    assert first is not None
    assert second is not None
    first.settle(used(60))
    assert (lease.tokens, lease.debt) == (30, 0)
    second.settle(used(60))
    assert (lease.tokens, lease.debt, world.owed) == (30, 50, [lease])


def test_a_request_that_outlives_its_lease_is_corrected_in_the_second_of_its_charge() -> None:
    world = World()
    early = world.give()
    tickets = [world.account.admit(40), world.account.admit(40)]
    late = world.give()
    for ticket in tickets:
        assert ticket is not None
        ticket.settle(used(10))
    assert (early.debt, late.debt, late.tokens) == (-60, 0, 100)


@pytest.mark.parametrize(("tokens", "delta"), [(-5, -10), (10**30, MAX_TOKENS - 10)])
def test_a_count_that_makes_no_sense_does_no_harm(tokens: int, delta: int) -> None:
    world = World()
    world.give()
    ticket = world.account.admit(10)
    assert ticket is not None
    lease = world.give()
    ticket.settle(used(tokens))
    assert (world.owed[0].debt, lease.debt) == (delta, 0)


def test_a_slot_more_than_may_be_idle_is_told_at_once() -> None:
    world = World()
    world.give(slots=3, idle=1)
    tickets = [world.account.admit(1) for _ in range(3)]
    told = []
    for ticket in tickets:
        assert ticket is not None
        ticket.settle(used(1))
        told.append(world.released)
    assert told == [0, 1, 2]


def test_a_kind_without_a_limit_holds_up_nothing() -> None:
    world = World((Limit("key:a", Kind.IN_FLIGHT, 2),))
    assert not world.account.has_windows
    lease = Lease(100, 0.0, FOREVER, 1 << 60, 1 << 60, None)
    world.account.lease, world.account.slots, world.account.idle = lease, 1, 1
    ticket = world.account.admit(MAX_TOKENS)
    assert ticket is not None
    assert ticket.rate == NO_RATE
    ticket.settle(used(3))
    assert world.owed == []


def test_a_day_alone_is_spent_from_a_lease_and_corrected_as_a_minute_is() -> None:
    world = World((Limit("key:a", Kind.DAY, 1000),))
    assert world.account.has_windows
    lease = world.give(tokens=100, slots=9)
    ticket, other = world.account.admit(60), world.account.admit(30)
    assert ticket is not None
    assert other is not None
    assert world.account.admit(20) is None
    ticket.settle(used(10))
    assert lease.tokens == 60
    lease.is_open = False
    other.settle(used(10))
    assert world.owed == [lease]
    assert lease.debt == -20


def test_a_ticket_tells_what_was_left_when_it_was_admitted() -> None:
    world = World()
    world.give(requests=10, tokens=100)
    world.now_s = 0.5
    ticket, later = world.account.admit(40), world.account.admit(10)
    assert ticket is not None
    assert later is not None
    assert ticket.rate == RateState(50, 39, 61.0, 1000, 760, 60.5)
    assert later.rate == RateState(50, 38, 61.0, 1000, 750, 60.5)
