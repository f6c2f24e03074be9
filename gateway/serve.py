"""`poolgate serve`: one gateway process, or a parent with several on one port. Called by cli.py."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import time

from gateway.app import build
from gateway.config.load import LoadedConfig, metrics_key
from gateway.config.outside import check_outside
from gateway.config.parent import PARENT_VARIABLE, follow_parent
from gateway.config.schema import process_count
from gateway.edge.inference import inference_handlers
from gateway.edge.lane import Lane
from gateway.edge.server import GatewayServer, listen, server_config
from gateway.telemetry.shared_values import SharedValues

log = logging.getLogger(__name__)
LISTENER_VARIABLE = "POOLGATE_LISTEN_FD"  # set for the processes of a group: the socket that their parent opened
RESTART_S = 1.0
STOP_MARGIN_S = 10.0
# Requests leave no cycles behind, so collections find next to nothing, and a full one walks through every open stream
GC_AFTER = 20_000
GC_OLDER = 25


def serve(loaded: LoadedConfig) -> int:
    """Runs until SIGTERM or SIGINT, then drains; the exit code.

    Raises ConfigError when the port cannot be had, or a key or an authority that pools of others need.
    """
    if not follow_parent():
        return 0
    metrics_key(loaded.config)  # here a fault is one line; in the processes of a group it would be one a second
    check_outside(loaded)
    inherited = os.environ.get(LISTENER_VARIABLE)
    if inherited is not None:
        return serve_one(loaded, socket.socket(fileno=int(inherited)))
    gateway = loaded.config.gateway
    listener = listen(gateway.host, gateway.port, write_s=gateway.timeouts.write_s)
    processes = process_count(loaded.config)
    return serve_one(loaded, listener) if processes == 1 else ProcessGroup(loaded, listener, processes).run()


def serve_one(loaded: LoadedConfig, listener: socket.socket) -> int:
    app, runtime = build(loaded)
    gateway = loaded.config.gateway
    lane = Lane(inference_handlers(runtime), gateway.timeouts.write_s, gateway.timeouts.total_s)
    config = server_config(app, lane, drain_s=gateway.drain_s)
    server = GatewayServer(config, lambda: runtime().begin_drain())
    allow_open_files()
    gc.collect()
    gc.freeze()  # what is imported stays: no collection has to walk through it
    gc.set_threshold(GC_AFTER, GC_OLDER, GC_OLDER)
    server.run(sockets=[listener])
    return 0


def allow_open_files() -> int:
    """As many as the system lets this process have: a stream needs two, and shells often start with 1024 in all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # an "unlimited" that the kernel does not take
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class ProcessGroup:
    """N equal processes that accept on one socket. One that dies is replaced; a stop is passed on and waited for.

    Each has a slot of shared memory for its metrics, which the one that replaces it goes on with.
    The kernel ends the processes when this parent is killed.
    """

    def __init__(self, loaded: LoadedConfig, listener: socket.socket, count: int) -> None:
        self._loaded = loaded
        self._listener = listener
        self._values = SharedValues.for_group(count)
        self._signals: list[int] = []
        self._children: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda received, _frame: self._signals.append(received))
        self._children = [self._start(number) for number in range(len(self._values.slots))]
        while not self._signals:
            time.sleep(0.2)
            for i, child in enumerate(self._children):
                if child.poll() is not None and not self._signals:
                    log.error("gateway process %d ended with code %d, starting another", child.pid, child.returncode)
                    self._values.slots[i].leave()
                    time.sleep(RESTART_S)
                    self._children[i] = self._start(i)
        return self._stop()

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        fd = self._listener.fileno()
        return subprocess.Popen(
            [sys.executable, "-m", "gateway", "serve", "--config", str(self._loaded.path)],
            pass_fds=[fd, self._values.descriptor],
            env={
                **os.environ,
                **self._values.variable(number),
                LISTENER_VARIABLE: str(fd),
                PARENT_VARIABLE: str(os.getpid()),
            },
            start_new_session=True,  # a Ctrl-C in the terminal comes once, from us
        )

    def _stop(self) -> int:
        self._listener.close()
        deadline = time.monotonic() + self._loaded.config.gateway.drain_s + STOP_MARGIN_S
        passed_on = 0
        while any(child.poll() is None for child in self._children):
            for number in self._signals[passed_on:]:
                passed_on += 1
                for child in self._children:
                    if child.poll() is None:
                        child.send_signal(number)
            if time.monotonic() > deadline:
                for child in self._children:
                    child.kill()
            time.sleep(0.05)
        return 0
