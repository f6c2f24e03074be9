"""What every contender is to the measurements: processes and an address. Made by poolgate.py and peers.py."""

from __future__ import annotations

import http.client
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from bench.children import Child, Children, RunFailed, tail
from bench.request import PATH, Target, body, headers

READY_S = 60.0
POLL_S = 0.1
ANSWER_S = 10.0


@dataclass(slots=True)
class Contender:
    """A running proxy. Its CPU and memory are those of `main` and all its descendants."""

    name: str
    target: Target
    main: Child
    beside: list[Child] = field(default_factory=list)  # what it needs and is not measured with it

    def stop(self, children: Children) -> None:
        children.stop(self.main)
        for child in self.beside:
            children.stop(child)

    def wait_until_ready(self) -> None:
        """Returns after one right answer. Raises RunFailed when that takes too long or a process ends."""
        until = time.monotonic() + READY_S
        while True:
            for child in (self.main, *self.beside):
                child.require_running()
            seen = first_answer(self.target)
            if seen == "200":
                return
            if time.monotonic() > until:
                raise RunFailed(f"{self.name} was not ready within {READY_S:g} s ({seen}):{tail(self.main.log)}")
            time.sleep(POLL_S)


Start = Callable[[Children, Path, int], Contender]  # a folder of its own, the port of its upstream


def first_answer(target: Target) -> str:
    """The status of one chat request, or what prevented it."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=ANSWER_S)
    try:
        connection.request("POST", PATH, body(target.model, is_stream=False), headers(target))
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        connection.close()


def free_port() -> int:
    """A port that nobody holds now, below the range from which the kernel gives out others' ports meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
