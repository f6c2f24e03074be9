"""A dispatcher between a scripted engine and a caller that listens: what the tests of dispatch.py share."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any, cast

import pytest
from fakes.story import (
    FakeCaller,
    FakeGate,
    FakeReply,
    FakeTransport,
    FixedSource,
    Silence,
    a_config,
    a_record,
    a_request,
    event,
    replica,
)

from gateway.admission.gate import Gate
from gateway.admission.slots import Slots
from gateway.config.schema import slots_of
from gateway.dispatch import Dispatcher
from gateway.domain.errors import ConnectFailed
from gateway.domain.outcome import Outcome
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import InferenceRequest
from gateway.fleet.registry import Registry
from gateway.routing.table import RouteTable, routes_of
from gateway.upstream.attempt import Attempts

POOLS = {name: {"urls": [f"http://{name}"]} for name in ("a", "b")}
CHAT = {"aliases": ["gpt"], "targets": [{"pool": "a"}], "fallback": ["b"]}
A, B = replica("a/0@h"), replica("b/0@h")
REFUSED = ConnectFailed("Connection refused.")
EVENTS = (event("Hel"), event("lo"), event("!", "stop"))


class World:
    """A dispatcher between a scripted engine and a caller that listens."""

    def __init__(
        self,
        *script: FakeReply | Exception | Silence,
        fleet: list[ReplicaRecord] | None = None,
        gate: FakeGate | None = None,
        **sections: Any,
    ) -> None:
        config = a_config(**{"pools": POOLS, "routes": {"chat": CHAT}} | sections).config
        self.transport = FakeTransport(*script)
        self.fleet = Registry([FixedSource([A, B] if fleet is None else fleet)])
        self.gate = gate or FakeGate()
        self.slots = Slots(slots_of(config.pools), config.classes, lambda pool: len(self.fleet.snapshot().ready(pool)))
        self.caller = FakeCaller(log=self.gate.log)
        self.record = a_record()
        self.dispatcher = Dispatcher(
            config,
            RouteTable(routes_of(config)),
            cast(Gate, self.gate),
            self.slots,
            self.fleet,
            Attempts(self.transport, self.fleet, config.gateway.timeouts, config.gateway.retry),
            Random(1),
        )

    async def serve(self, request: InferenceRequest | None = None, **fields: Any) -> None:
        await self.fleet.refresh()
        await self.dispatcher.serve(request or a_request(**fields), self.caller, self.record)

    async def serve_until(self, silence: Silence, **fields: Any) -> None:
        """The caller leaves when the engine has been silent for a while."""
        task = asyncio.create_task(self.serve(**fields))
        await silence.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def outcome(self) -> Outcome:
        """Of the one ticket, which was settled exactly once."""
        (ticket,) = self.gate.tickets
        (outcome,) = ticket.outcomes
        assert not self.fleet.in_flight_by_pool()
        return outcome

    @property
    def prompt_tokens(self) -> int:
        """The estimate that the reservation was made with."""
        return self.gate.reserved[0] - 1024
