"""Streamed requests in a closed loop; prints what the contender's processes spent per chunk, as JSON.

    python -m bench.load_stream PORT MODEL KEY --pid PID --streams 64 --seconds 5

The streams begin spread over the length of one, so that they do not end all at once. Run as a process by measure.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from time import perf_counter
from typing import Any

import uvloop

from bench.cpu import cpu_s, tree
from bench.request import STREAM_TOKENS, Target
from bench.spread import percentile
from bench.streams import StreamClient, Streams

TICK_S = 0.02  # the fake upstream's
STREAM_S = STREAM_TOKENS * TICK_S
LATE_S = 10.0  # without one event: the stream hangs
MAX_FAULTS = 1000


class ClosedLoop(Streams):
    """So many streams at any time: one that ends makes room for the next on the same connection."""

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self._loop = asyncio.get_running_loop()
        self.first_ms: list[float] = []

    async def open(self, streams: int) -> None:
        for _ in range(streams):
            await self._open()
            await asyncio.sleep(STREAM_S / streams)

    def reset(self) -> None:
        """What comes from now on counts; faults count from the first."""
        self.events()
        self.finished = 0
        self.first_ms.clear()

    def events(self) -> int:
        return sum(client.take_events() for client in self._clients)

    def hanging(self) -> int:
        """Streams that have waited LATE_S for their first event."""
        now = perf_counter()
        return sum(not client.first_at and now - client.asked_at > LATE_S for client in self._clients)

    def _ended(self, client: StreamClient, fault: str) -> None:
        super()._ended(client, fault)
        if not fault:
            self.first_ms.append((client.first_at - client.asked_at) * 1e3)
        if not client.is_lost and self.faults.total() < MAX_FAULTS:
            self._loop.call_soon(client.ask, self._request)


async def load(target: Target, pid: int, streams: int, seconds: float) -> dict[str, Any]:
    loop = ClosedLoop(target)
    try:
        await loop.open(streams)
        await asyncio.sleep(STREAM_S)
        pids = tree([pid])
        loop.reset()
        before, began = cpu_s(pids), perf_counter()
        await asyncio.sleep(seconds)
        spent, took = cpu_s(pids) - before, perf_counter() - began
        events, hanging = loop.events(), loop.hanging()
    finally:
        loop.close()
    if loop.faults or hanging or not events or not loop.finished:
        bad, seen = loop.faults.total(), loop.most_faults()
        sys.exit(f"{streams} streams: {bad} bad, {hanging} hang, {loop.finished} finished; {seen}")
    return {
        "cpu_us": spent / events * 1e6,
        "events_per_s": events / took,
        "finished": loop.finished,
        "first_p50_ms": percentile(loop.first_ms, 50),
        "first_p99_ms": percentile(loop.first_ms, 99),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load_stream")
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("key")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=5)
    given = parser.parse_args()
    target = Target(given.port, given.model, given.key)
    try:
        print(json.dumps(uvloop.run(load(target, given.pid, given.streams, given.seconds))))
    except OSError as exc:
        sys.exit(f"{given.streams} streams: {exc}")


if __name__ == "__main__":
    main()
