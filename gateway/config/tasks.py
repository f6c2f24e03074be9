"""Ends tasks for certain, and carries clean-up through whatever cancels it. Used where long-lived tasks are owned."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CANCEL_AGAIN_S = 1.0


async def end_task(task: asyncio.Task[Any], *, patience_s: float = 0.0) -> None:
    """Waits `patience_s` for the task, then cancels it until it is done: one cancellation may get lost.

    asyncio.wait_for of Python 3.11 drops it when its inner task has just finished; redis-py awaits each send that way.
    What the task raised is read, so that nothing complains of it later.
    """
    await asyncio.wait({task}, timeout=patience_s)
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Waits for `work` even while the waiting task is cancelled; raises the cancellation after it."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            if task.cancelled():
                raise
            cancelled = exc
    if cancelled is not None:
        raise cancelled
    return task.result()
