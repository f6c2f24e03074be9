"""What this machine has and allows: GPU, disk space, apt; and the lock of one set-up. Used by `prepare.py`."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

GB = 1_000_000_000
LOCK_WAIT_S = 7200.0


class SetupError(Exception):
    """The set-up cannot go on; the message says why and what to do."""


def has_nvidia_gpu(proc: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    """An NVIDIA card with a working driver: the driver lists it, or `nvidia-smi` does (containers may hide /proc)."""
    with contextlib.suppress(OSError):
        if any(proc.iterdir()):
            return True
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        done = subprocess.run(
            ["nvidia-smi", "-L"], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def require_space(folder: Path, need_bytes: int, what: str) -> None:
    """Raises SetupError when the file system of `folder` has less than `need_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < need_bytes:
        raise SetupError(
            f"{what} needs about {need_bytes / GB:.1f} GB of disk, and {folder} has {free / GB:.1f} GB free. "
            "Make room, or clone to a larger disk."
        )


def apt_get() -> list[str] | None:
    """How apt-get can be run without asking anybody anything; None where it cannot."""
    if shutil.which("apt-get") is None:
        return None
    if os.geteuid() == 0:
        return ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"]
    if shutil.which("sudo") is None:
        return None
    try:
        asked = subprocess.run(
            ["sudo", "-n", "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ["sudo", "-n", "env", "DEBIAN_FRONTEND=noninteractive", "apt-get"] if asked.returncode == 0 else None


def is_held(lock: Path) -> bool:
    """Some process holds this lock file, as `poolgate up` does while it runs."""
    try:
        fd = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def only_one(path: Path, say: Callable[[str], None]) -> Iterator[int]:
    """Holds the lock file while the block runs, waiting for another set-up of this checkout; gives its descriptor.

    Hand the descriptor to every child (`pass_fds`): should we be killed, the lock then lasts until the last child that
    still writes here is gone. Raises SetupError when the other one takes longer than LOCK_WAIT_S.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    began = said = time.monotonic()
    is_first = True
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
                if is_first or now - said >= 10:
                    holder = os.pread(fd, 20, 0).decode(errors="replace").strip() or "unknown"
                    say(f"another set-up of this checkout is running (pid {holder}); waited {now - began:.0f} s for it")
                    is_first, said = False, now
                if now - began > LOCK_WAIT_S:
                    raise SetupError(f"The other set-up still runs after {LOCK_WAIT_S:.0f} s; look at it.") from None
                time.sleep(0.3)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        yield fd
    finally:
        os.close(fd)
