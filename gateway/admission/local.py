"""The same budget arithmetic as budget.lua in this process's memory; budget.py uses it while Redis is away.

It is fed with every admitted request at all times, so that it knows what this process let through in the last minute
when Redis goes away. Pure: the clock's reading is passed in, in seconds, and never goes back.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from gateway.admission.limits import Kind, Limit, Reading

WINDOW_S = 60
SLOT_WAIT_S = 1.0
SHARE_WAIT_S = 1.0  # more than this process's share but within the limit: passes once Redis is back, perhaps soon
MAX_WINDOWS = 20_000


class Window:
    """One-second buckets; one counts until its last possible event is 60 s old."""

    __slots__ = ("_buckets", "used")

    def __init__(self) -> None:
        self._buckets: deque[list[int]] = deque()  # [second, amount], oldest first
        self.used = 0  # as of the last `advance`

    def advance(self, now_s: float) -> None:
        """Forget what has left the window; call before reading anything."""
        oldest = int(now_s) - WINDOW_S
        while self._buckets and self._buckets[0][0] < oldest:
            self.used -= self._buckets.popleft()[1]

    def add(self, now_s: float, amount: int) -> None:
        second = int(now_s)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append([second, 0])
        self._buckets[-1][1] += amount
        self.used += amount

    def correct(self, second: int, delta: int) -> None:
        """Change what was charged in `second`, not below 0; nothing if that bucket has left the window."""
        for bucket in reversed(self._buckets):
            if bucket[0] == second:
                delta = max(delta, -bucket[1])
                bucket[1] += delta
                self.used += delta
            if bucket[0] <= second:
                return

    def wait_s(self, now_s: float, excess: int) -> float:
        """Seconds until `excess` has left the window; 0 if there is none to leave."""
        for second, amount in self._buckets:
            if excess <= 0:
                break
            excess -= amount
            if excess <= 0:
                return second + WINDOW_S + 1 - now_s
        return 0.0

    def reset_s(self, now_s: float) -> float:
        newest = next((second for second, amount in reversed(self._buckets) if amount > 0), None)
        return 0.0 if newest is None else newest + WINDOW_S + 1 - now_s


class LocalBudget:
    """All windows and slots of this process; at most MAX_WINDOWS windows, the longest unused one goes first."""

    def __init__(self) -> None:
        self._windows: OrderedDict[str, Window] = OrderedDict()
        self._slots: dict[str, int] = {}  # in-flight key → how many this process holds; no entry for 0

    def read(self, limits: Sequence[Limit], tokens: int, processes: int, now_s: float) -> list[Reading]:
        """Where each limit stands for a request of `tokens`, each limit divided by `processes` (but at least 1)."""
        return [self._read(limit, limit.ask(tokens), max(1, limit.value // processes), now_s) for limit in limits]

    def _read(self, limit: Limit, ask: int, allowed: int, now_s: float) -> Reading:
        if limit.kind is Kind.IN_FLIGHT:
            held = self._slots.get(limit.key, 0)
            return Reading(limit, allowed, held, SLOT_WAIT_S if held + 1 > allowed else 0.0, 0.0)
        window = self._window(limit.key, now_s)
        wait_s: float | None
        if ask > limit.value:
            wait_s = None
        elif ask > allowed:
            wait_s = SHARE_WAIT_S
        else:
            wait_s = window.wait_s(now_s, window.used + ask - allowed)
        return Reading(limit, allowed, window.used, wait_s, window.reset_s(now_s))

    def charge(self, limits: Sequence[Limit], tokens: int, now_s: float) -> None:
        for limit in limits:
            if limit.kind is Kind.IN_FLIGHT:
                self._slots[limit.key] = self._slots.get(limit.key, 0) + 1
            else:
                self._window(limit.key, now_s).add(now_s, limit.ask(tokens))

    def settle(self, limits: Sequence[Limit], charged_s: float, delta: int) -> None:
        """Give the slots back and correct the tokens that were charged at `charged_s` by `delta` (used - reserved)."""
        for limit in limits:
            if limit.kind is Kind.IN_FLIGHT:
                held = self._slots.get(limit.key, 0) - 1
                if held > 0:
                    self._slots[limit.key] = held
                else:
                    self._slots.pop(limit.key, None)
            elif limit.kind is Kind.TOKENS and delta and (window := self._windows.get(limit.key)) is not None:
                window.correct(int(charged_s), delta)

    def _window(self, key: str, now_s: float) -> Window:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = Window()
            if len(self._windows) > MAX_WINDOWS:
                self._windows.popitem(last=False)
        else:
            self._windows.move_to_end(key)
        window.advance(now_s)
        return window
