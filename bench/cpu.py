"""What a tree of processes has used: CPU time and resident memory, read from the kernel. Called by the load tools."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def tree(roots: Iterable[int]) -> list[int]:
    """The processes and all their descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                children[parent_in(Path(f"/proc/{entry}/stat").read_text())].append(int(entry))
    found = list(roots)
    for pid in found:
        found += children[pid]
    return found


def parent_in(stat: str) -> int:
    """Field 4 of /proc/PID/stat; the name before it, in parentheses, may hold blanks and parentheses (proc(5))."""
    return int(stat.rpartition(")")[2].split()[1])


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of all threads, those that have ended too, to the nanosecond.

    It is the clock that clock_getcpuclockid(3) gives for a process: /proc/PID/stat shows the same time, but cut to
    whole ticks of 10 ms, which is some percent of a short run. Raises OSError for a process that is gone.
    """
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in pids)


def rss_bytes(pids: Iterable[int]) -> int:
    """Resident memory; what processes share counts for each. Raises OSError for a process that is gone."""
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * PAGE_BYTES
