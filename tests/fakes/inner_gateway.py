"""A whole gateway inside the test's own process, on real sockets: what it holds can be looked at after each request.

All is as `poolgate serve` makes it, but for three: uvicorn's server around the protocol is a plain asyncio one (so only
the proxied paths are served), access records stay here, and tickets are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fakes.client import DATE
from uvicorn.server import ServerState

from gateway.admission.account import Ticket
from gateway.admission.gate import Gate
from gateway.app import running
from gateway.config.load import parse
from gateway.domain.record import AccessRecord
from gateway.edge.context import Exchange
from gateway.edge.front import Front
from gateway.edge.inference import inference_handlers
from gateway.edge.lane import Handler, Lane
from gateway.runtime import Runtime
from gateway.upstream.wire import WireTransport


class InnerGateway:
    """Also the gate and the access log of its runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.url = ""
        self.begun = 0  # requests that reached their handler
        self.records: list[AccessRecord] = []
        self.tickets: list[Ticket] = []
        self.state = ServerState()
        self.state.default_headers = [DATE]
        dispatcher: Any = runtime.dispatcher
        self._gate: Gate = dispatcher._gate
        dispatcher._gate = self
        self.wire: WireTransport = dispatcher._attempts._transport
        self._access = runtime.access
        access: Any = self
        runtime.access = access

    # --- as a gate ----------------------------------------------------------------------------------------------------

    def try_admit(self, *ask: Any) -> Ticket | None:
        return self._kept(self._gate.try_admit(*ask))

    async def admit(self, *ask: Any) -> Ticket | None:
        return self._kept(await self._gate.admit(*ask))

    def _kept(self, ticket: Ticket | None) -> Ticket | None:
        if ticket is not None:
            self.tickets.append(ticket)
        return ticket

    # --- as an access log ---------------------------------------------------------------------------------------------

    dropped = 0

    def write(self, record: AccessRecord) -> None:
        self.records.append(replace(record))

    def close(self, timeout_s: float) -> None:
        self._access.close(timeout_s)

    # --- for the test -------------------------------------------------------------------------------------------------

    def handlers(self) -> dict[bytes, Handler]:
        def counted(handler: Callable[[Exchange], Awaitable[None]]) -> Handler:
            async def counting(exchange: Exchange) -> None:
                self.begun += 1
                await handler(exchange)

            return counting

        own: Mapping[bytes, Handler] = inference_handlers(lambda: self.runtime)
        return {path: counted(handler) for path, handler in own.items()}

    @property
    def in_flight(self) -> int:
        return sum(self.runtime.fleet.in_flight_by_pool().values())

    @property
    def unsettled(self) -> int:
        return sum(not ticket._is_settled for ticket in self.tickets)

    def forget(self) -> None:
        """What was kept of requests that are over."""
        self.begun = 0
        self.records.clear()
        self.tickets.clear()

    def drop_idle(self) -> None:
        """Closes the connections to replicas that wait for a next request."""
        for kept in list(self.wire._idle.values()):
            for connection in list(kept):
                connection.abort()

    async def open_redis_connections(self) -> None:
        """As many as calls of its parts may need side by side: they stay, and are no leak."""
        link = self._gate._budget._link
        await asyncio.gather(*(link.call(lambda redis: redis.ping()) for _ in range(8)))

    def left(self) -> dict[str, int]:
        """What is held for requests, by name; all 0 at rest."""
        return {
            "exchanges": len(self.runtime.exchanges),
            "handlers": len(self.state.tasks),
            "connections of callers": len(self.state.connections),
            "in flight": self.in_flight,
            "active": self.wire.active,
            "unsettled tickets": self.unsettled,
            "running by account": sum(ticket._account.running for ticket in self.tickets),
            "slots": sum(pool.held for pool in self.runtime.slots.pools()),
            "waiting": sum(len(pool.queue) for pool in self.runtime.slots.pools()),
            "records missing": self.begun - len(self.records),
        }


@asynccontextmanager
async def inner_gateway(folder: Path, redis_url: str, **sections: Any) -> AsyncIterator[InnerGateway]:
    """`sections` as those of the config file; `redis` is set here."""
    loaded = parse({"redis": {"url": redis_url, "timeout_s": 2.0}, **sections}, folder / "config.toml")
    async with running(loaded) as runtime:
        made = InnerGateway(runtime)
        timeouts = loaded.config.gateway.timeouts
        lane = Lane(made.handlers(), timeouts.write_s, timeouts.total_s)
        config: Any = SimpleNamespace(loaded_app=None, asgi_version="3.0")
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Front(config, made.state, {}, lane=lane), "127.0.0.1", 0)
        made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield made
        finally:
            server.close()
            for connection in list(made.state.connections):
                connection.shutdown()
