"""What a worker gets from its supervisor: ports, GPUs, a place to publish on. Used by `worker.py`, `life.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workers.gpu import GpuDesk


class Board(Protocol):
    """Where states are published; `publish.Publisher` is one."""

    def changed(self) -> None:
        """A record changed: publish soon."""

    async def flush(self) -> bool:
        """Publishes what is now; False when it could not. Ends by itself."""


class PortSource(Protocol):
    """Free ports of 127.0.0.1; `ports.Ports` is one."""

    def take(self) -> int: ...
    def release(self, port: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """`slot` is the worker's number on the host; times in seconds."""

    slot: int
    ports: PortSource
    gpus: GpuDesk
    board: Board
    temp_folder: Path
    parent_env: Mapping[str, str]
    drain_s: float  # longest wait for requests in flight at a stop
    settle_s: float  # from the publication of "draining" until gateways have read it
