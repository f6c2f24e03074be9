"""Streamed requests of several callers in an open loop; prints what became of them, as JSON.

    python -m bench.overload.load PORT MODEL --caller NAME KEY PER_S ... --warm-up 3 --seconds 10 --patience 10 --seed 1

No request waits for another, and none is sent again. Times count from when it was due, so a late load tool would not
flatter the contender. A caller who has no token after `--patience` gives up. Run as a process by rounds.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

import uvloop

from bench.overload.arrivals import Arrival, arrivals
from bench.request import Target, raw
from bench.spread import percentile
from bench.streams import StreamClient

Fate = Literal["served", "refused", "gave_up", "failed"]
REFUSALS = ("status 429", "status 503")
CONNECT_S = 10.0
END_S = 15.0  # from the first token: a stream takes less than half a second
IDLE_S = 2.0  # a connection that was idle for longer may be closed by the other side just now
BEHIND_MS = 50.0


class Client(StreamClient):
    """A connection for one request after the other; `begun` and `ended` are those of the present one."""

    __slots__ = ("begun", "ended", "idle_since", "queue_ms")

    def __init__(self) -> None:
        super().__init__(lambda _, fault: self._finish(fault))
        self.idle_since = 0.0

    def send(self, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()  # the fault
        self.queue_ms = 0.0
        self.ask(request)

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-poolgate-queue-ms":
            self.queue_ms = float(value)

    def on_body(self, data: bytes) -> None:
        super().on_body(data)
        if not self.begun.done():
            self.begun.set_result(None)

    def _finish(self, fault: str) -> None:
        if not self.begun.done():
            self.begun.set_result(None)
        if not self.ended.done():
            self.ended.set_result(fault)


@dataclass(slots=True)
class Request:
    """One request and what became of it. Times in seconds from the beginning of the phase."""

    caller: str
    due_s: float
    fate: Fate = "failed"
    fault: str = ""
    first_ms: float = 0.0  # from when it was due
    queue_ms: float = 0.0
    ended_s: float = 0.0
    behind_ms: float = 0.0  # sent later than it was due


@dataclass(slots=True)
class OpenLoop:
    """Sends what is due. Use once, in a running event loop."""

    port: int
    requests: dict[str, bytes]  # caller → head and body
    patience_s: float
    done: list[Request] = field(default_factory=list)
    _idle: list[Client] = field(default_factory=list)
    _began: float = 0.0

    async def run(self, coming: Sequence[Arrival]) -> None:
        """Returns when every request has ended or was given up."""
        self._began = perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                for arrival in coming:
                    if (ahead_s := arrival.at_s - self._now()) > 0:
                        await asyncio.sleep(ahead_s)
                    request = Request(arrival.caller, arrival.at_s)
                    self.done.append(request)
                    group.create_task(self._one(request))
        finally:
            for client in self._idle:
                client.close()

    async def _one(self, request: Request) -> None:
        try:
            client = await self._client()
        except (OSError, TimeoutError) as exc:
            request.fault = f"no connection: {exc or 'timeout'}"
            return
        request.behind_ms = (self._now() - request.due_s) * 1e3
        client.send(self.requests[request.caller])
        try:
            await self._follow(client, request)
        finally:
            if request.fate in ("served", "refused") and not client.is_lost:
                client.idle_since = perf_counter()
                self._idle.append(client)
            else:
                client.close()

    async def _follow(self, client: Client, request: Request) -> None:
        try:
            async with asyncio.timeout(request.due_s + self.patience_s - self._now()):
                await client.begun
        except TimeoutError:
            request.fate, request.first_ms = "gave_up", self.patience_s * 1e3
            return
        try:
            async with asyncio.timeout(END_S):
                request.fault = await client.ended
        except TimeoutError:
            request.fault = f"did not end within {END_S:g} s"
            return
        request.ended_s = self._now()
        if not request.fault:
            request.fate, request.queue_ms = "served", client.queue_ms
            request.first_ms = (client.first_at - self._began - request.due_s) * 1e3
        elif request.fault in REFUSALS:
            request.fate = "refused"

    async def _client(self) -> Client:
        """The connection that was used last, or a new one."""
        while self._idle:
            client = self._idle.pop()
            if not client.is_lost and perf_counter() - client.idle_since < IDLE_S:
                return client
            client.close()
        async with asyncio.timeout(CONNECT_S):
            _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", self.port)
        return client

    def _now(self) -> float:
        return perf_counter() - self._began


def summary(done: Sequence[Request], warm_up_s: float, seconds: float) -> dict[str, Any]:
    """Per caller: the fates of the requests that were due after the warm-up, and how many streams ended meanwhile.

    `first_ms` holds those that gave up as well, with all their patience.
    """
    until_s = warm_up_s + seconds
    callers: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(request.caller for request in done):
        mine = [request for request in done if request.caller == name]
        measured = [request for request in mine if request.due_s >= warm_up_s]
        fates = Counter(request.fate for request in measured)
        served = [request for request in measured if request.fate == "served"]
        callers[name] = {
            "offered": len(measured),
            **{fate: fates[fate] for fate in ("served", "refused", "gave_up", "failed")},
            "completed": sum(r.fate == "served" and warm_up_s <= r.ended_s < until_s for r in mine),
            "queue_ms": [round(r.queue_ms, 1) for r in served],
            "first_ms": [round(r.first_ms, 1) for r in measured if r.fate in ("served", "gave_up")],
        }
    faults = Counter(request.fault for request in done if request.fate == "failed")
    return {
        "seconds": seconds,
        "behind_ms": percentile([request.behind_ms for request in done], 99),
        "faults": ", ".join(f"{count} × {fault}" for fault, count in faults.most_common(3)),
        "callers": callers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overload.load")
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--caller", nargs=3, action="append", required=True, metavar=("NAME", "KEY", "PER_S"))
    parser.add_argument("--warm-up", type=float, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--patience", type=float, required=True)
    parser.add_argument("--seed", type=int, required=True)
    given = parser.parse_args()
    requests = {name: raw(Target(given.port, given.model, key), is_stream=True) for name, key, _ in given.caller}
    per_s = {name: float(rate) for name, _, rate in given.caller}
    loop = OpenLoop(given.port, requests, given.patience)
    uvloop.run(loop.run(arrivals(per_s, given.warm_up + given.seconds, given.seed)))
    if not any(request.due_s >= given.warm_up for request in loop.done):
        sys.exit("no request was due after the warm-up")
    found = summary(loop.done, given.warm_up, given.seconds)
    if found["behind_ms"] > BEHIND_MS:
        sys.exit(f"the load came {found['behind_ms']:.0f} ms late (p99): its core had other work")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
