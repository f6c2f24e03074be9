"""The load of `make bench-overload` against its engines as a process: what they can do is served, the rest gives up."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fakes.ports import free_port
from fakes.waits import eventually

from bench.children import RunFailed
from bench.fake_upstream import SERVED_NAME
from bench.overload.arrivals import Arrival
from bench.overload.capacity import SLOTS
from bench.overload.load import OpenLoop
from bench.overload.rounds import streams_in
from bench.request import Target, raw

ROOT = Path(__file__).parents[2]


def streams_or_none(port: int) -> int | None:
    with contextlib.suppress(RunFailed):
        return streams_in(port)
    return None


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of one engine."""
    port = free_port()
    command = [sys.executable, "-m", "bench.overload.engines", str(port)]
    engines = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        await eventually(lambda: asyncio.to_thread(lambda: streams_or_none(port) is not None), "no engine")
        yield port
    finally:
        engines.terminate()
        await engines.wait()


async def fates(port: int, requests: int, patience_s: float) -> Counter[str]:
    """Of requests that all come at once."""
    loop = OpenLoop(port, {"a": raw(Target(port, SERVED_NAME, "k"), is_stream=True)}, patience_s)
    await loop.run([Arrival(0.0, "a")] * requests)
    assert {request.fault for request in loop.done} == {""}
    return Counter(request.fate for request in loop.done)


async def test_all_are_served_when_they_have_the_patience(port: int) -> None:
    assert await fates(port, 3 * SLOTS, patience_s=60.0) == {"served": 3 * SLOTS}


async def test_those_that_give_up_leave_the_engine_and_the_next_find_it_free(port: int) -> None:
    found = await fates(port, 20 * SLOTS, patience_s=1.0)
    assert found["gave_up"] > 0 and found["gave_up"] + found["served"] == 20 * SLOTS
    await eventually(lambda: asyncio.to_thread(lambda: streams_in(port) == 0), "streams of callers that are gone")
    assert await fates(port, SLOTS, patience_s=60.0) == {"served": SLOTS}
