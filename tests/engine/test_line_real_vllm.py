"""The whole line on the CPU with real vLLM: `poolgate up`, two pools loaded side by side, the OpenAI client in front.

One set of workers serves all tests of this file; the tests that end a worker or the line come last.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import pytest_asyncio
from fakes.line import write_config
from fakes.ports import free_port
from fakes.up import Running, running_up
from fakes.waits import eventually
from openai import AsyncOpenAI, BadRequestError, NotFoundError, RateLimitError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
READY_S = 300.0  # 60 s on an idle machine
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@dataclass
class RealLine:
    up: Running
    url: str
    key: str
    openai: AsyncOpenAI

    async def post(self, key: str | None = None, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return await client.post(
                f"{self.url}/chat/completions",
                json={"model": "chat", "messages": FRANCE, "max_tokens": 8} | body,
                headers={"Authorization": f"Bearer {key or self.key}"} | (headers or {}),
            )

    async def replica(self, pool: str) -> dict[str, Any]:
        facts = json.loads((await self.up.cli("status", "--json")).stdout)
        found: dict[str, Any] = facts["pools"][pool][0]
        return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def line(
    vllm_command: str, models_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealLine]:
    folder = tmp_path_factory.mktemp("real")
    small = {"enforce_eager": True, "kv_cache_memory_bytes": 134_217_728}
    common = {"dtype": "bfloat16", "vllm_args": small, "replicas": [{"gpus": []}]}
    config = write_config(
        folder,
        gateway={"port": free_port(), "drain_s": 5},
        redis={"url": "embedded", "timeout_s": 2.0},
        workers={"vllm": vllm_command, "load_s": READY_S},
        classes={"interactive": {"priority": 0}, "batch": {"priority": 10}},
        pools={
            "smollm2": {
                "model": str(models_dir / "SmolLM2-135M-Instruct"),
                "max_model_len": 1024,
                "max_in_flight": 4,
            }
            | common,
            "tiny": {
                "model": str(models_dir / "tiny-random"),
                "max_model_len": 512,
                "scheduling_policy": "priority",
            }
            | common,
            "embed": {"model": str(models_dir / "tiny-embed"), "max_model_len": 512} | common,
        },
        routes={
            "chat": {
                "aliases": ["gpt-4o-mini"],
                "targets": [{"pool": "smollm2"}],
                "fallback": ["tiny"],
                "by_class": {"batch": {"targets": [{"pool": "tiny"}], "fallback": ["smollm2"]}},
                "defaults": {"temperature": 0},
            },
            "tiny": {"targets": [{"pool": "tiny"}]},
            "embed": {"targets": [{"pool": "embed"}]},
        },
    )
    async with running_up(config, READY_S) as up:
        url, key = up.address()
        async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=60) as openai:
            made = RealLine(up, url, key, openai)

            async def all_serve() -> bool:
                """The ready block waits for one pool in the gateway's view; the last one may be a second behind."""
                replies = [await made.post(model=model, max_tokens=1) for model in ("chat", "tiny", "embed")]
                by_chat = [reply.headers.get("x-poolgate-pool") for reply in replies[:2]]
                return by_chat == ["smollm2", "tiny"] and replies[2].status_code == 404  # it embeds, it does not chat

            await eventually(all_serve, "the gateway has seen that every pool is ready", 20)
            yield made


async def test_openai_client_gets_sensible_answers_plain_and_streamed(line: RealLine) -> None:
    plain = await line.openai.chat.completions.create(model="chat", messages=FRANCE, max_tokens=16)
    assert "Paris" in (plain.choices[0].message.content or "")
    assert plain.usage is not None and plain.usage.prompt_tokens > 10
    stream = await line.openai.chat.completions.create(model="gpt-4o-mini", messages=FRANCE, max_tokens=16, stream=True)
    assert "Paris" in "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def test_stream_tells_usage_only_when_asked(line: RealLine) -> None:
    for asked in (True, False):
        options: Any = {"stream_options": {"include_usage": True}} if asked else {}
        stream = await line.openai.chat.completions.create(
            model="chat", messages=FRANCE, max_tokens=4, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]
        assert [bool(c.usage) for c in chunks].count(True) == (1 if asked else 0)
        assert all(c.choices for c in chunks if not c.usage)


async def test_completions_plain_and_streamed_agree(line: RealLine) -> None:
    plain = await line.openai.completions.create(model="chat", prompt="The sea is", max_tokens=8)
    stream = await line.openai.completions.create(model="chat", prompt="The sea is", max_tokens=8, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == plain.choices[0].text


async def test_gateway_counts_a_long_prompt_exactly_as_the_engine_does(line: RealLine) -> None:
    messages: list[Any] = [{"role": "user", "content": "one two three " * 150}]
    fits = await line.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
    assert fits.usage is not None
    room = 512 - fits.usage.prompt_tokens
    exact = await line.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=room)
    assert exact.usage is not None
    with pytest.raises(BadRequestError) as refused:
        await line.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=room + 1)
    assert refused.value.code == "context_length_exceeded"
    for number in (512, fits.usage.prompt_tokens, room + 1):
        assert str(number) in refused.value.message


async def test_embeddings_are_the_same_in_base64_and_as_floats_from_text_and_from_tokens(line: RealLine) -> None:
    by_default = await line.openai.embeddings.create(model="embed", input=["hello", "world wide"])
    floats = await line.openai.embeddings.create(model="embed", input="hello", encoding_format="float")
    assert len(by_default.data) == 2
    assert by_default.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-3)
    tokens = await line.openai.embeddings.create(model="embed", input=[[1, 2, 3], [4, 5]])
    assert tokens.usage.prompt_tokens == 5
    with pytest.raises(NotFoundError) as refused:
        await line.openai.chat.completions.create(model="embed", messages=FRANCE)
    assert refused.value.response.headers["x-poolgate-error-source"] == "engine"
    assert (await line.openai.embeddings.create(model="embed", input="hello")).data


async def test_responses_plain_and_streamed_agree_and_are_counted_exactly(line: RealLine) -> None:
    plain = await line.openai.responses.create(model="chat", input=FRANCE[0]["content"], max_output_tokens=16)
    assert "Paris" in plain.output_text
    stream = await line.openai.responses.create(model="chat", input=FRANCE, max_output_tokens=16, stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.completed"
    assert events[-1].response.output_text == plain.output_text
    text = "one two three " * 150
    fits = await line.openai.responses.create(model="tiny", input=text, instructions="Be short.", max_output_tokens=4)
    assert fits.usage is not None
    room = 512 - fits.usage.input_tokens
    await line.openai.responses.create(model="tiny", input=text, instructions="Be short.", max_output_tokens=room)
    with pytest.raises(BadRequestError) as refused:
        await line.openai.responses.create(
            model="tiny", input=text, instructions="Be short.", max_output_tokens=room + 1
        )
    assert refused.value.code == "context_length_exceeded"


async def test_messages_plain_and_streamed_agree_and_are_counted_exactly(line: RealLine) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False, headers={"x-api-key": line.key}) as client:

        async def ask(path: str = "/messages", **body: Any) -> httpx.Response:
            return await client.post(
                line.url + path, json={"model": "chat", "messages": FRANCE, "max_tokens": 16} | body
            )

        plain = (await ask()).json()
        assert "Paris" in plain["content"][0]["text"]
        streamed = (await ask(stream=True)).text.rstrip().split("\n\n")
        data = [json.loads(event.partition("\ndata: ")[2]) for event in streamed]
        pieces = [event["delta"]["text"] for event in data if event["type"] == "content_block_delta"]
        assert "".join(pieces) == plain["content"][0]["text"]
        assert data[-1] == {"type": "message_stop"}

        long = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "one two three " * 150}],
            "system": "Be short.",
        }
        counted = (await ask("/messages/count_tokens", **long)).json()["input_tokens"]
        assert (await ask(**long, max_tokens=512 - counted)).status_code == 200
        refused = await ask(**long, max_tokens=512 - counted + 1)
        assert (refused.status_code, refused.json()["type"]) == (400, "error")
        assert refused.headers["x-poolgate-error-source"] == "client"


async def test_tokens_go_both_ways(line: RealLine) -> None:
    url, headers = line.url.removesuffix("/v1"), {"x-api-key": line.key}
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, headers=headers) as client:
        tokens = (await client.post("/tokenize", json={"model": "chat", "prompt": "Hello world"})).json()["tokens"]
        text = (await client.post("/detokenize", json={"model": "chat", "tokens": tokens})).json()
    assert text == {"prompt": "Hello world"}


async def test_two_answers_with_priority_scheduling_both_arrive_and_the_engine_lives(line: RealLine) -> None:
    reply = await line.post(headers={"X-Poolgate-Class": "batch"}, n=2, stream=True, max_tokens=6, temperature=1)
    assert reply.headers["x-poolgate-pool"] == "tiny"
    events = [json.loads(e[6:]) for e in reply.text.split("\n\n") if e.startswith("data: {")]
    assert {choice["index"] for event in events for choice in event["choices"]} == {0, 1}
    assert (await line.post(headers={"X-Poolgate-Class": "batch"})).status_code == 200


async def test_engines_own_refusal_arrives_in_our_envelope(line: RealLine) -> None:
    reply = await line.post(logprobs=True, top_logprobs=100_000)
    assert reply.status_code == 400
    assert reply.headers["x-poolgate-error-source"] == "engine"
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


async def test_limits_of_a_run_time_key_hold(line: RealLine) -> None:
    created = re.search(r"sk-pg-\S+", (await line.up.cli("keys", "create", "limited", "--rpm", "2")).stdout)
    assert created is not None
    async with AsyncOpenAI(base_url=line.url, api_key=created[0], max_retries=0) as limited:
        for _ in range(2):
            await limited.chat.completions.create(model="tiny", messages=FRANCE, max_tokens=2)
        with pytest.raises(RateLimitError) as refused:
            await limited.chat.completions.create(model="tiny", messages=FRANCE, max_tokens=2)
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert refused.value.response.headers["x-ratelimit-limit-requests"] == "2"


async def test_more_requests_than_slots_wait_their_turn_and_all_are_answered(line: RealLine) -> None:
    asked = [asyncio.create_task(line.post(max_tokens=24, ignore_eos=True)) for _ in range(12)]
    loads: list[int] = []
    while not all(task.done() for task in asked):
        load = (await line.replica("smollm2"))["load"]
        loads.append(load["running"] + load["waiting"])
    replies = [await task for task in asked]
    assert [reply.status_code for reply in replies] == [200] * 12
    assert sum("x-poolgate-queue-ms" in reply.headers for reply in replies) >= 8
    assert 0 < max(loads) <= 4


async def test_caller_that_leaves_ends_the_generation(line: RealLine) -> None:
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        client.stream(
            "POST",
            f"{line.url}/chat/completions",
            json={"model": "chat", "messages": FRANCE, "max_tokens": 900, "stream": True, "ignore_eos": True},
            headers={"x-api-key": line.key},
        ) as stream,
    ):
        pieces = stream.aiter_bytes()  # kept: a forgotten iterator closes its reply
        await anext(pieces)

        async def runs() -> bool:
            return bool((await line.replica("smollm2"))["load"]["running"] == 1)

        await eventually(runs, "the engine reports a running request", 20)

    async def is_idle() -> bool:
        return bool((await line.replica("smollm2"))["load"]["running"] == 0)

    await eventually(is_idle, "the engine is idle again", 10)  # 900 tokens would take 30 s


async def test_killed_engine_costs_its_own_requests_and_comes_back(line: RealLine) -> None:
    before = await line.replica("smollm2")
    [core] = [p for p in psutil.Process(before["pid"]).children() if "EngineCore" in " ".join(p.cmdline())]
    async with (
        httpx.AsyncClient(timeout=60, trust_env=False) as client,
        client.stream(
            "POST",
            f"{line.url}/chat/completions",
            json={"model": "chat", "messages": FRANCE, "max_tokens": 900, "stream": True, "ignore_eos": True},
            headers={"x-api-key": line.key},
        ) as stream,
    ):
        received = b""
        async for piece in stream.aiter_bytes():
            if not received:
                os.kill(core.pid, signal.SIGKILL)
            received += piece
    assert b'"error"' in received

    async def falls_back() -> bool:
        reply = await line.post(max_tokens=2)
        return reply.status_code == 200 and reply.headers["x-poolgate-pool"] == "tiny"

    await eventually(falls_back, "the fallback pool serves meanwhile", 20)

    async def is_back() -> bool:
        now = await line.replica("smollm2")
        return bool(now["state"] == "ready" and now["pid"] != before["pid"] and now["restarts"] == 1)

    await eventually(is_back, "the engine is back", READY_S)

    async def serves() -> bool:
        return (await line.post(max_tokens=2)).headers["x-poolgate-pool"] == "smollm2"

    await eventually(serves, "the gateway has heard of it", 10)
    again = await line.openai.chat.completions.create(model="chat", messages=FRANCE, max_tokens=16)
    assert "Paris" in (again.choices[0].message.content or "")


async def test_ctrl_c_under_load_leaves_no_process(line: RealLine) -> None:
    load = [asyncio.create_task(line.post(max_tokens=900, ignore_eos=True)) for _ in range(4)]

    async def runs() -> bool:
        return bool((await line.replica("smollm2"))["load"]["running"] >= 1)

    await eventually(runs, "requests run", 20)
    assert len(line.up.family()) >= 10  # up, redis, supervisor, gateway, and three or more of each vLLM
    assert await line.up.interrupt() == 0
    assert {reply.status_code for reply in await asyncio.gather(*load)} <= {200, 503}
    assert line.up.family() == []
