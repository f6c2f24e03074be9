"""Load is the same in every run, and what one caller asks for does not move another's requests."""

from __future__ import annotations

import pytest

from bench.overload.arrivals import ALONE, CALLERS, FIVEFOLD, PHASES, arrivals, rates
from bench.overload.capacity import PER_S


def test_the_phases_are_half_one_two_and_five_times_the_capacity() -> None:
    assert [sum(rates(phase).values()) / PER_S for phase in PHASES] == pytest.approx([0.5, 1, 2, 5])
    assert [phase.title for phase in PHASES] == [f"{load} × capacity" for load in ("0.5", "1", "2", "5")]


def test_interactive_asks_for_the_same_in_every_phase_and_alone_nobody_else_asks() -> None:
    assert {rates(phase)["interactive"] for phase in PHASES} == {0.5 * PER_S}
    assert list(rates(ALONE)) == ["interactive"]


def test_the_shares_of_a_class_add_up() -> None:
    assert sum(caller.share for caller in CALLERS if caller.class_name == "batch") == pytest.approx(1)


def test_the_same_seed_gives_the_same_arrivals_and_another_gives_others() -> None:
    first = arrivals({"a": 50.0}, 10, seed=1)
    assert first == arrivals({"a": 50.0}, 10, seed=1) != arrivals({"a": 50.0}, 10, seed=2)


def test_who_else_asks_does_not_move_a_callers_requests() -> None:
    among_others = arrivals(rates(FIVEFOLD), 10, seed=1)
    assert [each for each in among_others if each.caller == "interactive"] == arrivals(rates(ALONE), 10, seed=1)


def test_arrivals_come_in_order_within_the_time_and_at_the_rate() -> None:
    found = arrivals({"a": 100.0, "b": 10.0}, 100, seed=3)
    assert found == sorted(found) and found[0].at_s > 0 and found[-1].at_s < 100
    assert sum(each.caller == "a" for each in found) == pytest.approx(10_000, rel=0.05)
