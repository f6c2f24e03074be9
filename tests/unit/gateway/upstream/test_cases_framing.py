"""Events that sit across reads, a thousand ways: tap and chunk framing together give the caller the same stream."""

from __future__ import annotations

import json
import random

from fakes.client import KEY, Client

from gateway.edge.context import Exchange
from gateway.upstream.relay import StreamTap

CHAT = b"/v1/chat/completions"


def event(i: int) -> bytes:
    choice = {"index": 0, "delta": {"content": f"{i} 한👍\u2028\u0085"}, "finish_reason": "stop" if i == 49 else None}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


EVENTS = b"".join(event(i) for i in range(50))
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":50}}\n\n'
DONE = b"data: [DONE]\n\n"


async def test_no_event_is_lost_wherever_the_reads_are_cut() -> None:
    for seed in range(1000):
        rng = random.Random(seed)
        line_end = rng.choice([b"\n", b"\r\n", b"\r"])
        shown, usage, done = (part.replace(b"\n", line_end) for part in (EVENTS, USAGE, DONE))
        drops = rng.random() < 0.5
        sent = shown + usage + done
        cuts = sorted(rng.randrange(len(sent) + 1) for _ in range(rng.randrange(200)))
        tap = StreamTap(drops)

        async def relay(exchange: Exchange, tap: StreamTap = tap, sent: bytes = sent, cuts: list[int] = cuts) -> None:
            exchange.start(200, ())
            for begin, end in zip([0, *cuts], [*cuts, len(sent)], strict=True):
                if out := tap.feed(sent[begin:end]):
                    exchange.write(out)
            exchange.finish(tap.finish())
            exchange.close()

        client = Client(b"{}", headers=[KEY])
        await client.call({CHAT: relay})
        assert client.is_whole
        assert client.body == shown + (b"" if drops else usage) + done, f"seed {seed}"
        assert (tap.events, tap.saw_done, tap.usage and tap.usage.completion_tokens) == (50, True, 50), f"seed {seed}"
