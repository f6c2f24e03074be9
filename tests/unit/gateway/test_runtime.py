"""Runtime: who is given up for not reading, and what the begin and the end of a drain do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fakes.story import a_config

from gateway.runtime import Runtime


class Open:
    """An open exchange."""

    def __init__(self, writing_since: float | None = None) -> None:
        self.writing_since = writing_since
        self.calls: list[str] = []

    def abandon(self) -> None:
        self.calls.append("abandon")

    def end(self) -> None:
        self.calls.append("end")


def runtime(*exchanges: Open) -> Runtime:
    none: Any = None
    config = a_config(gateway={"drain_s": 7, "timeouts": {"write_s": 60}})
    return Runtime(config, none, none, none, none, none, None, exchanges=set(exchanges))


def test_only_a_caller_that_has_not_taken_a_write_for_too_long_is_given_up() -> None:
    idle, reading, stalled = Open(), Open(941.0), Open(939.0)
    assert runtime(idle, reading, stalled).drop_stalled(now=1000.0) == 1
    assert (idle.calls, reading.calls, stalled.calls) == ([], [], ["abandon"])


def test_nobody_is_given_up_exactly_at_the_limit() -> None:
    assert runtime(Open(940.0)).drop_stalled(now=1000.0) == 0


async def test_a_drain_ends_readiness_at_once_and_what_still_runs_after_its_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[tuple[float, Callable[[], None]]] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay, callback: timers.append((delay, callback)))
    early = Open()
    made = runtime(early)
    assert not made.is_draining
    made.begin_drain()
    assert made.is_draining and early.calls == []
    late = Open()
    made.exchanges.add(late)
    ((delay_s, end),) = timers
    assert delay_s == 7
    end()
    assert (early.calls, late.calls) == (["end"], ["end"])
