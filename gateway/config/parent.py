"""Ties a process to the one that started it, through the kernel: `poolgate up` and a gateway with several processes."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "POOLGATE_PARENT_PID"
_PR_SET_PDEATHSIG = 1


def follow_parent() -> bool:
    """With POOLGATE_PARENT_PID set: SIGTERM comes when that process dies. False: it is dead already, so end now.

    The kernel watches the thread that started us: the parent must spawn from a thread that lives as long as it does.
    """
    expected = os.environ.get(PARENT_VARIABLE, "")
    if not expected.isdecimal():
        return True
    prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == int(expected)  # else it died before the call above, and no signal will come


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
