"""Start and stop of a gateway that has requests: drain, second signal, taken port, several processes."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx
import pytest
from fakes.engine import running_fake_engine
from fakes.line import process, running_gateway, write_config
from fakes.ports import free_port
from fakes.waits import eventually

from .conftest import Pair


async def test_several_processes_serve_one_port_and_stop_together(tmp_path: Path, redis_url: str) -> None:
    async with running_fake_engine(name="tiny", key="") as engine:
        pools = {"tiny": {"urls": [engine.url], "served_name": "tiny", "max_model_len": 2048}}
        async with running_gateway(tmp_path, redis_url, gateway={"processes": 3}, pools=pools) as gateway:
            children = Path(f"/proc/{gateway.pid}/task/{gateway.pid}/children")
            pids = children.read_text().split()
            assert len(pids) == 3
            assert {(await gateway.chat()).status_code for _ in range(20)} == {200}
            gateway.process.terminate()
            assert await asyncio.wait_for(gateway.process.wait(), 20) == 0
            assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


async def running(pair: Pair, requests: int) -> None:
    """Returns once so many have reached the engine."""

    async def are() -> bool:
        return bool((await pair.first.state())["running"] == requests)

    await eventually(are, f"{requests} requests run")


async def draining(pair: Pair) -> None:
    """Returns once the gateway takes nobody new: it refuses, or says so."""

    async def takes_nobody() -> bool:
        try:
            async with httpx.AsyncClient(trust_env=False) as fresh:
                return (await fresh.get(pair.gateway.url + "/ready")).status_code == 503
        except httpx.TransportError:
            return True

    await eventually(takes_nobody, "new connections are refused")


async def test_sigterm_lets_running_streams_finish_and_takes_no_new_ones(pair: Pair) -> None:
    stream = asyncio.create_task(pair.gateway.events(max_tokens=200))
    await running(pair, 1)
    pair.gateway.process.terminate()
    await draining(pair)
    events = await stream
    assert events[-1] == "[DONE]" and len(events) > 200
    assert await asyncio.wait_for(pair.gateway.process.wait(), 10) == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_second_signal_ends_at_once_and_tells_the_callers(pair: Pair, second: signal.Signals) -> None:
    stream = asyncio.create_task(pair.gateway.events(max_tokens=1900))
    plain = asyncio.create_task(pair.gateway.chat(max_tokens=1900))
    await running(pair, 2)
    pair.gateway.process.terminate()
    await draining(pair)
    pair.gateway.process.send_signal(second)
    assert json.loads((await stream)[-1])["error"]["code"] == "shutting_down"
    reply = await plain
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
    assert reply.headers["x-request-id"]
    assert await asyncio.wait_for(pair.gateway.process.wait(), 4) == 0  # drain_s is 5


async def test_stream_that_outlasts_the_drain_gets_an_error_event(pair: Pair) -> None:
    stream = asyncio.create_task(pair.gateway.events(max_tokens=1900))  # 9.5 s; drain_s is 5
    await running(pair, 1)
    pair.gateway.process.terminate()
    events = await stream
    assert json.loads(events[-1])["error"]["code"] == "shutting_down"
    assert await asyncio.wait_for(pair.gateway.process.wait(), 10) == 0
    assert any(r["error_code"] == "shutting_down" for r in pair.gateway.access_lines())


async def test_taken_port_is_one_clear_line(tmp_path: Path, redis_url: str) -> None:
    port = free_port()
    config = write_config(
        tmp_path,
        gateway={"port": port},
        redis={"url": redis_url},
        pools={"a": {"urls": ["http://127.0.0.1:9"]}},
        routes={"a": {"targets": [{"pool": "a"}]}},
    )
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", port)
    async with server, process(["serve", "--config", str(config)], tmp_path / "log") as (child, log):
        assert await asyncio.wait_for(child.wait(), 20) == 1
        text = log.read_text()
    assert f"gateway.port: 127.0.0.1:{port}" in text and "another port" in text
    assert "Traceback" not in text
