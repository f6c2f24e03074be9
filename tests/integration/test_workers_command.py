"""`poolgate workers` as a process: its signals, its exit codes, its parent, and what it leaves when it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import pytest
from fakes.worker_program import is_alive, number_in, until, write_program

COMMAND = (sys.executable, "-c", "from workers.cli import workers; workers()")
PROGRAM_NOTES = 'note("worker", os.getpid())'


@pytest.fixture
def write_config(tmp_path: Path, redis_url: str) -> Callable[..., Path]:
    def write(**program: str) -> Path:
        path = tmp_path / "config.toml"
        path.write_text(
            f"""
            redis.url = "{redis_url}"
            workers = {{ vllm = "{write_program(tmp_path, **program)}", stop_s = 2 }}
            pools.chat.model = "org/m"
            routes.chat.targets = [{{ pool = "chat" }}]
            """
        )
        return path

    return write


@asynccontextmanager
async def running(config: Path, *prefix: str, **env: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with appending(config.parent / "stderr") as stderr:
        process = await asyncio.create_subprocess_exec(
            *prefix, *COMMAND, "--config", str(config), stderr=stderr, env={**os.environ, **env}
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await asyncio.wait_for(process.wait(), 20)


def appending(path: Path) -> IO[bytes]:
    return open(path, "ab")


def said(config: Path) -> str:
    return (config.parent / "stderr").read_text()


async def ready(config: Path, times: int = 1) -> int:
    """The worker's pid once it is ready for the `times`-th time."""
    await until(lambda: said(config).count("warming → ready") == times)
    return number_in(config.parent / "worker")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_stop_in_service_ends_the_workers_with_code_0(write_config, number):
    config = write_config(after=PROGRAM_NOTES)
    async with running(config) as process:
        worker = await ready(config)
        process.send_signal(number)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert not is_alive(worker)


async def test_a_stop_during_a_model_load_ends_the_worker_with_code_0(write_config, tmp_path):
    config = write_config(before=PROGRAM_NOTES + "; time.sleep(3600)")
    async with running(config) as process:
        worker = await until(lambda: number_in(tmp_path / "worker"))
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
        assert not is_alive(worker)


async def test_a_killed_supervisor_leaves_its_workers_and_the_next_one_ends_them_first(write_config, tmp_path):
    config = write_config(after=PROGRAM_NOTES)
    async with running(config) as first:
        old = await ready(config)
        first.kill()
        await first.wait()
        assert is_alive(old)
    async with running(config) as second:
        new = await ready(config, times=2)
        assert new != old and not is_alive(old)
        assert f"an earlier supervisor left pids [{old}]; killed" in said(config)
        second.terminate()
        assert await asyncio.wait_for(second.wait(), 20) == 0
    assert not is_alive(new)


async def test_a_supervisor_started_with_interrupts_ignored_does_not_pass_that_on(write_config):
    config = write_config(after=PROGRAM_NOTES)
    # what a shell does for `command &`
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execvp(sys.argv[1], sys.argv[1:])"
    )
    async with running(config, sys.executable, "-c", ignoring):
        worker = await ready(config)
        assert signal.SIGINT not in ignored_signals(worker)


def ignored_signals(pid: int) -> set[int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = int(next(line for line in lines if line.startswith("SigIgn")).split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


async def test_the_supervisor_stops_when_the_process_that_runs_it_dies(write_config, tmp_path):
    config = write_config(after=PROGRAM_NOTES)
    parent = f"""
import os, subprocess, time
env = {{**os.environ, "POOLGATE_PARENT_PID": str(os.getpid())}}
child = subprocess.Popen({[*COMMAND, "--config", str(config)]!r}, env=env)
open({str(tmp_path / "supervisor")!r}, "w").write(str(child.pid))
child.wait()
"""
    with appending(tmp_path / "stderr") as stderr:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", parent, stderr=stderr)
    worker = await ready(config)
    supervisor = number_in(tmp_path / "supervisor")
    process.kill()
    await process.wait()
    await until(lambda: not is_alive(supervisor) and not is_alive(worker))


async def test_a_supervisor_whose_parent_is_gone_already_starts_nothing(write_config, tmp_path):
    config = write_config(before=PROGRAM_NOTES)
    async with running(config, POOLGATE_PARENT_PID="1" if os.getpid() != 1 else "2") as process:
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert not (tmp_path / "worker").exists()


async def test_orphans_of_a_worker_are_reaped(write_config, tmp_path):
    orphan = """
if os.fork() == 0:
    if os.fork() == 0:
        note("orphan", os.getpid())
        time.sleep(0.2)
    os._exit(0)
os.wait()
"""
    config = write_config(before=orphan, after=PROGRAM_NOTES)
    async with running(config):
        await ready(config)
        pid = number_in(tmp_path / "orphan")
        await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_a_second_supervisor_is_refused_with_a_reason(write_config):
    config = write_config(after=PROGRAM_NOTES)
    async with running(config) as first:
        await ready(config)
        async with running(config) as second:
            assert await asyncio.wait_for(second.wait(), 20) == 1
        assert f"a supervisor already runs on {config.parent / '.poolgate'} (pid {first.pid})" in said(config)
        first.terminate()
        assert await asyncio.wait_for(first.wait(), 20) == 0


async def test_a_broken_config_is_exit_code_1_with_its_findings(write_config, tmp_path):
    config = write_config()
    config.write_text(config.read_text().replace("org/m", 'org/m"\nnonsense = "x'))
    async with running(config) as process:
        assert await asyncio.wait_for(process.wait(), 20) == 1
    assert "nonsense: unknown key" in said(config)


async def test_the_record_on_disk_is_readable_by_its_owner_only(write_config, tmp_path):
    config = write_config(after=PROGRAM_NOTES)
    async with running(config) as process:
        worker = await ready(config)
        path = tmp_path / ".poolgate" / "workers" / "chat-0.json"
        assert json.loads(path.read_text())["pid"] == worker
        assert path.stat().st_mode & 0o077 == 0
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 20) == 0
    assert not path.exists()
