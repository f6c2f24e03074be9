"""A full pool through real gateways: who waits, how long, who is refused, and what everybody is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fakes.engine import FakeEngine, running_fake_engine
from fakes.line import BATCH_KEY, KEY, Gateway, process, running_gateway, sha256
from fakes.scrape import read
from fakes.waits import eventually

CLASSES = {
    "interactive": {"priority": 0, "queue_s": 20, "queue_max": 3},
    "batch": {"priority": 10, "queue_s": 20, "queue_max": 50},
    "hasty": {"priority": 5, "queue_s": 0.2},
}
HASTY_KEY = "sk-test-hasty-0123456789"
KEYS = {
    "test": {"sha256": sha256(KEY), "class": "interactive"},
    "bulk": {"sha256": sha256(BATCH_KEY), "class": "batch"},
    "hasty": {"sha256": sha256(HASTY_KEY), "class": "hasty"},
}
STALLS = {"x_fake": {"stall_after": 0}}


def slow(ms: int) -> dict[str, Any]:
    return {"x_fake": {"ttft_ms": ms}}


@asynccontextmanager
async def full_pool(tmp_path: Path, redis_url: str, slots: int = 1) -> AsyncIterator[tuple[Gateway, FakeEngine]]:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_url,
            classes=CLASSES,
            keys=KEYS,
            pools={"tiny": {"urls": [engine.url], "served_name": "tiny", "max_in_flight": slots}},
        ) as gateway,
    ):
        yield gateway, engine


async def waiting(gateway: Gateway) -> float:
    return read((await gateway.client.get(gateway.url + "/metrics")).text).sum("requests_waiting")


async def until_waiting(gateway: Gateway, count: int) -> None:
    async def is_so() -> bool:
        return await waiting(gateway) == count

    await eventually(is_so, f"{count} wait")


async def shows(gateway: Gateway, line: str) -> bool:
    log = gateway.log.with_name("status.log")
    async with process(["status", "--config", str(gateway.config)], log) as (child, shown):
        await child.wait()
    return line in shown.read_text()


async def until_running(engine: FakeEngine, count: int) -> None:
    async def is_so() -> bool:
        return (await engine.state())["running"] == count

    await eventually(is_so, f"{count} run")


async def test_requests_beyond_the_slots_wait_and_are_told_how_long(tmp_path: Path, redis_url: str) -> None:
    async with full_pool(tmp_path, redis_url) as (gateway, engine):
        await gateway.chat(BATCH_KEY)  # the first one waits for Redis to tell that there are slots
        assert "x-poolgate-queue-ms" not in (await gateway.chat(BATCH_KEY)).headers
        replies = await asyncio.gather(*(gateway.chat(BATCH_KEY, **slow(100)) for _ in range(4)))
        assert [reply.status_code for reply in replies] == [200] * 4
        told = sorted(int(reply.headers.get("x-poolgate-queue-ms", 0)) for reply in replies)
        assert told[0] == 0 and told[1] >= 50 and told[3] >= 250
        await gateway.at_rest()
        waited = sorted(line["queue_s"] or 0 for line in gateway.access_lines() if line["route"])[-3:]
        assert all(abs(each * 1000 - said) <= 1 for each, said in zip(waited, told[1:], strict=True))
        metrics = read((await gateway.client.get(gateway.url + "/metrics")).text)
        assert metrics.sum("queue_seconds_count") == 4
        assert metrics.sum("requests_waiting") == 0 and metrics.sum("slots") == 1
        assert (await engine.state())["most_running"] == 1


async def test_many_long_requests_at_once_never_reach_the_engine_together(tmp_path: Path, redis_url: str) -> None:
    """What kills vLLM: long input times long output times concurrency without end."""
    async with full_pool(tmp_path, redis_url, slots=3) as (gateway, engine):
        replies = await asyncio.gather(*(gateway.chat(BATCH_KEY, **slow(20)) for _ in range(40)))
        assert {reply.status_code for reply in replies} == {200}
        assert (await engine.state())["most_running"] == 3


async def test_a_full_queue_is_503_with_the_time_and_engines_and_budgets_see_nothing(
    tmp_path: Path, redis_url: str
) -> None:
    async with full_pool(tmp_path, redis_url) as (gateway, engine):
        running = asyncio.create_task(gateway.chat(**STALLS))
        await until_running(engine, 1)
        queued = [asyncio.create_task(gateway.chat()) for _ in range(3)]
        await until_waiting(gateway, 3)
        refused = await gateway.chat()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "pool_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-poolgate-error-source"] == "gateway"
        assert len(await engine.requests()) == 1
        status = "pool tiny: 1 of 1 slots taken, 3 requests wait in the gateway"
        await eventually(lambda: shows(gateway, status), "status tells of it, a second later", 30)
        for task in [running, *queued]:
            task.cancel()
        await gateway.at_rest()
        assert await waiting(gateway) == 0
        assert (await gateway.chat()).status_code == 200


async def test_who_waits_longer_than_its_class_may_gets_503_and_leaves_the_queue(
    tmp_path: Path, redis_url: str
) -> None:
    async with full_pool(tmp_path, redis_url) as (gateway, engine):
        running = asyncio.create_task(gateway.chat(**STALLS))
        await until_running(engine, 1)
        refused = await gateway.chat(HASTY_KEY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_timeout")
        assert int(refused.headers["retry-after"]) >= 1 and int(refused.headers["x-poolgate-queue-ms"]) >= 200
        assert await waiting(gateway) == 0
        running.cancel()


async def test_a_client_that_leaves_the_queue_makes_room_and_costs_the_engine_nothing(
    tmp_path: Path, redis_url: str
) -> None:
    async with full_pool(tmp_path, redis_url) as (gateway, engine):
        running = asyncio.create_task(gateway.chat(**STALLS))
        await until_running(engine, 1)
        queued = [asyncio.create_task(gateway.chat()) for _ in range(3)]
        await until_waiting(gateway, 3)
        for task in queued:
            task.cancel()
        await until_waiting(gateway, 0)
        running.cancel()
        assert (await gateway.chat()).status_code == 200
        await gateway.at_rest()
        endings = [line["ending"] for line in gateway.access_lines() if line["route"]]
        assert endings.count("client_gone") == 4
        assert len(await engine.requests()) == 2


async def test_interactive_requests_go_before_batch_that_came_earlier(tmp_path: Path, redis_url: str) -> None:
    async with full_pool(tmp_path, redis_url) as (gateway, engine):
        running = asyncio.create_task(gateway.chat(**STALLS))
        await until_running(engine, 1)
        order: list[str] = []

        async def one(name: str, key: str) -> None:
            reply = await gateway.chat(key, **slow(30))
            assert reply.status_code == 200
            order.append(name)

        batch = [asyncio.create_task(one("batch", BATCH_KEY)) for _ in range(4)]
        await until_waiting(gateway, 4)
        interactive = [asyncio.create_task(one("interactive", KEY)) for _ in range(3)]
        await until_waiting(gateway, 7)
        running.cancel()
        await asyncio.gather(*batch, *interactive)
        assert order == ["interactive"] * 3 + ["batch"] * 4


async def test_a_slot_comes_back_however_a_request_ends(tmp_path: Path, redis_url: str) -> None:
    """Concurrency slots leaked on upstream failure, on time-outs and on hang-ups."""
    async with full_pool(tmp_path, redis_url, slots=2) as (gateway, _):
        ends: list[dict[str, Any]] = [
            {"status": 500},
            {"status": 400},
            {"reset_after": 0},
            {"cut_after": 2},
            {"close_after": 1},
            {"error_event_after": 1},
            {"abort": True},
        ]
        for fault in ends:
            for stream in (False, True):
                await gateway.chat(BATCH_KEY, stream=stream, x_fake=fault)
        for stream in (False, True):
            left = asyncio.create_task(gateway.chat(BATCH_KEY, stream=stream, **STALLS))
            await asyncio.wait([left], timeout=0.2)
            left.cancel()
        await gateway.at_rest()

        async def is_tried_again() -> bool:
            return (await gateway.chat(BATCH_KEY)).status_code == 200

        await eventually(is_tried_again, "the engine that reset a connection is no longer left out")
        replies = await asyncio.gather(*(gateway.chat(BATCH_KEY, **slow(20)) for _ in range(6)))
        assert [reply.status_code for reply in replies] == [200] * 6


async def test_counting_a_prompt_needs_no_slot(tmp_path: Path, redis_url: str) -> None:
    async with full_pool(tmp_path, redis_url) as (gateway, engine):
        running = asyncio.create_task(gateway.chat(**STALLS))
        await until_running(engine, 1)
        reply: httpx.Response = await gateway.post("/tokenize", {"model": "chat", "prompt": "one two three"})
        assert reply.status_code == 200 and reply.json()["count"] > 0
        running.cancel()


async def test_two_gateways_share_the_slots_of_one_pool(tmp_path: Path, redis_url: str) -> None:
    async with running_fake_engine(name="tiny", key="") as engine:
        pools = {"tiny": {"urls": [engine.url], "served_name": "tiny", "max_in_flight": 4}}
        async with (
            running_gateway(tmp_path / "a", redis_url, classes=CLASSES, keys=KEYS, pools=pools) as one,
            running_gateway(tmp_path / "b", redis_url, classes=CLASSES, keys=KEYS, pools=pools) as two,
        ):
            replies = await asyncio.gather(*((one, two)[i % 2].chat(BATCH_KEY, **slow(30)) for i in range(40)))
            assert {reply.status_code for reply in replies} == {200}
            assert (await engine.state())["most_running"] <= 4
