"""Several real redis-servers that belong together: a master with a replica behind sentinels, and a cluster."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes.certificates import Authority
from fakes.ports import free_port
from redis.connection import Connection, SSLConnection
from redis.exceptions import RedisError

from workers.redis_binary import find_binary

WITHIN_S = 60.0
DOWN_MS = 800  # silence after which a server counts as down
SERVICE = "poolgate-test"
HOST = "127.0.0.1"


@dataclass
class Server:
    """One redis-server on a port; a test may freeze it, kill it and start it again."""

    directory: Path
    port: int
    options: list[str]
    password: str | None = None
    authority: Authority | None = None  # then it speaks TLS only
    binary: Path = field(default_factory=find_binary)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def start(self) -> None:
        self.directory.mkdir(exist_ok=True)
        with open(self.directory / "log", "ab") as log:
            command = [str(self.binary), *self.options, *self._ports(), "--bind", HOST]
            self.process = subprocess.Popen([*command, "--dir", str(self.directory)], stdout=log, stderr=log)
        until(self._answers, "the server answers")

    def call(self, *words: Any) -> Any:
        """The raw reply of this very server. Raises RedisError."""
        options: dict[str, Any] = {"host": HOST, "port": self.port, "password": self.password, "protocol": 2}
        if self.authority:
            options["ssl_ca_certs"] = str(self.authority.certificate)
        connection = (SSLConnection if self.authority else Connection)(socket_timeout=10, **options)
        try:
            connection.send_command(*words)
            return connection.read_response()
        finally:
            connection.disconnect()

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"{self.binary} ended: {(self.directory / 'log').read_text()[-2000:]}"
        return bool(self.call("PING"))

    def _ports(self) -> list[str]:
        if self.authority is None:
            return ["--port", str(self.port)]
        certificate, key = self.authority.issue(f"IP:{HOST}")
        options = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no", "--tls-replication", "yes"]
        options += ["--tls-cluster", "yes"] if "--cluster-enabled" in self.options else []
        options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
        return [*options, "--tls-ca-cert-file", str(self.authority.certificate)]

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

    def is_master(self) -> bool:
        return bool(self.call("ROLE")[0] == b"master")


def until(look: Callable[[], Any], what: str) -> Any:
    """The first true answer; errors of Redis are answers that are not true yet."""
    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            if answer := look():
                return answer
            last: object = answer
        except RedisError as exc:
            last = exc
        assert time.monotonic() < deadline, f"not within {WITHIN_S} s: {what} ({last!r})"
        time.sleep(0.02)


def plain(directory: Path, *options: str) -> Server:
    return Server(directory, free_port(), ["--save", "", "--appendonly", "no", *options])


@dataclass
class Watched:
    """A master and a replica behind two sentinels, of which one is enough (quorum 1, and both elect)."""

    servers: list[Server]
    sentinels: list[Server]
    folder: Path
    password: str | None = None
    sentinel_password: str | None = None

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(sentinel.address for sentinel in self.sentinels)}/{SERVICE}"

    @property
    def master(self) -> Server:
        return next(server for server in self.servers if server.process is not None and server.is_master())

    def fail_over(self) -> None:
        """As an operator would; returns when the other one is the master."""
        old = self.master
        self.sentinels[0].call("SENTINEL", "FAILOVER", SERVICE)
        self.has_other_master(old)

    def knows_replica(self, sentinel: Server) -> bool:
        links = [facts_of(reply).get(b"master-link-status") for reply in sentinel.call("SENTINEL", "REPLICAS", SERVICE)]
        return links == [b"ok"]

    def has_other_master(self, old: Server) -> None:
        [new] = [server for server in self.servers if server is not old]
        until(new.is_master, "the replica is promoted")


@contextmanager
def running_sentinels(
    folder: Path,
    *,
    password: str | None = None,
    sentinel_password: str | None = None,
    authority: Authority | None = None,
) -> Iterator[Watched]:
    """`password` is the data servers'."""
    options = ["--requirepass", password, "--masterauth", password] if password else []
    master = plain(folder / "a", *options)
    replica = plain(folder / "b", *options, "--replicaof", HOST, str(master.port))
    group = Watched([master, replica], [], folder, password, sentinel_password)
    try:
        for server in group.servers:
            server.password, server.authority = password, authority
            server.start()
        group.sentinels += [Server(folder / f"sentinel-{number}", free_port(), []) for number in range(2)]
        for sentinel in group.sentinels:
            sentinel.authority = authority
        watch_anew(group, master)
        yield group
    finally:
        for server in [*group.sentinels, *group.servers]:
            server.stop()


def watch_anew(group: Watched, master: Server) -> None:
    """Starts the sentinels, on the ports that they have, with this master and with no memory."""
    for sentinel in group.sentinels:
        config = group.folder / f"{sentinel.directory.name}.conf"
        lines = [
            f"sentinel monitor {SERVICE} {HOST} {master.port} 1",
            f"sentinel down-after-milliseconds {SERVICE} {DOWN_MS}",
            f"sentinel failover-timeout {SERVICE} 4000",
        ]
        lines += [f'sentinel auth-pass {SERVICE} "{group.password}"'] if group.password else []
        lines += [f'requirepass "{group.sentinel_password}"'] if group.sentinel_password else []
        config.write_text("\n".join(lines) + "\n")
        sentinel.options, sentinel.password = [str(config), "--sentinel"], group.sentinel_password
        sentinel.start()
    for sentinel in group.sentinels:
        until(lambda s=sentinel: knows_all(group, s), "the sentinel knows the replica and the other one")  # type: ignore[misc]


def knows_all(group: Watched, sentinel: Server) -> bool:
    others = int(facts_of(sentinel.call("SENTINEL", "MASTER", SERVICE))[b"num-other-sentinels"])
    return others == len(group.sentinels) - 1 and group.knows_replica(sentinel)


def facts_of(reply: list[bytes]) -> dict[bytes, bytes]:
    return dict(zip(reply[::2], reply[1::2], strict=True))


@dataclass
class Cluster:
    """Three masters; `replica` follows the one that serves Poolgate's slot, `keeper`."""

    masters: list[Server]
    replica: Server
    keeper: Server

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(server.address for server in self.masters)}"

    @property
    def others(self) -> list[Server]:
        return [server for server in self.masters if server is not self.keeper]


@contextmanager
def running_cluster(
    folder: Path, slot: int, *, password: str | None = None, authority: Authority | None = None
) -> Iterator[Cluster]:
    mode = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(DOWN_MS)]
    mode += ["--requirepass", password, "--masterauth", password] if password else []
    every = [plain(folder / f"node-{number}", *mode) for number in range(4)]
    for server in every:
        server.port, server.password, server.authority = cluster_port(), password, authority
    *masters, replica = every
    bounds = [0, 5461, 10923, 16384]
    try:
        for server in every:
            server.start()
        for number, server in enumerate(masters):
            server.call("CLUSTER", "ADDSLOTS", *range(bounds[number], bounds[number + 1]))
            server.call("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for server in every[1:]:
            server.call("CLUSTER", "MEET", HOST, every[0].port)
        keeper = masters[next(number for number in range(3) if slot < bounds[number + 1])]
        keeper_id = keeper.call("CLUSTER", "MYID")
        for server in every:
            until(lambda s=server: knows_nodes(s, len(every)), "the nodes know each other")  # type: ignore[misc]
        until(lambda: replica.call("CLUSTER", "REPLICATE", keeper_id.decode()), "the replica follows")
        for server in every:
            until(lambda s=server: is_whole(s), "the cluster is whole")  # type: ignore[misc]
        until(lambda: b"master_link_status:up" in replica.call("INFO", "replication"), "the replica is in sync")
        yield Cluster(masters, replica, keeper)
    finally:
        for server in every:
            server.stop()


def cluster_port() -> int:
    """A port whose bus port is free too."""
    while True:
        port = free_port()
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port + 10_000))
            return port


def knows_nodes(server: Server, count: int) -> bool:
    nodes = nodes_of(server)
    return len(nodes) == count and not any("handshake" in line for line in nodes)


def nodes_of(server: Server) -> list[str]:
    return bytes(server.call("CLUSTER", "NODES")).decode().splitlines()


def is_whole(server: Server) -> bool:
    is_ok = b"cluster_state:ok" in server.call("CLUSTER", "INFO")
    return is_ok and sum("slave" in line for line in nodes_of(server)) == 1
