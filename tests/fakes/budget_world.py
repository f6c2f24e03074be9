"""What the budget tests share: budgets over one Redis, time that passes by ageing what Redis holds, a slow wire."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal, cast

from redis.asyncio import Redis

from gateway.admission.budget import Budget
from gateway.admission.limits import Scope
from gateway.admission.link import RedisLink
from gateway.domain.request import Limits


@contextlib.asynccontextmanager
async def budgets(
    url: str, count: int = 1, *, timeout_s: float = 10.0, on_outage: Literal["share", "open", "closed"] = "closed"
) -> AsyncIterator[list[Budget]]:
    """As many budgets as gateway processes would have, each with connections of its own. `closed`: no test of Redis'
    own arithmetic can pass by the local one."""
    links = [RedisLink(Redis.from_url(url, socket_timeout=20.0, retry=None), timeout_s=timeout_s) for _ in range(count)]
    made = [Budget(link, on_outage=on_outage) for link in links]
    try:
        yield made
    finally:
        for budget, link in zip(made, links, strict=True):
            await budget.aclose()
            await link.aclose()


def scope(name: str = "key:a", *, rpm: int | None = None, tpm: int | None = None, slots: int | None = None) -> Scope:
    return Scope(name, Limits(rpm, tpm, slots))


async def let_time_pass(redis: Redis, seconds: int) -> None:
    """As if `seconds` had gone by: every bucket, lease and expiry is that much older (Redis' clock cannot be set)."""
    for key in [key async for key in redis.scan_iter("{poolgate}:*")]:
        left_ms = await redis.pttl(key)
        kind = await redis.type(key)
        if left_ms <= seconds * 1000:
            await redis.delete(key)
            continue
        if kind == b"hash":
            buckets = cast(dict[bytes, bytes], await redis.hgetall(key))
            await redis.delete(key)
            await redis.hset(key, mapping=cast(Any, {int(at) - seconds: amount for at, amount in buckets.items()}))
        elif kind == b"zset":
            leases = await redis.zrange(key, 0, -1, withscores=True)
            await redis.zadd(key, {lease: ends_ms - seconds * 1000 for lease, ends_ms in leases})
        await redis.pexpire(key, left_ms - seconds * 1000)


async def held(redis: Redis, name: str = "key:a") -> int:
    return int(await redis.zcard(f"{{poolgate}}:in_flight:{name}"))


async def tokens_in_window(redis: Redis, name: str = "key:a") -> int:
    buckets = cast(dict[bytes, bytes], await redis.hgetall(f"{{poolgate}}:tokens_per_min:{name}"))
    return sum(int(amount) for amount in buckets.values())


@contextlib.asynccontextmanager
async def slow_wire(to: Path, directory: Path, delay_s: float) -> AsyncIterator[str]:
    """A Unix socket that passes everything on to `to`, and each way `delay_s` later."""
    path = directory / "slow.sock"
    pumps: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(65536):
                    await asyncio.sleep(delay_s)
                    writer.write(data)
                    await writer.drain()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_unix_connection(to)
        for work in (pump(reader, there_writer), pump(there_reader, writer)):
            task = asyncio.create_task(work)
            pumps.add(task)
            task.add_done_callback(pumps.discard)

    server = await asyncio.start_unix_server(join, path)
    try:
        yield f"unix://{path}"
    finally:
        server.close()
        for task in list(pumps):
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
