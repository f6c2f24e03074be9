"""The whole line on an NVIDIA GPU: `poolgate up`, two pools that share GPU 0, the OpenAI client in front.

    POOLGATE_TEST_VLLM=.venv-vllm/bin/vllm POOLGATE_TEST_MODELS=.poolgate/models pytest -m gpu

Wants a card that nothing else uses, of 48 GB or more (run on an H200), and about five minutes. One line serves all
tests of this file; those that end a worker or the line come last.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from fakes.line import write_config
from fakes.ports import free_port
from fakes.up import Running, running_up
from fakes.waits import eventually
from openai import AsyncOpenAI

from workers.errors import GpuBusy
from workers.gpu import Card, GpuDesk, list_cards

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

READY_S = 420.0  # two starts, one after the other: 2 to 3 minutes with cold compile caches
SMALL_SHARE, LARGE_SHARE = 0.1, 0.4
SLACK_MIB = 1024  # what a reading of used memory may differ by without a process being the cause
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class GpuLine:
    up: Running
    url: str
    key: str
    openai: AsyncOpenAI

    async def replica(self, pool: str) -> dict[str, Any]:
        """The pool's only one, as `poolgate status` shows it; empty while nobody reports it."""
        facts = json.loads((await self.up.cli("status", "--json")).stdout)
        return next(iter(facts["pools"][pool]), {})

    async def running(self, pool: str) -> int | None:
        """Requests that the pool's engine works at; None while it does not say."""
        load = (await self.replica(pool)).get("load")
        return load["running"] if load else None

    async def comes_back(self, pool: str, before: dict[str, Any]) -> dict[str, Any]:
        """The replica, once it is ready with another process than `before`."""

        async def is_back() -> dict[str, Any] | None:
            await asyncio.sleep(0.5)  # each look is a process of its own
            now = await self.replica(pool)
            return now if now.get("state") == "ready" and now["pid"] != before["pid"] else None

        found: dict[str, Any] = await eventually(is_back, f"{pool} is back", READY_S)
        return found

    def compilations(self, pool: str) -> int:
        """How often the pool's worker has compiled its model so far."""
        return (self.up.state / "logs" / f"{pool}-0.log").read_text(errors="replace").count("Compiling a graph")

    async def processes(self, pool: str) -> list[psutil.Process]:
        """The pool's `vllm serve` and all of its descendants."""
        server = psutil.Process((await self.replica(pool))["pid"])
        return [server, *server.children(recursive=True)]

    async def post(self, **body: Any) -> httpx.Response:
        async with self._client() as client:
            return await client.post("/chat/completions", json={"messages": FRANCE} | body)

    async def stream(self, model: str, tokens: int, on_first: Callable[[], None] = lambda: None) -> bytes:
        """Everything that a streamed answer of this many tokens brought; `on_first` is called at its first bytes."""
        body = {"model": model, "messages": FRANCE, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        received = b""
        async with self._client() as client, client.stream("POST", "/chat/completions", json=body) as reply:
            async for piece in reply.aiter_bytes():
                if not received:
                    on_first()
                received += piece
        return received

    def _client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=120, trust_env=False)


def config_of(folder: Path, vllm: str, small: Path, large: Path, small_gpus: list[int]) -> Path:
    return write_config(
        folder,
        gateway={"port": free_port(), "drain_s": 5},
        redis={"url": "embedded", "timeout_s": 2.0},
        workers={"vllm": vllm, "load_s": READY_S},
        pools={
            "small": {
                "model": str(small),
                "max_model_len": 8192,
                "gpu_memory_utilization": SMALL_SHARE,
                "replicas": [{"gpus": small_gpus}],
            },
            # names no GPU: takes the first
            "large": {
                "model": str(large),
                "max_model_len": 8192,
                "gpu_memory_utilization": LARGE_SHARE,
                "vllm_args": {"load_format": "dummy"},
            },
        },
        routes={
            "chat": {"targets": [{"pool": "small"}], "fallback": ["large"], "defaults": {"temperature": 0}},
            "large": {"targets": [{"pool": "large"}]},
        },
    )


async def used_mib() -> int:
    """Of GPU 0."""
    return (await list_cards())[0].used_mib


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def line(
    idle_card: Card, gpu_vllm: str, small_model: Path, large_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[GpuLine]:
    config = config_of(tmp_path_factory.mktemp("gpu"), gpu_vllm, small_model, large_model, [0])
    async with running_up(config, READY_S) as up:
        url, key = up.address()
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as openai:
            yield GpuLine(up, url, key, openai)


async def check(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of `poolgate check`."""
    command = [sys.executable, "-m", "gateway", "check", "--json", "--config", str(path)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    return done.returncode, json.loads(done.stdout)["findings"]


async def test_check_finds_nothing_wrong_with_two_pools_on_one_card(
    idle_card: Card, gpu_vllm: str, small_model: Path, large_model: Path, tmp_path: Path
) -> None:
    assert await check(config_of(tmp_path, gpu_vllm, small_model, large_model, [0])) == (0, [])


async def test_check_refuses_a_gpu_that_is_not_there_and_lists_the_ones_that_are(
    idle_card: Card, gpu_vllm: str, small_model: Path, large_model: Path, tmp_path: Path
) -> None:
    code, [finding] = await check(config_of(tmp_path, gpu_vllm, small_model, large_model, [7]))
    assert (code, finding["severity"], finding["key"]) == (1, "error", "pools.small.replicas[0].gpus")
    assert finding["fact"] == "no GPU 7 on this machine"
    assert idle_card.uuid in finding["way_out"]
    assert f"{idle_card.total_mib} MiB" in finding["way_out"]


async def test_workers_that_share_a_card_start_one_after_the_other(line: GpuLine) -> None:
    first, second = sorted([await line.replica("small"), await line.replica("large")], key=lambda r: r["since_s"])
    assert (first["state"], second["state"], first["restarts"], second["restarts"]) == ("ready", "ready", 0, 0)
    assert psutil.Process(second["pid"]).create_time() > first["since_s"] - 1


async def test_status_shows_both_pools(line: GpuLine) -> None:
    done = await line.up.cli("status")
    rows = [row.split() for row in done.stdout.splitlines()]
    assert done.returncode == 0
    assert [row[2] for row in rows if row[:1] in (["small"], ["large"])] == ["ready", "ready"]


async def test_each_worker_sees_the_card_of_its_config_and_one_without_gpus_takes_the_first(line: GpuLine) -> None:
    for pool in ("small", "large"):
        # vLLM's processes write over the memory of their environment when they set their title; not all of them do
        seen = [process.environ().get("CUDA_VISIBLE_DEVICES") for process in await line.processes(pool)]
        assert {value for value in seen if value is not None} == {"0"}


async def test_workers_take_their_shares_of_the_memory(line: GpuLine, idle_card: Card) -> None:
    taken = await used_mib() - idle_card.used_mib
    assert taken == pytest.approx((SMALL_SHARE + LARGE_SHARE) * idle_card.total_mib, rel=0.2)


async def test_a_start_into_memory_that_is_taken_is_refused_and_names_the_holder(line: GpuLine) -> None:
    with pytest.raises(GpuBusy, match=r"GPU 0: .* MiB are free, a share of 0\.9 is asked; held by .*MiB\)"):
        await GpuDesk(await list_cards()).wait_for_memory(["0"], 0.9, timeout_s=0)


async def test_openai_client_gets_sensible_answers_plain_and_streamed(line: GpuLine) -> None:
    plain = await line.openai.chat.completions.create(model="chat", messages=FRANCE, max_tokens=16)
    assert "Paris" in (plain.choices[0].message.content or "")
    assert plain.usage is not None and plain.usage.prompt_tokens > 10
    stream = await line.openai.chat.completions.create(model="chat", messages=FRANCE, max_tokens=16, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Paris" in text


async def test_64_streams_at_once_all_bring_every_token(line: GpuLine) -> None:
    async def tokens(model: str) -> int:
        stream = await line.openai.chat.completions.create(
            model=model,
            messages=FRANCE,
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        last = [chunk async for chunk in stream][-1]
        assert last.usage is not None
        return last.usage.completion_tokens

    assert await asyncio.gather(*(tokens(model) for model in ("chat", "large") * 32)) == [200] * 64


async def test_caller_that_leaves_ends_the_generation(line: GpuLine) -> None:
    left = asyncio.create_task(line.stream("large", 8000))  # half a minute's work

    async def runs() -> bool:
        return await line.running("large") == 1

    await eventually(runs, "the engine reports a running request", 20)
    left.cancel()
    await asyncio.wait({left})

    async def is_idle() -> bool:
        return await line.running("large") == 0

    await eventually(is_idle, "the engine is idle again", 10)


async def test_killed_engine_costs_its_own_stream_and_comes_back_while_the_other_pool_goes_on(line: GpuLine) -> None:
    before, before_mib = await line.replica("small"), await used_mib()
    processes = await line.processes("small")
    [core] = [process for process in processes if "EngineCore" in " ".join(process.cmdline())]
    compilations = line.compilations("small")
    other = asyncio.create_task(line.stream("large", 2000))  # nine seconds' work
    received = await line.stream("chat", 8000, on_first=lambda: os.kill(core.pid, signal.SIGKILL))
    assert b'"error"' in received

    async def falls_back() -> bool:
        reply = await line.post(model="chat", max_tokens=2)
        return reply.status_code == 200 and reply.headers["x-poolgate-pool"] == "large"

    await eventually(falls_back, "the fallback pool serves meanwhile", 20)
    whole = await other
    assert b'"error"' not in whole and b'"finish_reason":"length"' in whole and whole.endswith(b"data: [DONE]\n\n")

    assert (await line.comes_back("small", before))["restarts"] == 1
    assert not [process for process in processes if process.is_running()]
    assert abs(await used_mib() - before_mib) < SLACK_MIB
    assert line.compilations("small") == compilations
    assert (await line.replica("large"))["restarts"] == 0

    async def answers_again() -> bool:
        reply = await line.post(model="chat", max_tokens=16)
        return reply.headers["x-poolgate-pool"] == "small" and "Paris" in reply.text

    await eventually(answers_again, "requests go to the engine that is back", 10)


async def test_killed_server_leaves_no_engine_behind_that_keeps_its_memory(line: GpuLine) -> None:
    before, before_mib, processes = await line.replica("small"), await used_mib(), await line.processes("small")
    os.kill(before["pid"], signal.SIGKILL)
    await line.comes_back("small", before)
    assert not [process for process in processes if process.is_running()]
    assert abs(await used_mib() - before_mib) < SLACK_MIB


async def test_killed_supervisor_has_its_workers_ended_before_others_take_the_card(line: GpuLine) -> None:
    before, before_mib = {pool: await line.replica(pool) for pool in ("small", "large")}, await used_mib()
    processes = [*await line.processes("small"), *await line.processes("large")]
    supervisor = processes[0].parent()
    assert supervisor is not None and "workers" in supervisor.cmdline()
    supervisor.kill()
    for pool in before:
        await line.comes_back(pool, before[pool])
    assert not [process for process in processes if process.is_running()]
    assert abs(await used_mib() - before_mib) < SLACK_MIB


async def test_ctrl_c_under_load_leaves_no_process_and_gives_all_memory_back(line: GpuLine, idle_card: Card) -> None:
    async def is_known() -> bool:  # to the gateway too, which asks twice a second who is ready
        return (await line.post(model="large", max_tokens=1)).status_code == 200

    await eventually(is_known, "the gateway sends requests to the worker that came back", 10)
    load = [asyncio.create_task(line.stream("large", 8000)) for _ in range(4)]

    async def runs() -> bool:
        return await line.running("large") == 4

    await eventually(runs, "requests run", 20)
    processes = [*line.up.family(), *await line.processes("small"), *await line.processes("large")]
    assert len({process.pid for process in processes}) >= 9  # up, redis, supervisor, gateway, 2 x (server, core, …)
    assert await line.up.interrupt() == 0
    assert all(b'"error"' in received for received in await asyncio.gather(*load))
    assert not [process for process in processes if process.is_running()]

    async def is_free() -> bool:
        return await used_mib() <= idle_card.used_mib + SLACK_MIB

    await eventually(is_free, f"GPU memory in use is back at {idle_card.used_mib} MiB", 20)
