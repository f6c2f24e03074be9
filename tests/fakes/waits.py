"""How tests wait: for a condition, with a deadline that fails the test, and for a few turns of the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")

WITHIN_S = 10.0  # far above what is waited for: a busy machine must not fail a test
LOOK_S = 0.005  # between two looks


async def eventually(look: Callable[[], T | Awaitable[T]], what: str = "", within_s: float = WITHIN_S) -> T:
    """The first true answer of `look`, which may be a coroutine function. Raises AssertionError with `what`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        answer = look()
        if inspect.isawaitable(answer):
            answer = await answer
        if answer:
            return answer
        assert loop.time() < deadline, f"not within {within_s} s: {what or answer!r}"
        await asyncio.sleep(LOOK_S)


async def loop_turns(count: int = 5) -> None:
    """Lets what is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)
