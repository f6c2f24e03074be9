"""Ports for the servers that tests start: whoever has to name one before it listens asks here."""

from __future__ import annotations

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A port that nobody holds now, below the range from which the kernel gives out others' ports meanwhile."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
