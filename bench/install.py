"""Gets the peers and the load tool where they are missing. Called by __main__.py before anything is started.

The peers live in virtual environments of their own beside the checkout's: `.venv-bench`, and `.venv-litellm` if wanted.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from bench.children import ROOT, RunFailed
from deploy.demo.environments import Made, key_of
from deploy.demo.machine import apt_get

PEERS_VENV, LITELLM_VENV = ROOT / ".venv-bench", ROOT / ".venv-litellm"
PEERS = ("vllm-router>=0.1.17,<0.2", "matplotlib>=3.11,<4", "py-spy>=0.4,<0.5")
LITELLM = ("litellm[proxy]>=1.108,<1.110",)  # 1.110 wants litellm-proxy, which no index seems to have
PROGRAMS = {"nginx": "nginx-light", "wrk": "wrk"}  # program → the Debian package that carries it
INSTALL_S = 1200.0


def programs(wanted: Iterable[str]) -> None:
    """Raises RunFailed where one is missing and apt-get cannot bring it."""
    missing = [name for name in wanted if shutil.which(name) is None]
    if not missing:
        return
    apt = apt_get()
    if apt is None:
        raise RunFailed(f"{' and '.join(missing)} not found; install it, or leave it out (--only)")
    print(f"installing {', '.join(missing)}", file=sys.stderr, flush=True)
    packages = [PROGRAMS[name] for name in missing]
    _run([*apt, "update"])
    _run([*apt, "install", "-y", "--no-install-recommends", *packages])
    if still := [name for name in missing if shutil.which(name) is None]:
        raise RunFailed(f"{' and '.join(still)} is still not on PATH after apt-get install {' '.join(packages)}")


def environment(path: Path, requirements: tuple[str, ...]) -> None:
    """Makes the virtual environment once, and anew when the requirements or Python change. Raises RunFailed."""
    made = Made(path, key_of(*requirements))
    if made.is_ready:
        return
    print(f"installing {', '.join(requirements)} into {path.name}", file=sys.stderr, flush=True)
    made.begin(keep=made.is_foreign)
    if not (path / "bin/pip").exists():
        _run([sys.executable, "-m", "venv", str(path)])
    _run([str(path / "bin/python"), "-m", "pip", "--no-input", "install", "--quiet", *requirements])
    made.finish()


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunFailed(f"{' '.join(command)} took longer than {INSTALL_S:g} s") from None
    if done.returncode != 0:
        raise RunFailed(f"{' '.join(command)} failed:\n{(done.stderr or done.stdout).strip()[-1000:]}")
