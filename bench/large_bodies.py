"""How long one turn of the event loop takes while a large body is decoded, beside all of it in one go; prints a table.

    python -m bench.large_bodies [--mb 5] [--rounds 3]

In this process, with the gateway's own code: a task that does nothing but take turns notes the longest wait between
two. The bodies are what callers send, and the worst that they could send. The lowest of the rounds counts: it is what
the work itself takes.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from time import perf_counter

from backports import zstd

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import GatewayError
from gateway.domain.request import Principal
from gateway.edge.decode import decode
from gateway.edge.encoding import decode_body
from gateway.edge.large import decode_large

CALLER = Principal("bench", None, "default", ("*",))
Work = Callable[[], Awaitable[object]]


def chat(content: str, size: int) -> bytes:
    """One message, of so many bytes."""
    text = content * (size // len(content.encode()))
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()


def repeated(begin: bytes, item: bytes, end: bytes, size: int) -> bytes:
    return begin + b",".join([item] * (size // (len(item) + 1))) + end


def bodies(size: int) -> Iterator[tuple[str, Endpoint, bytes]]:
    messages, rest = b'{"model":"m","messages":[', b'{"model":"m","messages":[{"role":"user","content":"x"}],'
    part = b'{"role":"user","content":[{"type":"text","text":"%b"}]}' % (b"x" * 40)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * size}}
    yield "text", Endpoint.CHAT, chat("lorem ipsum ", size)
    yield "text, Chinese", Endpoint.CHAT, chat("你好世界", size)
    yield "text, emoji", Endpoint.CHAT, chat("😀x", size)
    yield "text, all escapes", Endpoint.CHAT, chat('"', size // 2)
    yield (
        "an image",
        Endpoint.CHAT,
        json.dumps({"model": "m", "messages": [{"role": "user", "content": [image]}]}).encode(),
    )
    yield "messages of 100 bytes", Endpoint.CHAT, repeated(messages, part, b"]}", size)
    yield "smallest messages", Endpoint.CHAT, repeated(messages, b'{"role":"user","content":[]}', b"]}", size)
    yield (
        "smallest parts",
        Endpoint.CHAT,
        repeated(b'{"model":"m","messages":[{"role":"user","content":[', b'{"type":"a"}', b"]}]}", size),
    )
    yield "nested 500 deep", Endpoint.CHAT, repeated(rest + b'"x":[', b"[" * 500 + b"]" * 500, b"]}", size)
    fields = b",".join(b'"f%d":1' % i for i in range(size // 11))
    yield "fields", Endpoint.CHAT, rest + fields + b"}"
    yield "token ids", Endpoint.COMPLETIONS, repeated(b'{"model":"m","prompt":[', b"1", b"]}", size)
    yield "empty prompts", Endpoint.COMPLETIONS, repeated(b'{"model":"m","prompt":[', b"[]", b"]}", size)
    yield "items", Endpoint.RESPONSES, repeated(b'{"model":"m","input":[', b'{"type":"a"}', b"]}", size)


async def longest_turn_ms(work: Work) -> float:
    longest = 0.0

    async def take_turns() -> None:
        nonlocal longest
        last = perf_counter()
        while True:
            await asyncio.sleep(0)
            now = perf_counter()
            longest, last = max(longest, now - last), now

    others = asyncio.create_task(take_turns())
    await asyncio.sleep(0)
    with suppress(GatewayError):  # some are refused
        await work()
    await asyncio.sleep(0)
    others.cancel()
    return longest * 1e3


def in_one_go_ms(body: bytes, endpoint: Endpoint) -> float:
    began = perf_counter()
    with suppress(GatewayError):
        decode(body, endpoint, CALLER, "default", "id")
    return (perf_counter() - began) * 1e3


async def run(megabytes: int, rounds: int) -> None:
    print("longest turn in ms    gzip    zstd  decode  in one go")
    for name, endpoint, body in bodies(megabytes * 1_000_000):
        works: list[Work] = [
            partial(decode_body, gzip.compress(body, 1), b"gzip", 1 << 30),
            partial(decode_body, zstd.compress(body), b"zstd", 1 << 30),
            partial(decode_large, body, endpoint, CALLER, "default", "id"),
        ]
        found = [min([await longest_turn_ms(work) for _ in range(rounds)]) for work in works]
        found.append(min(in_one_go_ms(body, endpoint) for _ in range(rounds)))
        print(f"{name:21}" + "".join(f"{ms:8.1f}" for ms in found[:3]) + f"{found[3]:11.1f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.large_bodies")
    parser.add_argument("--mb", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    asyncio.run(run(given.mb, given.rounds))
