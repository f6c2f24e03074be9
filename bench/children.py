"""Starts and ends every process of a benchmark run. Made once by __main__.py; all others start theirs through it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = Path(__file__).with_name("launch.py")
STOP_S = 15.0
FINISH_S = 30.0  # for a profiler to write what it has seen
LOG_LINES_SHOWN = 12


class RunFailed(Exception):
    """A measurement, or a process that it needs, did not do what it should; the message says what."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where: the measured one alone, everything else beside it. Numbers as the kernel counts."""

    measured: str
    load: str


@dataclass(slots=True)
class Child:
    """A process that runs until `Children.stop`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def require_running(self) -> None:
        """Raises RunFailed with the end of its log when it has ended."""
        code = self.process.poll()
        if code is not None:
            raise RunFailed(f"{self.name} ended with code {code}:{tail(self.log)}")


class Children:
    """Leaving the block ends them all, last started first, however it is left."""

    def __init__(self, folder: Path, cores: Cores) -> None:
        """`folder` takes the logs and whatever else a contender writes; the caller makes and removes it."""
        self.folder = folder
        self.cores = cores
        self._running: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in reversed(self._running[:]):
            self.stop(child)

    def start(
        self, name: str, command: Sequence[str], *, cores: str, env: Mapping[str, str] | None = None, out: str = ""
    ) -> Child:
        """Starts and does not wait. `out`: a file of its own for stdout, in `folder`; else it goes into the log."""
        log = self.folder / f"{name}.log"
        with log.open("ab") as errors, (self.folder / (out or log.name)).open("ab") as output:
            process = subprocess.Popen(
                bound(command, cores),
                cwd=ROOT,
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,  # a Ctrl-C in the terminal comes to us alone; we end them in order
            )
            child = Child(name, process, log)
            self._running.append(child)
        return child

    def stop(self, child: Child) -> None:
        """SIGTERM, SIGKILL after STOP_S to it and its descendants, reaped."""
        if child.process.poll() is None:
            child.process.terminate()
            try:
                child.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.process.wait()
        self._running.remove(child)

    def ask(self, command: Sequence[str], *, timeout_s: float, on_start: Sequence[str] = ()) -> str:
        """What a load tool writes to stdout; it runs on the load's cores. Raises RunFailed when it fails or hangs.

        `on_start`: a profiler to run beside it.
        """
        beside = self.start("profiler", on_start, cores=self.cores.load) if on_start else None
        process = subprocess.Popen(
            bound(command, self.cores.load),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{Path(command[0]).name} took longer than {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
            if beside is not None:
                self._let_finish(beside)
        if process.returncode != 0:
            raise RunFailed((errors or output).strip()[-500:] or f"{command[0]} ended with code {process.returncode}")
        return output

    def _let_finish(self, child: Child) -> None:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(FINISH_S)
        self.stop(child)

    def ask_tool(self, module: str, *arguments: str, timeout_s: float, on_start: Sequence[str] = ()) -> dict[str, Any]:
        """The JSON object that one of our own load tools prints."""
        command = [sys.executable, "-m", f"bench.{module}", *arguments]
        answer: dict[str, Any] = json.loads(self.ask(command, timeout_s=timeout_s, on_start=on_start))
        return answer


def bound(command: Sequence[str], cores: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(LAUNCH), str(os.getpid()), cores, *command]


def tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    return "".join(f"\n  | {line[:200]}" for line in lines)
