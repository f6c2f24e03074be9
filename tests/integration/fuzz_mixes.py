"""What callers ask and engines answer in the fuzz test of the data path: well or ill behaved, cut anywhere."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from dataclasses import dataclass
from typing import Any

from fakes.ruled_line import DONE, LAST, HangUp, data, text
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, chunk, plain
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint

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
