"""One stream from a replica's bytes to a client's, in memory: real Connection, forward(), Exchange and Front between.

passage = Passage()
await passage.begin()
await passage.send(STREAM_HEAD, chunk(event("Hi")), chunk(event(" there")))
assert passage.client.body.endswith(event(" there")) and passage.short == 1
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import Any

from fakes.client import Client, Line, Timers
from fakes.story import a_record, a_request, replica
from fakes.waits import loop_turns

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import GatewayError
from gateway.domain.outcome import Outcome
from gateway.edge.context import Exchange
from gateway.upstream.connection import Connection
from gateway.upstream.forward import STREAM_HEADERS, forward
from gateway.upstream.journey import Journey
from gateway.upstream.transport import Deadlines

LONG_S = 3600.0
FAILURE = b'{"error":{"message":"failed"}}'
FAILED = b"data: " + FAILURE + b"\n\n"
PROMPT_TOKENS = 30


class Clock(Timers):
    """Stands in for the loop wherever a stream asks it for the time."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().create_future()

    def get_running_loop(self) -> Clock:
        """As a module's `asyncio`, where that is all it asks for."""
        return self


class NarrowLine(Line):
    """The client's socket: takes `room_bytes`, and says so as a transport does, from within the write."""

    def __init__(self, room_bytes: float = math.inf) -> None:
        super().__init__()
        self.room_bytes = room_bytes
        self.is_full = False

    def write(self, data: Any) -> None:
        super().write(data)
        self.room_bytes -= len(data)
        if self.room_bytes < 0 and not self.is_full:
            self.is_full = True
            self.protocol.pause_writing()

    def read_on(self, room_bytes: float = math.inf) -> None:
        self.room_bytes, self.is_full = room_bytes, False
        self.protocol.resume_writing()


class ReplicaSocket(Line):
    """The gateway's socket to the replica: reads wait while the gateway does not want them."""

    def __init__(self) -> None:
        super().__init__()
        self._waiting: deque[bytes] = deque()

    @property
    def waiting_bytes(self) -> int:
        return sum(map(len, self._waiting))

    def deliver(self, data: bytes) -> None:
        self._waiting.append(data)
        self._pump()

    def _pump(self) -> None:
        while self._waiting and self.is_reading and not self.is_closed:
            self.protocol.data_received(self._waiting.popleft())

    def resume_reading(self) -> None:
        super().resume_reading()
        asyncio.get_running_loop().call_soon(self._pump)


class Passage:
    """One request, whose reply the test sends. A second one may follow on the same two connections: `again`."""

    def __init__(
        self,
        endpoint: Endpoint = Endpoint.CHAT,
        *,
        version: str = "1.1",
        clock: Clock | None = None,
        gap_s: float = LONG_S,
        total_s: float = LONG_S,
        keepalive_s: float | None = None,
        room_bytes: float = math.inf,
        **fields: Any,
    ) -> None:
        """`fields` of the request. With `clock`, the module `asyncio` of forward.py and comments.py has to be it."""
        self.request = a_request(endpoint=endpoint, stream=True, **fields)
        self.line = NarrowLine(room_bytes)
        self.socket = ReplicaSocket()
        self.client = Client(b"{}", path=endpoint.value, version=version)
        self.client.line = self.line
        self.freed: list[bool] = []  # of each exchange with the replica that ended: can its connection be used again
        self.settled: list[Outcome] = []
        self.journey: Journey
        self.outcome: Outcome | None = None
        self.error: GatewayError | None = None
        self.was_cancelled = False
        self.exchange: Exchange
        self._path = endpoint.raw
        self._clock = clock
        self._deadlines = Deadlines(LONG_S, LONG_S, gap_s, total_s)
        self._keepalive_s = keepalive_s
        self._connection: Connection

    async def begin(self) -> None:
        """Returns when the replica has been asked."""
        loop: Any = self._clock or asyncio.get_running_loop()
        self._connection = Connection("http://a", loop, lambda _, is_good: self.freed.append(is_good), lambda _: None)
        self.socket.protocol = self._connection
        self._connection.connection_made(self.socket)
        self.client.connect({self._path: self._handle}, timers=self._clock)
        await self.again()

    async def again(self) -> None:
        """One more request on the connections that are there."""
        self.socket.written.clear()
        self.client.ask()
        await loop_turns()
        assert self.socket.written, "nobody asked the replica"

    async def send(self, *reads: bytes) -> None:
        """Bytes of the replica, each of them one read; returns when they have been dealt with."""
        for data in reads:
            self.socket.deliver(data)
            await loop_turns()

    def end(self) -> None:
        """The replica closes, if nobody has yet."""
        if not self.socket.is_closed:
            self._connection.eof_received()

    @property
    def short(self) -> int:
        """How many reads of the stream under way, or of the last one, went the short way."""
        tap = self.journey.tap
        return 0 if tap is None or tap.fast_path is None else tap.fast_path.events

    async def _handle(self, exchange: Exchange) -> None:
        """As inference.py, dispatch and attempt.py do together."""
        self.exchange = exchange
        loop: Any = self._clock or asyncio.get_running_loop()
        self.journey = Journey(
            self.request, exchange, a_record(), lambda _: b"", self.settled.append, PROMPT_TOKENS, was_clamped=False
        )
        if self._keepalive_s is not None:
            exchange.comment_every(self._keepalive_s, STREAM_HEADERS)
        now = loop.time()
        try:
            reply = await self._connection.exchange(
                b"POST", b"", self._deadlines, now, now + self._deadlines.total_s, expects_body=True
            )
            try:
                self.outcome = await forward(self.journey, reply, replica())
            finally:
                reply.close()
        except GatewayError as error:
            self.error = error
            exchange.fail(502, (), FAILURE)
        except asyncio.CancelledError:
            self.was_cancelled = True
        finally:
            exchange.close()
