"""The stand-in answers as vLLM does on the wire, and refuses what vLLM would refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.kept_transport import KeptTransport

from bench.fake_upstream import SERVED_NAME, Connection, Engine
from bench.request import Target, body, raw


class Asked:
    """A connection to the stand-in, fed by hand."""

    def __init__(self, engine: Engine) -> None:
        self.connection = Connection(engine)
        self.transport = KeptTransport()
        self.connection.connection_made(self.transport)

    def get(self, path: str) -> bytes:
        self.connection.data_received(f"GET {path} HTTP/1.1\r\nhost: fake\r\n\r\n".encode())
        return self.transport.take()

    def chat(self, model: str = SERVED_NAME, *, is_stream: bool = False) -> bytes:
        self.connection.data_received(raw(Target(1, model, "k"), is_stream=is_stream))
        return self.transport.take()

    def step(self, *, is_finishing: bool = False) -> tuple[bool, bytes]:
        return self.connection.step(is_finishing), self.transport.take()


@pytest.fixture
def engine() -> Engine:
    return Engine(tick_s=0.02, slices=1, tokens=3)


def payloads(data: bytes) -> list[Any]:
    found = [line.removeprefix(b"data: ") for line in data.split(b"\r\n") if line.startswith(b"data: ")]
    return [text.strip().decode() if b"[DONE]" in text else json.loads(text) for text in found]


def test_a_plain_request_is_answered_at_once(engine: Engine) -> None:
    head, _, content = Asked(engine).chat().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK") and f"content-length: {len(content)}".encode() in head
    assert json.loads(content)["usage"]["completion_tokens"] == 64
    assert engine.requests == 1


def test_the_model_must_have_the_name_that_the_engine_knows(engine: Engine) -> None:
    assert Asked(engine).chat("bench-alias").startswith(b"HTTP/1.1 404 ")


def test_a_stream_is_role_tokens_finish_usage_done(engine: Engine) -> None:
    asked = Asked(engine)
    [first] = payloads(asked.chat(is_stream=True))
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert engine.running == 1
    steps = [asked.step() for _ in range(3)]
    assert [goes_on for goes_on, _ in steps] == [True, True, False]
    *tokens, finish, usage, done = payloads(b"".join(data for _, data in steps))
    assert [token["choices"][0]["delta"]["content"] for token in tokens] == [" token"] * 3
    assert finish["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["total_tokens"] == 295
    assert done == "[DONE]" and steps[-1][1].endswith(b"0\r\n\r\n")


def test_usage_is_sent_only_when_asked_for(engine: Engine) -> None:
    asked = Asked(engine)
    fields = json.loads(body(SERVED_NAME, is_stream=True)) | {"stream_options": None}
    content = json.dumps(fields).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: f\r\ncontent-length: {len(content)}\r\n\r\n"
    asked.connection.data_received(head.encode() + content)
    asked.transport.take()
    _, data = asked.step(is_finishing=True)
    assert [bool(p.get("usage")) for p in payloads(data)[:-1]] == [False, False]


def test_without_a_token_count_a_stream_goes_on_until_told() -> None:
    engine = Engine(tick_s=0.1, slices=50, tokens=0)
    asked = Asked(engine)
    asked.chat(is_stream=True)
    assert all(asked.step()[0] for _ in range(100))
    Asked(engine).get("/fake/finish")
    assert engine.is_finishing
    goes_on, data = asked.step(is_finishing=True)
    assert not goes_on and payloads(data)[-1] == "[DONE]"


def test_a_client_that_leaves_a_stream_is_counted_as_aborted(engine: Engine) -> None:
    asked, idle = Asked(engine), Asked(engine)
    asked.chat(is_stream=True)
    asked.connection.connection_lost(None)
    idle.connection.connection_lost(None)
    assert (engine.aborted, engine.running) == (1, 0)


def test_health_models_and_metrics_are_there(engine: Engine) -> None:
    asked = Asked(engine)
    assert asked.get("/health").startswith(b"HTTP/1.1 200 OK")
    assert SERVED_NAME.encode() in asked.get("/v1/models")
    assert b"vllm:num_requests_running" in asked.get("/metrics")
