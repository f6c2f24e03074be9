"""The embedded Redis: a real redis-server as a child on a Unix socket. `poolgate up` starts it first and stops it last.

Its data (an append-only file) and log lie in `<state_dir>/redis`. The kernel ends it when the process that started it
dies, and a lock that it inherits keeps a second one off its data for as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import stat
import struct
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from gateway.config.store import embedded_socket
from workers.redis_binary import RedisFailed, find_binary, version_of

START_S = 60.0  # reading a long append-only file counts
LOCK_S = 10.0  # for the one before us to finish writing
STOP_S = 10.0
POLL_S = 0.02
LOG_KEPT_BYTES = 1_000_000
LOG_LINES_SHOWN = 8
SPLIT_AOF = 7  # Redis 7 keeps the append-only file as a directory, which older ones do not see

# Becomes redis-server. A pre-exec hook would need fork() in a process with threads, which CPython warns of.
_TETHER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, {int(signal.SIGTERM)}, 0, 0, 0)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this Redis is gone")
os.umask(0o077)
os.execv(sys.argv[2], sys.argv[2:])
"""


class RedisServer:
    """One start and one stop; `async with` does both. Start it from a thread that lives as long as it shall."""

    def __init__(self, state_dir: Path, *, binary: Path | None = None) -> None:
        self.socket = embedded_socket(state_dir)
        self.directory = state_dir.resolve() / "redis"
        self.log = self.directory / "redis.log"
        self._binary = binary
        self._process: asyncio.subprocess.Process | None = None
        self._lock: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when it answers PING. Raises RedisFailed (with the end of its log if it died) and leaves nothing."""
        binary = await asyncio.to_thread(find_binary) if self._binary is None else self._binary
        try:
            self._prepare(await asyncio.to_thread(version_of, binary))
            await self._take_lock()
            await self._refuse_if_answered()
            await self._spawn(binary)
            await self._until_ready()
        except BaseException:
            await self.stop()
            raise

    async def wait(self) -> int:
        """Returns when it has ended, whoever ended it: its exit code, negative for a signal."""
        assert self._process is not None, "start() first"
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, SIGKILL after a deadline, reaped. Goes on to the end when cancelled. Calling it again is fine."""
        ending = asyncio.ensure_future(self._end())
        was_cancelled = False
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                was_cancelled = True
        if was_cancelled:
            raise asyncio.CancelledError
        ending.result()

    def last_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        except OSError:
            return []

    def _options(self) -> list[str]:
        return [
            *("--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"),
            *("--dir", str(self.directory), "--appendonly", "yes", "--save", ""),
            *("--maxmemory-policy", "noeviction", "--daemonize", "no", "--databases", "1"),
        ]

    def _prepare(self, version: tuple[int, int]) -> None:
        for folder in (self.directory.parent, self.directory, self.socket.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        facts = self.socket.parent.lstat()
        if facts.st_uid != os.getuid() or not stat.S_ISDIR(facts.st_mode):
            raise RedisFailed(f"{self.socket.parent} belongs to somebody else; set gateway.state_dir to a shorter path")
        if version[0] < SPLIT_AOF and (self.directory / "appendonlydir").is_dir():
            raise RedisFailed(
                f"the data in {self.directory} was written by Redis {SPLIT_AOF} or later; the redis-server found is "
                f"{version[0]}.{version[1]} and would start empty. Install a newer Redis, or remove that directory to "
                "start afresh (keys made at run time are lost then)"
            )
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > LOG_KEPT_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))

    async def _spawn(self, binary: Path) -> None:
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid())),
                *(str(binary), *self._options()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=() if self._lock is None else (self._lock,),
            )
        finally:
            os.close(log)

    async def _take_lock(self) -> None:
        self._lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = asyncio.get_running_loop().time() + LOCK_S
        while True:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if asyncio.get_running_loop().time() > until:
                    raise RedisFailed(
                        f"another Redis works on {self.directory}; stop the other `poolgate up` of this state "
                        "directory, or set gateway.state_dir"
                    ) from None
            await asyncio.sleep(POLL_S)

    async def _refuse_if_answered(self) -> None:
        """redis-server itself would take the socket's path from a living one. A stale file refuses the connection."""
        pid, _ = await self._ask()
        if pid is not None:
            raise RedisFailed(
                f"another process (pid {pid}) listens on {self.socket}; stop it, or set gateway.state_dir to another "
                "directory"
            )

    async def _until_ready(self) -> None:
        assert self._process is not None
        until = asyncio.get_running_loop().time() + START_S
        while asyncio.get_running_loop().time() < until:
            if self._process.returncode is not None:
                raise RedisFailed(f"redis-server ended with code {self._process.returncode}:{self._tail()}")
            pid, answer = await self._ask()
            if pid == self._process.pid and answer.startswith(b"+PONG"):
                return
            await asyncio.sleep(POLL_S)
        raise RedisFailed(f"redis-server was not ready within {START_S:g} s:{self._tail()}")

    def _tail(self) -> str:
        return "".join(f"\n  | {line}" for line in self.last_lines()) + f"\n  (all of it: {self.log})"

    async def _ask(self) -> tuple[int | None, bytes]:
        """Who listens on the socket (its pid; None: nobody); what it says to PING (empty: nothing within a second)."""
        try:
            async with asyncio.timeout(1.0):
                reader, writer = await asyncio.open_unix_connection(self.socket)
        except (OSError, TimeoutError):
            return None, b""
        try:
            sock: socket.socket = writer.get_extra_info("socket")
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid: int = struct.unpack("3i", credentials)[0]
            writer.write(b"PING\r\n")
            answer = b""
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    answer = await reader.readline()
            return pid, answer
        finally:
            writer.close()

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
