"""Which candidates are asked, in which order, with what, and what the caller gets of them."""

from __future__ import annotations

import asyncio

import pytest
from fakes.story import DONE, FakeReply, Silence, a_request, event, plain_answer, usage_event

from gateway.domain.errors import EngineFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.upstream.attempt import headers_for
from gateway.upstream.body import JSON

from .attempts_world import ERROR_EVENT, IN_FLIGHT, MOVES_ON, REFUSED, STAYS, A, B, C, fine, status, world


async def test_the_first_candidate_serves_and_its_reply_is_closed_afterwards() -> None:
    reply = fine()
    made = await world(reply)
    assert await made.run(A, B) == Outcome(Ending.COMPLETED, 200, Usage(7, 3))
    assert reply.is_closed and made.transport.urls == ["http://a/0@h"]
    assert (made.record.attempts, made.record.pool, made.record.replica) == (1, "a", "a/0@h")
    deadlines = made.transport.deadlines[0]
    assert (deadlines.connect_s, deadlines.first_byte_s, deadlines.gap_s, deadlines.total_s) == (1, 2, 3, 40)
    assert made.aside() == {}


@pytest.mark.parametrize("cause", MOVES_ON)
async def test_another_replica_is_asked_where_it_may_do_better(cause: str) -> None:
    failure = MOVES_ON[cause]()
    made = await world(failure, fine())
    assert (await made.run(A, B)).ending is Ending.COMPLETED
    assert (made.record.attempts, made.record.pool, made.record.replica) == (2, "b", "b/0@h")
    assert [request.body for _, request in made.transport.sent] == [b"a/0@h", b"b/0@h"], "each gets a body of its own"
    assert made.caller.status == 200 and made.caller.body == plain_answer(7, 3)
    assert len(made.outcomes) == 1, "the failed attempt was not settled"
    assert not isinstance(failure, FakeReply) or failure.is_closed


@pytest.mark.parametrize("cause", STAYS)
async def test_nobody_else_is_asked_where_the_request_may_have_done_it_or_the_time_is_gone(cause: str) -> None:
    made = await world(STAYS[cause](), fine())
    with pytest.raises(UpstreamError):
        await made.run(A, B)
    assert made.transport.urls == [A.url]
    assert not made.caller.has_started and made.outcomes == []


@pytest.mark.parametrize("cause", STAYS)
async def test_a_request_in_flight_is_replayed_only_if_the_config_says_so(cause: str) -> None:
    made = await world(STAYS[cause](), fine(), replay_in_flight=True)
    if cause in IN_FLIGHT:
        assert (await made.run(A, B)).ending is Ending.COMPLETED
    else:
        with pytest.raises(UpstreamTimeout):
            await made.run(A, B)
    assert len(made.transport.sent) == (2 if cause in IN_FLIGHT else 1)


@pytest.mark.parametrize("code", [400, 404, 422])
async def test_the_requests_own_fault_is_nobody_elses_to_mend(code: int) -> None:
    made = await world(status(code), fine())
    assert (await made.run(A, B)).ending is Ending.ENGINE_REFUSED
    assert made.caller.status == code and made.transport.urls == [A.url]


@pytest.mark.parametrize("cause", [*MOVES_ON, *STAYS])
async def test_the_last_candidates_failure_is_the_one_that_is_told(cause: str) -> None:
    failure = (MOVES_ON | STAYS)[cause]()
    made = await world(REFUSED, failure)
    with pytest.raises(UpstreamError) as caught:
        await made.run(A, B)
    assert len(made.transport.sent) == 2
    assert caught.value is failure or isinstance(failure, FakeReply)


async def test_a_caller_who_leaves_closes_the_reply_and_asks_nobody_else() -> None:
    silence = Silence()
    reply = FakeReply(silence)
    made = await world(reply, fine())
    task = asyncio.create_task(made.run(A, B))
    await silence.reached()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reply.is_closed and made.transport.urls == [A.url]


# --- streams -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "first",
    [[ERROR_EVENT, DONE], [event("", "abort"), DONE], [event("") + ERROR_EVENT]],
    ids=["error event", "given up", "error behind the role"],
)
async def test_a_stream_that_fails_before_its_first_byte_moves_on(first: list[bytes]) -> None:
    made = await world(FakeReply(*first), FakeReply(event("Hi", "stop"), usage_event(7, 1), DONE))
    assert await made.run(A, B, stream=True) == Outcome(Ending.COMPLETED, 200, Usage(7, 1))
    assert made.caller.body == event("Hi", "stop") + DONE


async def test_what_a_failed_attempt_had_read_and_given_to_nobody_costs_nothing() -> None:
    made = await world(FakeReply(event("Hel") + event("lo") + ERROR_EVENT + DONE), UpstreamBroken("reset"))
    with pytest.raises(UpstreamBroken):
        await made.run(A, B, stream=True)
    assert made.transport.urls == [A.url, B.url] and made.journey.cut_off() == Usage(30, 0)


@pytest.mark.parametrize(
    "failure",
    [UpstreamBroken("reset", response_began=True), UpstreamTimeout("silent", deadline="gap"), EngineFailed("any")],
)
async def test_nothing_moves_on_after_the_first_byte(failure: UpstreamError) -> None:
    made = await world(FakeReply(event("Hel"), failure), FakeReply(event("Hi"), DONE), replay_in_flight=True)
    with pytest.raises(type(failure)):
        await made.run(A, B, stream=True)
    assert made.transport.urls == [A.url] and made.caller.body == event("Hel")


async def test_a_comment_that_opened_the_stream_is_no_first_byte() -> None:
    made = await world(status(500), FakeReply(event("Hi", "stop"), DONE))
    made.caller.open_by_comment()
    assert (await made.run(A, B, stream=True)).ending is Ending.COMPLETED
    assert made.caller.body == event("Hi", "stop") + DONE


# --- what travels ------------------------------------------------------------------------------------------------


def test_the_engines_key_goes_to_the_engine_and_no_other_credential_does() -> None:
    request = a_request()
    request.headers = ((b"traceparent", b"00-x"),)
    with_key = headers_for(request, B, 1, JSON)
    assert (b"authorization", b"Bearer engine-b") in with_key
    assert [name for name, _ in headers_for(request, A, 1, JSON)] == [b"content-type", b"x-request-id", b"traceparent"]


async def test_each_replica_gets_its_own_key_only() -> None:
    made = await world(REFUSED, fine())
    await made.run(A, B)
    to_a, to_b = (dict(request.headers) for _, request in made.transport.sent)
    assert b"authorization" not in to_a
    assert to_b[b"authorization"] == b"Bearer engine-b"


async def test_a_further_attempt_has_a_request_id_of_its_own() -> None:
    made = await world(REFUSED, status(503), fine())
    await made.run(A, B, C)
    ids = [dict(request.headers)[b"x-request-id"] for _, request in made.transport.sent]
    assert ids == [b"req-1", b"req-1-2", b"req-1-3"]
