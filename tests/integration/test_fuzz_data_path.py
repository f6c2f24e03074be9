"""Any mix of callers and engines, well or ill behaved: nothing is left behind, and no reply is more than it was.

POOLGATE_FUZZ_EXAMPLES=1000 runs more than the few of an ordinary run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import pytest_asyncio
from fakes.bodies import json_fields
from fakes.caller import Caller, replies_so_far, request_bytes
from fakes.inner_gateway import InnerGateway, inner_gateway
from fakes.line import KEY, sha256
from fakes.scripted_upstream import Peer, ScriptedUpstream
from fakes.waits import eventually
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint

from .fuzz_judge import judge
from .fuzz_mixes import ASKS, DIALECTS, ENDINGS, MANNERS, Ask, answer

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = int(os.environ.get("POOLGATE_FUZZ_EXAMPLES", "40"))

DEADLINES = {"first_byte_s": 0.3, "gap_s": 0.3, "write_s": 0.3, "body_s": 0.3, "connect_s": 2, "total_s": 60}
TRIES = 4
TURNS = 20  # of the loop; an engine's answer may take twice as many
SLOW_TURNS_S = 0.05
OF_DEADLINES = {"upstream_timeout", "client_closed_request", "request_timeout"}


class World:
    """Two gateways: one plain with one replica, one that comments and has two."""

    def __init__(self) -> None:
        self.asks: dict[bytes, Ask] = {}  # by the session id that travels with a request
        self.names = itertools.count()
        self.plain: InnerGateway
        self.commenting: InnerGateway

    async def serve(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            await answer(peer, self.asks[request.header(b"x-session-id")[0]])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, redis_process: Any) -> AsyncIterator[World]:
    made = World()
    folder = tmp_path_factory.mktemp("fuzz")
    limits = {"in_flight": 1000, "tokens_per_min": 10**9, "requests_per_min": 10**6}
    keys = {
        "keys": {"test": {"sha256": sha256(KEY), "limits": limits}},
        "routes": {"chat": {"targets": [{"pool": "p"}]}},
    }
    async with ScriptedUpstream(made.serve) as one, ScriptedUpstream(made.serve) as two:
        pool = {"served_name": "tiny", "max_model_len": 1_000_000, "max_in_flight": 3}
        async with (
            inner_gateway(
                folder / "plain",
                redis_process.url,
                gateway={"timeouts": DEADLINES},
                pools={"p": {"urls": [one.url], **pool}},
                **keys,
            ) as made.plain,
            inner_gateway(
                folder / "commenting",
                redis_process.url,
                gateway={"timeouts": DEADLINES, "sse_keepalive_s": 0.05},
                pools={"p": {"urls": [one.url, two.url], **pool}},
                **keys,
            ) as made.commenting,
        ):
            for gateway in (made.plain, made.commenting):
                await gateway.open_redis_connections()
            yield made


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="POOLGATE_FUZZ_EXAMPLES" not in os.environ,
    print_blob=True,
    phases=[Phase.explicit, Phase.generate],  # a failing mix is told as it was: playing it smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(asks=st.lists(ASKS, min_size=1, max_size=12), has_comments=st.booleans())
async def test_nothing_is_left_behind_and_no_reply_is_more_than_it_was(
    world: World, asks: list[Ask], has_comments: bool
) -> None:
    await play(world, asks, has_comments)


@pytest.mark.parametrize("seed", random.SystemRandom().sample(range(1 << 32), 3), ids=["first", "second", "third"])
async def test_a_few_mixes_that_nobody_has_seen_before(world: World, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(5):
        asks = [
            Ask(
                endpoint=rng.choice([*DIALECTS, Endpoint.EMBEDDINGS]),
                stream=rng.random() < 0.7,
                ending=rng.choice(ENDINGS),
                events=rng.randrange(16),
                is_large=rng.random() < 0.2,
                manner=rng.choice(MANNERS),
                at_byte=rng.randrange(3000),
                seed=rng.randrange(1 << 32),
            )
            for _ in range(rng.randint(1, 12))
        ]
        try:
            await play(world, asks, rng.random() < 0.5)
        except BaseException:
            print(f"seed {seed}: {asks}")
            raise


async def play(world: World, asks: list[Ask], has_comments: bool) -> None:
    """Once; again if the machine was too slow for an engine, or a caller, to be in time for the gateway's deadlines.

    They share one event loop: when its turns take long, who meant to go on at once is silent for the 0.3 s of a
    deadline.
    """
    for _ in range(TRIES - 1):
        async with slowest_turns() as turns:
            late = await play_once(world, asks, has_comments)
        if not late:
            return
        if turns.longest_s < SLOW_TURNS_S:
            raise late[0]
    if late := await play_once(world, asks, has_comments):
        raise late[0]


async def play_once(world: World, asks: list[Ask], has_comments: bool) -> list[BaseException]:
    """Raises what is wrong; gives what may be wrong only because a deadline of the gateway's passed."""
    gateway = world.commenting if has_comments else world.plain
    process = psutil.Process()
    tasks, files = asyncio.all_tasks(), process.num_fds()
    gateway.forget()
    names = [f"s{next(world.names)}" for _ in asks]
    answers = await asyncio.gather(
        *(call(world, gateway, ask, name) for ask, name in zip(asks, names, strict=True)), return_exceptions=True
    )
    await eventually(lambda: not any(gateway.left().values()))
    gateway.drop_idle()
    await eventually(lambda: gateway.wire.idle == 0)
    await eventually(lambda: asyncio.all_tasks() <= tasks)
    await eventually(lambda: process.num_fds() <= files)
    records = gateway.records
    passed = {record.request_id for record in records if record.error_code in OF_DEADLINES}
    late = []
    for name, answer_ in zip(names, answers, strict=True):
        if isinstance(answer_, BaseException):
            if not isinstance(answer_, AssertionError) or name not in passed:
                raise answer_
            late.append(answer_)
    assert gateway.begun == len(records) >= sum(ask.manner != "breaks off asking" for ask in asks)
    assert all(record.ending and record.status for record in records), records
    assert "failed" not in {record.ending for record in records}
    return late


@dataclass
class Turns:
    longest_s: float = 0.0


@asynccontextmanager
async def slowest_turns() -> AsyncIterator[Turns]:
    """How long so many turns of the loop took at most while the block ran."""
    turns = Turns()

    async def watch() -> None:
        while True:
            before = time.monotonic()
            for _ in range(TURNS):
                await asyncio.sleep(0)
            turns.longest_s = max(turns.longest_s, time.monotonic() - before)
            await asyncio.sleep(0.02)

    watcher = asyncio.create_task(watch())
    try:
        yield turns
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


async def call(world: World, gateway: InnerGateway, ask: Ask, name: str) -> None:
    world.asks[name.encode()] = ask
    fields = json_fields(ask.endpoint, "chat", **({"stream": ask.stream} if ask.endpoint in DIALECTS else {}))
    headers = [("x-session-id", name), ("x-request-id", name)]
    request = request_bytes(ask.endpoint.value, fields, headers=headers)
    small = 4096 if ask.manner == "stops reading" else None
    async with Caller(gateway.url, receive_buffer=small) as caller:
        match ask.manner:
            case "breaks off asking":
                await caller.send(request[: ask.at_byte % len(request)])
                await asyncio.sleep(0)
                caller.reset()
                return
            case "pipelines":
                await caller.send(request * 2)
                await read_replies(caller, 2)
            case "half-closes":
                await caller.send(request)
                caller.sock.shutdown(socket.SHUT_WR)
                while await caller.read():
                    pass
            case "stops reading":
                await caller.send(request)
                await stop_reading(caller, gateway)
            case "leaves by FIN" | "leaves by RST":
                await caller.send(request)
                while len(caller.data) < ask.at_byte and await caller.read(max(1, ask.at_byte - len(caller.data))):
                    if (found := replies_so_far(caller.data)) and found[0].is_whole:
                        break
                caller.reset() if ask.manner.endswith("RST") else caller.close()
            case _:
                await caller.send(request)
                await read_replies(caller, 1)
    replies = replies_so_far(caller.data)
    if ask.manner in ("reads all", "pipelines"):
        assert replies and all(reply.is_whole for reply in replies), (ask, caller.data[-200:])
    for reply in replies:
        judge(ask, reply)


async def read_replies(caller: Caller, count: int) -> None:
    """So many whole replies, or less where the gateway closes; then the next request would not be answered."""
    while sum(reply.is_whole for reply in replies_so_far(caller.data)) < count:
        if not await caller.read():
            return


async def stop_reading(caller: Caller, gateway: InnerGateway) -> None:
    """Until the gateway is done with it one way or another: all fits the kernel's buffers, or it was given up."""
    before = len(gateway.records)
    with contextlib.suppress(AssertionError):
        await eventually(lambda: len(gateway.records) > before and not gateway.in_flight, within_s=1.5)
