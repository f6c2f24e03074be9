"""A small ASGI app under the gateway's own server, run as a process by tests/integration/test_asgi_server.py.

python asgi_probe.py DRAIN_S HEAD_S: prints one word per line, first `port N`, then what its handlers see.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from gateway.edge import heads
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
        await {"/": plain, "/wait": wait, "/stream": stream, "/flood": flood, "/until-told": until_told}[scope["path"]](
            receive, send
        )


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


if __name__ == "__main__":
    heads.HEAD_S = float(sys.argv[2])
    draining = asyncio.Event()
    listener = listen("127.0.0.1", 0)
    say(f"port {listener.getsockname()[1]}")
    GatewayServer(server_config(app, drain_s=float(sys.argv[1])), draining.set).run(sockets=[listener])
