"""A child's output: always drained, in bounded memory, to a rotated file; keeps the lines that explain an end.

Made and closed by `worker.py`, one per start. The disk is written by a thread of its own: a slow or full disk drops
log text, and never holds up the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from workers.log_lines import names_a_cause, phase_of

READ_BYTES = 65_536
MAX_LINE_BYTES = 8_192
TAIL_LINES = 60
CAUSE_LINES = 40
FILE_BYTES = 10_000_000
FILE_COUNT = 3  # the current one and its predecessors .1, .2
QUEUED_CHUNKS = 64  # of at most READ_BYTES each, between the reader and the disk
CLOSE_S = 2.0


class LineReader:
    """Splits bytes into text lines at LF or CR (progress bars end with CR); pure, holds at most one cut line."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._open = bytearray()  # a line that has not ended, cut at MAX_LINE_BYTES

    def feed(self, chunk: bytes) -> None:
        *ended, rest = chunk.replace(b"\r", b"\n").split(b"\n")
        for part in ended:
            self._extend(part)
            self.finish()
        self._extend(rest)

    def finish(self) -> None:
        """Ends the open line."""
        if self._open:
            line = self._open.decode("utf-8", errors="replace")
            self._open.clear()
            self._on_line(line)

    def _extend(self, part: bytes) -> None:
        self._open += part[: max(0, MAX_LINE_BYTES - len(self._open))]


class LogFile:
    """Appends text to `path` from a thread, rotating by size; `write` never blocks and never raises.

    Text that finds the queue full, or that the disk refuses, is dropped; the next text that is written says how much.
    """

    def __init__(self, path: Path, *, file_bytes: int = FILE_BYTES, file_count: int = FILE_COUNT) -> None:
        self._path = path
        self._file_bytes = file_bytes
        self._file_count = file_count
        self._queue: queue.Queue[bytes | None] = queue.Queue(QUEUED_CHUNKS)
        self._dropped_bytes = 0
        self._thread = threading.Thread(target=self._run, name=f"log {path.name}", daemon=True)
        self._thread.start()

    def write(self, text: bytes) -> None:
        try:
            self._queue.put_nowait(text)
        except queue.Full:
            self._dropped_bytes += len(text)

    def close(self) -> None:
        """Waits up to CLOSE_S for what is queued; the thread is a daemon, so a hung disk cannot keep the process."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        file: IO[bytes] | None = None
        while (text := self._queue.get()) is not None:
            try:
                if file is not None and file.tell() >= self._file_bytes:
                    file.close()
                    file = None
                    self._rotate()
                file = file or self._open()
                if self._dropped_bytes:
                    lost, self._dropped_bytes = self._dropped_bytes, 0
                    text = b"[poolgate: %d bytes of this log were dropped]\n" % lost + text
                file.write(text)
                file.flush()
            except OSError:
                self._dropped_bytes += len(text)
                if file is not None:
                    with contextlib.suppress(OSError):
                        file.close()
                file = None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _open(self) -> IO[bytes]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        return open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")

    def _rotate(self) -> None:
        for number in range(self._file_count - 1, 0, -1):
            older = self._path.with_name(f"{self._path.name}.{number}")
            newer = self._path.with_name(f"{self._path.name}.{number - 1}") if number > 1 else self._path
            if newer.exists():
                os.replace(newer, older)


class ChildLog:
    """Reads one end of the child's output pipe until it ends; owns that descriptor, the file and its thread."""

    def __init__(self, read_fd: int, path: Path, on_phase: Callable[[str], None]) -> None:
        self._read_fd = read_fd
        self._file = LogFile(path)
        self._on_phase = on_phase
        self._causes: list[str] = []
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._task = asyncio.create_task(self._drain(), name=f"drain {path.name}")

    def lines(self) -> list[str]:
        """What may explain the end, oldest first: the first lines that name a cause, then the last lines of all."""
        return [*self._causes, *self._tail]

    def forget_causes(self) -> None:
        """Called once the worker is ready: what its log said before does not explain a later end."""
        self._causes.clear()

    async def close(self, timeout_s: float = 1.0) -> None:
        """Reads what is left, up to `timeout_s` (a stray holder of the pipe must not keep us), then closes all."""
        await asyncio.wait({self._task}, timeout=timeout_s)
        self._task.cancel()
        await asyncio.wait({self._task})
        await asyncio.to_thread(self._file.close)

    async def _drain(self) -> None:
        reader = asyncio.StreamReader(limit=READ_BYTES)
        lines = LineReader(self._take)
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(self._read_fd, "rb", buffering=0)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            while chunk := await reader.read(READ_BYTES):
                lines.feed(chunk)
            lines.finish()
        finally:
            transport.close()

    def _take(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._tail.append(line)
        if len(self._causes) < CAUSE_LINES and names_a_cause(line):
            self._causes.append(line)
        if phase := phase_of(line):
            self._on_phase(phase)
