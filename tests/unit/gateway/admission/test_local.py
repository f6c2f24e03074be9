"""The window arithmetic of this process against a model that remembers every single charge."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import local
from gateway.admission.limits import KEEP_S, WINDOW_S, Kind, Limit, Reading
from gateway.admission.local import Ledger, Ledgers, Window
from gateway.admission.period import Calendar

REQUESTS = Limit("key:a", Kind.REQUESTS, 10)
TOKENS = Limit("key:a", Kind.TOKENS, 100)
SLOTS = Limit("key:a", Kind.IN_FLIGHT, 2)

gaps = st.one_of(st.floats(0, 0.4), st.floats(0, 5), st.floats(30, 90))
steps = st.lists(st.tuples(gaps, st.integers(1, 60)), max_size=80)


@dataclass
class Model:
    """Every charge with its exact time."""

    charges: list[tuple[float, int]] = field(default_factory=list)

    def in_last_minute(self, now_s: float) -> int:
        return sum(amount for at_s, amount in self.charges if now_s - at_s < WINDOW_S)

    def in_buckets(self, now_s: float) -> int:
        return sum(amount for at_s, amount in self.charges if int(at_s) >= int(now_s) - KEEP_S)


def read(ledger: Ledger, limit: Limit, tokens: int, processes: int, now_s: float) -> Reading:
    return ledger.read(limit, limit.ask(tokens), processes, now_s)


def admit(ledger: Ledger, limit: Limit, tokens: int, now_s: float) -> bool:
    reading = read(ledger, limit, tokens, 1, now_s)
    if reading.passes:
        if limit.kind is Kind.IN_FLIGHT:
            ledger.held += 1
        else:
            ledger.window.add(int(now_s), limit.ask(tokens))
    return reading.passes


@given(start=st.floats(0, 10), plan=steps)
def test_no_minute_ever_holds_more_than_the_limit(start: float, plan: list[tuple[float, int]]) -> None:
    ledger, model, now_s = Ledger(TOKENS, Calendar()), Model(), start
    for gap, ask in plan:
        now_s += gap
        if admit(ledger, TOKENS, ask, now_s):
            model.charges.append((now_s, ask))
        assert model.in_last_minute(now_s) <= TOKENS.value


@given(start=st.floats(0, 10), plan=steps)
def test_what_counts_as_used_is_exactly_the_buckets_of_the_last_minute(
    start: float, plan: list[tuple[float, int]]
) -> None:
    window, model, now_s = Window(), Model(), start
    for gap, amount in plan:
        now_s += gap
        window.advance(now_s)
        window.add(int(now_s), amount)
        model.charges.append((now_s, amount))
        assert window.used == model.in_buckets(now_s)


@given(start=st.floats(0, 10), plan=steps, ask=st.integers(1, 100))
def test_a_refused_request_passes_when_its_wait_is_over_and_not_before(
    start: float, plan: list[tuple[float, int]], ask: int
) -> None:
    ledger, now_s = Ledger(TOKENS, Calendar()), start
    for gap, amount in plan:
        now_s += gap
        admit(ledger, TOKENS, amount, now_s)
    reading = read(ledger, TOKENS, ask, 1, now_s)
    if reading.passes:
        return
    assert reading.wait_s is not None
    free_s = round(now_s + reading.wait_s)  # a bucket leaves on the second
    just_before = read(ledger, TOKENS, ask, 1, free_s - 0.001)
    then = read(ledger, TOKENS, ask, 1, free_s)
    assert (just_before.passes, then.passes) == (False, True)


@given(start=st.floats(0, 10), plan=steps)
def test_after_the_reset_the_whole_limit_is_free(start: float, plan: list[tuple[float, int]]) -> None:
    ledger, now_s = Ledger(TOKENS, Calendar()), start
    for gap, amount in plan:
        now_s += gap
        admit(ledger, TOKENS, amount, now_s)
    reading = read(ledger, TOKENS, 1, 1, now_s)
    after = read(ledger, TOKENS, 1, 1, round(now_s + reading.reset_s))
    assert after.used == 0


@given(
    reserved=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40), st.integers(0, 80)), min_size=1, max_size=20),
    wait=st.floats(0, 80),
)
def test_real_tokens_replace_the_reserved_ones_in_the_second_of_their_charge(
    reserved: list[tuple[float, int, int]], wait: float
) -> None:
    ledger, now_s, charges = Ledger(TOKENS, Calendar()), 0.0, []
    for gap, tokens, used in reserved:
        now_s += gap
        ledger.window.add(int(now_s), tokens)
        charges.append((now_s, tokens, used))
    now_s += wait
    read(ledger, TOKENS, 0, 1, now_s)  # forgets what has left the window
    for at_s, tokens, used in charges:
        if int(at_s) >= int(now_s) - KEEP_S:
            ledger.window.add(int(at_s), used - tokens)
    reading = read(ledger, TOKENS, 0, 1, now_s)
    assert reading.used == sum(used for at_s, _, used in charges if int(at_s) >= int(now_s) - KEEP_S)


@given(charges=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=30))
def test_charges_that_are_learnt_of_late_leave_with_their_own_second(charges: list[tuple[int, int]]) -> None:
    window = Window()
    for second, amount in charges:
        window.add(second, amount)
    for now_s in range(20, 90):
        window.advance(now_s)
        assert window.used == sum(amount for second, amount in charges if second >= now_s - KEEP_S)


def test_more_than_the_whole_limit_never_passes() -> None:
    reading = read(Ledger(TOKENS, Calendar()), TOKENS, 101, 1, 0.0)
    assert reading.wait_s is None


def test_a_share_is_never_less_than_one() -> None:
    ledger = Ledger(REQUESTS, Calendar())
    assert admit(ledger, REQUESTS, 0, 0.0)
    reading = read(ledger, REQUESTS, 0, 20, 0.0)
    assert (reading.allowed, reading.passes) == (1, False)


def test_more_than_the_share_but_not_than_the_limit_may_pass_soon() -> None:
    reading = read(Ledger(TOKENS, Calendar()), TOKENS, 60, 2, 0.0)
    assert reading.wait_s == 1.0


def test_slots_are_counted_and_given_back() -> None:
    ledger = Ledger(SLOTS, Calendar())
    assert admit(ledger, SLOTS, 0, 0.0)
    assert admit(ledger, SLOTS, 0, 0.0)
    assert not admit(ledger, SLOTS, 0, 0.0)
    ledger.held -= 1
    assert admit(ledger, SLOTS, 0, 0.0)


def test_ledgers_are_bounded_and_the_longest_unused_goes_first_but_none_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "MAX_LEDGERS", 3)
    ledgers = Ledgers()
    in_use = ledgers.of([Limit("key:used", Kind.REQUESTS, 10)])
    for number in range(5):
        [ledger] = ledgers.of([Limit(f"key:{number}", Kind.REQUESTS, 10)])
        ledger.window.add(0, 1)
        del ledger
    kept = [ledgers.of([Limit(f"key:{number}", Kind.REQUESTS, 10)])[0].window.used for number in (4, 3, 2, 0)]
    assert kept == [1, 1, 1, 0]
    assert ledgers.of([Limit("key:used", Kind.REQUESTS, 99)]) == in_use  # whatever its limit is by now
