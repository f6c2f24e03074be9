"""Ports for workers: a free one per start, tested by binding it without reuse. Owned by the supervisor."""

from __future__ import annotations

import errno
import random
import socket

from workers.errors import StartRefused

# Below Linux's ephemeral range (32768-60999): between our test and the bind of vLLM, 10 s later, no outgoing
# connection of the host can be given the port.
FIRST_PORT, LAST_PORT = 22_000, 31_999
# vLLM looks upwards from VLLM_PORT for ports between its own processes; a range per worker keeps them apart.
FIRST_INTERNAL_PORT, INTERNAL_PORTS = 12_000, 50
MAX_INTERNAL_RANGES = 200


class Ports:
    """Hands out ports that nobody listens on, never one twice while it is held."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._held: set[int] = set()

    def take(self) -> int:
        """Raises StartRefused when the whole range is in use. The caller gives it back with `release`."""
        count = LAST_PORT - FIRST_PORT + 1
        start = self._rng.randrange(count)
        for step in range(count):
            port = FIRST_PORT + (start + step) % count
            if port not in self._held and is_free(port):
                self._held.add(port)
                return port
        raise StartRefused(f"no free port between {FIRST_PORT} and {LAST_PORT} on 127.0.0.1; end what holds them")

    def release(self, port: int) -> None:
        self._held.discard(port)


def internal_port(slot: int) -> int:
    """First port of the range of the worker with this number on the host."""
    return FIRST_INTERNAL_PORT + slot % MAX_INTERNAL_RANGES * INTERNAL_PORTS


def is_free(port: int) -> bool:
    """Whether 127.0.0.1:`port` can be bound; a server on 0.0.0.0 or :: counts as there, whatever it set for reuse."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError as exc:
            if exc.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True
