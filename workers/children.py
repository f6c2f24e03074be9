"""The processes that `poolgate up` runs beside Redis (supervisor, gateway): started, restarted and stopped here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.config.parent import PARENT_VARIABLE
from workers.logs import ChildLog

RESTART_WAIT_S = 1.0
HURRY_S = 5.0  # for a child that was told to stop at once
RESTARTS_ALLOWED = 5
RESTART_WINDOW_S = 120.0


class Child:
    """One process in a session of its own, so that a Ctrl-C in the terminal reaches `up` alone, which ends it in order.

    `run()` keeps it going until `stop()`; it returns when the child died too often, and then `gave_up` is True.
    PARENT_VARIABLE asks the child to end when `up` itself is killed.
    """

    def __init__(self, name: str, argv: Sequence[str], log_path: Path, say: Callable[[str], None]) -> None:
        self.name = name
        self.gave_up = False
        self._argv = list(argv)
        self._log_path = log_path
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._deaths: list[float] = []
        self._last_lines: list[str] = []

    async def run(self) -> None:
        while True:
            code = await self._run_once()
            if self._is_stopping:
                return
            now = time.monotonic()
            self._deaths = [t for t in self._deaths if now - t < RESTART_WINDOW_S] + [now]
            self._say(f"{self.name} ended with {describe_exit(code)}; its log is {self._log_path}")
            if len(self._deaths) > RESTARTS_ALLOWED:
                self.gave_up = True
                return
            await asyncio.sleep(RESTART_WAIT_S)

    async def _run_once(self) -> int:
        read_fd, write_fd = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
                start_new_session=True,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        log = ChildLog(read_fd, self._log_path, lambda _phase: None)
        try:
            return await self._process.wait()
        finally:
            await log.close()
            self._last_lines = log.lines()[-5:]

    def last_lines(self) -> list[str]:
        """The end of the log of the run that ended last."""
        return self._last_lines

    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def signal(self, number: int) -> None:
        if self._process is not None and self.is_running():
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, grace_s: float, is_hurried: asyncio.Event) -> bool:
        """SIGTERM, then SIGKILL of its whole session after `grace_s`; `is_hurried` sends a second SIGTERM and cuts
        what is left of the grace time to HURRY_S.

        False when it had to be killed.
        """
        self._is_stopping = True
        if self._process is None or not self.is_running():
            return True
        self.signal(signal.SIGTERM)
        ended = asyncio.ensure_future(self._process.wait())
        hurried = asyncio.ensure_future(is_hurried.wait())
        try:
            await asyncio.wait({ended, hurried}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done() and hurried.done():
                self.signal(signal.SIGTERM)
                await asyncio.wait({ended}, timeout=min(HURRY_S, grace_s))
            if ended.done():
                return True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await ended
            return False
        finally:
            hurried.cancel()


def describe_exit(code: int) -> str:
    """'code 1' or 'signal SIGKILL', from an exit status as Python's subprocess gives it."""
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
