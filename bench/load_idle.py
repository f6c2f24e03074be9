"""Opens thousands of streams that hardly move; prints the contender's memory for each, as JSON.

    python -m bench.load_idle PORT MODEL KEY --pid PID --upstream-port PORT --steps 2000,9900

Opens up to the first step, waits, reads the resident memory, goes on to the next; at the end it tells the upstream to
finish and sees that every stream came to its end. Run as a process by measure.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import uvloop

from bench.cpu import rss_bytes, tree
from bench.load_latency import BadReply, durations_ms
from bench.request import Target
from bench.streams import StreamClient, Streams

OPENS_PER_S = 1500
BATCH = 15
SETTLE_S = 1.0
FIRST_EVENT_S = 30.0  # for the last of a step to have its first event
END_S = 40.0  # for all streams to end, once the upstream was told
WARM_UP_REQUESTS = 200
ANSWER_S = 10.0  # of the upstream, to being told
POLL_S = 0.05


class IdleStreams(Streams):
    """Streams that stay open until the upstream ends them."""

    async def open_up_to(self, wanted: int) -> None:
        """Paced; returns when each has had its first event, or has failed, or FIRST_EVENT_S passed."""
        began, already = perf_counter(), len(self._clients)
        while len(self._clients) < wanted and not self.faults:
            await asyncio.gather(*(self._open(self._source()) for _ in range(min(BATCH, wanted - len(self._clients)))))
            ahead_s = (len(self._clients) - already) / OPENS_PER_S - (perf_counter() - began)
            await asyncio.sleep(max(0.0, ahead_s))
        await until(lambda: self.waiting == 0 or bool(self.faults), FIRST_EVENT_S)

    def _source(self) -> tuple[str, int]:
        # 127.0.0.1 has some 28,000 ports for one server; spread over addresses they last for any number of runs
        return f"127.0.{1 + len(self._clients) % 16}.1", 0

    @property
    def waiting(self) -> int:
        return sum(not client.first_at for client in self._clients)

    async def finish(self, upstream_port: int) -> None:
        await finish_upstream(upstream_port)
        wanted = len(self._clients)
        await until(lambda: self.finished + self.faults.total() >= wanted, END_S)

    def require_sound(self, wanted: int) -> None:
        """Ends the process with what went wrong, if anything did."""
        if self.faults or self.waiting or len(self._clients) != wanted:
            opened, seen = len(self._clients), self.most_faults() or "-"
            sys.exit(f"{wanted} idle streams: {opened} opened, {self.waiting} without a first event; {seen}")

    def _ended(self, client: StreamClient, fault: str) -> None:
        super()._ended(client, fault)
        client.close()


async def until(condition: Callable[[], bool], deadline_s: float) -> None:
    """Returns when the condition holds, or the deadline passed: the caller looks again."""
    ends = perf_counter() + deadline_s
    while not condition() and perf_counter() < ends:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


async def finish_upstream(port: int) -> None:
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /fake/finish HTTP/1.1\r\nHost: fake\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def load(target: Target, pid: int, upstream_port: int, steps: list[int]) -> dict[str, Any]:
    await asyncio.to_thread(durations_ms, target, WARM_UP_REQUESTS)  # code and pools that any use brings in
    streams = IdleStreams(target)
    pids = tree([pid])
    before = rss_bytes(pids)
    bytes_each: list[float] = []
    try:
        for wanted in steps:
            await streams.open_up_to(wanted)
            streams.require_sound(wanted)
            await asyncio.sleep(SETTLE_S)
            bytes_each.append((rss_bytes(pids) - before) / wanted)
        await streams.finish(upstream_port)
        streams.require_sound(steps[-1])
    finally:
        streams.close()
    if streams.finished != steps[-1]:
        sys.exit(f"{steps[-1]} idle streams: only {streams.finished} came to their end within {END_S:g} s")
    return {"bytes_each": bytes_each, "finished": streams.finished, "rss_before_bytes": before}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load_idle")
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("key")
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--upstream-port", type=int, required=True)
    parser.add_argument("--steps", required=True, help="how many streams, ascending, separated by commas")
    given = parser.parse_args()
    target = Target(given.port, given.model, given.key)
    steps = [int(step) for step in given.steps.split(",")]
    try:
        print(json.dumps(uvloop.run(load(target, given.pid, given.upstream_port, steps))))
    except (OSError, BadReply, TimeoutError) as exc:
        sys.exit(f"idle streams: {type(exc).__name__}: {exc}")


if __name__ == "__main__":
    main()
