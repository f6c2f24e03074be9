"""Small handlers under the gateway's own server, run as a process by tests/integration/test_front.py.

Each path is there twice: as a proxied path, which gets an Exchange, and below /app as a part of the ASGI application.

python front_probe.py DRAIN_S HEAD_S WRITE_S: prints one word per line, first `port N`, then what its handlers see.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.edge import timers
from gateway.edge.context import Exchange
from gateway.edge.lane import Handler, Lane
from gateway.edge.server import GatewayServer, listen, server_config

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

START: Message = {"type": "http.response.start", "status": 200, "headers": []}
CHUNK = b"x" * 65_536


def say(text: str) -> None:
    print(text, flush=True)


async def app(scope: Message, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await lifespan(receive, send)
    else:
        await APP[scope["path"]](receive, send)


async def lifespan(receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    say("lifespan ends")
    await send({"type": "lifespan.shutdown.complete"})


async def gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def plain(receive: Receive, send: Send) -> None:
    await send({**START, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def wait(receive: Receive, send: Send) -> None:
    say("entered")
    await gone(receive)
    say("client gone")


async def stream(receive: Receive, send: Send) -> None:
    """Sends until the client is gone or it is cancelled; takes a moment to clean up, as a settlement does."""
    await send(START)
    say("entered")
    watching = asyncio.ensure_future(gone(receive))
    try:
        while not watching.done():
            await send({"type": "http.response.body", "body": b"tick\n", "more_body": True})
            await asyncio.sleep(0.01)
        say("client gone")
    except asyncio.CancelledError:
        say("cancelled")
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"bye\n"})
    finally:
        watching.cancel()
        say("cleaned up")


async def flood(receive: Receive, send: Send) -> None:
    """Tells after each accepted chunk how many there are; a hundred megabytes at most."""
    await send(START)
    for n in range(1, 1600):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        say(f"sent {n}")
    await send({"type": "http.response.body", "body": b""})
    say("all sent")


async def until_told(receive: Receive, send: Send) -> None:
    """A stream that ends by itself once the drain has begun."""
    await send(START)
    say("entered")
    await draining.wait()
    await send({"type": "http.response.body", "body": b"whole"})


APP = {
    "/app": plain,
    "/app/wait": wait,
    "/app/stream": stream,
    "/app/flood": flood,
    "/app/until-told": until_told,
}


# --- the same as proxied paths ----------------------------------------------------------------------------------


async def proxied_plain(exchange: Exchange) -> None:
    exchange.reply(200, [], b"ok")


async def proxied_wait(exchange: Exchange) -> None:
    say("entered")
    try:
        await asyncio.Event().wait()
    finally:
        say("client gone" if exchange.is_gone else "cancelled")


async def proxied_stream(exchange: Exchange) -> None:
    exchange.start(200, [])
    exchange.write(b"begin\n")
    say("entered")
    try:
        while True:
            exchange.write(b"tick\n")
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        if exchange.is_gone:
            say("client gone")
            raise
        say("cancelled")
        await asyncio.sleep(0.1)
        exchange.finish(b"bye\n")
    finally:
        say("cleaned up")


async def proxied_flood(exchange: Exchange) -> None:
    exchange.start(200, [])
    try:
        for n in range(1, 1600):
            if not exchange.write(CHUNK):
                await exchange.drained()
            say(f"sent {n}")
    except asyncio.CancelledError:
        say("client gone")
        raise
    exchange.finish()
    say("all sent")


async def proxied_until_told(exchange: Exchange) -> None:
    exchange.start(200, [])
    exchange.write(b"begin\n")
    say("entered")
    await draining.wait()
    exchange.finish(b"whole")


async def proxied_body(exchange: Exchange) -> None:
    exchange.reply(200, [], b"%d" % len(await exchange.read_body(1 << 30, 10, 10)))


def closing(handler: Handler) -> Handler:
    """As the gateway's own handlers do: whatever happens, the exchange is closed, and nothing is raised."""

    async def handle(exchange: Exchange) -> None:
        try:
            await handler(exchange)
        except asyncio.CancelledError:
            pass
        finally:
            exchange.close()

    return handle


PROXIED: dict[bytes, Handler] = {
    b"/plain": proxied_plain,
    b"/wait": proxied_wait,
    b"/stream": proxied_stream,
    b"/flood": proxied_flood,
    b"/until-told": proxied_until_told,
    b"/body": proxied_body,
}


if __name__ == "__main__":
    drain_s, timers.HEAD_S, write_s = map(float, sys.argv[1:])
    draining = asyncio.Event()
    listener = listen("127.0.0.1", 0, write_s=write_s)
    say(f"port {listener.getsockname()[1]}")
    lane = Lane({path: closing(handler) for path, handler in PROXIED.items()}, write_s, 600)
    GatewayServer(server_config(app, lane, drain_s=drain_s), draining.set).run(sockets=[listener])
