"""The fake engine's life as a process up to its end, and its faults by flag."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import httpx
import psutil
from fakes.engine import FakeEngine, loading_fake_engine, running_fake_engine
from fakes.waits import eventually

READ_S = 10.0
SERVE = [sys.executable, "-m", "workers.fake_engine", "serve", "/models/fake", "--host", "127.0.0.1", "--port"]


async def _status(engine: FakeEngine, path: str) -> int:
    async with httpx.AsyncClient(timeout=READ_S, trust_env=False) as client:
        return (await client.get(engine.url + path)).status_code


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


async def _run(*arguments: str) -> tuple[int, str]:
    """Exit code and output of an engine that ends by itself."""
    process = await asyncio.create_subprocess_exec(*SERVE, *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 10)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


async def test_port_in_use_ends_with_code_1():
    async with running_fake_engine() as engine:
        code, output = await _run(engine.url.rpartition(":")[2])
    assert (code, output.endswith("OSError: [Errno 98] Address already in use\n")) == (1, True)


async def test_connections_are_refused_until_it_is_ready():
    async with loading_fake_engine("--fake-load-s", "0.5") as (process, url):
        assert await _refuses(url)

        async def healthy() -> bool:
            return not await _refuses(url)

        await eventually(healthy, "it listens")
        assert process.returncode is None


async def test_of_two_that_load_on_one_port_the_slower_goes_on_without_it():
    async with loading_fake_engine("--fake-load-s", "1") as (slower, url):
        os.kill(slower.pid, signal.SIGSTOP)
        async with running_fake_engine(port=int(url.rpartition(":")[2])) as engine:
            os.kill(slower.pid, signal.SIGCONT)
            assert slower.stdout is not None
            while b"startup complete" not in await asyncio.wait_for(slower.stdout.readline(), READ_S):
                pass
            assert (await engine.state())["pid"] == engine.pid
            slower.terminate()
            assert await asyncio.wait_for(slower.wait(), READ_S) == 0


async def test_exit_code_on_start_comes_with_the_given_log_lines():
    code, output = await _run("0", "--fake-exit-code-on-start", "3", "--fake-log-line", "ValueError: no memory")
    assert (code, "ValueError: no memory\n" in output) == (3, True)


async def test_bad_value_of_a_flag_is_code_2_and_a_flag_of_vllm_is_ignored():
    code, output = await _run("0", "--max-model-len", "long")
    assert (code, "error: argument --max-model-len" in output) == (2, True)
    async with running_fake_engine("--dtype", "bfloat16", "--enforce-eager", "--no-enable-prefix-caching") as engine:
        assert await _status(engine, "/health") == 200


async def test_exit_after_s_is_a_crash_after_it_was_ready():
    async with running_fake_engine("--fake-exit-after-s", "0.5") as engine:
        assert await engine.exit_code() == 1


async def test_health_only_hangs_completions():
    async with running_fake_engine("--fake-health-only") as engine:
        assert await _status(engine, "/health") == 200
        request = asyncio.create_task(engine.chat())
        done, _ = await asyncio.wait([request], timeout=0.3)
        assert not done
        request.cancel()


async def test_hang_after_requests_answers_that_many():
    async with running_fake_engine("--fake-hang-after-requests", "1") as engine:
        assert (await engine.chat()).status_code == 200
        request = asyncio.create_task(engine.chat())
        done, _ = await asyncio.wait([request], timeout=0.3)
        assert not done
        request.cancel()


async def test_wrong_name_and_no_auth():
    async with running_fake_engine("--fake-wrong-name", "--fake-no-auth") as engine:
        assert (await engine.chat(model="tiny")).status_code == 404
        assert await _status(engine, "/v1/models") == 200


async def test_engine_child_goes_with_a_clean_end_and_stays_after_sigkill():
    async with running_fake_engine("--fake-engine-child") as engine:
        [child] = (await engine.state())["children"]
        assert os.getpgid(child) == os.getpgid(engine.pid)
        os.kill(engine.pid, signal.SIGTERM)
        await engine.exit_code()
        assert not psutil.pid_exists(child)
    async with running_fake_engine("--fake-engine-child") as engine:
        [child] = (await engine.state())["children"]
        os.kill(engine.pid, signal.SIGKILL)
        await engine.exit_code()
        assert psutil.Process(child).status() == psutil.STATUS_SLEEPING


async def test_orphan_child_is_in_a_session_of_its_own_and_outlives_a_clean_end():
    async with running_fake_engine("--fake-orphan-child") as engine:
        [child] = (await engine.state())["children"]
        assert os.getsid(child) == child
        os.kill(engine.pid, signal.SIGTERM)
        await engine.exit_code()
        assert psutil.Process(child).status() == psutil.STATUS_SLEEPING


async def test_log_flood_reaches_both_pipes_while_it_serves():
    async with running_fake_engine("--fake-log-flood") as engine:

        async def flooded() -> bool:
            return engine.log.stat().st_size > 10_000_000

        await eventually(flooded, "10 MB of log")
        assert (await engine.chat(max_tokens=2)).status_code == 200


async def test_more_requests_than_slots_wait_and_lower_priority_numbers_go_first():
    flags = ("--fake-slots", "1", "--fake-itl-ms", "5", "--scheduling-policy", "priority", "--max-model-len", "100000")
    async with running_fake_engine(*flags) as engine:
        order: list[int] = []

        async def one(priority: int) -> None:
            await engine.chat(priority=priority, max_tokens=20)
            order.append(priority)

        first = asyncio.create_task(engine.chat(ignore_eos=True, max_tokens=90_000))
        await _running(engine)
        others = [asyncio.create_task(one(priority)) for priority in (10, 5, 0, -5)]

        async def waiting() -> bool:
            return await engine.metric("vllm:num_requests_waiting") == 4

        await eventually(waiting, "four are waiting")
        first.cancel()  # it has the only slot until its client leaves
        await asyncio.gather(*others)
    assert order == [-5, 0, 5, 10]


async def test_requests_are_kept_as_received():
    async with running_fake_engine() as engine:
        async with httpx.AsyncClient(timeout=READ_S, trust_env=False) as client:
            await client.post(engine.url + "/v1/completions", content=b'{"p": "\xc3\x28"', headers={"X-Mine": "a"})
        [request] = await engine.requests("/v1/completions")
    assert (request["method"], request["body"]) == ("POST", '{"p": "\\xc3("')
    assert ["X-Mine", "a"] in request["headers"]
