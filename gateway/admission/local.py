"""What this process knows of each limit by itself: budget.py decides with it while Redis is away.

It is fed with what was admitted at all times, so that it knows what this process let through in the last minute when
Redis goes away; of days and months, with what Redis told too. Pure: the clock's reading is passed in, in seconds, and
never goes back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from weakref import WeakValueDictionary

from gateway.admission.limits import KEEP_S, PERIODS, SLOT_WAIT_S, Kind, Limit, Reading, wait_s
from gateway.admission.period import Calendar, PeriodUse

SHARE_WAIT_S = 1.0  # more than this process's share but within the limit: passes once Redis is back, perhaps soon
MAX_LEDGERS = 20_000


class Window:
    """One-second buckets; one counts until its last possible spending is 60 s old."""

    __slots__ = ("_buckets", "used")

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()  # [second, amount], oldest first
        self.used = 0  # as of the last `advance`

    def advance(self, now_s: float) -> None:
        """Forget what has left the window; call before reading anything."""
        oldest = int(now_s) - KEEP_S
        while self._buckets and self._buckets[0][0] < oldest:
            self.used -= self._buckets.popleft()[1]

    def add(self, second: int, amount: int) -> None:
        """Charge, or correct where `amount` is negative: a bucket does not go below 0."""
        for at in range(len(self._buckets) - 1, -1, -1):
            bucket = self._buckets[at]
            if bucket[0] == second:
                amount = max(amount, -bucket[1])
                bucket[1] += amount
                self.used += amount
                return
            if bucket[0] < second:
                break
        else:
            at = -1
        if amount > 0:
            self._buckets.insert(at + 1, [second, amount])
            self.used += amount

    def wait_s(self, now_s: float, excess: int) -> float:
        """Seconds until `excess` has left the window; 0 if there is none to leave."""
        return wait_s(((second, amount) for second, amount in self._buckets), now_s, excess)

    def reset_s(self, now_s: float) -> float:
        newest = next((second for second, amount in reversed(self._buckets) if amount > 0), None)
        return 0.0 if newest is None else newest + KEEP_S + 1 - now_s


class Ledger:
    """One Redis key, whatever value its limit has: what is used of the minute, day or month, or the slots held.

    There is one per key as long as anybody refers to it, so what is held can never be counted in two places.
    """

    __slots__ = ("__weakref__", "held", "key", "kind", "window")

    def __init__(self, limit: Limit, calendar: Calendar) -> None:
        self.key = limit.key
        self.kind = limit.kind
        self.window = PeriodUse(limit.kind, calendar) if limit.kind in PERIODS else Window()
        self.held = 0  # slots, used or idle

    def read(self, limit: Limit, ask: int, processes: int, now_s: float) -> Reading:
        """Where the limit stands for a request of `ask`, divided by `processes` (but at least 1)."""
        window = self.window
        window.advance(now_s)
        if isinstance(window, PeriodUse):
            return _read_period(window, limit, ask, processes, now_s)
        allowed = max(1, limit.value // processes)
        if self.kind is Kind.IN_FLIGHT:
            return Reading(limit, allowed, self.held, SLOT_WAIT_S if self.held + 1 > allowed else 0.0, 0.0)
        wait: float | None
        if ask > limit.value:
            wait = None
        elif ask > allowed:
            wait = SHARE_WAIT_S
        else:
            wait = window.wait_s(now_s, window.used + ask - allowed)
        return Reading(limit, allowed, window.used, wait, window.reset_s(now_s))


def _read_period(use: PeriodUse, limit: Limit, ask: int, processes: int, now_s: float) -> Reading:
    allowed, ends_in_s = use.share(limit.value, processes), use.ends_in_s(now_s)
    wait: float | None
    if ask > limit.value:
        wait = None
    elif use.used + ask <= allowed:
        wait = 0.0
    else:
        wait = SHARE_WAIT_S if use.used + ask <= limit.value else ends_in_s
    return Reading(limit, allowed, use.used, wait, ends_in_s)


class Ledgers:
    """All ledgers of this process. The longest unused go first beyond MAX_LEDGERS, but never one that is in use."""

    def __init__(self) -> None:
        self.calendar = Calendar()
        self._all: WeakValueDictionary[str, Ledger] = WeakValueDictionary()
        self._recent: OrderedDict[str, Ledger] = OrderedDict()

    def of(self, limits: Iterable[Limit]) -> tuple[Ledger, ...]:
        return tuple(self._of(limit) for limit in limits)

    def _of(self, limit: Limit) -> Ledger:
        key = limit.key
        ledger = self._all.get(key)
        if ledger is None:
            ledger = self._all[key] = Ledger(limit, self.calendar)
        self._recent[key] = ledger
        self._recent.move_to_end(key)
        if len(self._recent) > MAX_LEDGERS:
            self._recent.popitem(last=False)
        return ledger
