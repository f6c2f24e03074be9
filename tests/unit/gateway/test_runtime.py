"""Runtime: what the begin and the end of a drain do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fakes.story import a_config

from gateway.runtime import Runtime


class Open:
    """An open exchange."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def end(self) -> None:
        self.calls.append("end")


def runtime(*exchanges: Open) -> Runtime:
    none: Any = None
    config = a_config(gateway={"drain_s": 7})
    return Runtime(config, none, none, none, none, None, exchanges=set(exchanges))


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
