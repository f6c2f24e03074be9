"""Killing a worker's processes to the last thread, on real processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from fakes.worker_program import until

from workers import proc
from workers.proc import Family

# What a killed engine looks like while its threads still hold memory: /proc calls the first one a zombie.
FIRST_THREAD_ENDS = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
ctypes.CDLL(None).pthread_exit(None)
"""


async def test_engine_that_still_frees_its_gpu_memory_is_taken_for_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", FIRST_THREAD_ENDS], start_new_session=True)
    try:
        await until(lambda: ") Z " in Path(f"/proc/{child.pid}/stat").read_text())
        row = proc.row_of(child.pid)
        assert row is not None and not row.is_zombie
        assert proc.kill_family(Family("no mark", child.pid, {row.identity}), 10) == []
        assert child.poll() == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
