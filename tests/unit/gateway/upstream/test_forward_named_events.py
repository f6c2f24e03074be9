"""forward() over the streams of named events that the Responses and the Messages API have."""

from __future__ import annotations

import asyncio

import pytest
from fakes.story import Silence

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import EngineFailed, UpstreamBroken
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.upstream import forward

from .forwarding import SETTLED, stream

RESPONSE_DELTA = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hi"}\n\n'
RESPONSE_END = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"status":"completed",'
    b'"usage":{"input_tokens":7,"output_tokens":2}}}\n\n'
)
BLOCK_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"Hi"},"index":0}\n\n'
MESSAGE_END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"input_tokens":7,"output_tokens":2}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n'
)
NAMED = [
    (Endpoint.RESPONSES, RESPONSE_DELTA, RESPONSE_END),
    (Endpoint.MESSAGES, BLOCK_DELTA, MESSAGE_END),
]


@pytest.mark.parametrize(("endpoint", "piece", "end"), NAMED)
async def test_a_stream_of_named_events_goes_through_whole_and_is_settled_by_its_last_event(
    endpoint: Endpoint, piece: bytes, end: bytes
) -> None:
    made = stream(piece, piece, end, endpoint=endpoint)
    assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.body == piece + piece + end
    assert made.log == [SETTLED, "caller sees the end"]


@pytest.mark.parametrize(("endpoint", "piece", "end"), NAMED)
async def test_the_last_named_event_ends_the_callers_reply(
    endpoint: Endpoint, piece: bytes, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "END_S", 0)
    made = stream(piece, end, piece, Silence(), endpoint=endpoint)
    async with asyncio.timeout(5):
        assert await made.run() == Outcome(Ending.COMPLETED, 200, Usage(7, 2))
    assert made.caller.body == piece + end and made.log == [SETTLED, "caller sees the end"]


@pytest.mark.parametrize(("endpoint", "piece", "end"), NAMED)
async def test_a_stream_of_named_events_without_its_last_one_is_no_good_end(
    endpoint: Endpoint, piece: bytes, end: bytes
) -> None:
    made = stream(piece, piece, endpoint=endpoint)
    with pytest.raises(UpstreamBroken):
        await made.run()
    assert made.journey.cut_off() == Usage(30, 2) and made.log == []


async def test_an_error_event_of_anthropics_is_passed_on_and_counts_as_the_engines_failure() -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"no luck"}}\n\n'
    made = stream(BLOCK_DELTA, error, endpoint=Endpoint.MESSAGES)
    outcome = await made.run()
    assert (outcome.ending, outcome.error_code) == (Ending.UPSTREAM_ERROR, "engine_failed")
    assert made.caller.body == BLOCK_DELTA + error
    open_end = stream(BLOCK_DELTA, error.rstrip(b"\n"), endpoint=Endpoint.MESSAGES)
    assert (await open_end.run()).error_code == "engine_failed"
    assert open_end.caller.body == BLOCK_DELTA + error, "no client would read an event that does not end"
    first = stream(error, endpoint=Endpoint.MESSAGES)
    with pytest.raises(EngineFailed, match="no luck"):
        await first.run()
