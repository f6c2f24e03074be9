"""Becomes a child of the benchmark: bound to its cores, with all open files allowed, ended when its parent dies.

    python -I -S launch.py PARENT_PID CORES COMMAND...

Run by children.py. A hook between fork and exec would do the same, but Python warns of it in processes with threads.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, cores, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit("the benchmark that started this is gone")
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
