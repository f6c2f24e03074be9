"""A look over the network for gather.py: whether the gateway's port is free."""

from __future__ import annotations

import errno
import itertools
import socket
from pathlib import Path

import psutil

from gateway.config.load import LoadedConfig
from workers.facts import PortUse

PROBLEMS = {errno.EADDRINUSE: "taken", errno.EACCES: "forbidden", errno.EADDRNOTAVAIL: "address"}


def look_at_port(loaded: LoadedConfig) -> PortUse | None:
    """None when gateway.host and gateway.port can be listened on now."""
    host, port = loaded.config.gateway.host, loaded.config.gateway.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as exc:
        detail = exc.strerror or str(exc)
        problem = PROBLEMS.get(exc.errno or 0, "address" if isinstance(exc, socket.gaierror) else "other")
        holder = _listener(port) if problem == "taken" else None
        if holder is None:
            return PortUse(problem, detail)
        return PortUse(problem, detail, holder.pid, _name(holder), _serves(holder, loaded.path))
    return None


def _listener(port: int) -> psutil.Process | None:
    """Who listens on the port, if this user may see it."""
    try:
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return psutil.Process(connection.pid)
    except psutil.Error:
        return None
    return None


def _name(process: psutil.Process) -> str:
    try:
        name: str = process.name()
    except psutil.Error:
        return "?"
    return name


def _serves(process: psutil.Process, config: Path) -> bool:
    """Whether it is a `poolgate serve` of this config file."""
    try:
        words, folder = process.cmdline(), Path(process.cwd())
    except (psutil.Error, OSError):
        return False
    given = [after for before, after in itertools.pairwise(words) if before == "--config"]
    return "serve" in words and (folder / (given[-1] if given else "config.toml")).resolve() == config
