"""Everything that serves requests, built from one config revision by app.py; a request keeps the one it began with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.admission.keys import KeyStore
from gateway.admission.slots import Slots
from gateway.config.load import LoadedConfig
from gateway.config.schema import Config
from gateway.dispatch import Dispatcher
from gateway.fleet.registry import Registry
from gateway.telemetry.access import AccessLog
from gateway.telemetry.instruments import Instruments
from gateway.telemetry.traces import Traces


class Endable(Protocol):
    """An open exchange as the drain sees it."""

    def end(self) -> None: ...


@dataclass(slots=True)
class Runtime:
    loaded: LoadedConfig
    keys: KeyStore
    dispatcher: Dispatcher
    fleet: Registry
    access: AccessLog
    traces: Traces | None
    exchanges: set[Endable] = field(default_factory=set)
    instruments: Instruments = field(default_factory=Instruments.alone)
    slots: Slots = field(default_factory=Slots.unbounded)
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)  # one is decoded at a time: their steps add up
    is_redis_away: Callable[[], bool] = lambda: False
    metrics_key: str | None = None  # that `/metrics` asks for
    started_s: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def revision(self) -> str:
        return self.loaded.revision

    def publish(self) -> None:
        """Tells what this process is busy with, for scrapes that reach another one. Loops over no requests."""
        self.instruments.publish_slots(*self.slots.facts())
        self.instruments.publish(
            self.fleet.in_flight_by_pool(),
            len(self.exchanges),
            self.access.dropped,
            is_redis_away=self.is_redis_away(),
        )

    def begin_drain(self) -> None:
        """Not ready any more; what still runs after `gateway.drain_s` is ended with an error event."""
        self.is_draining = True
        asyncio.get_running_loop().call_later(self.config.gateway.drain_s, self._end_all)

    def _end_all(self) -> None:
        for exchange in list(self.exchanges):
            exchange.end()
