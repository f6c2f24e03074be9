"""What the budget tests share: budgets over one Redis, time that passes by ageing what Redis holds, a slow wire."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal, cast

import pytest
from redis.asyncio import Redis

from gateway.admission.account import Ticket
from gateway.admission.budget import Budget
from gateway.admission.exchange import Script
from gateway.admission.holdings import Holdings
from gateway.admission.limits import Scope
from gateway.admission.link import RedisLink
from gateway.config.redis_client import client_for
from gateway.config.tasks import end_task
from gateway.domain.errors import LimitExceeded
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.request import Limits


@contextlib.asynccontextmanager
async def budgets(
    url: str,
    count: int = 1,
    *,
    timeout_s: float = 10.0,
    on_outage: Literal["share", "open", "closed"] = "closed",
    started: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[list[Budget]]:
    """As many budgets as gateway processes would have, each with connections of its own. `closed`: no test of Redis'
    own arithmetic can pass by the local one. `started`: each knows of the others from the beginning."""
    links = [RedisLink(client_for(url, 20.0), timeout_s=timeout_s) for _ in range(count)]
    made = [Budget(link, on_outage=on_outage, clock=clock) for link in links]
    try:
        if started:
            for budget in made:
                budget.start()
                await budget.renew()
        yield made
    finally:
        for budget, link in zip(made, links, strict=True):
            await budget.aclose()
            await link.aclose()


async def kill(budget: Budget) -> None:
    """As SIGKILL would: nothing that it holds is given back."""
    budget._is_closed = True
    if budget._timer is not None:
        budget._timer.cancel()
        budget._timer = None
    if budget._pump is not None:
        await end_task(budget._pump)
    budget._holdings = Holdings()
    budget._link = RedisLink(budget._link._client, timeout_s=0.0)  # says nothing more
    budget._script = Script(budget._link)


def scope(
    name: str = "key:a",
    *,
    rpm: int | None = None,
    tpm: int | None = None,
    slots: int | None = None,
    day: int | None = None,
    month: int | None = None,
) -> Scope:
    return Scope(name, Limits(rpm, tpm, slots, day, month))


async def reserve(budget: Budget, scopes: list[Scope], tokens: int = 0) -> Ticket:
    return await budget.admit(budget.account(scopes), tokens)


async def refused(budget: Budget, scopes: list[Scope], tokens: int = 0) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        await reserve(budget, scopes, tokens)
    return caught.value


def used(tokens: int) -> Outcome:
    return Outcome(Ending.COMPLETED, 200, Usage(0, tokens))


async def settle(budget: Budget, ticket: Ticket, tokens: int = 0) -> None:
    """And Redis knows of it, with nothing left lying idle."""
    ticket.settle(used(tokens))
    await budget.flush()


def second_of(ticket: Ticket) -> int | None:
    """The Redis second in which it was charged; None: decided without Redis."""
    return ticket._lease.bucket_s


async def let_time_pass(redis: Redis, seconds: int, *budgets: Budget) -> None:
    """As if `seconds` had gone by: every bucket, slot and expiry is that much older (Redis' clock cannot be set).

    What `budgets` hold ahead goes back first; their running tickets have to be `aged`.
    """
    for budget in budgets:
        await budget.flush()
    for key in [key async for key in redis.scan_iter("{poolgate}:*")]:
        left_ms = await redis.pttl(key)
        kind = await redis.type(key)
        if left_ms <= seconds * 1000:
            await redis.delete(key)
            continue
        if kind == b"hash":
            fields = cast(dict[bytes, bytes], await redis.hgetall(key))
            await redis.delete(key)
            await redis.hset(key, mapping=cast(Any, dict(_aged(*field, seconds) for field in fields.items())))
        elif kind == b"zset":
            ends = await redis.zrange(key, 0, -1, withscores=True)
            await redis.zadd(key, {member: ends_ms - seconds * 1000 for member, ends_ms in ends})
        await redis.pexpire(key, left_ms - seconds * 1000)


def _aged(field: bytes, value: bytes, seconds: int) -> tuple[str, str]:
    if b":" in value:  # slots: "held:ends in ms"
        held_slots, ends_ms = value.decode().split(":")
        return field.decode(), f"{held_slots}:{int(ends_ms) - seconds * 1000}"
    ahead, second = ("p", field[1:]) if field.startswith(b"p") else ("", field)
    return f"{ahead}{int(second) - seconds}", value.decode()


def aged(ticket: Ticket, seconds: int) -> Ticket:
    """The same ticket after `let_time_pass`, which moved its bucket: it must be settled under the new second."""
    assert ticket._lease.bucket_s is not None
    ticket._lease.bucket_s -= seconds
    return ticket


async def held(redis: Redis, name: str = "key:a") -> int:
    """Slots that count: of processes that have renewed them in time."""
    seconds, micros = await redis.time()
    now_ms = seconds * 1000 + micros // 1000
    fields = cast(dict[bytes, bytes], await redis.hgetall(f"{{poolgate}}:in_flight:{name}"))
    slots = [value.decode().split(":") for value in fields.values()]
    return sum(int(count) for count, ends_ms in slots if int(ends_ms) > now_ms)


async def tokens_in_window(redis: Redis, name: str = "key:a") -> int:
    return await in_window(redis, f"tokens_per_min:{name}")


async def in_window(redis: Redis, key: str) -> int:
    buckets = cast(dict[bytes, bytes], await redis.hgetall(f"{{poolgate}}:{key}"))
    return sum(int(amount) for bucket, amount in buckets.items() if not bucket.startswith(b"p"))


async def limit_keys(redis: Redis) -> list[bytes]:
    return [key for kind in ("*_per_min", "in_flight") for key in await redis.keys(f"{{poolgate}}:{kind}:*")]


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
