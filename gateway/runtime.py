"""Everything that serves requests, built from one config revision by app.py; a request keeps the one it began with."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

from gateway.admission.keys import KeyStore
from gateway.config.load import LoadedConfig
from gateway.config.schema import Config
from gateway.dispatch import Dispatcher, Settler
from gateway.fleet.registry import Registry
from gateway.telemetry.access import AccessLog
from gateway.telemetry.traces import Traces


class Abandonable(Protocol):
    """An open exchange as the sweep and the drain see it."""

    writing_since: float | None

    def abandon(self) -> None: ...

    def end(self) -> None: ...


@dataclass(slots=True)
class Runtime:
    loaded: LoadedConfig
    keys: KeyStore
    dispatcher: Dispatcher
    fleet: Registry
    settler: Settler
    access: AccessLog
    traces: Traces | None
    exchanges: set[Abandonable] = field(default_factory=set)
    started_s: int = field(default_factory=lambda: int(time.time()))
    is_draining: bool = False

    @property
    def config(self) -> Config:
        return self.loaded.config

    @property
    def revision(self) -> str:
        return self.loaded.revision

    def drop_stalled(self, now: float) -> int:
        """Gives up callers that have not taken a write for `timeouts.write_s`; returns how many. `now` is loop time."""
        limit = self.config.gateway.timeouts.write_s
        stalled = [e for e in self.exchanges if e.writing_since is not None and now - e.writing_since > limit]
        for exchange in stalled:
            exchange.abandon()
        return len(stalled)

    def begin_drain(self) -> None:
        """Not ready any more; what still runs after `gateway.drain_s` is ended with an error event."""
        self.is_draining = True
        asyncio.get_running_loop().call_later(self.config.gateway.drain_s, self._end_all)

    def _end_all(self) -> None:
        for exchange in list(self.exchanges):
            exchange.end()
