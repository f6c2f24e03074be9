"""Stand-ins for vLLM that serve so many streams at once; all others wait inside, in the order in which they came.

    python -m bench.overload.engines PORT...

One engine per port, with what capacity.py says. A stream gets its status line at once, as vLLM's do, its first token
FIRST_S after it has a slot, the others at a fixed interval. One that is given up leaves its slot, or its place in the
queue, at once. Started by rounds.py, one process for all contenders.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
from collections.abc import Callable
from typing import Protocol

import uvloop

from bench.fake_upstream import HEAD, Connection, load_gauges
from bench.overload.capacity import FIRST_S, INTERVAL_S, LENGTHS, SLOTS


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """The part of an event loop that an engine needs."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer: ...


class BoundedEngine:
    """One engine: who is served, who waits."""

    def __init__(self, clock: Clock, slots: int = SLOTS) -> None:
        self.opening = HEAD
        self.tokens = self.requests = 0
        self.is_finishing = False
        self._clock = clock
        self._slots = slots
        self._lengths = itertools.cycle(LENGTHS)
        self._waiting: dict[Connection, None] = {}
        self._running: dict[Connection, Timer] = {}

    def add(self, stream: Connection) -> None:
        self._waiting[stream] = None
        self._fill()

    def lost(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        if timer := self._running.pop(connection, None):
            timer.cancel()
            self._fill()

    def metrics(self) -> str:
        return load_gauges(len(self._running), len(self._waiting), len(self._running) / self._slots)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            stream = next(iter(self._waiting))
            del self._waiting[stream]
            self._at(self._clock.time() + FIRST_S, self._first, stream)

    def _first(self, stream: Connection, due: float) -> None:
        stream.begin(next(self._lengths))
        self._token(stream, due)

    def _token(self, stream: Connection, due: float) -> None:
        if stream.step(is_finishing=False):
            self._at(due + INTERVAL_S, self._token, stream)
        else:
            del self._running[stream]
            self._fill()

    def _at(self, due: float, work: Callable[[Connection, float], None], stream: Connection) -> None:
        """`due` is passed on: a late token does not make those after it later."""
        self._running[stream] = self._clock.call_at(due, lambda: work(stream, due))


async def serve(ports: list[int]) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        accept = functools.partial(Connection, BoundedEngine(loop))
        await loop.create_server(accept, "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()  # until it is ended


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overload.engines")
    parser.add_argument("ports", type=int, nargs="+", metavar="PORT")
    uvloop.run(serve(parser.parse_args().ports))


if __name__ == "__main__":
    main()
