"""Each fault that a request can ask the fake engine for ends as its manual says, down to the bytes on the socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fakes.engine import FakeEngine, running_fake_engine
from fakes.waits import eventually

READ_S = 10.0
CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"


def body_of(stream: bool = True, **x_fake: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Say hi."}]
    return {"messages": messages, "max_tokens": 8, "stream": stream, "x_fake": x_fake}


async def _raw(engine: FakeEngine, body: dict[str, Any]) -> tuple[bytes, str]:
    """Everything that the engine sends, and how it ends: closed, reset or silent."""
    url = httpx.URL(engine.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    content = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {engine.key}\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    received = bytearray()
    try:
        while True:
            try:
                data = await asyncio.wait_for(reader.read(1 << 16), 0.5 if _stalls(body) else READ_S)
            except TimeoutError:
                return bytes(received), "silent"
            except ConnectionResetError:
                return bytes(received), "reset"
            if not data:
                return bytes(received), "closed"
            received += data
    finally:
        writer.close()


def _stalls(body: dict[str, Any]) -> bool:
    return bool({"stall_after", "headers_only", "delay_s", "ttft_ms"} & body["x_fake"].keys())


def _deltas(received: bytes | str) -> list[dict[str, Any]]:
    text = received.decode() if isinstance(received, bytes) else received
    lines = [line for line in text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_reset_after_some_events_is_a_tcp_reset():
    async with running_fake_engine() as engine:
        received, end = await _raw(engine, body_of(reset_after=3))
    assert (received.count(b"data: {"), end) == (3, "reset")


async def test_cut_after_some_events_closes_without_a_last_chunk():
    async with running_fake_engine() as engine:
        received, end = await _raw(engine, body_of(cut_after=3))
    assert (received.count(b"data: {"), end) == (3, "closed")
    assert not received.endswith(LAST_CHUNK)


async def test_close_after_some_events_ends_the_body_without_done_and_finish_reason():
    async with running_fake_engine() as engine:
        received, end = await _raw(engine, body_of(close_after=6))
    assert (received.count(b"data: {"), end) == (6, "closed")
    assert received.endswith(LAST_CHUNK)
    assert DONE not in received
    assert all(delta["choices"][0]["finish_reason"] is None for delta in _deltas(received))


async def test_an_end_past_the_answer_comes_just_before_done():
    async with running_fake_engine() as engine:
        received, _ = await _raw(engine, body_of(close_after=1000))
    assert _deltas(received)[-1]["choices"][0]["finish_reason"] == "length"
    assert DONE not in received


async def test_error_event_is_vllms_and_is_followed_by_done():
    async with running_fake_engine() as engine:
        received, _ = await _raw(engine, body_of(error_event_after=2))
    events = _deltas(received)
    assert len(events) == 3
    assert events[-1]["error"]["type"] == "InternalServerError"
    assert DONE in received
    assert received.endswith(LAST_CHUNK)


async def test_stall_after_some_events_is_silence_with_the_connection_open():
    async with running_fake_engine() as engine:
        received, end = await _raw(engine, body_of(stall_after=2))
        assert (received.count(b"data: {"), end) == (2, "silent")
        await eventually(lambda: _aborted(engine), "the engine sees that the client left")


@pytest.mark.parametrize("stream", [True, False])
async def test_headers_only_sends_the_headers_and_then_nothing(stream: bool):
    async with running_fake_engine() as engine:
        received, end = await _raw(engine, body_of(stream, headers_only=True))
    assert received.startswith(b"HTTP/1.1 200 OK\r\n")
    assert received.endswith(b"\r\n\r\n")
    assert end == "silent"


@pytest.mark.parametrize(("fault", "end"), [("reset_after", "reset"), ("cut_after", "closed"), ("die_after", "closed")])
async def test_no_headers_ends_before_anything_is_sent(fault: str, end: str):
    async with running_fake_engine() as engine:
        assert await _raw(engine, body_of(no_headers=True, **{fault: 0})) == (b"", end)


async def test_an_end_of_a_plain_answer_comes_after_half_of_the_body():
    async with running_fake_engine() as engine:
        received, end = await _raw(engine, body_of(stream=False, cut_after=1))
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(int(line.split(b": ")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
    assert (len(body), end) == (length // 2, "closed")


async def test_die_after_some_events_ends_the_process_with_the_code():
    async with running_fake_engine() as engine:
        received, _ = await _raw(engine, body_of(die_after=2, exit_code=7))
        assert await engine.exit_code() == 7
    assert received.count(b"data: {") == 2


async def test_a_dead_engine_core_fails_every_request_and_then_exits_with_0():
    async with running_fake_engine("--fake-itl-ms", "50") as engine:
        other = asyncio.create_task(_raw(engine, body_of() | {"max_tokens": 500, "ignore_eos": True}))
        await eventually(lambda: _runs(engine), "the other request runs")
        own, _ = await _raw(engine, body_of(engine_dead_after=2, itl_ms=0))
        async with httpx.AsyncClient(timeout=READ_S, trust_env=False) as client:
            assert (await client.get(engine.url + "/health")).status_code == 503
        received, _ = await other
        assert await engine.exit_code() == 0
    assert b'{"error": {' in own
    assert b'{"error": {' in received


async def test_a_status_comes_with_message_and_retry_after():
    async with running_fake_engine() as engine:
        reply = await engine.post(CHAT, body_of(status=503, message="full", retry_after=7))
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "7")
    error = {"message": "full", "type": "InternalServerError", "param": None, "code": 503}
    assert reply.json() == {"error": error}


async def test_a_status_comes_with_a_body_of_any_text_and_size():
    async with running_fake_engine() as engine:
        reply = await engine.post(CHAT, body_of(status=400, body="no json", body_bytes=100_000))
    assert (reply.text.rstrip(), len(reply.content)) == ("no json", 100_000)


async def test_abort_ends_the_answer_half_way():
    async with running_fake_engine() as engine:
        events = _deltas((await engine.post(CHAT, body_of(abort=True))).text)
    assert len(events) == 1 + 4
    assert events[-1]["choices"][0]["finish_reason"] == "abort"


async def test_no_finish_and_no_done_leave_them_out():
    async with running_fake_engine() as engine:
        reply = await engine.post(CHAT, body_of(no_finish=True, no_done=True))
    assert all(event["choices"][0]["finish_reason"] is None for event in _deltas(reply.text))
    assert "[DONE]" not in reply.text


async def test_no_usage_leaves_it_out_though_it_was_asked_for():
    async with running_fake_engine() as engine:
        streamed = await engine.post(CHAT, body_of(no_usage=True) | {"stream_options": {"include_usage": True}})
        plain = await engine.post(CHAT, body_of(stream=False, no_usage=True))
    assert '"usage"' not in streamed.text
    assert plain.json()["usage"] is None


@pytest.mark.parametrize(
    "shape", [{"byte_by_byte": True}, {"chunk_bytes": 1}, {"chunk_bytes": 7}, {"chunk_bytes": 1 << 20}]
)
async def test_text_arrives_whole_however_it_is_cut(shape: dict[str, Any]):
    text = "a 가나다 \u2028\u2029\u0085 🙂🙂 end"
    async with running_fake_engine() as engine:
        reply = await engine.post(CHAT, body_of(text=text, **shape))
    assert "".join(event["choices"][0]["delta"]["content"] for event in _deltas(reply.text)) == text
    assert "\u2028" in reply.text  # as it is, not as an escape


async def test_extra_delta_is_in_every_delta():
    async with running_fake_engine() as engine:
        events = _deltas((await engine.post(CHAT, body_of(extra_delta={"reasoning": "hm", "x_future": [1]}))).text)
    for event in events[1:]:
        assert event["choices"][0]["delta"].keys() == {"content", "reasoning", "x_future"}


@pytest.mark.parametrize("stream", [True, False])
async def test_delay_holds_back_the_headers_too(stream: bool):
    async with running_fake_engine() as engine:
        assert await _raw(engine, body_of(stream, delay_s=60)) == (b"", "silent")


async def test_ttft_holds_back_the_events_of_a_stream_and_not_its_headers():
    async with running_fake_engine() as engine:
        received, end = await _raw(engine, body_of(ttft_ms=60_000))
    assert (received.startswith(b"HTTP/1.1 200 OK"), received.endswith(b"\r\n\r\n"), end) == (True, True, "silent")


@pytest.mark.parametrize("x_fake", [{"dy_after": 1}, {"die_after": 1, "cut_after": 1}, "die", {"die_after": "x"}])
async def test_a_mistyped_fault_is_refused(x_fake: Any):
    async with running_fake_engine() as engine:
        reply = await engine.post(CHAT, body_of() | {"x_fake": x_fake})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x_fake")


async def _aborted(engine: FakeEngine) -> bool:
    return (await engine.state())["aborted"] == 1


async def _runs(engine: FakeEngine) -> bool:
    return (await engine.state())["running"] == 1
