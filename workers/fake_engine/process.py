"""The fake engine as a process: bind, load, listen, end; entry point of `poolgate-fake-engine` and `__main__.py`.

As vLLM does, it binds its port before it loads and listens only when ready, exits 0 on SIGTERM when idle, and has the
ends of `options.py` when it is not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from workers.fake_engine.api import Api
from workers.fake_engine.engine import Engine
from workers.fake_engine.options import VERSION, Options, parse, program_arguments
from workers.fake_engine.wire import Server

_BACKLOG = 2048
_CHILD_S = 300  # an orphan that no test ends goes by itself


def main() -> None:
    """Runs until a signal or a fault ends it; exits with the code that the options ask for."""
    options = parse(program_arguments())
    try:
        import uvloop

        new_loop: Callable[[], asyncio.AbstractEventLoop] | None = uvloop.new_event_loop
    except ImportError:
        new_loop = None
    try:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            code = runner.run(_Process(options).run())
    except OSError as exc:
        print(f"OSError: [Errno {exc.errno}] {exc.strerror}", file=sys.stderr)
        code = 1
    sys.stdout.flush()
    os._exit(code)


class _Process:
    """Owner of the life cycle: loading → serving → stopping; `run` returns the exit code."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._engine = Engine(options)
        self._api = Api(options, self._engine, self._engine_died)
        self._server = Server(self._api.handle, options.keep_alive_s)
        self._exit: asyncio.Future[int]
        self._stop_asked = asyncio.Event()
        self._signals = 0
        self._in_group: subprocess.Popen[bytes] | None = None

    async def run(self) -> int:
        """The whole life; the port is bound when this begins to load. Raises OSError when it is taken."""
        loop = asyncio.get_running_loop()
        self._exit = loop.create_future()
        bound = _bind(self._options)
        _log(f"version {VERSION}, loading {self._options.model} for {_url_of(bound)}")
        for line in self._options.log_lines:
            print(line, flush=True)
        self._api.children(self._start_children())
        live = loop.create_task(self._live(bound))
        flood = [loop.create_task(_flood())] if self._options.log_flood else []
        try:
            ends: list[asyncio.Future[int]] = [live, self._exit]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return self._exit.result() if self._exit.done() else live.result()
        finally:
            for task in (live, *flood):
                task.cancel()
            await asyncio.gather(live, *flood, return_exceptions=True)
            if self._in_group is not None:
                self._in_group.kill()
                self._in_group.wait(5)

    async def _live(self, bound: socket.socket) -> int:
        """Loads, serves, stops; the exit code of a life that no fault cuts short."""
        if self._options.ignore_sigterm or self._options.swallow_sigterm_in_load:
            self._on_signals(self._signalled_in_load)
        await asyncio.sleep(self._options.load_s)
        if self._options.start_exit_code is not None:
            return self._options.start_exit_code
        if self._options.never_listen:
            await self._stop_asked.wait()
        self._on_signals(self._signalled)
        url = _url_of(bound)
        listener = await self._listen(bound)
        _log(f"Starting vLLM server on {url}")
        print("INFO:     Application startup complete.", flush=True)
        try:
            async with asyncio.timeout(self._options.exit_after_s):
                await self._stop_asked.wait()
        except TimeoutError:
            return 1
        await self._stop(listener)
        return 0

    async def _listen(self, bound: socket.socket) -> asyncio.Server | None:
        """None where somebody else listens there meanwhile: vLLM 0.32 goes on without a port then, and says nothing.

        Two sockets may be bound to one port until one of them listens (SO_REUSEADDR), and uvloop's create_server hides
        that the second could not.
        """
        try:
            bound.listen(_BACKLOG)
        except OSError:
            return None
        return await asyncio.get_running_loop().create_server(self._server.connection, sock=bound, backlog=_BACKLOG)

    def _on_signals(self, handler: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, handler)

    def _signalled_in_load(self) -> None:
        self._signals += 1
        if self._signals > 1 and not self._options.ignore_sigterm:
            self._end(130)

    def _signalled(self) -> None:
        if not self._options.ignore_sigterm:
            self._stop_asked.set()

    async def _stop(self, listener: asyncio.Server | None) -> None:
        """Ends as vLLM does: at once when idle, else by `busy_stop`, or after the drain of --shutdown-timeout.

        Waits for every connection to close: for ever, in the mode "hang", until the clients leave.
        """
        _log("[shutdown] API server: shutdown triggered")
        mode = self._options.busy_stop
        if self._options.drain_s and self._engine.jobs:
            self._engine.refuses_new = True
            _, late = await asyncio.wait(self._engine.jobs, timeout=self._options.drain_s)
            mode = "hang" if late else mode
        if listener is not None:
            listener.close()
        self._engine.stop_jobs(mode)
        await self._server.stop()

    def _engine_died(self) -> None:
        """A dead engine core takes the process along a moment later, with code 0."""
        asyncio.get_running_loop().call_later(0.3, self._end, 0)

    def _end(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    def _start_children(self) -> list[int]:
        children = []
        command = ["sleep", str(_CHILD_S)]
        if self._options.engine_child:
            self._in_group = subprocess.Popen(command)
            children.append(self._in_group.pid)
        if self._options.orphan_child:
            children.append(subprocess.Popen(command, start_new_session=True).pid)
        return children


def _bind(options: Options) -> socket.socket:
    """A bound socket that does not listen yet; raises OSError when the address is taken."""
    if options.uds is not None:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bound.bind(options.uds)
        return bound
    bound = socket.socket(socket.AF_INET6 if ":" in options.host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((options.host, options.port))
    return bound


def _url_of(bound: socket.socket) -> str:
    name = bound.getsockname()
    return f"unix:{name}" if isinstance(name, str) else f"http://{name[0]}:{name[1]}"


def _log(text: str) -> None:
    stamp = time.strftime("%m-%d %H:%M:%S")
    print(f"(APIServer pid={os.getpid()}) INFO {stamp} [fake_engine] {text}", flush=True)


async def _flood() -> None:
    """1 MB at once and 1 MB/s after it, on both pipes, with a line of 5 MB and bytes that are not UTF-8."""
    line = b"(EngineCore pid=1) INFO flood \xff\xfe\xc3\x28 " + b"x" * 60 + b"\n"
    _write(line * 10_000 + b"y" * 5_000_000 + b"\n")
    while True:
        await asyncio.sleep(0.1)
        _write(line * 1_000)


def _write(data: bytes) -> None:
    """Blocks while nobody reads the pipes, as a print of vLLM would."""
    for descriptor in (1, 2):
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
