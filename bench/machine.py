"""What the figures were taken on: processor, kernel, versions, checkout. Called by rounds.py and __main__.py."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from bench.children import ROOT
from bench.install import LITELLM_VENV, PEERS_VENV


def open_files_limit() -> int:
    """How many files one process of ours may have open (hard limit, which launch.py takes)."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1_000_000 if hard == resource.RLIM_INFINITY else hard


def idle_steps(wanted: Iterable[int], open_files: int) -> list[int]:
    """Streams that a proxy can hold: each takes two descriptors, and some are needed for the rest."""
    return [min(step, (open_files - 200) // 2) for step in wanted]


def facts(contenders: Iterable[str]) -> dict[str, str]:
    """Name → value, in the order in which a report shows them."""
    found = {
        "processor": f"{_cpu_model()}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "load before the run": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "open files": f"{open_files_limit():,} for one process",
        "Python": f"{platform.python_version()}, uvloop {version('uvloop')}, httptools {version('httptools')}",
        "gateway": f"{_git('rev-parse', '--short=10', 'HEAD')}, {'dirty' if is_dirty() else 'clean'} checkout",
    }
    if "nginx" in contenders:
        found["nginx"] = _output(["nginx", "-v"]).rpartition("/")[2]
    if "vllm-router" in contenders:
        found["vllm-router"] = _installed(PEERS_VENV, "vllm_router")
    if "litellm" in contenders:
        found["litellm"] = _installed(LITELLM_VENV, "litellm")
    return found


def short_commit() -> str:
    return _git("rev-parse", "--short=10", "HEAD")


def is_dirty() -> bool:
    return bool(_git("status", "--porcelain"))


def _cpu_model() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return match[1].strip() if match else platform.machine()


def _installed(venv: Path, name: str) -> str:
    infos = [info.name for info in venv.glob(f"lib/python3*/site-packages/{name}-*.dist-info")]
    return infos[0].removeprefix(f"{name}-").removesuffix(".dist-info") if infos else "unknown"


def _git(*arguments: str) -> str:
    return _output(["git", *arguments])


def _output(command: list[str]) -> str:
    """What it says on either channel, or "unknown"."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return (done.stdout or done.stderr).strip() if done.returncode == 0 else "unknown"
