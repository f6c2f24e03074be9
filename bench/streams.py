"""Streamed requests as a load tool sees them: a protocol that counts events and judges the end, and many of those.

Used by load_stream.py and load_idle.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import cast

import httptools

from bench.request import Target, raw

_TAIL_BYTES = 32


class StreamClient(asyncio.Protocol):
    """A connection that carries one stream after the other; `ask` begins one.

    `on_end(self, fault)` comes once per stream; `fault` is "" when it was answered 200 and ended with [DONE]. A
    connection that breaks ends its stream; no `ask` may follow then.
    """

    __slots__ = (
        "_events",
        "_is_asking",
        "_on_end",
        "_parser",
        "_tail",
        "_transport",
        "asked_at",
        "first_at",
        "is_lost",
    )

    def __init__(self, on_end: Callable[[StreamClient, str], None]) -> None:
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._is_asking = False
        self._tail = b""
        self._events = 0
        self.is_lost = False
        self.asked_at = self.first_at = 0.0  # perf_counter; first_at 0: no event yet

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def ask(self, request: bytes) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._is_asking = True
        self._tail = b""
        self.first_at = 0.0
        self.asked_at = perf_counter()
        self._transport.write(request)

    def close(self) -> None:
        """What still runs is given up without a word to `on_end`."""
        self._is_asking = False
        if self._transport is not None:
            self._transport.abort()

    def take_events(self) -> int:
        """Events since the last call."""
        count, self._events = self._events, 0
        return count

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self._end(f"not HTTP: {exc}")

    def on_body(self, data: bytes) -> None:
        if not self.first_at:
            self.first_at = perf_counter()
        self._events += data.count(b"\n\n")
        self._tail = (self._tail + data)[-_TAIL_BYTES:]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status != 200:
            self._end(f"status {status}")
        else:
            self._end("" if self._tail.rstrip().endswith(b"data: [DONE]") else "ended without [DONE]")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self._end(f"connection lost: {exc or 'closed'}")

    def _end(self, fault: str) -> None:
        if self._is_asking:
            self._is_asking = False
            self._on_end(self, fault)


class Streams:
    """Clients of one target, and how their streams ended."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._request = raw(target, is_stream=True)
        self._clients: list[StreamClient] = []
        self.finished = 0
        self.faults: Counter[str] = Counter()

    async def _open(self, source: tuple[str, int] | None = None) -> None:
        """One more client, which asks at once; `source` is the address that it comes from."""
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: StreamClient(self._ended), self._target.host, self._target.port, local_addr=source
        )
        self._clients.append(client)
        client.ask(self._request)

    def _ended(self, client: StreamClient, fault: str) -> None:
        if fault:
            self.faults[fault] += 1
        else:
            self.finished += 1

    def most_faults(self) -> str:
        return ", ".join(f"{count} × {fault}" for fault, count in self.faults.most_common(3))

    def close(self) -> None:
        for client in self._clients:
            client.close()
