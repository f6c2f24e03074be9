"""Any mix of callers and engines, well or ill behaved: nothing is left behind, and no reply is more than it was.

POOLGATE_FUZZ_EXAMPLES=1000 runs more than the few of an ordinary run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
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
from fakes.client import Reply
from fakes.inner_gateway import InnerGateway, inner_gateway
from fakes.line import KEY, sha256
from fakes.ruled_line import DONE, LAST, HangUp, data, text
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, ScriptedUpstream, chunk, plain
from fakes.waits import eventually
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")
EXAMPLES = int(os.environ.get("POOLGATE_FUZZ_EXAMPLES", "40"))
COMMENT = b": keep-alive\n\n"
DEADLINES = {"first_byte_s": 0.3, "gap_s": 0.3, "write_s": 0.3, "body_s": 0.3, "connect_s": 2, "total_s": 60}
TRIES = 4
TURNS = 20  # of the loop; an engine's answer may take twice as many
SLOW_TURNS_S = 0.05
OF_DEADLINES = {"upstream_timeout", "client_closed_request", "request_timeout"}
FLOOD_BYTES = 60_000  # of one event; sixteen of them are more than a small reader's buffers hold


def named(name: str, document: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\n" + data({"type": name, **document})


@dataclass(frozen=True)
class Dialect:
    """How the engine speaks at a path that streams."""

    piece: bytes
    end: bytes
    error: bytes


OPENAI = Dialect(text("han 한👍 "), LAST + DONE, data({"error": {"message": "boom", "code": 500}}) + DONE)
DIALECTS = {
    Endpoint.CHAT: OPENAI,
    Endpoint.COMPLETIONS: OPENAI,
    Endpoint.RESPONSES: Dialect(
        named("response.output_text.delta", {"delta": "han 한👍 "}),
        named("response.completed", {"response": {"status": "completed", "usage": None}}),
        named("error", {"message": "boom"}),
    ),
    Endpoint.MESSAGES: Dialect(
        named("content_block_delta", {"delta": {"text": "han 한👍 "}}),
        named("message_stop", {}),
        named("error", {"error": {"type": "api_error", "message": "boom"}}),
    ),
}
MARKS = {Endpoint.RESPONSES: b"response.completed", Endpoint.MESSAGES: b"message_stop"}
ENDINGS = [
    "whole",
    "closed",
    "reset",
    "no end mark",
    "error event",
    "error event, silence",
    "malformed chunk",
    "silence",
    "500",
    "503",
    "400",
]
MANNERS = [
    "reads all",
    "stops reading",
    "leaves by FIN",
    "leaves by RST",
    "half-closes",
    "pipelines",
    "breaks off asking",
]


@dataclass(frozen=True)
class Ask:
    endpoint: Endpoint
    stream: bool
    ending: str
    events: int
    is_large: bool
    manner: str
    at_byte: int  # of the reply, or of the request, at which the caller leaves
    seed: int  # of the cuts and pauses

    @property
    def is_stream(self) -> bool:
        return self.stream and self.endpoint in DIALECTS

    @property
    def is_sound(self) -> bool:
        return self.ending == "whole" or (self.ending == "no end mark" and not self.is_stream)

    @property
    def has_error_event(self) -> bool:
        return self.ending.startswith("error event")

    @property
    def body(self) -> bytes:
        """Of a plain reply."""
        return json.dumps(
            {"object": "x", "stop_reason": "end_turn", "text": "한" * (20_000 if self.is_large else 20)}
        ).encode()

    @property
    def pieces(self) -> bytes:
        """The events before the end."""
        piece = DIALECTS[self.endpoint].piece
        if self.is_large:
            piece = piece.replace(b"han", b"x" * FLOOD_BYTES)
        return piece * self.events

    @property
    def sent(self) -> bytes:
        """Every event that the engine sends."""
        dialect = DIALECTS[self.endpoint]
        return self.pieces + (dialect.end if self.ending == "whole" else dialect.error if self.has_error_event else b"")


ASKS = st.builds(
    Ask,
    endpoint=st.sampled_from([*DIALECTS, *DIALECTS, Endpoint.EMBEDDINGS, Endpoint.TOKENIZE]),
    stream=st.sampled_from([True, True, False]),
    ending=st.sampled_from(["whole", *ENDINGS]),
    events=st.integers(0, 16),
    is_large=st.sampled_from([False, False, False, True]),
    manner=st.sampled_from(["reads all", *MANNERS]),
    at_byte=st.integers(0, 3000),
    seed=st.integers(0, 1 << 32),
)


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


async def answer(peer: Peer, ask: Ask) -> None:
    """The script of one request, cut anywhere, with pauses."""
    rng = random.Random(ask.seed)
    if ask.ending.isdigit():
        error = json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": int(ask.ending)}})
        await send_cut(peer, plain(error.encode(), ask.ending.encode() + b" No"), rng)
        return
    if ask.is_stream:
        wire = STREAM_HEAD + b"".join(map(chunk, cut(ask.sent, rng)))
        wire += STREAM_END if ask.ending in ("whole", "error event", "no end mark") else b""
    else:
        wire = plain(ask.body, b"200 OK", b"content-type: application/json")
        if not (ask.is_sound or ask.ending == "error event"):
            wire = wire[: rng.randrange(len(wire))]
    await send_cut(peer, wire, rng)
    match ask.ending:
        case "closed":
            raise HangUp
        case "reset":
            peer.reset()
            raise HangUp
        case "malformed chunk":
            await peer.send(b"x\r\ny")
            if not ask.is_stream:  # there it may have been taken for a piece of the body
                raise HangUp
            await peer.closed()
            raise HangUp
        case "silence" | "error event, silence":
            await peer.closed()
            raise HangUp


async def send_cut(peer: Peer, data: bytes, rng: random.Random) -> None:
    for piece in cut(data, rng):
        await peer.send(piece)
        for _ in range(rng.randrange(3)):
            await asyncio.sleep(0)
        if rng.random() < 0.05:
            await asyncio.sleep(0.06)  # longer than the interval of comments


def cut(data: bytes, rng: random.Random) -> list[bytes]:
    bounds = sorted({0, len(data), *(rng.randrange(len(data) + 1) for _ in range(rng.randrange(12)))})
    return [data[a:b] for a, b in itertools.pairwise(bounds)]


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
        pool = {"served_name": "tiny", "max_model_len": 1_000_000}
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


def judge(ask: Ask, reply: Reply) -> None:
    """What came has to be a beginning of what the engine sent, or tell an error."""
    if not ask.is_stream:
        if ask.ending.isdigit():
            assert reply.status == {"500": 502, "503": 503, "400": 400}[ask.ending], (ask, reply)
        elif ask.is_sound or ask.ending == "error event":
            assert reply.status == 200 and ask.body.startswith(reply.body), (ask, reply)
        else:
            assert reply.status in (502, 504), (ask, reply)
        if reply.is_whole and reply.status != 200:
            assert "error" in json.loads(reply.body)
        return
    if reply.status != 200:
        assert not ask.is_sound and reply.status in (400, 502, 503, 504), (ask, reply)
        assert not reply.is_whole or "error" in json.loads(reply.body)
        return
    body = reply.body
    while body.startswith(COMMENT) or b"\n\n" + COMMENT in body:
        body = body.removeprefix(COMMENT).replace(b"\n\n" + COMMENT, b"\n\n")
    if not reply.is_whole:
        judge_part(ask, body)
    elif ask.is_sound:
        assert body == ask.sent, (ask, body[-300:])
    elif ask.has_error_event and body == ask.sent:
        pass
    else:
        assert MARKS.get(ask.endpoint, b"[DONE]") not in body, (ask, body[-300:])
        *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
        assert "error" in json.loads(last.partition(b"data: ")[2]), (ask, body[-300:])
        whole = b"".join(event + b"\n\n" for event in events)
        # half an event may stand before the error, on a line of its own
        assert ask.sent.startswith(whole) or ask.sent.startswith(whole.rstrip(b"\n")), (ask, body[-300:])


def judge_part(ask: Ask, body: bytes) -> None:
    """The caller left before the end: a beginning of the stream, then perhaps that of a comment or an error event."""
    begun = next((size for size in range(len(COMMENT) - 1, 0, -1) if body.endswith(COMMENT[:size])), 0)
    if ask.sent.startswith(body) or ask.sent.startswith(body[: len(body) - begun]):
        return
    assert not ask.is_sound, (ask, body[-300:])
    shared = next((i for i, (a, b) in enumerate(zip(body, ask.sent, strict=False)) if a != b), len(ask.sent))
    boundary = body.rfind(b"\n\n", 0, shared) + 2 if b"\n\n" in body[:shared] else 0
    heads = (b'data: {"error"', b"event: error\n")
    rests = [body[i:].removeprefix(b"\n\n") for i in (boundary, shared, shared - 1)]
    assert any(rest.startswith(head) or head.startswith(rest) for rest in rests for head in heads), (ask, body[-300:])
