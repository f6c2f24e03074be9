"""Callers that leave, stall or stop reading: the engine and the slot come free."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes.line import KEY, MESSAGES
from fakes.waits import eventually

from .conftest import LIMITED, Pair, slot_is_free


@pytest.mark.parametrize("phase", ["before the head", "before the first event", "mid stream", "plain"])
async def test_caller_that_leaves_frees_the_engine_and_the_slot(pair: Pair, phase: str) -> None:
    fields: dict[str, Any] = {
        "before the head": {"stream": True, "x_fake": {"delay_s": 60}},
        "before the first event": {"stream": True, "x_fake": {"headers_only": True}},
        "mid stream": {"stream": True, "max_tokens": 1000},
        "plain": {"stream": False, "max_tokens": 1000},
    }[phase]
    body = json.dumps({"model": "chat", "messages": MESSAGES} | fields).encode()
    host, port = pair.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Length: %d\r\n\r\n%b"
        % (LIMITED.encode(), len(body), body)
    )

    async def runs() -> bool:
        return bool((await pair.first.state())["calls"].get("POST /v1/chat/completions"))

    await eventually(runs, "the engine has the request")
    if phase == "mid stream":
        await reader.readuntil(b"data: ")
    else:
        assert (await pair.gateway.chat(LIMITED)).status_code == 429  # the slot is taken
    writer.transport.abort()

    async def is_aborted() -> bool:
        state = await pair.first.state()
        return state["aborted"] == 1 and state["running"] == 0

    await eventually(is_aborted, "the engine stops generating", 5)
    await eventually(lambda: slot_is_free(pair.gateway), "the slot is given back", 5)


async def test_disconnects_in_numbers_leave_nothing_behind(pair: Pair) -> None:
    async def hang_up(i: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await pair.gateway.client.post(
                pair.gateway.url + "/v1/chat/completions",
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
    host, port = pair.gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Length: 1000\r\n\r\n{"
        % KEY.encode()
    )
    answer = await asyncio.wait_for(reader.read(4096), 10)
    assert answer.startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_caller_that_stops_reading_is_dropped_and_the_engine_freed(pair: Pair) -> None:
    body = json.dumps(
        {"model": "chat", "messages": MESSAGES, "stream": True, "max_tokens": 1900, "x_fake": {"text": "x" * 7_500_000}}
    ).encode()
    host, port = pair.gateway.url.removeprefix("http://").split(":")
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect((host, int(port)))
        await asyncio.get_running_loop().run_in_executor(
            None,
            caller.sendall,
            (
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: %b\r\nContent-Length: %d\r\n\r\n%b"
                % (KEY.encode(), len(body), body)
            ),
        )

        async def is_dropped() -> bool:
            return [record["ending"] for record in pair.gateway.access_lines()] == ["client_gone"]

        await eventually(is_dropped, "the stalled caller is given up", 15)

        async def is_freed() -> bool:
            return bool((await pair.first.state())["running"] == 0)

        await eventually(is_freed, "the engine stops generating", 5)
    assert (await pair.gateway.chat()).status_code == 200
