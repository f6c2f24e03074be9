"""Sends a probe to an engine and checks the answer; both contract tests call it."""

from __future__ import annotations

import json
import re
from typing import Any, Protocol

import httpx
from contract.answers import Stream
from contract.answers_paths import Named
from contract.probes import Probe
from contract.shapes import mismatch


class Engine(Protocol):
    """A running engine, fake or real."""

    url: str
    key: str


async def check(engine: Engine, probe: Probe) -> None:
    """AssertionError says what does not hold."""
    headers = dict(probe.headers)
    if probe.with_key:
        headers["authorization"] = f"Bearer {engine.key}"
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        reply = await client.request(probe.method, engine.url + probe.path, content=probe.content, headers=headers)
    assert reply.status_code == probe.status, reply.text[:1000]
    for name, expected in probe.answer_headers.items():
        fits(expected if isinstance(expected, re.Pattern) else re.compile(re.escape(expected)), reply.headers.get(name))
    if probe.stream is not None:
        check_stream(probe.stream, reply.text)
    elif probe.named is not None:
        check_named(probe.named, reply.text)
    elif isinstance(probe.answer, bytes):
        assert reply.content == probe.answer
    elif probe.answer is not None:
        fits(probe.answer, reply.json())


def check_stream(expected: Stream, text: str) -> None:
    """AssertionError unless the events of the body are the expected ones, in order."""
    assert text.endswith("\n\n"), "the last event is not complete"
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events), events
    assert events.pop() == "data: [DONE]"
    data = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len({event["id"] for event in data}) == 1
    if expected.usage is not None:
        event = data.pop()
        fits(expected.usage, event)
        usage = event["usage"]
        assert usage["completion_tokens"] == expected.tokens * expected.choices
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    for choice in range(expected.choices):
        own = [event for event in data if event["choices"][0]["index"] == choice]
        if expected.first is not None:
            fits(expected.first, own.pop(0))
        fits(expected.last, own.pop())
        assert len(own) < expected.tokens
        for event in own:
            fits(expected.token, event)


def check_named(expected: Named, text: str) -> None:
    """AssertionError unless the named events of the body are the expected ones, in order, with one piece or more."""
    events = []
    for event in text.rstrip("\n").split("\n\n"):
        name, _, data = event.partition("\ndata: ")
        events.append((name.removeprefix("event: "), json.loads(data)))
    pieces = len(events) - len(expected.before) - len(expected.after)
    assert pieces > 0, [name for name, _ in events]
    shapes = [*expected.before, *[expected.piece] * pieces, *expected.after]
    assert [name for name, _ in events] == [name for name, _ in shapes]
    for (_, shape), (_, value) in zip(shapes, events, strict=True):
        fits(shape, value)


def fits(shape: Any, value: Any) -> None:
    """AssertionError with the first difference."""
    difference = mismatch(shape, value)
    assert difference is None, difference
