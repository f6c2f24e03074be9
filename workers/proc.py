"""The process table of this host, and which processes of it are one worker's. For `process.py`, `leftovers.py`.

Read from /proc and not through psutil: start times in clock ticks do not move when the wall clock is set.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from workers.command import MARK_VARIABLE

PROC = Path("/proc")


class Identity(NamedTuple):
    """A process for good: the kernel gives a pid again, but not with the same start time."""

    pid: int
    start_ticks: int  # since boot


@dataclass(frozen=True, slots=True)
class Row:
    pid: int
    start_ticks: int
    parent: int
    session: int
    is_zombie: bool  # dead to the last thread; only its parent has not taken note of it

    @property
    def identity(self) -> Identity:
        return Identity(self.pid, self.start_ticks)


@dataclass(slots=True)
class Family:
    """A worker's processes: what was started, and every descendant seen since (they may leave session and parent)."""

    mark: str
    session: int | None  # pid of what was started, which leads a session; None: that number may be somebody else's now
    seen: set[Identity] = field(default_factory=set)


def boot_id() -> str:
    return (PROC / "sys/kernel/random/boot_id").read_text().strip()


def row_of(pid: int) -> Row | None:
    try:
        # the command name is in parentheses and may hold any character, so count from the last ")"
        fields = (PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    # a first thread that has ended is shown as a zombie while others go on and hold the process's memory
    is_zombie = fields[0] in (b"Z", b"X") and int(fields[17]) <= 1
    return Row(pid, int(fields[19]), int(fields[1]), int(fields[3]), is_zombie)


def table() -> dict[int, Row]:
    """All processes by pid; blocking, about 10 µs for each."""
    rows = (row_of(int(name)) for name in os.listdir(PROC) if name.isdecimal())
    return {row.pid: row for row in rows if row is not None}


def marked(pids: Iterable[int], mark: str) -> set[int]:
    """Which of `pids` carry the mark in their environment; those of other users cannot be read and carry none.

    vLLM's processes overwrite that memory when they set their title, so the mark alone does not find them.
    """
    wanted = f"{MARK_VARIABLE}={mark}".encode()
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            if wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def members(family: Family, rows: Mapping[int, Row], marked_pids: Iterable[int] = ()) -> set[Row]:
    """The family's processes in `rows`, zombies among them. Pure.

    Seeds are processes seen before, those that carry the mark and those of the first session; to them come, again and
    again, the children of each and everyone in a session of one of them. A member's session is always the family's
    own: the first process leads one, and a process can only leave to a new session. The kernel does not give a number
    again while a session has it, so a process of that session is ours unless a stranger has the number as its pid.
    """
    us = os.getpid()
    found = {row.pid for row in rows.values() if row.identity in family.seen} | {p for p in marked_pids if p in rows}
    if family.session is not None:
        leader = rows.get(family.session)
        if leader is None or leader.identity in family.seen:
            found |= {row.pid for row in rows.values() if row.session == family.session}
    found.discard(us)
    while True:
        sessions = {rows[pid].session for pid in found} - {rows[us].session if us in rows else 0, 0, -1}
        more = {
            row.pid
            for row in rows.values()
            if row.pid not in found and row.pid != us and (row.parent in found or row.session in sessions)
        }
        if not more:
            return {rows[pid] for pid in found}
        found |= more


def kill_family(family: Family, timeout_s: float) -> list[int]:
    """SIGKILL of every member until a look at the whole table finds none but zombies; blocking.

    Returns the pids that are still there after `timeout_s`. Zombies that were left to us by a dead parent are reaped.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        rows = table()
        found = members(family, rows, marked(rows, family.mark))
        family.seen |= {row.identity for row in found}
        reap_adopted(found, family.session)
        alive = [row for row in found if not row.is_zombie]
        if not alive or time.monotonic() >= deadline:
            return sorted(row.pid for row in alive)
        for row in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(row.pid, signal.SIGKILL)
        time.sleep(0.02)


def reap_adopted(rows: Iterable[Row], started: int | None) -> None:
    """Waits for dead members whose parent died before them, when we are their parent now (`parent.adopt_orphans`).

    `started` is the one that asyncio waits for; it must stay for that.
    """
    for row in rows:
        if row.is_zombie and row.parent == os.getpid() and row.pid != started:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(row.pid, os.WNOHANG)
