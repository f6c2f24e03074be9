"""The supervisor over real processes that misbehave as vLLM, its engine or its neighbours do."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fakes.worker_program import SupervisorUnderTest, is_alive, number_in, until, write_program
from redis.asyncio import Redis

from gateway.config.load import LoadedConfig
from gateway.domain.replica import ReplicaState
from workers import proc
from workers.errors import SupervisorBusy
from workers.ports import Ports, is_free
from workers.restart import RestartPolicy

GRANDCHILD = """
program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
grandchild = subprocess.Popen([sys.executable, "-c", program], start_new_session={new_session}, env={env})
note("grandchild", grandchild.pid)
"""


@pytest.fixture
def supervise(tmp_path: Path, config_for: Callable[..., LoadedConfig], redis_url: str, redis_client: Redis):
    """`supervise(before=…, after=…)`: a supervisor over one program, in this test's folder."""

    def make(*, before: str = "", after: str = "", workers: dict | None = None, pool: dict | None = None, **kwargs):
        program = write_program(tmp_path, before=before, after=after)
        loaded = config_for(
            redis_url,
            workers={"vllm": str(program), "stop_s": 1.0, "load_s": 20.0, **(workers or {})},
            pools={"chat": {"model": "org/m", **(pool or {})}},
            routes={"chat": {"targets": [{"pool": "chat"}]}},
        )
        return SupervisorUnderTest(loaded, redis_client, **kwargs)

    return make


class OnePort:
    """Gives the same port each time."""

    def __init__(self, port: int) -> None:
        self.port = port

    def take(self) -> int:
        return self.port

    def release(self, port: int) -> None:
        assert port == self.port


def working_directory(pid: int) -> Path:
    return Path(f"/proc/{pid}/cwd").resolve()


async def test_a_worker_becomes_ready_and_leaves_nothing_behind(supervise, tmp_path):
    async with supervise() as run:
        record = await run.is_in(ReplicaState.READY)
        assert (record.max_model_len, record.engine_version, record.restarts) == (512, "0.0.1", 0)
        run_folder = working_directory(record.pid)
        assert record.load is not None and record.api_key and record.url.startswith("http://127.0.0.1:")
        await run.stop()
        assert run.record.state is ReplicaState.STOPPED
        assert not is_alive(record.pid)
    state = tmp_path / "state"
    assert (state / "logs" / "chat-0.log").read_text() == "starting\n"
    assert not run_folder.exists() and not list((state / "workers").glob("*.json"))


async def test_no_secret_is_on_the_command_line(supervise, monkeypatch):
    env = {**os.environ, "POOLGATE_ADMIN_KEY": "canary-admin"}
    async with supervise(parent_env=env) as run:
        record = await run.is_in(ReplicaState.READY)
        folder = Path(f"/proc/{record.pid}")
        assert record.api_key.encode() not in (folder / "cmdline").read_bytes()
        assert b"canary-admin" not in (folder / "environ").read_bytes()


async def test_restart_loop_eats_the_host(supervise, tmp_path):
    async with supervise(before='starts(); print("ValueError: no such thing"); sys.exit(1)') as run:
        record = await run.is_in(ReplicaState.FAILED)
        assert record.detail == "no such thing (exit code 1)"
        assert len((tmp_path / "starts").read_text()) == 3


async def test_an_exit_with_code_0_that_nobody_asked_for_is_a_crash(supervise):
    program = "if starts() == 1: threading.Timer(0.3, lambda: os._exit(0)).start()"
    async with supervise(after=program, policy=RestartPolicy(first_s=3, jitter=0)) as run:
        record = await run.is_in(ReplicaState.BACKOFF)
        await until(lambda: "exit code 0, which nobody asked for" in run.record.detail)
        assert not record.is_ready()
        again = await run.is_in(ReplicaState.READY)
        assert (again.restarts, again.api_key) == (1, record.api_key)


async def test_a_killed_worker_is_not_explained_by_the_last_line_of_its_log(supervise):
    program = 'print("GET /metrics 200", flush=True); note("said", 1)'
    async with supervise(after=program, policy=RestartPolicy(first_s=3, jitter=0)) as run:
        record = await run.is_in(ReplicaState.READY)
        os.kill(record.pid, signal.SIGKILL)
        await until(lambda: run.record.detail.startswith("ended by SIGKILL"))


async def test_an_unknown_option_is_not_tried_again(supervise, tmp_path):
    program = 'starts(); print("vllm: error: unrecognized arguments: --frobnicate 1"); sys.exit(2)'
    async with supervise(before=program) as run:
        record = await run.is_in(ReplicaState.FAILED)
        assert record.detail.startswith("unrecognized arguments: --frobnicate 1")
        assert len((tmp_path / "starts").read_text()) == 1


async def test_a_command_that_is_not_there_is_said_so(supervise):
    async with supervise(workers={"vllm": "/nowhere/vllm"}) as run:
        record = await run.is_in(ReplicaState.FAILED)
        assert "/nowhere/vllm" in record.detail and "workers.vllm" in record.detail


async def test_a_worker_that_hangs_in_load_is_ended_at_its_deadline(supervise):
    program = 'print("Loading safetensors checkpoint shards:  38% Completed | 3/8 [0s]", flush=True); time.sleep(3600)'
    async with supervise(before=program, workers={"load_s": 1.0}) as run:
        await until(lambda: run.record.detail == "loading weights 3/8")
        pid = run.record.pid
        await run.is_in(ReplicaState.BACKOFF)
        await until(lambda: "not ready after 1 s (last phase: loading weights 3/8" in run.record.detail)
        assert not is_alive(pid)


async def test_log_pipe_fills_and_the_worker_freezes(supervise, tmp_path):
    noise = """
for stream in (sys.stdout.buffer, sys.stderr.buffer):
    for _ in range(8192):
        stream.write(b"0123456789abcdef" * 7 + b"0123456789abcde\\n")
    stream.write(b"x" * 5_000_000 + b"\\n" + bytes(range(128, 256)) + b"\\n")
    stream.flush()
"""
    async with supervise(before=noise, after=noise + 'note("said", 1)') as run:
        await run.is_in(ReplicaState.READY)
        await until(lambda: number_in(tmp_path / "said"))
        assert run.record.is_ready()


async def test_a_full_disk_drops_the_log_and_not_the_worker(supervise, tmp_path):
    (tmp_path / "state" / "logs").mkdir(parents=True)
    (tmp_path / "state" / "logs" / "chat-0.log").symlink_to("/dev/full")
    async with supervise(before='print("x" * 100_000, flush=True)') as run:
        await run.is_in(ReplicaState.READY)


async def test_a_disk_that_cannot_be_written_does_not_end_a_worker_that_serves(supervise, tmp_path, caplog):
    records = tmp_path / "state" / "workers"
    async with supervise() as run:
        await run.is_in(ReplicaState.READY)
        records.rename(tmp_path / "aside")
        records.touch()
        await until(lambda: "its record cannot be written" in caplog.text)
        assert run.record.is_ready()
        records.unlink()
        (tmp_path / "aside").rename(records)


async def test_a_state_directory_that_cannot_be_written_is_said_so(supervise, tmp_path):
    (tmp_path / "state" / "workers" / "chat-0.new").mkdir(parents=True)
    async with supervise() as run:
        record = await run.is_in(ReplicaState.FAILED)
        assert "the state directory must be writable" in record.detail


@pytest.mark.parametrize(
    ("new_session", "env"),
    [
        (False, "os.environ"),
        (True, "os.environ"),
        # as vLLM's engine, which overwrites its environment; found because it was seen as a child before
        (True, "{}"),
    ],
)
async def test_engine_outlives_its_api_server(supervise, tmp_path, new_session, env):
    program = "if starts() == 1:" + GRANDCHILD.format(new_session=new_session, env=env).replace("\n", "\n    ")
    async with supervise(before=program) as run:
        record = await run.is_in(ReplicaState.READY)
        grandchild = number_in(tmp_path / "grandchild")
        assert is_alive(grandchild)
        os.kill(record.pid, signal.SIGKILL)
        await until(lambda: run.record.restarts == 1)
        assert not is_alive(grandchild)
        await run.is_in(ReplicaState.READY)


async def test_a_daemon_that_cut_all_ties_is_found_by_its_mark(supervise, tmp_path):
    daemon = """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        note("daemon", os.getpid())
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.closerange(0, 3)
        time.sleep(3600)
    os._exit(0)
os.wait()
"""
    async with supervise(before=daemon) as run:
        await run.is_in(ReplicaState.READY)
        pid = number_in(tmp_path / "daemon")
        assert is_alive(pid)
        await run.stop()
        assert not is_alive(pid)


async def test_a_worker_that_ignores_sigterm_is_killed_with_all_its_children(supervise, tmp_path):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + GRANDCHILD.format(new_session=True, env="os.environ")
    async with supervise(before=deaf) as run:
        record = await run.is_in(ReplicaState.READY)
        await run.stop()
        assert not is_alive(record.pid) and not is_alive(number_in(tmp_path / "grandchild"))


async def test_a_first_sigterm_that_is_swallowed_is_followed_by_a_second(supervise, tmp_path):
    swallow = """
def on_term(*_):
    note("terms", 1 + (int((here / "terms").read_text()) if (here / "terms").exists() else 0))
    if (here / "terms").read_text() == "2":
        os._exit(0)
signal.signal(signal.SIGTERM, on_term)
"""
    async with supervise(before=swallow, workers={"stop_s": 30.0}) as run:
        await run.is_in(ReplicaState.READY)
        await run.stop()
        assert number_in(tmp_path / "terms") == 2


async def test_a_stop_during_the_load_leaves_nothing(supervise):
    async with supervise(before="time.sleep(3600)") as run:
        await until(lambda: run.record.pid)
        pid = run.record.pid
        await run.stop()
        assert not is_alive(pid) and run.record.state is ReplicaState.STOPPED


async def test_a_stop_waits_for_requests_in_flight_but_not_when_told_to_hurry(supervise, tmp_path):
    (tmp_path / "busy").touch()
    async with supervise() as run:
        await run.is_in(ReplicaState.READY)
        run.supervisor.request_stop()
        await until(lambda: run.record.detail == "2 requests in flight")
        assert is_alive(run.record.pid) and run.record.state is ReplicaState.DRAINING
        run.supervisor.request_stop(hurry=True)
        await asyncio.wait_for(run.task, 20)
        assert not is_alive(run.record.pid)


STRAY = """
import http.server, socket
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b'{"data": [{"id": "chat"}]}')
    do_POST = do_GET
    def log_message(self, *args): pass
class Server(http.server.ThreadingHTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()
server = Server(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture
async def stray() -> AsyncIterator[tuple[int, int]]:
    """Somebody else's server that answers 200 to everything and shares its port with whoever asks: (pid, port)."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", STRAY, stdout=subprocess.PIPE)
    yield process.pid, int(await process.stdout.readline())
    process.kill()
    await process.wait()


async def test_orphan_on_the_port_answers_the_health_check(supervise, stray):
    pid, port = stray
    # the worker is slow to bind, as vLLM is: meanwhile only the stray answers
    async with supervise(before="time.sleep(3600)", ports=OnePort(port)) as run:
        record = await run.is_in(ReplicaState.FAILED)
        assert record.detail.startswith(f"port {port} is taken by pid {pid}")
        assert is_alive(pid)


async def test_two_servers_share_one_port_without_an_error(supervise, stray):
    pid, port = stray
    sharing = """
class Sharing(http.server.ThreadingHTTPServer):
    def server_bind(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        super().server_bind()
http.server.ThreadingHTTPServer = Sharing
"""
    async with supervise(before=sharing, after='note("bound", 1)', ports=OnePort(port)) as run:
        record = await run.is_in(ReplicaState.FAILED)
        assert record.detail.startswith(f"port {port} is taken by pid {pid}")


async def test_a_port_that_somebody_listens_on_is_never_handed_out(stray):
    _, port = stray
    assert not is_free(port)
    ports = Ports(random.Random(1))
    first, second = ports.take(), ports.take()
    assert first != second and is_free(first)
    ports.release(first)


async def test_a_wrong_served_name_is_never_ready(supervise):
    async with supervise(before='name = "other"', workers={"load_s": 2.0}) as run:
        await until(lambda: 'does not serve "chat"' in run.record.detail)


async def test_gateway_killed_and_workers_stay(supervise, tmp_path):
    program = GRANDCHILD.format(new_session=True, env="{}")
    async with supervise(before=program) as first:
        record = await first.is_in(ReplicaState.READY)
        saved = (tmp_path / "state" / "workers" / "chat-0.json").read_bytes()
        await first.stop()
    # as a killed supervisor would leave it: the processes, and the record of them
    sleeper = (sys.executable, "-c", "import time; time.sleep(3600)")
    left = await asyncio.create_subprocess_exec(*sleeper, start_new_session=True)
    bystander = await asyncio.create_subprocess_exec(*sleeper, start_new_session=True)
    try:
        row = proc.row_of(left.pid)
        old = f'"seen": [[{left.pid}, {row.start_ticks}], [{bystander.pid}, 1]]'
        text = saved.decode()
        start = text.index('"seen": ')
        record_path = tmp_path / "state" / "workers" / "chat-0.json"
        record_path.write_text(text[:start] + old + "}")
        async with supervise() as second:
            await until(lambda: left.returncode is not None)
            assert (await second.is_in(ReplicaState.READY)).pid != record.pid
            assert bystander.returncode is None  # same pid as recorded, another start time
    finally:
        for process in (left, bystander):
            if process.returncode is None:
                process.kill()
            await process.wait()


async def test_a_second_supervisor_on_one_state_directory_is_refused(supervise):
    async with supervise() as first:
        await first.is_in(ReplicaState.READY)
        second = supervise()
        with pytest.raises(SupervisorBusy, match=f"pid {os.getpid()}"):
            await second.supervisor.run()
        assert first.record.is_ready()


async def test_workers_on_the_cpu_start_side_by_side(supervise, tmp_path):
    meet = """
(here / f"met-{os.getpid()}").touch()
while len(list(here.glob("met-*"))) < 2:
    time.sleep(0.01)
"""
    async with supervise(before=meet, pool={"replicas": [{"gpus": []}, {"gpus": []}]}) as run:
        await until(lambda: all(record.is_ready() for record in run.supervisor.records()))
        assert len({record.url for record in run.supervisor.records()}) == 2
