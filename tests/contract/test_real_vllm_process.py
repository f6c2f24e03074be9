"""What the supervisor relies on in the life of a real `vllm serve`, and what the fake engine's flags imitate.

Each needs a start of its own, so all are started together.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from contract.probes import chat
from plugins.real_engines import START_S, RealEngine, is_healthy, started

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
READ_S = 30.0


@pytest.fixture(scope="module")
def starts(vllm_command: str, models_dir: Path, bare_tiny: RealEngine) -> Iterator[dict[str, RealEngine]]:
    """Starts of tiny-random, by what they are for."""
    model, taken = models_dir / "tiny-random", httpx.URL(bare_tiny.url).port
    with ExitStack() as stack:
        yield {
            "idle": stack.enter_context(started(vllm_command, model, "tiny")),
            "busy": stack.enter_context(started(vllm_command, model, "tiny")),
            "port in use": stack.enter_context(started(vllm_command, model, "tiny", port=taken)),
            "unknown flag": stack.enter_context(started(vllm_command, model, "tiny", "--frobnicate", "1")),
        }


def test_unknown_flag_ends_with_code_2(starts: dict[str, RealEngine]):
    engine = starts["unknown flag"]
    assert engine.process.wait(START_S) == 2
    assert "error: unrecognized arguments: --frobnicate" in engine.log.read_text()


def test_port_in_use_ends_with_code_1(starts: dict[str, RealEngine]):
    engine = starts["port in use"]
    assert engine.process.wait(START_S) == 1
    assert "OSError: [Errno 98] Address already in use" in engine.log.read_text()


def test_connections_are_refused_until_it_is_ready_and_sigterm_when_idle_is_code_0(starts: dict[str, RealEngine]):
    engine = starts["idle"]
    refusals = _until_healthy(engine)
    assert refusals <= {"ConnectionRefusedError"}
    children = psutil.Process(engine.pid).children(recursive=True)
    engine.process.terminate()
    assert engine.process.wait(READ_S) == 0
    assert _within(lambda: not any(child.is_running() for child in children))


def test_sigterm_when_busy_ends_with_code_0_once_the_clients_have_left(starts: dict[str, RealEngine]):
    """It hangs, or ends the requests with `abort` or an error: a race in vLLM 0.32. The fake has a flag for each."""
    engine = starts["busy"]
    _until_healthy(engine)
    with socket.create_connection(("127.0.0.1", httpx.URL(engine.url).port), READ_S) as client:
        content = json.dumps(chat(stream=True, max_tokens=1900, ignore_eos=True)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {engine.key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content)
        received = b""
        while received.count(b"data: ") < 3:
            received += client.recv(1 << 16)
        engine.process.terminate()
        assert _within(lambda: not is_healthy(engine.url))
    assert engine.process.wait(READ_S) == 0


def _until_healthy(engine: RealEngine) -> set[str]:
    """Waits; the kinds of trouble that connections had until then."""
    troubles = set()
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert engine.process.poll() is None, engine.log.read_text()[-2000:]
        try:
            socket.create_connection(("127.0.0.1", httpx.URL(engine.url).port), 5).close()
        except OSError as exc:
            troubles.add(type(exc).__name__)
        if is_healthy(engine.url):
            return troubles
        time.sleep(0.1)
    raise AssertionError(f"not healthy within {START_S} s")


def _within(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + READ_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()
