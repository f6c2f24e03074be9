"""Behind the end mark of a stream: what the caller still waits for, and what becomes of the engine's connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fakes.bodies import json_fields
from fakes.caller import Caller, replies_so_far
from fakes.inner_gateway import InnerGateway, inner_gateway
from fakes.line import KEY, sha256
from fakes.redis_process import RedisProcess
from fakes.ruled_line import DONE, LAST, data, text
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Script, ScriptedUpstream, chunk
from fakes.waits import eventually

from gateway.domain.endpoint import Endpoint

RESPONSE_END = data({"type": "response.completed", "response": {"status": "completed"}})
MESSAGE_END = data({"type": "message_delta", "delta": {"stop_reason": "end_turn"}}) + data({"type": "message_stop"})
STREAMS = {
    Endpoint.CHAT: text("Hi.") + LAST + DONE,
    Endpoint.RESPONSES: data({"type": "response.output_text.delta", "delta": "Hi."}) + RESPONSE_END,
    Endpoint.MESSAGES: data({"type": "content_block_delta", "delta": {"text": "Hi."}}) + MESSAGE_END,
}


@asynccontextmanager
async def in_front_of(script: Script, folder: Path, redis: RedisProcess) -> AsyncIterator[InnerGateway]:
    """`gap_s` is longer than any step of a test waits."""
    async with (
        ScriptedUpstream(script) as upstream,
        inner_gateway(
            folder,
            redis.url,
            gateway={"timeouts": {"gap_s": 300}},
            pools={"p": {"urls": [upstream.url], "max_model_len": 100_000}},
            routes={"chat": {"targets": [{"pool": "p"}]}},
            keys={"test": {"sha256": sha256(KEY), "limits": {"in_flight": 1}}},
        ) as gateway,
    ):
        yield gateway


async def ask(caller: Caller, endpoint: Endpoint = Endpoint.CHAT) -> None:
    await caller.ask(endpoint.value, json_fields(endpoint, "chat", stream=True))


@pytest.mark.parametrize("endpoint", STREAMS)
async def test_a_caller_waits_for_the_end_of_a_body_that_has_been_said_to_be_over(
    endpoint: Endpoint, tmp_path: Path, redis_process: RedisProcess
) -> None:
    """The caller has its end, its slot and its connection at once; the engine is hung up on soon after."""
    were_cut: list[bool] = []

    async def never_ends(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(STREAMS[endpoint]))
        await peer.closed()
        were_cut.append(True)

    async with in_front_of(never_ends, tmp_path, redis_process) as gateway, Caller(gateway.url) as caller:
        for count in (1, 2, 3):
            await ask(caller, endpoint)
            while sum(reply.is_whole for reply in replies_so_far(caller.data)) < count:
                assert await caller.read()
        assert [reply.body for reply in replies_so_far(caller.data)] == [STREAMS[endpoint]] * 3
        await eventually(lambda: len(were_cut) == 3)
        await eventually(lambda: len(gateway.records) == 3 and gateway.in_flight == 0)
        assert {(record.ending, record.status, record.error_code) for record in gateway.records} == {
            ("completed", 200, None)
        }
        assert gateway.unsettled == 0 and gateway.wire.active == gateway.wire.idle == 0


async def test_an_end_that_comes_in_a_read_of_its_own_costs_the_connection(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    accepted: list[Peer] = []

    async def ends_later(peer: Peer) -> None:
        accepted.append(peer)
        while True:
            await peer.request()
            await peer.trickle(STREAM_HEAD + chunk(STREAMS[Endpoint.CHAT]))
            await asyncio.sleep(0.02)
            await peer.send(chunk(b"data: too late\n\n") + STREAM_END)

    async with in_front_of(ends_later, tmp_path, redis_process) as gateway:
        for count in range(1, 4):
            async with Caller(gateway.url) as caller:
                await ask(caller)
                assert (await caller.reply()).body == STREAMS[Endpoint.CHAT]
            await eventually(lambda count=count: len(gateway.records) == count)
        assert len(accepted) == 1 and gateway.wire.idle == 1


async def test_a_caller_who_leaves_with_the_end_in_hand_is_one_who_left(
    tmp_path: Path, redis_process: RedisProcess
) -> None:
    async def never_ends(peer: Peer) -> None:
        await peer.request()
        await peer.send(STREAM_HEAD + chunk(STREAMS[Endpoint.CHAT]))
        await peer.closed()

    async with in_front_of(never_ends, tmp_path, redis_process) as gateway:
        async with Caller(gateway.url) as caller:
            await ask(caller)
            await caller.reply()
            caller.reset()
        await eventually(lambda: len(gateway.records) == 1)
        assert gateway.records[0].ending == "completed"
        await eventually(lambda: not any(gateway.left().values()))
