"""A client for a Redis URL: of one server, or of whoever is the master behind sentinels or in a cluster.

All our keys lie in one hash slot (gateway/domain/store_keys.py), so in a cluster too there is one server to talk to,
and an ordinary client does, whose connections go where the master is: looked up when a connection fails, when the
server turns out to be a replica, and when it answers that it no longer serves us. Nothing is repeated here; a call that
failed has failed, and the next one goes to the new master.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
from typing import Any

import redis.asyncio as redis_asyncio
from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ConnectionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)
from redis.maint_notifications import MaintNotificationsConfig

from gateway.config.redis_master import Ask, Seeker, ask_node, ask_sentinel
from gateway.config.redis_url import SENTINEL, SERVER, Member, RedisUrl, read_redis_url

NOT_THERE = (AskError, ClusterDownError, ReadOnlyError, TryAgainError)  # MOVED is an AskError, MASTERDOWN a CLUSTERDOWN


def client_for(url: str, timeout_s: float) -> redis_asyncio.Redis:
    """Not connected yet; the caller closes it. Each wait within a call has `timeout_s`; errors are RedisErrors."""
    read = read_redis_url(url)
    times: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "health_check_interval": 0,
        "decode_responses": False,
        "retry": None,
    }
    if read.form == SERVER:
        return redis_asyncio.Redis.from_url(url, **times)
    options: dict[str, Any] = {**parse_url(read.data_server()), **times}
    is_tls = options.pop("connection_class", None) is not None
    seeker = Seeker(_question(read, options, times, is_tls), read.members, timeout_s)
    pool = MasterPool(
        connection_class=TlsMasterConnection if is_tls else MasterConnection,
        maint_notifications_config=MaintNotificationsConfig(enabled=False),  # they would move connections by themselves
        seeker=seeker,
        **options,
    )
    return redis_asyncio.Redis.from_pool(pool)


def _question(read: RedisUrl, options: dict[str, Any], times: dict[str, Any], is_tls: bool) -> Ask:
    kind = SSLConnection if is_tls else Connection
    if read.form != SENTINEL:
        return ask_node(kind, options)
    own: dict[str, Any] = {**parse_url(read.sentinel_server()), **times}
    own.pop("connection_class", None)
    given = read.options()
    own |= {name: given[f"sentinel_{name}"] for name in ("username", "password") if given.get(f"sentinel_{name}")}
    return ask_sentinel(read.service, kind, own)


class MasterPool(ConnectionPool):
    """Owns the seeker that its connections share."""

    def __init__(self, *, seeker: Seeker, **options: Any) -> None:
        super().__init__(seeker=seeker, **options)
        self._seeker = seeker

    async def aclose(self) -> None:
        await self._seeker.aclose()
        await super().aclose()


class MasterConnection(Connection):
    """Connects to the master of the moment, whatever it was connected to before."""

    def __init__(self, *, seeker: Seeker, **options: Any) -> None:
        super().__init__(**options)
        self._seeker = seeker

    @property
    def _address(self) -> Member:
        return self.host, self.port

    async def connect(self) -> None:
        """Called by the pool for each call. One that goes elsewhere than the newest ones is not used again."""
        if self.is_connected and self._seeker.known != self._address:
            await self.disconnect(nowait=True)
        await super().connect()  # type: ignore[no-untyped-call]

    async def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = False) -> None:
        if self.is_connected:
            return
        try:
            async with asyncio.timeout(self.socket_connect_timeout):
                if self._seeker.known is not None:
                    with contextlib.suppress(RedisError):  # then it is doubted
                        await self._connect_to(self._seeker.known, check_health)
                        return
                await self._connect_to(await self._seeker.find(), check_health)
        except builtins.TimeoutError as exc:
            raise TimeoutError("Timeout connecting to the master") from exc

    async def _connect_to(self, address: Member, check_health: bool) -> None:
        self.host, self.port = address
        try:
            await super().connect_check_health(check_health, retry_socket_connect=False)
        except BaseException:
            self._seeker.doubt(address)  # also when our caller's deadline is over: it may be frozen
            raise

    async def on_connect_check_health(self, check_health: bool = True) -> None:
        await super().on_connect_check_health(check_health)
        # HELLO and not ROLE, which users with few rights may not call
        await self.send_command("HELLO", check_health=False)
        told = await self.read_response()
        facts = told if isinstance(told, dict) else dict(zip(told[::2], told[1::2], strict=True))
        if facts.get(b"role") != b"master":
            raise ConnectionError(f"{self.host}:{self.port} is a replica and not the master")

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as exc:
            # Redis 6.2 tells of READONLY within a script in the middle of another error
            if isinstance(exc, NOT_THERE) or "READONLY" in str(exc):
                self._seeker.doubt(self._address)
                self.mark_for_reconnect()  # type: ignore[no-untyped-call]
            raise


class TlsMasterConnection(MasterConnection, SSLConnection):
    pass
