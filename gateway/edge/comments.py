"""SSE comments in a stream that is silent: no client shows them, and no proxy takes it for dead. Made by context.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.upstream.reply import TIMER_SLACK_S

COMMENT = b": keep-alive\n\n"


class Comments:
    """Calls `comment` after each silence of `interval_s`, until `stop`. Whoever writes to the stream calls `wrote`."""

    __slots__ = ("_comment", "_interval_s", "_loop", "_passed_at", "_timer", "_wrote_at")

    def __init__(self, interval_s: float, passed_at: Callable[[], float], comment: Callable[[], None]) -> None:
        """`passed_at`: the loop's time of the last write that went past `wrote`; 0 for none."""
        self._interval_s = interval_s
        self._passed_at = passed_at
        self._comment = comment
        self._loop = loop = asyncio.get_running_loop()
        self._wrote_at = loop.time()
        self._timer = loop.call_later(interval_s, self._tick)

    def wrote(self) -> None:
        self._wrote_at = self._loop.time()

    def _tick(self) -> None:
        now = self._loop.time()
        self._wrote_at = max(self._wrote_at, self._passed_at())
        is_due = self._wrote_at + self._interval_s <= now + TIMER_SLACK_S
        if is_due:
            self._wrote_at = now  # be it that the comment cannot be written
        self._timer = self._loop.call_at(self._wrote_at + self._interval_s, self._tick)
        if is_due:
            self._comment()

    def stop(self) -> None:
        self._timer.cancel()
