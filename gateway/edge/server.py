"""The ASGI server as we run it: uvicorn, its options, and what a signal does. Called by `gateway/serve.py`.

Why uvicorn, and what each option is there for: docs/decisions/asgi-server.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from gateway.domain.errors import ConfigError
from gateway.edge.front import Front
from gateway.edge.lane import Lane

BACKLOG = 2048
PROBE_AFTER_S, PROBE_EVERY_S, PROBES = 30, 10, 3  # of a client from which nothing comes: is it still there?
LAST_RESORT_S = 2  # past the drain time the app ends its streams itself; what is left then is cancelled
CANCELLED_S = 5  # for a cancelled handler to clean up
TICK_S = 0.05
DATE_S = 1.0  # replies tell the time to the second


def server_config(app: Any, lane: Lane, *, drain_s: float) -> uvicorn.Config:
    """`app` is the ASGI application for what is not in `lane`; `drain_s` is `gateway.drain_s`."""
    return uvicorn.Config(
        app,
        http=partial(Front, lane=lane),  # type: ignore[arg-type]  # uvicorn only ever calls it
        loop="uvloop",
        ws="none",
        interface="asgi3",
        lifespan="on",  # a start that fails ends the process (exit code 3) instead of serving half an app
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(drain_s) + LAST_RESORT_S,
        access_log=False,
        log_config=None,  # logging belongs to the process, not to the server
        server_header=False,
        proxy_headers=False,  # nothing of ours trusts a forwarded address
    )


class GatewayServer(uvicorn.Server):
    """One gateway process.

    First SIGTERM, SIGINT or SIGHUP: `on_drain` is called on the event loop, new connections are refused, idle ones
    closed, running replies go on. Second one: what still runs is cancelled at once. The exit code is 0 either way:
    uvicorn's own Server raises the signal again after a clean stop, and the process would seem killed by it.
    """

    def __init__(self, config: uvicorn.Config, on_drain: Callable[[], None] | None = None) -> None:
        super().__init__(config)
        self._on_drain = on_drain
        self._stop: Callable[[], object] = lambda: None  # ends `main_loop`, from anywhere

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._stop()

    async def main_loop(self) -> None:
        """As uvicorn's, but that looks ten times a second whether it shall stop; here a quiet gateway is left alone."""
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        self._stop = partial(loop.call_soon_threadsafe, stopped.set)
        while not await self.on_tick(0):  # the date
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), DATE_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with one difference: handlers that are cancelled have ended before the app's lifespan ends.

        They settle tickets and write records on their way out, with clients that the lifespan closes.
        """
        if self._on_drain is not None:
            self._on_drain()
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        deadline = time.monotonic() + (self.config.timeout_graceful_shutdown or 0)
        # uvicorn's sets tell nobody when they become empty
        while self._is_busy() and not self.force_exit and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        left = set(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=CANCELLED_S)
        await self.lifespan.shutdown()

    def _is_busy(self) -> bool:
        return bool(self.server_state.connections or self.server_state.tasks)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for sig in handled:
            signal.signal(sig, self.handle_exit)
        try:
            yield
        finally:
            for sig in handled:  # the process is on its way out: one more must not turn its exit code into a death
                signal.signal(sig, signal.SIG_IGN)


def listen(host: str, port: int, *, write_s: float = 60) -> socket.socket:
    """A listening socket; several processes may inherit it, and each connection goes to one of them.

    Its connections inherit what it says of clients whose network is gone without a word: what they do not confirm
    within a quarter more than `write_s` ends the connection, and so does silence to the kernel's own probes. One that
    only does not read is cut before that, by timers.py. The kernel also counts a receive buffer that stays smaller than
    one segment as no confirmation: seen on the loopback (segments of 64 kB), not with segments of 1,448 or 512 bytes.

    Raises ConfigError when the address cannot be had. The caller closes it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, math.ceil(write_s * 1250))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_AFTER_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, PROBES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            [f"gateway.port: {host}:{port} cannot be used ({exc.strerror or exc}); free it or set another port"]
        ) from exc
    listener.set_inheritable(True)
    return listener
