"""What our gateway relies on in vLLM beyond single answers: connections, disconnects, counters. Fake and real alike.

Each is a coroutine over a running engine and raises AssertionError; `test_fake_engine_contract.py` and
`test_real_vllm_contract.py` run them all.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from contract.checking import Engine
from contract.probes import chat, text
from fakes.waits import eventually

READ_S = 30.0
_LONG = {"max_tokens": 1900, "ignore_eos": True}


async def each_event_is_one_http_chunk(engine: Engine) -> None:
    async with _connection(engine) as (reader, writer):
        await _send(writer, engine, chat(stream=True))
        assert (await _head(reader)).startswith("HTTP/1.1 200 OK\r\n")
        chunks = await _chunks(reader)
    assert chunks[-1] == b"data: [DONE]\n\n"
    for chunk in chunks:
        assert re.fullmatch(rb"data: [^\n]+\n\n", chunk), chunk


async def a_connection_serves_many_requests_and_is_closed_when_idle(engine: Engine) -> None:
    async with _connection(engine) as (reader, writer):
        for _ in range(2):
            await _send(writer, engine, chat())
            head = await _head(reader)
            await reader.readexactly(int(re.search(r"content-length: (\d+)", head)[1]))
        assert await asyncio.wait_for(reader.read(), READ_S) == b""


async def a_stream_whose_client_leaves_is_aborted(engine: Engine) -> None:
    await _left(engine, chat(stream=True, **_LONG), half=False)


async def a_plain_request_whose_client_leaves_is_aborted(engine: Engine) -> None:
    await _left(engine, chat(**_LONG), half=False)


async def a_half_closed_connection_counts_as_left(engine: Engine) -> None:
    await _left(engine, text(**_LONG), half=True)


async def counters_move_by_the_usage_of_an_answer(engine: Engine) -> None:
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total")
    before = [await metric(engine, name) for name in names]
    usage = (await _post(engine, "/v1/completions", text(max_tokens=5)))["usage"]
    expected = [usage["prompt_tokens"], usage["completion_tokens"], 1]

    async def moved() -> bool:
        after = [await metric(engine, name) for name in names]
        return [int(b - a) for a, b in zip(before, after, strict=True)] == expected

    await eventually(moved, f"{names} moved by {expected}")


async def load_metrics_carry_engine_and_first_served_name(engine: Engine) -> None:
    await _post(engine, "/v1/completions", text())
    lines = (await _get(engine, "/metrics")).splitlines()
    own = 'engine="0",model_name="tiny"'
    for series in (
        f"vllm:num_requests_running{{{own}}}",
        f"vllm:num_requests_waiting{{{own}}}",
        f'vllm:num_requests_waiting_by_reason{{{own},reason="capacity"}}',
        f"vllm:kv_cache_usage_perc{{{own}}}",
        f"vllm:num_preemptions_total{{{own}}}",
        f"vllm:prompt_tokens_total{{{own}}}",
        f"vllm:generation_tokens_total{{{own}}}",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"}',
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"}',
    ):
        assert any(re.fullmatch(rf"{re.escape(series)} [\d.e+-]+", line) for line in lines), series
    for kind in ("vllm:num_requests_running gauge", "vllm:generation_tokens_total counter"):
        assert f"# TYPE {kind}" in lines


async def tokenize_counts_what_usage_counts(engine: Engine) -> None:
    messages = chat()["messages"]
    counted = (await _post(engine, "/tokenize", {"messages": messages}))["count"]
    usage = (await _post(engine, "/v1/chat/completions", chat(messages=messages)))["usage"]
    assert usage["prompt_tokens"] == counted


BEHAVIOURS = [
    each_event_is_one_http_chunk,
    a_connection_serves_many_requests_and_is_closed_when_idle,
    a_stream_whose_client_leaves_is_aborted,
    a_plain_request_whose_client_leaves_is_aborted,
    a_half_closed_connection_counts_as_left,
    counters_move_by_the_usage_of_an_answer,
    load_metrics_carry_engine_and_first_served_name,
    tokenize_counts_what_usage_counts,
]


async def metric(engine: Engine, name: str) -> float:
    """Sum of a metric over its labels."""
    text = await _get(engine, "/metrics")
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith((f"{name}{{", f"{name} ")))


async def _left(engine: Engine, body: dict[str, Any], *, half: bool) -> None:
    """A request that was seen to run stops when its client leaves.

    `engine` needs long for all the tokens that were asked for: one that is as fast as its API server answers nobody
    else, and hears of no end, before it is through.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    before = await metric(engine, "vllm:generation_tokens_total")
    async with _connection(engine) as (reader, writer):
        await _send(writer, engine, body, path)
        if body.get("stream"):
            assert (await _head(reader)).startswith("HTTP/1.1 200 OK\r\n")
        await eventually(lambda: _runs(engine), "it runs", READ_S)
        if half:
            writer.write_eof()
            await asyncio.wait_for(reader.read(), READ_S)
    await eventually(lambda: _runs_not(engine), "nothing runs any more", READ_S)
    assert await metric(engine, "vllm:generation_tokens_total") - before < body["max_tokens"]


async def _runs(engine: Engine) -> bool:
    return await metric(engine, "vllm:num_requests_running") > 0


async def _runs_not(engine: Engine) -> bool:
    return not await _runs(engine)


async def _get(engine: Engine, path: str) -> str:
    async with httpx.AsyncClient(timeout=READ_S, trust_env=False) as client:
        return (await client.get(engine.url + path)).raise_for_status().text


async def _post(engine: Engine, path: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {engine.key}"}
    async with httpx.AsyncClient(timeout=READ_S, trust_env=False) as client:
        reply = await client.post(engine.url + path, json=body, headers=headers)
    answer: dict[str, Any] = reply.raise_for_status().json()
    return answer


@asynccontextmanager
async def _connection(engine: Engine) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    url = httpx.URL(engine.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def _send(
    writer: asyncio.StreamWriter, engine: Engine, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> None:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {engine.key}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    await writer.drain()


async def _head(reader: asyncio.StreamReader) -> str:
    return (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), READ_S)).decode("latin-1")


async def _chunks(reader: asyncio.StreamReader) -> list[bytes]:
    chunks = []
    while size := int(await asyncio.wait_for(reader.readuntil(b"\r\n"), READ_S), 16):
        chunks.append(await asyncio.wait_for(reader.readexactly(size), READ_S))
        assert await reader.readexactly(2) == b"\r\n"
    return chunks
