"""/metrics of a real group of gateway processes: one truth, whichever process is asked and whichever has died."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from fakes.engine import FakeEngine, running_fake_engine
from fakes.line import KEY, Gateway, process, running_gateway, write_config
from fakes.ports import free_port
from fakes.scrape import Scrape, read
from fakes.waits import eventually

PROCESSES = 4
SCRAPE_KEY = "scrape-0123456789abcdef"
CLOSE = {"Connection": "close"}  # the next call may reach another process
PROMPT = "a prompt that nobody may see"


@dataclass
class Group:
    gateway: Gateway
    engine: FakeEngine


@pytest.fixture
async def group(tmp_path: Path, redis_url: str) -> AsyncIterator[Group]:
    async with (
        running_fake_engine("--fake-tokens", "5000", "--max-model-len", "8192", name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_url,
            gateway={"processes": PROCESSES},
            pools={"a": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 8192}},
            routes={"chat": {"targets": [{"pool": "a"}], "aliases": ["gpt-4o-mini"]}},
        ) as gateway,
    ):

        async def all_are_there() -> bool:
            return (await scrape(gateway)).sum("processes") == PROCESSES

        await eventually(all_are_there, "all processes", 30)
        yield Group(gateway, engine)


async def text_of(gateway: Gateway, key: str | None = None) -> str:
    """On a connection of its own, so that any process may answer."""
    headers = CLOSE if key is None else CLOSE | {"Authorization": f"Bearer {key}"}
    reply = await gateway.client.get(gateway.url + "/metrics", headers=headers)
    assert reply.status_code == 200, reply.text
    return reply.text


async def scrape(gateway: Gateway) -> Scrape:
    return read(await text_of(gateway))


async def one_call(gateway: Gateway, key: str = KEY) -> int:
    """A chat on a connection of its own."""
    messages = [{"role": "user", "content": PROMPT}]
    return (await gateway.chat(key, CLOSE, model="gpt-4o-mini", messages=messages, max_tokens=3)).status_code


async def calls(gateway: Gateway, count: int, key: str = KEY) -> list[int]:
    limit = asyncio.Semaphore(20)

    async def one() -> int:
        async with limit:
            return await one_call(gateway, key)

    return await asyncio.gather(*(one() for _ in range(count)))


def assert_nothing_fell(before: Scrape, after: Scrape) -> None:
    later = after.growing()
    fell = {key: (value, later.get(key)) for key, value in before.growing().items() if later.get(key, -1) < value}
    assert fell == {}


async def all_counted(gateway: Gateway, count: int) -> Scrape:
    """Records are counted after the caller has its last byte."""

    async def counted() -> Scrape | None:
        seen = await scrape(gateway)
        return seen if seen.sum("requests_total") >= count else None

    found: Scrape = await eventually(counted, f"{count} requests counted")
    return found


async def test_counters_do_not_jump_between_processes(group: Group) -> None:
    running = asyncio.create_task(calls(group.gateway, 300))
    scrapes = [await scrape(group.gateway)]
    while not running.done() or len(scrapes) < 20:
        scrapes.append(await scrape(group.gateway))
        assert_nothing_fell(scrapes[-2], scrapes[-1])
    assert set(await running) == {200}
    assert await calls(group.gateway, 5, key="sk-wrong") == [401] * 5

    seen = await all_counted(group.gateway, 305)
    assert seen.sum("requests_total", route="chat", pool="a", status="200", ending="completed") == 300
    assert seen.sum("requests_total", status="401", ending="refused") == 5
    assert seen.sum("requests_total") == 305
    assert seen.sum("errors_total", error_code="invalid_api_key") == 5
    assert seen.sum("tokens_total", kind="completion") == 900
    assert seen.sum("request_seconds_count", route="chat") == 300
    assert seen.sum("request_seconds_bucket", le="+Inf") == 305
    spent = [v for (name, _), v in seen.samples.items() if name == "poolgate_process_cpu_seconds_total"]
    assert len(spent) == PROCESSES


async def test_gauges_add_up_over_processes_and_are_0_at_rest(group: Group) -> None:
    streams = [
        asyncio.create_task(group.gateway.events(stream=True, max_tokens=4000, x_fake={"stall_after": 2}))
        for _ in range(8)
    ]

    async def all_run() -> bool:
        seen = await scrape(group.gateway)
        return seen.sum("requests_in_flight", pool="a") == seen.sum("open_exchanges") == 8

    await eventually(all_run, "8 in flight")
    assert (await scrape(group.gateway)).sum("replicas", pool="a", state="ready") == 1
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)

    async def at_rest() -> bool:
        seen = await scrape(group.gateway)
        return seen.sum("requests_in_flight") == seen.sum("open_exchanges") == 0

    await eventually(at_rest, "0 in flight")
    assert (await all_counted(group.gateway, 8)).sum("requests_total", ending="client_gone") == 8


async def test_processes_that_die_leave_their_totals(group: Group) -> None:
    for count in (40, 80):
        await calls(group.gateway, 40)
        await kill_two(group.gateway, await all_counted(group.gateway, count))
    assert (await scrape(group.gateway)).sum("requests_total") == 80
    await calls(group.gateway, 40)
    assert (await all_counted(group.gateway, 120)).sum("requests_total") == 120


async def kill_two(gateway: Gateway, before: Scrape) -> None:
    """SIGKILL for two processes; returns when others have taken their places. Nothing may fall meanwhile."""
    gone = {child.pid for child in psutil.Process(gateway.pid).children()[:2]}
    for pid in gone:
        os.kill(pid, signal.SIGKILL)

    async def replaced() -> bool:
        now = await scrape_through_a_death(gateway)
        if now is not None:
            assert_nothing_fell(before, now)
        living = {child.pid for child in psutil.Process(gateway.pid).children()}
        return now is not None and now.sum("processes") == PROCESSES and not gone & living

    await eventually(replaced, "new processes", 30)


async def scrape_through_a_death(gateway: Gateway) -> Scrape | None:
    """None where the process that was to answer was killed."""
    try:
        return await scrape(gateway)
    except httpx.TransportError:
        return None


async def test_nothing_of_callers_is_in_the_text(group: Group) -> None:
    assert set(await calls(group.gateway, 3)) == {200}
    await all_counted(group.gateway, 3)
    text = await text_of(group.gateway)
    assert not [word for word in (KEY, PROMPT, "gpt-4o-mini", "test", "req-") if word in text]


async def test_two_gateways_on_one_host_do_not_mix(tmp_path: Path, redis_url: str) -> None:
    async with running_fake_engine(name="tiny", key="") as engine:
        pools = {"a": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}}
        settings = {"processes": 2, "state_dir": str(tmp_path / "state")}
        async with (
            running_gateway(tmp_path / "one", redis_url, gateway=settings, pools=pools) as one,
            running_gateway(tmp_path / "two", redis_url, gateway=settings, pools=pools) as two,
        ):
            assert (await one.chat()).status_code == 200
            assert (await all_counted(one, 1)).sum("requests_total") == 1
            assert (await scrape(two)).sum("requests_total") == 0


async def test_one_process_alone_counts_and_asks_for_its_key(tmp_path: Path, redis_url: str) -> None:
    async with (
        running_fake_engine(name="tiny", key="") as engine,
        running_gateway(
            tmp_path,
            redis_url,
            env={"SCRAPE": SCRAPE_KEY},
            metrics={"key_env": "SCRAPE"},
            pools={"a": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}},
        ) as gateway,
    ):
        events = await gateway.events(max_tokens=5)
        assert events[-1] == "[DONE]"

        async def counted() -> Scrape | None:
            seen = read(await text_of(gateway, SCRAPE_KEY))
            return seen if seen.sum("time_per_output_token_seconds_count", pool="a") == 1 else None

        seen = await eventually(counted, "the stream counted")
        assert (seen.sum("ttft_seconds_count", route="chat", pool="a"), seen.sum("processes")) == (1, 1)
        for headers in ({}, {"Authorization": f"Bearer {KEY}"}):
            refused = await gateway.client.get(gateway.url + "/metrics", headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert "poolgate_" not in refused.text


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_key_that_is_not_set_is_a_config_error_at_the_start(tmp_path: Path, processes: int) -> None:
    config = write_config(
        tmp_path,
        gateway={"port": free_port(), "processes": processes},
        redis={"url": "redis://127.0.0.1:9"},
        metrics={"key_env": "POOLGATE_TEST_UNSET"},
        pools={"a": {"urls": ["http://127.0.0.1:9"]}},
        routes={"chat": {"targets": [{"pool": "a"}]}},
    )
    async with process(["serve", "--config", str(config)], tmp_path / "log") as (child, log):
        assert await asyncio.wait_for(child.wait(), 30) == 1
        (line,) = log.read_text().splitlines()
    assert line.startswith("config error: metrics.key_env: environment variable POOLGATE_TEST_UNSET is not set; ")
