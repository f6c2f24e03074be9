"""A cheap stand-in for one vLLM API server: what is measured in front of it shall be the dearer part by far.

    python -m bench.fake_upstream PORT... [--tick-ms 20] [--slices 1] [--tokens 64]

A request without `stream` is answered at once. Streams get one chunk each per round of ticks, all in the same tick as
after an engine's step; with `--slices 30` a tick serves every 30th stream, so that thousands of idle streams do not
stir at once. After `--tokens` chunks a stream ends as vLLM's do; with 0 only after GET /fake/finish. Started by
rounds.py, one process for all contenders, each with a port of its own: closed connections of one never use up
the ports of another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any, Protocol, cast

import httptools
import msgspec
import uvloop

SERVED_NAME = "bench-model"
_ID = {"id": "chatcmpl-6f3c1d7e9b5a4c2e8d0f1a3b5c7d9e2f", "created": 1_790_000_000, "model": SERVED_NAME}
_USAGE = {"prompt_tokens": 231, "total_tokens": 295, "completion_tokens": 64, "prompt_tokens_details": None}


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Asked(msgspec.Struct):
    """The fields of a request that the answer depends on."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None


_decode = msgspec.json.Decoder(Asked).decode


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    fields = {**_ID, "object": "chat.completion.chunk", "choices": choices, **more}
    return chunked(b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n")


def choice(delta: dict[str, str], finish_reason: str | None = None) -> list[dict[str, Any]]:
    return [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]


def plain(fields: dict[str, Any] | str, status: str = "200 OK") -> bytes:
    is_text = isinstance(fields, str)
    content = fields.encode() if isinstance(fields, str) else json.dumps(fields, separators=(",", ":")).encode()
    kind = "text/plain; version=0.0.4" if is_text else "application/json"
    head = f"HTTP/1.1 {status}\r\nserver: uvicorn\r\ncontent-length: {len(content)}\r\ncontent-type: {kind}\r\n\r\n"
    return head.encode() + content


_MESSAGE = {
    "role": "assistant",
    "content": "A fox that is quick and brown jumps over a dog that is lazy.",
    "refusal": None,
}
REPLY = plain(
    {
        **_ID,
        "object": "chat.completion",
        "choices": [{"index": 0, "message": _MESSAGE, "logprobs": None, "finish_reason": "stop"}],
        "usage": _USAGE,
    }
)
UNKNOWN = plain(
    {"error": {"message": "The model does not exist.", "type": "NotFoundError", "code": 404}}, "404 Not Found"
)
MODELS = plain({"object": "list", "data": [{"id": SERVED_NAME, "object": "model", "created": 1, "owned_by": "vllm"}]})
HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
FIRST = event(choice({"role": "assistant", "content": ""}))
TOKEN = event(choice({"content": " token"}))
LAST = event(choice({"content": ""}, "stop"))
USAGE = event([], usage=_USAGE)
DONE = chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def load_gauges(running: int, waiting: int, kv_use: float) -> str:
    label = f'{{model_name="{SERVED_NAME}"}}'
    return (
        f"vllm:num_requests_running{label} {running}\nvllm:num_requests_waiting{label} {waiting}\n"
        f"vllm:kv_cache_usage_perc{label} {kv_use:.3f}\n"
    )


class Serving(Protocol):
    """What a connection needs of the engine behind it."""

    opening: bytes  # what a stream gets at once
    tokens: int
    requests: int
    is_finishing: bool

    def add(self, stream: Connection) -> None: ...

    def lost(self, connection: Connection) -> None: ...

    def metrics(self) -> str: ...


class Engine:
    """All open streams, in as many slices as a round has ticks, and what has been counted."""

    def __init__(self, tick_s: float, slices: int, tokens: int) -> None:
        self.opening = HEAD + FIRST
        self.tokens = tokens
        self.requests = self.aborted = 0
        self.is_finishing = False
        self._tick_s = tick_s
        self._slices: list[set[Connection]] = [set() for _ in range(slices)]
        self._next = 0

    @property
    def running(self) -> int:
        return sum(map(len, self._slices))

    def add(self, stream: Connection) -> None:
        self._next = (self._next + 1) % len(self._slices)
        self._slices[self._next].add(stream)

    def lost(self, connection: Connection) -> None:
        for streams in self._slices:
            if connection in streams:
                streams.discard(connection)
                self.aborted += 1

    async def run(self) -> None:
        while True:
            for streams in self._slices:
                await asyncio.sleep(self._tick_s)
                for stream in [stream for stream in streams if not stream.step(self.is_finishing)]:
                    streams.discard(stream)

    def metrics(self) -> str:
        counted = f"fake:requests_total {self.requests}\nfake:aborted_total {self.aborted}\n"
        return load_gauges(self.running, 0, 0.1) + counted


class Connection(asyncio.Protocol):
    """One client; requests come one after the other."""

    __slots__ = ("_body", "_engine", "_left", "_parser", "_transport", "_url", "_wants_usage")

    def __init__(self, engine: Serving) -> None:
        self._engine = engine
        self._parser = httptools.HttpRequestParser(self)
        self._wants_usage = False
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.lost(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url = self._body = b""

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._url.partition(b"?")[0]
        if path == b"/v1/chat/completions":
            self._chat()
        elif path == b"/v1/models":
            self._transport.write(MODELS)
        elif path == b"/metrics":
            self._transport.write(plain(self._engine.metrics()))
        else:
            self._engine.is_finishing = self._engine.is_finishing or path == b"/fake/finish"
            self._transport.write(plain({}))

    def _chat(self) -> None:
        self._engine.requests += 1
        asked = _decode(self._body)
        if asked.model != SERVED_NAME:
            self._transport.write(UNKNOWN)
        elif not asked.stream:
            self._transport.write(REPLY)
        else:
            self._wants_usage = asked.stream_options is not None and asked.stream_options.include_usage
            self._left = self._engine.tokens
            self._transport.write(self._engine.opening)
            self._engine.add(self)

    def begin(self, tokens: int) -> None:
        """The first event of a stream that had none, which will have so many tokens."""
        self._left = tokens
        self._transport.write(FIRST)

    def step(self, is_finishing: bool) -> bool:
        """One chunk, or the end; False: that was the end."""
        if is_finishing or self._left == 1:
            self._transport.write((TOKEN if self._left else b"") + LAST + (USAGE if self._wants_usage else b"") + DONE)
            return False
        self._left = max(0, self._left - 1)  # 0 from the start: until told
        self._transport.write(TOKEN)
        return True


async def serve(ports: list[int], engine: Engine) -> None:
    loop = asyncio.get_running_loop()
    for port in ports:
        await loop.create_server(lambda: Connection(engine), "127.0.0.1", port, backlog=4096)
    await engine.run()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fake_upstream")
    parser.add_argument("ports", type=int, nargs="+", metavar="PORT")
    parser.add_argument("--tick-ms", type=float, default=20)
    parser.add_argument("--slices", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    uvloop.run(serve(given.ports, Engine(given.tick_ms / 1000, given.slices, given.tokens)))


if __name__ == "__main__":
    main()
