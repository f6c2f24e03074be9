"""Real `vllm serve` processes that the tests of one session share; registered by `tests/conftest.py`.

They run on the CPU, each in a session and a temporary directory of its own, and are ended as a process group.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fakes.ports import free_port

START_S = 240.0  # 25 s alone; several at once on two cores take a minute or two
STOP_S = 20.0
KEY = "engine-key"


@dataclass(frozen=True, slots=True)
class RealEngine:
    """A vLLM that answers /health; ended by its context manager."""

    url: str
    key: str
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid


@pytest.fixture(scope="session")
def bare_tiny(vllm_command: str, models_dir: Path) -> Iterator[RealEngine]:
    """vLLM on tiny-random as `tiny`, with a key, a window of 2,048 tokens and priority scheduling."""
    with real_engine(vllm_command, models_dir / "tiny-random", "tiny", "--scheduling-policy", "priority") as engine:
        yield engine


@pytest.fixture(scope="session")
def bare_slow(vllm_command: str, models_dir: Path) -> Iterator[RealEngine]:
    """vLLM on SmolLM2 as `tiny`, with a key and a window of 2,048 tokens, half a minute's work for it."""
    with real_engine(vllm_command, models_dir / "SmolLM2-135M-Instruct", "tiny") as engine:
        yield engine


@pytest.fixture(scope="session")
def bare_embed(vllm_command: str, models_dir: Path) -> Iterator[RealEngine]:
    """vLLM on tiny-embed as `tiny`, with a key and a window of 512 tokens."""
    with real_engine(vllm_command, models_dir / "tiny-embed", "tiny", "--max-model-len", "512") as engine:
        yield engine


@pytest.fixture(scope="session")
def bare_rerank(vllm_command: str, models_dir: Path) -> Iterator[RealEngine]:
    """vLLM on tiny-rerank as `tiny`, with a key and a window of 512 tokens."""
    with real_engine(vllm_command, models_dir / "tiny-rerank", "tiny", "--max-model-len", "512") as engine:
        yield engine


@contextmanager
def real_engine(vllm: str, model: Path, name: str, *flags: str) -> Iterator[RealEngine]:
    """Starts a vLLM of its own and waits until it is healthy; AssertionError with its log if it never is."""
    with started(vllm, model, name, *flags) as engine:
        deadline = time.monotonic() + START_S
        while not is_healthy(engine.url):
            code = engine.process.poll()
            assert code is None, f"vllm ended with {code}:\n{_tail(engine.log)}"
            assert time.monotonic() < deadline, f"vllm is not healthy after {START_S} s:\n{_tail(engine.log)}"
            time.sleep(0.2)
        yield engine


@contextmanager
def started(vllm: str, model: Path, name: str, *flags: str, port: int | None = None) -> Iterator[RealEngine]:
    """Starts a vLLM and does not wait for it; whatever is left of its process group is killed and reaped."""
    folder = Path(tempfile.mkdtemp(prefix="vllm-"))
    chosen = free_port() if port is None else port
    command = [vllm, "serve", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(chosen)]
    command += ["--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager"]
    command += ["--kv-cache-memory-bytes", str(128 << 20), *flags]
    own = {"TMPDIR": str(folder), "VLLM_RPC_BASE_PATH": str(folder), "VLLM_API_KEY": KEY, "VLLM_NO_USAGE_STATS": "1"}
    own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TORCH_COMPILE_DISABLE": "1"}
    log = folder / "log"
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
                start_new_session=True,
            )
        try:
            yield RealEngine(f"http://127.0.0.1:{chosen}", KEY, name, process, log)
        finally:
            _end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_healthy(url: str) -> bool:
    """True when /health answers 200."""
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server, then SIGKILL to its group, until no member is left."""
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    deadline = time.monotonic() + STOP_S
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.05)
    process.wait(STOP_S)


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-4000:]
