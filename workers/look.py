"""Two looks over the network for gather.py: whether the gateway's port is free, and whether Redis can be used."""

from __future__ import annotations

import errno
import itertools
import socket
import threading
from pathlib import Path
from urllib.parse import unquote, urlsplit

import psutil
import redis
from redis import exceptions as redis_errors

from gateway.config.load import LoadedConfig
from gateway.config.store import store_url
from workers.facts import PortUse, Trouble
from workers.redis_binary import RedisFailed, find_binary

REDIS_S = 2.0
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


def look_at_redis(loaded: LoadedConfig) -> Trouble | None:
    """None when it can be used: for "embedded" a binary is there, else the server answers and takes scripts."""
    if loaded.config.redis.is_embedded:
        try:
            find_binary()
        except RedisFailed as exc:
            fact, _, way_out = exc.message.partition("; ")
            return Trouble(fact, way_out)
        return None
    answer: list[Trouble | None] = []
    # a thread, since looking up a name knows no deadline; it ends by itself
    thread = threading.Thread(target=lambda: answer.append(_ask(store_url(loaded))), daemon=True)
    thread.start()
    thread.join(REDIS_S * 2)
    return answer[0] if answer else _unreachable(store_url(loaded), "it did not answer in time")


def _ask(url: str) -> Trouble | None:
    place = place_of(url)
    client = None
    try:
        client = redis.Redis.from_url(url, socket_timeout=REDIS_S, socket_connect_timeout=REDIS_S, retry=None)
        client.ping()
        client.script_load("return 1")
    except (redis_errors.AuthenticationError, redis_errors.AuthorizationError):
        return Trouble(f"{place} refuses the user or password", "correct them in the URL: redis://USER:PASSWORD@HOST")
    except redis_errors.NoPermissionError:
        return Trouble(f"{place} does not let this user run scripts", "allow @scripting and @read @write to it (ACL)")
    except (redis_errors.ConnectionError, redis_errors.TimeoutError) as exc:
        return _unreachable(url, _reason(exc))
    except redis_errors.ResponseError as exc:
        if str(exc).startswith(("NOAUTH", "WRONGPASS", "ERR AUTH", "ERR invalid password")):
            return Trouble(f"{place} asks for a password", "add it to the URL: redis://USER:PASSWORD@HOST")
        return Trouble(
            f"{place} answers with an error: {_plain(exc, url)}", "correct the database number or the server's settings"
        )
    except (redis_errors.RedisError, ValueError):  # a ValueError of the URL would show all of it
        return Trouble("the URL cannot be used", "write it as redis://HOST:6379/0, rediss://… or unix:///PATH")
    finally:
        if client is not None:
            client.close()
    return None


def _plain(exc: Exception, url: str) -> str:
    """What the server said, without what we had sent: some echo the arguments of a command that they do not know."""
    said = str(exc).partition(", with args")[0]
    secret = unquote(urlsplit(url).password or "")
    return said.replace(secret, "***") if secret else said


def _reason(exc: Exception) -> str:
    cause = exc.__cause__ or exc.__context__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return "it did not answer in time" if isinstance(exc, redis_errors.TimeoutError) else "the connection ended"


def _unreachable(url: str, reason: str) -> Trouble:
    return Trouble(
        f"{place_of(url)} cannot be reached ({reason})",
        'start it, correct the URL, or use "embedded" for a Redis of ours',
    )


def place_of(url: str) -> str:
    """The server of a Redis URL without user and password."""
    try:
        parts = urlsplit(url)
        if parts.scheme == "unix":
            return f"unix://{parts.path}"
        return f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        return "the server"
