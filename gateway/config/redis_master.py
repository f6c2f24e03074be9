"""Who is the master now: asks all sentinels, or nodes of a cluster, at once. Used by redis_client.py.

redis-py asks one after the other: a sentinel on the host that just died would then use up every deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from redis.asyncio.connection import Connection
from redis.crc import key_slot
from redis.exceptions import ConnectionError, NoPermissionError, RedisError, TimeoutError

from gateway.config.redis_url import MAX_MEMBERS, Member
from gateway.config.tasks import end_task
from gateway.domain.store_keys import TAG

SLOT = key_slot(TAG.encode())
GRACE_S = 0.1  # for the others once one has answered: it may be the one that has not heard of a failover


class MasterUnknown(ConnectionError):
    """Nobody told the master; `reasons` says why of each that was asked."""

    def __init__(self, reasons: dict[Member, Exception]) -> None:
        told = "; ".join(f"{host}:{port}: {exc}" for (host, port), exc in reasons.items())
        super().__init__(f"nobody tells the Redis master: {told or 'no answer in time'}")
        self.reasons = reasons


class ServiceUnknown(ConnectionError):
    """A sentinel that watches other masters only."""


@dataclass(frozen=True, slots=True)
class Told:
    """What one member knows. A higher `epoch` is newer; `others` can be asked next time, beside those of the URL."""

    epoch: int
    master: Member
    others: tuple[Member, ...] = ()


Ask = Callable[[Member], Awaitable[Told]]


class Seeker:
    """One per client. Remembers the master until somebody doubts it; all who wait share one search."""

    def __init__(self, ask: Ask, members: Iterable[Member], timeout_s: float) -> None:
        self._ask = ask
        self._members = tuple(members)
        self._others: tuple[Member, ...] = ()
        self._timeout_s = timeout_s
        self._search: asyncio.Task[Member | MasterUnknown] | None = None
        self.known: Member | None = None

    async def find(self) -> Member:
        """Raises MasterUnknown. The search goes on when the caller is cancelled: the next one has its result."""
        if self.known is not None:
            return self.known
        if self._search is None or self._search.done():
            self._search = asyncio.create_task(self._seek(), name="redis-master")
        found = await asyncio.shield(self._search)
        if isinstance(found, MasterUnknown):
            raise MasterUnknown(found.reasons)
        return found

    def doubt(self, address: Member) -> None:
        """It does not answer, or is no master: the next connection asks anew."""
        if self.known == address:
            self.known = None

    async def aclose(self) -> None:
        if self._search is not None:
            await end_task(self._search)

    async def _seek(self) -> Member | MasterUnknown:
        members = list(dict.fromkeys([*self._members, *self._others]))
        asked = {asyncio.create_task(_told(self._ask, member)): member for member in members}
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._timeout_s
        answers: list[Told] = []
        reasons: dict[Member, Exception] = {}
        pending = set(asked)
        try:
            while pending and loop.time() < until_s:
                done, pending = await asyncio.wait(
                    pending, timeout=until_s - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    answer = task.result()
                    if isinstance(answer, Told):
                        until_s = min(until_s, loop.time() + GRACE_S) if not answers else until_s
                        answers.append(answer)
                    else:
                        reasons[asked[task]] = answer
        finally:
            for task in pending:
                await end_task(task)
        if not answers:
            silent = {asked[task]: TimeoutError("no answer in time") for task in pending}
            return MasterUnknown(reasons | silent)
        newest = max(answers, key=lambda answer: answer.epoch)
        self._others = newest.others
        self.known = newest.master
        return newest.master


async def _told(ask: Ask, member: Member) -> Told | Exception:
    try:
        return await ask(member)
    except (
        RedisError,
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
    ) as exc:  # the latter: no such reply is known
        return exc


def ask_sentinel(service: str, connection_class: type[Connection], options: dict[str, Any]) -> Ask:
    async def ask(member: Member) -> Told:
        async with _Call(connection_class, member, options) as call:
            # the first changes as soon as a replica is promoted, the second only when all others follow it
            address = await call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service)
            state = await call("SENTINEL", "MASTER", service) if address else []
        if address is None:
            raise ServiceUnknown(f"the sentinel knows no service {service!r}")
        host, port = address
        fields = dict(zip(state[::2], state[1::2], strict=True))
        return Told(int(fields[b"config-epoch"]), (host.decode(), int(port)))

    return ask


def ask_node(connection_class: type[Connection], options: dict[str, Any]) -> Ask:
    async def ask(member: Member) -> Told:
        async with _Call(connection_class, member, options) as call:
            slots = await call("CLUSTER", "SLOTS")
            try:
                nodes = await call("CLUSTER", "NODES")
            except NoPermissionError:  # then an answer is as good as any other
                nodes = b""
        ours = next((entry for entry in slots if entry[0] <= SLOT <= entry[1]), None)
        if ours is None:
            raise ConnectionError(f"no node of the cluster serves slot {SLOT}, where Poolgate's keys are")
        epochs = {line.split()[0]: int(line.split()[6]) for line in nodes.splitlines()}
        others = [_endpoint(node, member) for node in ours[2:]]
        others += [_endpoint(entry[2], member) for entry in slots]
        epoch = epochs.get(ours[2][2], 0)
        return Told(epoch, _endpoint(ours[2], member), tuple(dict.fromkeys(others))[:MAX_MEMBERS])

    return ask


def _endpoint(node: list[Any], asked: Member) -> Member:
    """A node that does not know its own address is where we found it. Source: redis.io, CLUSTER SLOTS."""
    host = node[0].decode() if node[0] else ""
    if host == "?":
        raise ConnectionError("the node knows no host name of itself; see cluster-announce-hostname")
    return host or asked[0], int(node[1])


class _Call:
    """A connection for a few questions."""

    def __init__(self, connection_class: type[Connection], member: Member, options: dict[str, Any]) -> None:
        # the older protocol: its replies are lists in every version
        self._connection = connection_class(**options | {"host": member[0], "port": member[1], "protocol": 2})

    async def __aenter__(self) -> Callable[..., Awaitable[Any]]:
        try:
            await self._connection.connect()  # type: ignore[no-untyped-call]
        except BaseException:
            await self._connection.disconnect(nowait=True)
            raise
        return self._call

    async def __aexit__(self, *_: object) -> None:
        await self._connection.disconnect(nowait=True)

    async def _call(self, *words: str) -> Any:
        await self._connection.send_command(*words)
        return await self._connection.read_response()
