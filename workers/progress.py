"""What `poolgate up` shows while workers load: a line per worker, rewritten in a terminal, repeated elsewhere."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

from gateway.domain.replica import ReplicaRecord

REPEAT_S = 5.0


def worker_line(replica: ReplicaRecord, now_s: float) -> str:
    """'  chat/0@host  starting  loading weights 3/8  12s'."""
    elapsed = max(0, int(now_s - replica.since_s))
    detail = f"  {replica.detail}" if replica.detail else ""
    return f"  {replica.id:<28} {replica.state.value:<9} {elapsed:>4} s{detail}"


class ProgressPrinter:
    """In a terminal the lines are drawn over; elsewhere one is printed when it changes, or every REPEAT_S."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._is_terminal = self._out.isatty()
        self._drawn = 0
        self._printed: dict[str, tuple[tuple[object, ...], float]] = {}

    def say(self, text: str) -> None:
        """A line that stays."""
        self._erase()
        self._print(text)

    def show(self, replicas: Sequence[ReplicaRecord], now_s: float) -> None:
        if self._is_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._erase()
            for replica in replicas:
                self._print(worker_line(replica, now_s)[:width])
            self._drawn = len(replicas)
            return
        for replica in replicas:
            facts: tuple[object, ...] = (replica.state, replica.detail, replica.restarts)
            last = self._printed.get(replica.id)
            if last is None or last[0] != facts or (not replica.is_ready() and now_s - last[1] >= REPEAT_S):
                self._printed[replica.id] = (facts, now_s)
                self._print(worker_line(replica, now_s))

    def keep(self) -> None:
        """Leaves the drawn block as it stands."""
        self._drawn = 0

    def _erase(self) -> None:
        if self._drawn:
            self._write(f"\x1b[{self._drawn}A\x1b[J")
            self._drawn = 0

    def _print(self, text: str) -> None:
        self._write(text + "\n")

    def _write(self, text: str) -> None:
        try:
            self._out.write(text)
            self._out.flush()
        except (BrokenPipeError, ValueError, OSError):
            pass  # nobody looks any more; the work goes on
