"""Writes one JSON line per request, from a thread of its own: a slow disk or pipe never holds up a request.

The line is made where the request ends, a small piece of work each time; a thread that encoded a backlog would keep the
event loop from running for milliseconds. The thread only writes, and at a busy time it wakes every PAUSE_S: waking it
for each line cost more than making the line.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections import deque
from operator import attrgetter
from typing import Any, BinaryIO

import msgspec

from gateway.domain.record import AccessRecord

log = logging.getLogger(__name__)
MAX_WAITING = 10_000
ATOMIC_BYTES = 4096  # PIPE_BUF of Linux: up to here a write goes into a pipe whole, whoever else writes there
FILE_BYTES = 65_536  # a file that is written to at its end takes any write whole
PAUSE_S = 0.1
STARVED_S = 0.2  # without a sign of the thread
HAND_OVER_S = 0.005


class AccessLog:
    """Bounded: over MAX_WAITING waiting lines new ones are dropped and counted, and the count is logged.

    `write` belongs to the event loop's thread. An event loop without a pause releases the interpreter lock often, but
    for so short a time that a waiting thread misses it, every time and for good. So where nothing was written for
    STARVED_S, `write` itself waits until the thread has been through, for at most HAND_OVER_S.
    """

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._batch_bytes = FILE_BYTES if is_file(out) else ATOMIC_BYTES
        self._waiting: deque[bytes] = deque()
        self._wake = threading.Event()
        self._wrote = threading.Event()
        self._is_idle = False  # the thread waits for `_wake` without a deadline, or is about to
        self._is_closing = False
        self._seen_s = time.monotonic()  # the thread's last sign, or the last time that it was given way
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: AccessRecord) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.dropped += 1
            return
        self._waiting.append(line_of(record))
        now = time.monotonic()
        if self._is_idle:
            self._is_idle = False
            self._seen_s = now
            self._wake.set()
        elif now - self._seen_s > STARVED_S:
            self._seen_s = now
            self._wrote.clear()
            self._wake.set()
            self._wrote.wait(HAND_OVER_S)

    def close(self, timeout_s: float) -> None:
        """Waits until the waiting lines are written, at most `timeout_s`."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._waiting or self.dropped:
            log.warning("access records not written: %d", len(self._waiting) + self.dropped)

    def _run(self) -> None:
        while not self._is_closing:
            self._is_idle = True
            if not self._waiting:  # asked after `_is_idle` is set: a line that came before it would wake nobody
                self._wake.wait()
            self._is_idle = False
            self._wake.clear()
            self._write_waiting()
            self._seen_s = time.monotonic()
            self._wrote.set()
            if not self._is_closing:
                self._wake.wait(PAUSE_S)
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            lines = self._batch()
            try:
                self._out.write(b"".join(lines))
                self._out.flush()
            except (OSError, ValueError):  # disk full, pipe closed: serving goes on
                self.dropped += len(lines)

    def _batch(self) -> list[bytes]:
        """As many lines as one write takes without mixing with those of the other gateway processes on one stdout."""
        lines = [self._waiting.popleft()]
        size = len(lines[0])
        while self._waiting and (size := size + len(self._waiting[0])) <= self._batch_bytes:
            lines.append(self._waiting.popleft())
        return lines


def is_file(out: BinaryIO) -> bool:
    try:
        return stat.S_ISREG(os.fstat(out.fileno()).st_mode)
    except (OSError, ValueError):  # no descriptor behind it
        return False


# The record's fields in its own order; the durations stand last and are rounded, `began_s` means nothing outside.
_DURATIONS = ("admit_s", "queue_s", "ttft_s", "total_s")
_PLAIN = tuple(name for name in AccessRecord.__slots__ if name not in ("began_s", *_DURATIONS))
_plain_values = attrgetter(*_PLAIN)
_Line: Any = msgspec.defstruct("_Line", ["log", "at_s", *_PLAIN, *_DURATIONS], gc=False)  # encoded in C, in this order
_encode = msgspec.json.Encoder().encode


def line_of(record: AccessRecord) -> bytes:
    """The record as one JSON line; durations in seconds to the 0.1 ms, `at_s` is the time of writing (epoch)."""
    admit_s, queue_s, ttft_s = record.admit_s, record.queue_s, record.ttft_s
    return (
        _encode(
            _Line(
                "access",
                int(time.time() * 1000) / 1000,
                *_plain_values(record),
                None if admit_s is None else int(admit_s * 10_000 + 0.5) / 10_000,  # round() takes three times as long
                None if queue_s is None else int(queue_s * 10_000 + 0.5) / 10_000,
                None if ttft_s is None else int(ttft_s * 10_000 + 0.5) / 10_000,
                int(record.total_s * 10_000 + 0.5) / 10_000,
            )
        )
        + b"\n"
    )
