"""A replica whose answer the test of the moment sets, and raw requests to the gateway in front of it.

async with Stage() as stage:
    stage.answer = says(plain(b'{"error": {"message": "no"}}', b"400 Bad Request"))
    reply = await ask(gateway, b"POST /v1/chat/completions HTTP/1.1\\r\\nHost: x\\r\\n…", body)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from fakes.line import KEY, Gateway
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, ScriptedUpstream, chunk, plain

WITHIN_S = 20.0
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "input_tokens": 7, "output_tokens": 3}
# a reply that makes sense on every proxied path
ANSWER = json.dumps(
    {
        "id": "of-the-engine",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hi"}}],
        "stop_reason": "end_turn",
        "usage": USAGE,
    }
).encode()
DONE = b"data: [DONE]\n\n"

Answer = Callable[[Peer, Received], Awaitable[None]]


def says(reply: bytes) -> Answer:
    """The same bytes to every request; the connection is kept."""

    async def answer(peer: Peer, _request: Received) -> None:
        await peer.send(reply)

    return answer


def event(**delta: Any) -> bytes:
    """One event of a chat's stream."""
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode() + b"\n\n"


def stream(*events: bytes) -> bytes:
    """A whole stream as one reply, with its end mark."""
    return STREAM_HEAD + b"".join(map(chunk, (*events, DONE))) + STREAM_END


def error(message: str, status: bytes, *headers: bytes) -> bytes:
    """A reply in OpenAI's envelope."""
    body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": None}}).encode()
    return plain(body, status, b"content-type: application/json", *headers)


def hang_up(peer: Peer) -> NoReturn:
    """Ends the connection with RST."""
    peer.reset()
    raise ConnectionResetError("by the script")


async def by_default(peer: Peer, request: Received) -> None:
    is_stream = b'"stream":true' in request.body.replace(b" ", b"")
    await peer.send(stream(event(content="hi")) if is_stream else plain(ANSWER, b"200 OK"))


class Stage(ScriptedUpstream):
    """Serves requests one after the other on each connection, with what `answer` says at the time."""

    def __init__(self, otherwise: Answer = by_default) -> None:
        """`otherwise` is the answer while a test sets none."""
        super().__init__(self._serve)
        self.answer = self._otherwise = otherwise

    def reset(self) -> None:
        self.answer = self._otherwise
        self.requests.clear()

    async def _serve(self, peer: Peer) -> None:
        while True:
            request = await peer.request()
            await self.answer(peer, request)


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply as it came; `headers` keep their order and their doubles."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key == name]

    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.body)["error"]
        return error


def reply_of(data: bytes) -> Reply:
    """Reads a reply whose connection has ended. Asserts that it has one length, the right one."""
    head, end, body = data.partition(b"\r\n\r\n")
    assert end, f"no whole head: {data[:200]!r}"
    line, *lines = head.split(b"\r\n")
    headers = tuple((name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines))
    reply = Reply(int(line.split()[1]), headers, body)
    lengths = reply.all(b"content-length")
    assert len(lengths) + len(reply.all(b"transfer-encoding")) == 1, headers
    assert not lengths or int(lengths[0]) == len(body), (lengths, len(body))
    return reply


def head(gateway_path: str, *headers: bytes, key: str = KEY) -> bytes:
    """The head of a POST that ends its connection."""
    lines = [f"POST {gateway_path} HTTP/1.1", "Host: x", f"x-api-key: {key}", "Connection: close"]
    return b"\r\n".join([line.encode() for line in lines] + list(headers)) + b"\r\n\r\n"


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection of the test's own, cut at the end."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 24)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def ask(gateway: Gateway, data: bytes) -> Reply:
    """What the gateway answers to these bytes, read until it closes."""
    async with asyncio.timeout(WITHIN_S), connected(gateway) as (reader, writer):
        writer.write(data)
        return reply_of(await to_the_end(reader))


async def to_the_end(reader: asyncio.StreamReader) -> bytes:
    """All that comes until the gateway closes, or resets."""
    data = b""
    with suppress(ConnectionError):
        while piece := await reader.read(65_536):
            data += piece
    return data


async def post(gateway: Gateway, path: str, body: bytes, *headers: bytes) -> Reply:
    """A whole POST with its length, on a connection of its own."""
    return await ask(gateway, head(path, b"Content-Length: %d" % len(body), *headers) + body)


async def push(gateway: Gateway, opening: bytes, piece: bytes, most: int) -> tuple[Reply, int]:
    """Sends `piece` again and again until the gateway has answered, and how many times; AssertionError at `most`."""
    async with asyncio.timeout(WITHIN_S), connected(gateway) as (reader, writer):
        writer.write(opening)
        answer = asyncio.create_task(to_the_end(reader))
        sent = 0
        while not answer.done():
            assert sent < most, "nobody stopped it"
            with suppress(ConnectionError):
                writer.write(piece)
                await writer.drain()
            sent += 1
            await asyncio.wait({answer}, timeout=0)
        return reply_of(await answer), sent


def peak_kib(pid: int) -> int:
    """The most memory that a process has had resident so far, in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
