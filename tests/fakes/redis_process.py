"""A real redis-server that a test may freeze, kill and start again; made by tests/integration/conftest.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from workers.redis_binary import find_binary

START_S = 30.0


@dataclass
class RedisProcess:
    """A redis-server that a test may freeze, kill and start again; its data (an append-only file) stays."""

    directory: Path
    binary: Path | None = None
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def socket(self) -> Path:
        return self.directory / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "yes"]
        options += ["--appendfsync", "no", "--dir", str(self.directory)]
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen([self.binary or find_binary(), *options], stdout=log, stderr=log)
        until = time.monotonic() + START_S
        while not self._answers():
            assert self.process.poll() is None, (self.directory / "log").read_text()
            assert time.monotonic() < until, "redis-server did not start"
            time.sleep(0.01)

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.socket))
                probe.sendall(b"PING\r\n")
                return probe.recv(64).startswith(b"+PONG")
            except OSError:
                return False
