"""Callers that leave, stall or stop reading: the engine and the slot come free."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.caller import Caller, request_bytes
from fakes.line import KEY, LIMITED, MESSAGES
from fakes.waits import eventually

from .conftest import Pair, slot_is_free

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("phase", ["before the head", "before the first event", "mid stream", "plain"])
async def test_caller_that_leaves_frees_the_engine_and_the_slot(pair: Pair, phase: str) -> None:
    fields: dict[str, Any] = {
        "before the head": {"stream": True, "x_fake": {"delay_s": 60}},
        "before the first event": {"stream": True, "x_fake": {"headers_only": True}},
        "mid stream": {"stream": True, "max_tokens": 1000},
        "plain": {"stream": False, "max_tokens": 1000},
    }[phase]

    async def runs() -> bool:
        return bool((await pair.first.state())["calls"].get(f"POST {CHAT}"))

    async with Caller(pair.gateway.url) as caller:
        await caller.ask(CHAT, {"model": "chat", "messages": MESSAGES} | fields, key=LIMITED)
        await eventually(runs, "the engine has the request")
        if phase == "mid stream":
            await caller.read_until(b"data: ")
        else:
            assert (await pair.gateway.chat(LIMITED)).status_code == 429  # the slot is taken

    async def is_aborted() -> bool:
        state = await pair.first.state()
        return state["aborted"] == 1 and state["running"] == 0

    await eventually(is_aborted, "the engine stops generating", 5)
    await eventually(lambda: slot_is_free(pair.gateway), "the slot is given back", 5)


async def test_disconnects_in_numbers_leave_nothing_behind(pair: Pair) -> None:
    async def hang_up(i: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await pair.gateway.client.post(
                pair.gateway.url + CHAT,
                json={"model": "chat", "messages": MESSAGES, "max_tokens": 1900, "stream": False},
                headers={"x-api-key": KEY},
                timeout=httpx.Timeout(5, read=0.05 + i % 7 / 50),
            )

    for _ in range(4):
        await asyncio.gather(*(hang_up(i) for i in range(50)))

    async def is_idle() -> bool:
        return bool((await pair.first.state())["running"] == 0)

    await eventually(is_idle, "no request runs", 5)
    connections = sum(1 for _ in Path(f"/proc/{pair.gateway.pid}/fd").iterdir())
    assert connections < 100
    assert (await pair.gateway.chat()).status_code == 200
    assert "Traceback" not in pair.gateway.log.read_text()


async def test_stalled_upload_ends_in_408(pair: Pair) -> None:
    async with Caller(pair.gateway.url) as caller:
        await caller.send(request_bytes(CHAT, b"{" * 1000)[:-999])
        assert (await caller.reply()).status == 408


async def test_caller_that_stops_reading_is_dropped_and_the_engine_freed(pair: Pair) -> None:
    fields = {"stream": True, "max_tokens": 1900, "x_fake": {"text": "x" * 7_500_000}}
    async with Caller(pair.gateway.url, receive_buffer=4096) as caller:
        await caller.ask(CHAT, {"model": "chat", "messages": MESSAGES} | fields)

        async def is_dropped() -> bool:
            return [record["ending"] for record in pair.gateway.access_lines()] == ["client_gone"]

        await eventually(is_dropped, "the stalled caller is given up", 15)

        async def is_freed() -> bool:
            return bool((await pair.first.state())["running"] == 0)

        await eventually(is_freed, "the engine stops generating", 5)
    assert (await pair.gateway.chat()).status_code == 200
