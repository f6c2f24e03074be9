"""Handlers that a test holds in its hand, an app beside them, and requests for both: for a `Client` on a real `Front`.

work = Work()
client = connected(work.handlers)
client.send(request("a"))
await loop_turns()
await work.answer(0)
"""

from __future__ import annotations

import asyncio
from typing import Any

from fakes.client import KEY, Client, Timers, request_pieces
from fakes.waits import loop_turns

from gateway.edge.context import Exchange
from gateway.edge.lane import Handler

CHAT = "/v1/chat/completions"


class Work:
    """A handler that keeps its exchanges and answers each of them when it is told to."""

    def __init__(self, *, reads: bool = False) -> None:
        self.exchanges: list[Exchange] = []
        self.bodies: list[bytes] = []
        self.cancelled = 0
        self._reads = reads
        self._answered: list[asyncio.Event] = []

    @property
    def handlers(self) -> dict[bytes, Handler]:
        return {CHAT.encode(): self}

    async def __call__(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        answer = asyncio.Event()
        self._answered.append(answer)
        try:
            if self._reads:
                self.bodies.append(await exchange.read_body(1 << 30, 60, 60))
            await answer.wait()
            exchange.reply(200, [], exchange.request_id.encode())
        except asyncio.CancelledError:
            self.cancelled += 1
        finally:
            exchange.close()

    async def answer(self, number: int) -> None:
        self._answered[number].set()
        await loop_turns()


async def at_once(exchange: Exchange) -> None:
    exchange.reply(200, [], exchange.request_id.encode())
    exchange.close()


AT_ONCE: dict[bytes, Handler] = {CHAT.encode(): at_once}


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """What is not proxied: answers with the path as it got it."""
    body = scope["path"].encode() + b"?" + scope["query_string"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


def request(id_: str = "", body: bytes = b"{}", *, path: str = CHAT, method: str = "POST") -> bytes:
    headers = [KEY, *([(b"x-request-id", id_.encode())] if id_ else [])]
    (data,) = request_pieces(body, method, path, headers)
    return data


def connected(handlers: dict[bytes, Handler], timers: Timers | None = None, method: str = "POST") -> Client:
    client = Client(method=method)
    client.connect(handlers, app=app, timers=timers)
    return client
