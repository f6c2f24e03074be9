"""The window arithmetic of this process against a model that remembers every single charge."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.limits import Kind, Limit
from gateway.admission.local import MAX_WINDOWS, WINDOW_S, LocalBudget, Window

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
        return sum(amount for at_s, amount in self.charges if int(at_s) >= int(now_s) - WINDOW_S)


def admit(budget: LocalBudget, limit: Limit, ask: int, now_s: float) -> bool:
    [reading] = budget.read([limit], ask, 1, now_s)
    if reading.passes:
        budget.charge([limit], ask, now_s)
    return reading.passes


@given(start=st.floats(0, 10), plan=steps)
def test_no_minute_ever_holds_more_than_the_limit(start: float, plan: list[tuple[float, int]]) -> None:
    budget, model, now_s = LocalBudget(), Model(), start
    for gap, ask in plan:
        now_s += gap
        if admit(budget, TOKENS, ask, now_s):
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
        window.add(now_s, amount)
        model.charges.append((now_s, amount))
        assert window.used == model.in_buckets(now_s)


@given(start=st.floats(0, 10), plan=steps, ask=st.integers(1, 100))
def test_a_refused_request_passes_when_its_wait_is_over_and_not_before(
    start: float, plan: list[tuple[float, int]], ask: int
) -> None:
    budget, now_s = LocalBudget(), start
    for gap, amount in plan:
        now_s += gap
        admit(budget, TOKENS, amount, now_s)
    [reading] = budget.read([TOKENS], ask, 1, now_s)
    if reading.passes:
        return
    assert reading.wait_s is not None
    free_s = round(now_s + reading.wait_s)  # a bucket leaves on the second
    [just_before] = budget.read([TOKENS], ask, 1, free_s - 0.001)
    [then] = budget.read([TOKENS], ask, 1, free_s)
    assert (just_before.passes, then.passes) == (False, True)


@given(start=st.floats(0, 10), plan=steps)
def test_after_the_reset_the_whole_limit_is_free(start: float, plan: list[tuple[float, int]]) -> None:
    budget, now_s = LocalBudget(), start
    for gap, amount in plan:
        now_s += gap
        admit(budget, TOKENS, amount, now_s)
    [reading] = budget.read([TOKENS], 1, 1, now_s)
    [after] = budget.read([TOKENS], 1, 1, round(now_s + reading.reset_s))
    assert after.used == 0


@given(
    reserved=st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40), st.integers(0, 80)), min_size=1, max_size=20),
    wait=st.floats(0, 80),
)
def test_real_tokens_replace_the_reserved_ones_in_the_second_of_their_charge(
    reserved: list[tuple[float, int, int]], wait: float
) -> None:
    budget, now_s, charges = LocalBudget(), 0.0, []
    for gap, tokens, used in reserved:
        now_s += gap
        budget.charge([TOKENS], tokens, now_s)
        charges.append((now_s, tokens, used))
    now_s += wait
    budget.read([TOKENS], 0, 1, now_s)  # forgets what has left the window
    for at_s, tokens, used in charges:
        budget.settle([TOKENS], at_s, used - tokens)
    [reading] = budget.read([TOKENS], 0, 1, now_s)
    assert reading.used == sum(used for at_s, _, used in charges if int(at_s) >= int(now_s) - WINDOW_S)


def test_more_than_the_whole_limit_never_passes() -> None:
    [reading] = LocalBudget().read([TOKENS], 101, 1, 0.0)
    assert reading.wait_s is None


def test_a_share_is_never_less_than_one() -> None:
    budget = LocalBudget()
    assert admit(budget, REQUESTS, 0, 0.0)
    [reading] = budget.read([REQUESTS], 0, 20, 0.0)
    assert (reading.allowed, reading.passes) == (1, False)


def test_more_than_the_share_but_not_than_the_limit_may_pass_soon() -> None:
    [reading] = LocalBudget().read([TOKENS], 60, 2, 0.0)
    assert reading.wait_s == 1.0


def test_slots_are_counted_and_given_back() -> None:
    budget = LocalBudget()
    assert admit(budget, SLOTS, 0, 0.0)
    assert admit(budget, SLOTS, 0, 0.0)
    assert not admit(budget, SLOTS, 0, 0.0)
    budget.settle([SLOTS], 0.0, 0)
    assert admit(budget, SLOTS, 0, 0.0)


def test_windows_are_bounded_and_the_longest_unused_goes_first() -> None:
    budget = LocalBudget()
    admit(budget, REQUESTS, 0, 0.0)
    for number in range(MAX_WINDOWS - 1):
        admit(budget, Limit(f"key:{number}", Kind.REQUESTS, 10), 0, 0.0)
    [kept] = budget.read([REQUESTS], 0, 1, 0.0)
    assert kept.used == 1
    admit(budget, Limit("key:one-more", Kind.REQUESTS, 10), 0, 0.0)  # pushes out "key:0", not the one just read
    [kept] = budget.read([REQUESTS], 0, 1, 0.0)
    [gone] = budget.read([Limit("key:0", Kind.REQUESTS, 10)], 0, 1, 0.0)
    assert (kept.used, gone.used) == (1, 0)
