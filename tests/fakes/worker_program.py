"""Small programs that a supervisor under test starts in place of `vllm serve`, and a supervisor over them.

from fakes.worker_program import SupervisorUnderTest, write_program

program = write_program(tmp_path, before="sys.exit(1)")
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.config.load import LoadedConfig
from gateway.domain.replica import ReplicaRecord, ReplicaState
from workers import proc
from workers.gpu import GpuDesk
from workers.restart import RestartPolicy
from workers.spec import specs_of
from workers.supervisor import Supervisor
from workers.surroundings import PortSource

T = TypeVar("T")

# Gives the few answers that readiness asks for. BEFORE runs before it listens, AFTER once it does.
_SERVER = """\
#!PYTHON
import http.server, json, os, pathlib, signal, socket, subprocess, sys, threading, time
args = sys.argv
port = int(args[args.index("--port") + 1])
name = args[args.index("--served-model-name") + 1]
key = "Bearer " + os.environ["VLLM_API_KEY"]
here = pathlib.Path(__file__).parent

def note(file, text):  # facts for the test, whole or not at all
    (here / (file + ".new")).write_text(str(text))
    os.replace(here / (file + ".new"), here / file)

def starts():  # how many starts there were, this one included
    with open(here / "starts", "a") as f:
        f.write("x")
    return len((here / "starts").read_text())

print("starting", flush=True)
BEFORE

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self, status, body=""):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())
    def do_GET(self):
        if self.path == "/v1/models" and self.headers.get("Authorization") != key:
            return self.answer(401)
        self.answer(200, {
            "/v1/models": json.dumps({"data": [{"id": name, "max_model_len": 512}]}),
            "/version": '{"version": "0.0.1"}',
            "/metrics": "vllm:num_requests_running 2.0\\nvllm:num_requests_waiting 0.0\\n"
            if (here / "busy").exists() else "vllm:num_requests_running 0.0\\n",
        }.get(self.path, ""))
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.answer(200, "{}")
    def log_message(self, *args):
        pass

server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.daemon_threads = True
threading.Thread(target=server.serve_forever, daemon=True).start()
AFTER
while True:
    time.sleep(3600)
"""


def write_program(directory: Path, *, before: str = "", after: str = "") -> Path:
    """An executable that serves like vLLM, with Python statements run before and after it begins to listen."""
    path = directory / "vllm-stand-in"
    path.write_text(_SERVER.replace("PYTHON", sys.executable).replace("BEFORE", before).replace("AFTER", after))
    path.chmod(0o755)
    return path


async def until(look: Callable[[], T | Awaitable[T]], within_s: float = 20.0) -> T:
    """`eventually`, with the time that processes take to start and to end."""
    return await eventually(look, within_s=within_s)


def number_in(path: Path) -> int | None:
    """What the program noted there, once it has."""
    return int(path.read_text()) if path.exists() else None


def is_alive(pid: int) -> bool:
    row = proc.row_of(pid)
    return row is not None and not row.is_zombie


class SupervisorUnderTest:
    """`async with` runs it and stops it; `histories` keeps every state and detail that each worker went through."""

    def __init__(
        self,
        loaded: LoadedConfig,
        store: Redis,
        *,
        ports: PortSource | None = None,
        policy: RestartPolicy | None = None,
        parent_env: dict[str, str] | None = None,
    ) -> None:
        self.supervisor = Supervisor(
            loaded,
            specs_of(loaded, "here", 0),
            store,
            host="here",
            gpus=GpuDesk([]),
            ports=ports,
            policy=policy or RestartPolicy(first_s=0.1, cap_s=0.2, max_crashes=3),
            parent_env=parent_env,
        )
        self.task: asyncio.Task[None] | None = None

    @property
    def record(self) -> ReplicaRecord:
        return self.supervisor.records()[0]

    async def is_in(self, state: ReplicaState) -> ReplicaRecord:
        """The first worker's record once it is in that state."""
        await until(lambda: self.record.state is state or self._ended())
        return self.record

    async def stop(self) -> None:
        assert self.task is not None
        self.supervisor.request_stop()
        await asyncio.wait_for(self.task, 30)

    async def __aenter__(self) -> SupervisorUnderTest:
        self.task = asyncio.create_task(self.supervisor.run())
        return self

    async def __aexit__(self, *_: Any) -> None:
        if self.task is not None and not self.task.done():
            self.supervisor.request_stop(hurry=True)
            await asyncio.wait_for(self.task, 30)

    def _ended(self) -> bool:
        assert self.task is not None
        if self.task.done():
            self.task.result()
            raise AssertionError("the supervisor has ended")
        return False
