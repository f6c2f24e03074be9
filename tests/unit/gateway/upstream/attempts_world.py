"""Attempts over scripted engines, and the failures that they have: what the tests of attempt.py share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fakes.story import (
    FakeCaller,
    FakeReply,
    FakeTransport,
    FixedSource,
    Silence,
    a_record,
    a_request,
    plain_answer,
    replica,
)

from gateway.config.schema import RetrySection, TimeoutsSection
from gateway.domain.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from gateway.domain.outcome import Outcome
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import InferenceRequest
from gateway.fleet.registry import Registry
from gateway.upstream.attempt import Attempts
from gateway.upstream.journey import Journey
from gateway.upstream.transport import late

A, B, C = replica("a/0@h"), replica("b/0@h", api_key="engine-b"), replica("c/0@h")
D, E, F = replica("d/0@h"), replica("e/0@h"), replica("f/0@h")
REFUSED = ConnectFailed("No connection to the engine: Connection refused.")
NO_CONNECT = late("connect", "took no connection before")
ERROR_EVENT = b'data: {"error":{"message":"out of memory","code":500}}\n\n'


class World:
    def __init__(self, transport: FakeTransport, **retry: Any) -> None:
        self.transport = transport
        self.fleet = Registry([FixedSource([A, B, C, D, E, F])])
        self.attempts = Attempts(
            transport,
            self.fleet,
            TimeoutsSection(connect_s=1, first_byte_s=2, gap_s=3, total_s=40),
            RetrySection(**retry),
        )
        self.record = a_record()
        self.caller = FakeCaller()
        self.outcomes: list[Outcome] = []

    async def run(self, *candidates: ReplicaRecord, request: InferenceRequest | None = None, **fields: Any) -> Outcome:
        def body_for(replica: ReplicaRecord) -> bytes:
            assert sum(self.fleet.in_flight_by_pool().values()) == 1, "each replica counts while it has the request"
            return replica.id.encode()

        self.journey = Journey(
            request or a_request(**fields),
            self.caller,
            self.record,
            body_for,
            self.outcomes.append,
            prompt_tokens=30,
            was_clamped=False,
        )
        try:
            return await self.attempts.run(self.journey, candidates)
        finally:
            assert not self.fleet.in_flight_by_pool()

    def ready(self) -> set[str]:
        return {r.id for r in self.fleet.snapshot().all() if r.is_ready()}

    def aside(self) -> dict[str, str | None]:
        return {r.id: r.detail for r in self.fleet.snapshot().all() if not r.is_ready()}


async def world(*script: FakeReply | Exception | Silence, **retry: Any) -> World:
    made = World(FakeTransport(*script), **retry)
    await made.fleet.refresh()
    return made


def fine() -> FakeReply:
    return FakeReply(plain_answer(7, 3))


def status(number: int, message: str = "no") -> FakeReply:
    return FakeReply(json.dumps({"error": {"message": message, "code": number}}).encode(), status=number)


MOVES_ON: dict[str, Callable[[], FakeReply | Exception]] = {
    "refused": lambda: REFUSED,
    "blackhole": lambda: NO_CONNECT,
    "never sent": lambda: UpstreamBroken("closed", request_sent=False),
    "500": lambda: status(500),
    "502": lambda: status(502),
    "401": lambda: status(401),
    "429": lambda: status(429),
    "503": lambda: status(503),
    "aborted": lambda: FakeReply(plain_answer(finish="abort")),
    "no json": lambda: FakeReply(b"<html>"),
}
STAYS: dict[str, Callable[[], FakeReply | Exception]] = {
    "reset": lambda: UpstreamBroken("reset"),
    "reset in the body": lambda: FakeReply(b"{", UpstreamBroken("reset", response_began=True)),
    "first byte": lambda: UpstreamTimeout("silent", deadline="first byte"),
    "gap": lambda: FakeReply(b"{", UpstreamTimeout("silent", deadline="gap")),
    "total": lambda: UpstreamTimeout("slow", deadline="total"),
    "died": lambda: status(500, "EngineCore encountered an issue."),
}
IN_FLIGHT = ("reset", "reset in the body", "died")
