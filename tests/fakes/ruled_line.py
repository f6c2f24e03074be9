"""A real gateway process in front of one scripted upstream, whose answer a test sets anew for each of its requests.

async with ruled_line(tmp_path, redis_url) as line:
    line.answer = stream_of(text("Hi."), LAST, DONE)
    reply = await line.gateway.chat(stream=True)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fakes.line import KEY, Gateway, running_gateway, sha256
from fakes.scrape import Scrape, read
from fakes.scripted_upstream import STREAM_END, STREAM_HEAD, Peer, Received, chunk, plain
from fakes.stage import DONE, Answer, Stage
from fakes.waits import eventually

ONE_AT_A_TIME = "sk-test-one-at-a-time-0123"  # may have one request in flight
USAGE = {"prompt_tokens": 33, "completion_tokens": 48, "total_tokens": 81}
WHOLE_REPLY = plain(
    json.dumps(
        {
            "id": "x",
            "object": "chat.completion",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi."}, "finish_reason": "stop"}],
            "usage": USAGE,
        }
    ).encode(),
    b"200 OK",
    b"content-type: application/json",
)


class HangUp(ConnectionError):
    """Raised by an answer that wants its connection closed."""


def event(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    """As vLLM writes it: compact, text not escaped."""
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return data({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "choices": [choice], **more})


def data(document: Any) -> bytes:
    return b"data: " + json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def text(content: str) -> bytes:
    return event({"content": content})


LAST = event({"content": ""}, "stop")
USAGE_EVENT = data({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": USAGE})


class RuledLine:
    def __init__(self) -> None:
        self.gateway: Gateway
        self.upstream = Stage(whole)
        self._records = 0

    @property
    def answer(self) -> Answer:
        return self.upstream.answer

    @answer.setter
    def answer(self, answer: Answer) -> None:
        self.upstream.answer = answer

    async def next_record(self) -> dict[str, Any]:
        """The access record that follows the last one taken here."""
        (record,) = await self.next_records(1)
        return record

    async def next_records(self, count: int) -> list[dict[str, Any]]:
        async def written() -> list[dict[str, Any]]:
            lines = self.gateway.access_lines()[self._records :]
            return lines if len(lines) >= count else []

        found: list[dict[str, Any]] = await eventually(written, f"{count} access records are written")
        assert len(found) == count, found
        self._records += count
        return found

    async def skip_records(self) -> None:
        """Forgets those of requests that the test does not look at; they have ended, but may not be written yet."""
        self._records = await self.gateway.at_rest()

    async def scrape(self) -> Scrape:
        return read((await self.gateway.client.get(self.gateway.url + "/metrics")).text)

    async def at_rest(self) -> None:
        """Until nothing is in flight: neither exchanges, nor requests of replicas."""

        async def is_idle() -> bool:
            scrape = await self.scrape()
            return scrape.sum("open_exchanges") == 0 and scrape.sum("requests_in_flight") == 0

        await eventually(is_idle, "nothing is in flight")


@asynccontextmanager
async def ruled_line(
    folder: Path,
    redis_url: str,
    *,
    limits: dict[str, dict[str, Any]] | None = None,
    env: dict[str, str] | None = None,
    **gateway: Any,
) -> AsyncIterator[RuledLine]:
    """`limits` by key, beside KEY without any and ONE_AT_A_TIME; `gateway` are keys of that section."""
    line = RuledLine()
    keys = {
        "test": {"sha256": sha256(KEY)},
        "one": {"sha256": sha256(ONE_AT_A_TIME), "limits": {"in_flight": 1}},
        **{f"key-{i}": {"sha256": sha256(key), "limits": own} for i, (key, own) in enumerate((limits or {}).items())},
    }
    async with line.upstream:
        pools = {"tiny": {"urls": [line.upstream.url], "served_name": "tiny", "max_model_len": 4_000_000}}
        async with running_gateway(folder, redis_url, env=env, gateway=gateway, keys=keys, pools=pools) as made:
            line.gateway = made
            yield line


# --- answers ----------------------------------------------------------------------------------------------------------


async def whole(peer: Peer, request: Received) -> None:
    """What a sound engine answers, streamed if asked for."""
    if json.loads(request.body).get("stream"):
        await stream_of(text("Hi."), LAST, USAGE_EVENT, DONE)(peer, request)
    else:
        await peer.send(WHOLE_REPLY)


def stream_of(*events: bytes) -> Answer:
    """Each event in a chunk of its own, then a sound end of the reply."""

    async def answer(peer: Peer, request: Received) -> None:
        await peer.send(STREAM_HEAD + b"".join(map(chunk, events)) + STREAM_END)

    return answer


def silent_after(data: bytes, asked: asyncio.Event) -> Answer:
    """Sends `data`, sets `asked`, and waits for the gateway to leave."""

    async def answer(peer: Peer, request: Received) -> None:
        await peer.send(data)
        asked.set()
        await peer.closed()
        raise HangUp

    return answer
