"""How the fake engine ends when it is told to: as vLLM does, with a flag for each outcome of vLLM's race."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
import pytest
from fakes.engine import FakeEngine, loading_fake_engine, running_fake_engine
from fakes.waits import eventually

READ_S = 10.0
LONG = {"max_tokens": 500, "ignore_eos": True}


async def _running(engine: FakeEngine, count: int = 1) -> None:
    async def runs() -> bool:
        return (await engine.state())["running"] == count

    await eventually(runs, f"{count} running")


async def _refuses(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=READ_S, trust_env=False) as client:
            await client.get(url + "/health")
    except httpx.TransportError:
        return True
    return False


async def _catches_sigterm(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    return bool(mask >> (signal.SIGTERM - 1) & 1)


async def test_sigterm_when_idle_ends_with_code_0():
    async with running_fake_engine() as engine:
        os.kill(engine.pid, signal.SIGTERM)
        assert await engine.exit_code() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_when_busy_ends_requests_with_abort(number: signal.Signals):
    async with running_fake_engine("--fake-itl-ms", "20") as engine:
        streamed = asyncio.create_task(engine.chat(**LONG, stream=True))
        plain = asyncio.create_task(engine.chat(**LONG))
        await _running(engine, 2)
        os.kill(engine.pid, number)
        assert await engine.exit_code() == 0
    assert '"finish_reason":"abort"' in (await streamed).text
    assert (await streamed).text.endswith("data: [DONE]\n\n")
    assert (await plain).json()["choices"][0]["finish_reason"] == "abort"


async def test_sigterm_when_busy_may_end_requests_with_an_error():
    async with running_fake_engine("--fake-itl-ms", "20", "--fake-error-on-sigterm-when-busy") as engine:
        streamed = asyncio.create_task(engine.chat(**LONG, stream=True))
        plain = asyncio.create_task(engine.chat(**LONG))
        await _running(engine, 2)
        os.kill(engine.pid, signal.SIGTERM)
        assert await engine.exit_code() == 0
    assert 'data: {"error": {' in (await streamed).text
    assert (await plain).status_code == 500


async def test_sigterm_when_busy_may_hang_until_the_clients_leave():
    async with running_fake_engine("--fake-itl-ms", "20", "--fake-hang-on-sigterm-when-busy") as engine:
        request = asyncio.create_task(engine.chat(**LONG, stream=True))
        await _running(engine)
        os.kill(engine.pid, signal.SIGTERM)
        await eventually(lambda: _refuses(engine.url), "the port is closed")
        os.kill(engine.pid, signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await engine.exit_code(within_s=0.5)
        request.cancel()
        assert await engine.exit_code() == 0


async def test_shutdown_timeout_drains_and_refuses_new_requests_with_500():
    async with running_fake_engine("--fake-itl-ms", "5", "--shutdown-timeout", "30") as engine:
        running = asyncio.create_task(engine.chat(ignore_eos=True, max_tokens=400))
        await _running(engine)
        os.kill(engine.pid, signal.SIGTERM)

        async def refused() -> bool:
            return (await engine.chat(max_tokens=1)).status_code == 500

        await eventually(refused, "new requests are refused")
        assert not await _refuses(engine.url)
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        assert await engine.exit_code() == 0


async def test_ignored_sigterm_leaves_it_serving():
    async with running_fake_engine("--fake-ignore-sigterm") as engine:
        os.kill(engine.pid, signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await engine.exit_code(within_s=0.3)
        assert not await _refuses(engine.url)


async def test_sigterm_while_loading_kills_it():
    async with loading_fake_engine("--fake-never-listen") as (process, _):
        process.terminate()
        assert await asyncio.wait_for(process.wait(), READ_S) == -signal.SIGTERM


async def test_sigterm_while_loading_may_be_swallowed_once():
    async with loading_fake_engine("--fake-never-listen", "--fake-swallow-sigterm-in-load") as (process, _):
        await eventually(lambda: _catches_sigterm(process.pid), "its handler is set")
        process.terminate()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), 0.3)
        process.terminate()
        assert await asyncio.wait_for(process.wait(), READ_S) == 130
