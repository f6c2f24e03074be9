"""What the kernel is told of the gateway's connections: how long a client without a network may hold one."""

from __future__ import annotations

import socket

from gateway.edge.server import PROBE_AFTER_S, PROBE_EVERY_S, PROBES, listen


def test_an_accepted_connection_asks_a_silent_client_whether_it_is_still_there() -> None:
    """Nothing flows while a request waits or is prefilled: only the kernel's own probes notice then."""
    with listen("127.0.0.1", 0, write_s=2.5) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:

            def tcp(option: int) -> int:
                return accepted.getsockopt(socket.IPPROTO_TCP, option)

            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert tcp(socket.TCP_KEEPIDLE) == PROBE_AFTER_S
            assert tcp(socket.TCP_KEEPINTVL) == PROBE_EVERY_S
            assert tcp(socket.TCP_KEEPCNT) == PROBES
            assert tcp(socket.TCP_USER_TIMEOUT) == 3125, "a quarter more, since timers.py comes first"
    assert PROBE_AFTER_S + PROBES * PROBE_EVERY_S <= 60
