"""Writes one JSON line per request, from a thread of its own: a slow disk or pipe never holds up a request."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import BinaryIO

import msgspec

from gateway.domain.record import AccessRecord

log = logging.getLogger(__name__)
MAX_WAITING = 10_000
ATOMIC_BYTES = 4096  # PIPE_BUF of Linux: up to here a write goes into a pipe whole, whoever else writes there


class AccessLog:
    """Bounded: over MAX_WAITING waiting lines new ones are dropped and counted, and the count is logged."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._waiting: deque[bytes] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: AccessRecord) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(line_of(record))
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """Waits until the waiting lines are written, at most `timeout_s`."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._waiting or self.dropped:
            log.warning("access records not written: %d", len(self._waiting) + self.dropped)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._waiting:
                lines = self._batch()
                try:
                    self._out.write(b"".join(lines))
                    self._out.flush()
                except (OSError, ValueError):  # disk full, pipe closed: serving goes on
                    self.dropped += len(lines)
            if self._is_closing and not self._waiting:
                return

    def _batch(self) -> list[bytes]:
        """As many lines as one write takes without mixing with those of the other gateway processes on one stdout."""
        lines = [self._waiting.popleft()]
        size = len(lines[0])
        while self._waiting and (size := size + len(self._waiting[0])) <= ATOMIC_BYTES:
            lines.append(self._waiting.popleft())
        return lines


_ROUNDED = ("admit_s", "ttft_s", "total_s")


def line_of(record: AccessRecord) -> bytes:
    """The record as one JSON line; durations in seconds to the 0.1 ms, `at_s` is the time of writing (epoch)."""
    fields = {name: getattr(record, name) for name in AccessRecord.__slots__ if name != "began_s"}
    for name in _ROUNDED:
        if fields[name] is not None:
            fields[name] = round(fields[name], 4)
    return msgspec.json.encode({"log": "access", "at_s": round(time.time(), 3), **fields}) + b"\n"
