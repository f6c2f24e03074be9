from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.limits import Kind, Limit
from gateway.admission.local import Ledger
from gateway.admission.period import DAY_S, Calendar, Period, PeriodUse, period_at

seconds = st.floats(0, 253_000_000_000)  # until the year 9987
kinds = st.sampled_from([Kind.DAY, Kind.MONTH])


@given(kind=kinds, utc_s=seconds)
def test_each_second_is_in_one_period_and_the_next_begins_where_it_ends(kind: Kind, utc_s: float) -> None:
    number, begins_s, ends_s = period_at(kind, utc_s)
    assert begins_s <= utc_s < ends_s
    assert period_at(kind, ends_s - 1) == (number, begins_s, ends_s)
    assert period_at(kind, ends_s)[:2] == (number + 1, ends_s)


@given(kind=kinds, utc_s=seconds)
def test_a_period_begins_at_midnight_and_a_month_on_the_first(kind: Kind, utc_s: float) -> None:
    period = period_at(kind, utc_s)
    assert period.begins_s % DAY_S == period.ends_s % DAY_S == 0
    if kind is Kind.MONTH:
        now, begins = datetime.fromtimestamp(utc_s, UTC), datetime.fromtimestamp(period.begins_s, UTC)
        assert (begins.year, begins.month, begins.day) == (now.year, now.month, 1)


class World:
    """What one process knows of a day, its clock standing at 100 where Redis has noon of the second day."""

    def __init__(self, value: int = 100) -> None:
        self.calendar = Calendar()
        self.calendar.offset_s = 1.5 * DAY_S - 100
        self.limit = Limit("key:a", Kind.DAY, value)
        self.ledger = Ledger(self.limit, self.calendar)
        assert isinstance(self.ledger.window, PeriodUse)
        self.use = self.ledger.window

    def wait_s(self, ask: int, now_s: float = 100.0, processes: int = 1) -> float | None:
        return self.ledger.read(self.limit, ask, processes, now_s).wait_s


TO_MIDNIGHT_S = DAY_S / 2


def test_used_up_is_used_up_until_midnight() -> None:
    world = World()
    world.use.add(100, 90)
    assert world.wait_s(10) == 0
    assert world.wait_s(11) == TO_MIDNIGHT_S
    assert world.wait_s(11, 100 + TO_MIDNIGHT_S - 0.5) == 0.5
    assert world.wait_s(11, 100 + TO_MIDNIGHT_S) == 0
    assert world.wait_s(101, 100 + TO_MIDNIGHT_S) is None


def test_a_correction_touches_only_the_day_of_its_charge() -> None:
    world = World()
    world.use.add(100, 90)
    world.use.add(100, -40)
    assert (world.wait_s(50), world.wait_s(51)) == (0, TO_MIDNIGHT_S)
    tomorrow_s = 100 + DAY_S
    world.use.add(tomorrow_s, 60)
    world.use.add(100, -50)
    assert world.ledger.read(world.limit, 0, 1, tomorrow_s).used == 60


def test_the_share_is_of_what_was_left_when_redis_last_told() -> None:
    world = World()
    world.use.told(60, 100.0)
    assert world.wait_s(20, processes=2) == 0
    world.use.add(101, 20)
    assert world.wait_s(1, processes=2) == 1.0  # within the limit: passes once Redis is back, perhaps
    assert world.wait_s(21, processes=2) == TO_MIDNIGHT_S
    world.use.told(100, 102.0)
    assert world.wait_s(1, processes=2) == TO_MIDNIGHT_S
    world.use.told(70, 103.0)
    assert world.ledger.read(world.limit, 0, 3, 103.0).allowed == 80


def test_what_redis_told_is_forgotten_with_its_day() -> None:
    world = World()
    world.use.told(100, 100.0)
    assert world.wait_s(50, 100 + DAY_S, processes=2) == 0
    assert world.wait_s(51, 100 + DAY_S, processes=2) == 1.0


@pytest.mark.parametrize("kind", [Kind.DAY, Kind.MONTH])
def test_a_calendar_that_learns_the_date_begins_anew(kind: Kind) -> None:
    calendar = Calendar()
    use = PeriodUse(kind, calendar)
    use.add(100, 90)
    assert use.used == 90
    calendar.offset_s = 40.0 * DAY_S
    use.advance(100)
    assert (use.used, use.ends_in_s(100)) == (0, period_at(kind, 40 * DAY_S + 100).ends_s - 40 * DAY_S - 100)


def test_the_numbers_are_those_that_budget_lua_writes() -> None:
    at = datetime(2026, 12, 1, tzinfo=UTC).timestamp()
    assert period_at(Kind.MONTH, at).number == 12 * 2026 + 11
    assert period_at(Kind.DAY, DAY_S * 3 + 7) == Period(3, 3 * DAY_S, 4 * DAY_S)
