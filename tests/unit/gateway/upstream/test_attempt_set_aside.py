"""Which replica is left out of the next decisions after an attempt."""

from __future__ import annotations

import contextlib

import pytest
from fakes.story import DONE, FakeReply, a_request, event

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import UpstreamBroken, UpstreamError, UpstreamTimeout
from gateway.domain.outcome import Ending

from .attempts_world import ERROR_EVENT, MOVES_ON, STAYS, A, B, fine, world


@pytest.mark.parametrize("cause", [*MOVES_ON, *STAYS])
async def test_a_replica_is_left_out_where_nobody_lives_and_nowhere_else(cause: str) -> None:
    made = await world((MOVES_ON | STAYS)[cause](), fine())
    with contextlib.suppress(UpstreamError):
        await made.run(A, B)
    why = {"refused": "refused a connection", "blackhole": "refused a connection", "died": "its engine died"}.get(cause)
    assert made.aside() == ({A.id: why} if why else {})


DEATH = b'data: {"error":{"message":"EngineCore encountered an issue. See stack trace (above).","code":500}}\n\n'
MESSAGES_DEATH = b'event: error\ndata: {"type":"error","error":{"message":"EngineCore encountered an issue. See"}}\n\n'
BROKEN = UpstreamBroken("reset", response_began=True)


@pytest.mark.parametrize(
    "parts",
    [
        [event("Hel"), DEATH, DONE],
        [event("Hel"), DEATH + DONE],
        [event("Hel"), DEATH, BROKEN],
        [event("Hel"), DEATH],
        [event("Hel"), DEATH, UpstreamTimeout("silent", deadline="gap")],
    ],
    ids=["in order", "at once", "then broken", "then cut", "then silent"],
)
async def test_a_death_that_is_told_in_mid_stream_leaves_the_next_requests_running_into_it(
    parts: list[bytes | Exception],
) -> None:
    made = await world(FakeReply(*parts))
    outcome = await made.run(A, B, stream=True)
    assert (outcome.ending, outcome.error_code) == (Ending.UPSTREAM_ERROR, "engine_died")
    assert made.outcomes == [outcome]
    assert made.aside() == {A.id: "its engine died"}
    assert made.transport.urls == [A.url] and made.caller.body.startswith(event("Hel") + DEATH)
    assert made.caller.body.count(b'"error"') == 1


async def test_a_death_in_the_midst_of_a_message_of_anthropics_is_one_too() -> None:
    delta = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"Hi"}}\n\n'
    made = await world(FakeReply(delta, MESSAGES_DEATH))
    outcome = await made.run(A, B, request=a_request(endpoint=Endpoint.MESSAGES, stream=True))
    assert outcome.error_code == "engine_died"
    assert made.aside() == {A.id: "its engine died"}


@pytest.mark.parametrize(
    "parts",
    [[event("Hel"), ERROR_EVENT, DONE], [event("Hel"), ERROR_EVENT, BROKEN], [event("Hel"), event("", "abort"), DONE]],
    ids=["failed", "failed and broken", "given up"],
)
async def test_a_failure_in_mid_stream_sets_nobody_aside(parts: list[bytes | Exception]) -> None:
    made = await world(FakeReply(*parts))
    with contextlib.suppress(UpstreamBroken):
        await made.run(A, B, stream=True)
    assert made.aside() == {}


async def test_a_refusal_that_calls_itself_a_death_sets_nobody_aside() -> None:
    made = await world(FakeReply(b'{"error":{"message":"no","code":"engine_died"}}', status=400))
    assert (await made.run(A, B)).ending is Ending.ENGINE_REFUSED
    assert made.aside() == {}
