"""Days and months that a budget ends with, in UTC, and what this process knows of the running one. Pure; for local.py.

budget.lua has the same calendar, by Redis' clock; this one is for the time that Redis is away.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from gateway.admission.limits import Kind

DAY_S = 86_400


class Period(NamedTuple):
    """One day or month: `begins_s` <= second < `ends_s`, since the epoch. `number` as budget.lua writes it."""

    number: int  # days since the epoch, or 12 * year + month - 1
    begins_s: int
    ends_s: int


def period_at(kind: Kind, utc_s: float) -> Period:
    if kind is Kind.DAY:
        day = int(utc_s // DAY_S)
        return Period(day, day * DAY_S, (day + 1) * DAY_S)
    at = datetime.fromtimestamp(utc_s, UTC)
    month = 12 * at.year + at.month - 1
    return Period(month, _first_second(month), _first_second(month + 1))


def _first_second(month: int) -> int:
    return int(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp())


class Calendar:
    """Makes UTC of this process's clock, which has no date: `offset_s` comes from whoever knows (see budget.py)."""

    __slots__ = ("offset_s",)

    def __init__(self) -> None:
        self.offset_s = 0.0

    def utc(self, now_s: float) -> float:
        return now_s + self.offset_s


class PeriodUse:
    """What of the running period is used, as far as this process knows; the previous ones are forgotten.

    That is what all processes together had used when Redis last told (`base`), and since then what this process spent
    and settled: it does not see what the others do. Some of that may be in both, a second's worth at most.
    """

    __slots__ = ("_base", "_calendar", "_kind", "_period", "used")

    def __init__(self, kind: Kind, calendar: Calendar) -> None:
        self._kind = kind
        self._calendar = calendar
        self._period = Period(-1, 0, 0)
        self._base = 0
        self.used = 0  # as of the last `advance`

    def advance(self, now_s: float) -> None:
        """Begin anew where a new period has begun; call before reading anything."""
        if not self._is_running(utc_s := self._calendar.utc(now_s)):
            self._period = period_at(self._kind, utc_s)
            self._base = self.used = 0

    def told(self, used: int, now_s: float) -> None:
        """Redis says that all processes together have used so much."""
        self.advance(now_s)
        self._base = self.used = used

    def add(self, second: int, amount: int) -> None:
        """Charge, or correct where `amount` is negative; what belongs to a period that has ended changes nothing."""
        utc_s = self._calendar.utc(second)
        if utc_s >= self._period.ends_s:
            self.advance(second)
        if self._is_running(utc_s):
            self.used = max(0, self.used + amount)

    def second(self, now_s: float) -> int:
        """Redis' second at that time of this process's clock, as far as known."""
        return int(self._calendar.utc(now_s))

    def share(self, value: int, processes: int) -> int:
        """What this process may bring `used` to: of what was left when Redis last told, its part."""
        return max(1, self._base + max(0, value - self._base) // processes)

    def ends_in_s(self, now_s: float) -> float:
        return self._period.ends_s - self._calendar.utc(now_s)

    def _is_running(self, utc_s: float) -> bool:
        return self._period.begins_s <= utc_s < self._period.ends_s
