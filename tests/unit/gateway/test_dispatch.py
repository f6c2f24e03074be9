"""The story of one request over a scripted engine: one settlement in every ending."""

from __future__ import annotations

import asyncio

import pytest
from fakes.bodies import CHAT_LIKE
from fakes.story import DONE, FakeReply, Silence, a_request, plain_answer, usage_event

from gateway.dispatch import ending_of
from gateway.domain import errors
from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import (
    ConnectFailed,
    EngineBusy,
    EngineDied,
    EngineFailed,
    GatewayError,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.domain.outcome import Ending, Outcome, Usage

from .dispatch_world import EVENTS, REFUSED, A, B, World


# --- endings: each settles exactly once ---------------------------------------------------------------------
async def test_a_plain_answer_is_settled_with_the_engines_own_count() -> None:
    world = World(FakeReply(plain_answer(7, 3)))
    await world.serve()
    assert world.outcome() == Outcome(Ending.COMPLETED, 200, Usage(7, 3))
    record = world.record
    assert (record.route, record.pool, record.replica, record.attempts) == ("chat", "a", "a/0@h", 1)
    assert (record.ending, record.error_code) == ("completed", None)
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)
    assert record.admit_s is not None and record.ttft_s is not None


@pytest.mark.parametrize("endpoint", CHAT_LIKE)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_chat_and_completions_are_counted_alike_streamed_or_not(endpoint: Endpoint, is_stream: bool) -> None:
    reply = FakeReply(*EVENTS, usage_event(9, 3), DONE) if is_stream else FakeReply(plain_answer(9, 3))
    world = World(reply)
    await world.serve(a_request(endpoint=endpoint, stream=is_stream))
    assert world.outcome().usage == Usage(9, 3)
    assert world.transport.sent[0][1].path == endpoint.value.encode()


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_ticket_is_settled_before_the_caller_sees_the_end(is_stream: bool) -> None:
    world = World(FakeReply(*EVENTS, DONE) if is_stream else FakeReply(plain_answer()))
    await world.serve(stream=is_stream)
    assert world.gate.log[0] == "settled"
    assert world.gate.log.count("settled") == 1


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_engines_400_gives_the_whole_reservation_back(is_stream: bool) -> None:
    world = World(FakeReply(b'{"error":{"message":"no","type":"BadRequestError","code":400}}', status=400))
    await world.serve(stream=is_stream)
    assert world.outcome() == Outcome(Ending.ENGINE_REFUSED, 400, None, "400")
    assert world.caller.refusal is not None and world.caller.refusal[:2] == (400, "no")
    assert (world.record.ending, world.record.status) == ("engine_refused", 400), "whatever a comment said before it"
    assert world.transport.urls == [A.url], "no retry, no degradation"


@pytest.mark.parametrize("status", [500, 401, 403])
async def test_an_engines_5xx_or_its_view_of_our_key_moves_on_to_the_fallback(status: int) -> None:
    world = World(FakeReply(b"{}", status=status), FakeReply(plain_answer()))
    await world.serve()
    assert world.transport.urls == [A.url, B.url]
    assert world.outcome().ending is Ending.COMPLETED
    assert (world.record.pool, world.record.attempts, world.record.error_code) == ("b", 2, None)


@pytest.mark.parametrize("status", [500, 401, 403])
async def test_an_engines_failure_everywhere_costs_nothing(status: int) -> None:
    world = World(*(FakeReply(b"{}", status=status) for _ in range(2)))
    with pytest.raises(EngineFailed):
        await world.serve()
    outcome = world.outcome()
    assert (outcome.ending, outcome.usage, outcome.error_code) == (Ending.UPSTREAM_ERROR, None, "engine_failed")


@pytest.mark.parametrize("status", [429, 503])
async def test_full_engines_are_told_as_busy(status: int) -> None:
    world = World(*(FakeReply(b"{}", status=status) for _ in range(2)))
    with pytest.raises(EngineBusy):
        await world.serve()
    outcome = world.outcome()
    assert (outcome.ending, outcome.usage, outcome.error_code) == (Ending.UPSTREAM_ERROR, None, "engine_busy")


async def test_an_engines_death_is_not_tried_on_the_next_one() -> None:
    world = World(FakeReply(b'{"error":{"message":"EngineCore encountered an issue."}}', status=500))
    with pytest.raises(EngineDied):
        await world.serve()
    assert world.transport.urls == [A.url]
    assert world.outcome().error_code == "engine_died"
    assert [r.id for r in world.fleet.snapshot().all() if r.is_ready()] == [B.id]


async def test_a_plain_answer_given_up_everywhere_is_an_upstream_error() -> None:
    world = World(*(FakeReply(plain_answer(finish="abort")) for _ in range(2)))
    with pytest.raises(EngineFailed):
        await world.serve()
    assert world.outcome().ending is Ending.UPSTREAM_ERROR
    assert world.outcome().usage is None, "an error reply costs nothing"


async def test_an_error_as_first_event_has_a_status_of_its_own_and_costs_nothing() -> None:
    world = World(FakeReply(b'data: {"error":{"message":"EngineCore encountered an issue."}}\n\n', DONE))
    with pytest.raises(EngineDied, match="EngineCore encountered"):
        await world.serve(stream=True)
    assert not world.caller.status
    outcome = world.outcome()
    assert (outcome.ending, outcome.usage) == (Ending.UPSTREAM_ERROR, None)


@pytest.mark.parametrize("failure", [UpstreamBroken("reset"), UpstreamTimeout("silent", deadline="gap"), None])
async def test_a_stream_that_breaks_off_costs_prompt_and_events_and_no_other_replica_is_asked(
    failure: Exception | None,
) -> None:
    ends = [failure] if failure else []  # None: a clean end without the end mark
    world = World(FakeReply(*EVENTS[:2], *ends), FakeReply(*EVENTS, DONE))
    with pytest.raises(UpstreamError):
        await world.serve(stream=True)
    assert world.transport.urls == [A.url], "the other one gets nothing"
    assert b"[DONE]" not in world.caller.body and not world.caller.is_finished
    outcome = world.outcome()
    assert (outcome.ending, outcome.usage) == (Ending.UPSTREAM_ERROR, Usage(world.prompt_tokens, 2))
    assert (world.record.ending, world.record.completion_tokens) == ("upstream_error", 2)


@pytest.mark.parametrize("failure", [UpstreamBroken("reset"), UpstreamTimeout("silent", deadline="first byte")])
async def test_an_engine_that_answers_nothing_costs_nothing_and_is_not_retried(failure: Exception) -> None:
    for script in ([failure], [FakeReply(failure)]):
        world = World(*script, FakeReply(plain_answer()))
        with pytest.raises(UpstreamError):
            await world.serve(stream=True)
        assert world.outcome().usage is None
        assert world.transport.urls == [A.url]


async def test_a_refused_connection_moves_on_to_the_fallback() -> None:
    world = World(REFUSED, FakeReply(plain_answer()))
    await world.serve()
    assert world.transport.urls == [A.url, B.url]
    assert [body["model"] for body in world.transport.bodies()] == ["a-model", "b-model"]
    assert world.outcome().ending is Ending.COMPLETED
    assert (world.record.pool, world.record.attempts) == ("b", 2)
    assert world.caller.headers[b"x-poolgate-pool"] == b"b"


async def test_no_connection_anywhere_is_a_502_that_costs_nothing() -> None:
    world = World(REFUSED, REFUSED)
    with pytest.raises(ConnectFailed):
        await world.serve()
    outcome = world.outcome()
    assert (outcome.ending, outcome.usage, outcome.error_code) == (
        Ending.UPSTREAM_ERROR,
        None,
        "upstream_connect_failed",
    )


async def test_a_defect_of_ours_costs_what_the_engine_has_done_by_then() -> None:
    world = World(FakeReply(*EVENTS, DONE))
    world.caller.fails_at_write = RuntimeError("a defect")
    with pytest.raises(RuntimeError):
        await world.serve(stream=True)
    assert world.outcome() == Outcome(Ending.FAILED, 500, Usage(21, 1))


# --- comments in a silent stream ----------------------------------------------------------------------------


@pytest.mark.parametrize(("keepalive_s", "is_stream"), [(0, True), (15, False), (15, True)])
async def test_only_a_stream_is_kept_alive_and_only_where_the_config_says_so(keepalive_s: int, is_stream: bool) -> None:
    world = World(
        FakeReply(*EVENTS, DONE) if is_stream else FakeReply(plain_answer()), gateway={"sse_keepalive_s": keepalive_s}
    )
    await world.serve(stream=is_stream)
    if keepalive_s and is_stream:
        assert world.caller.comments is not None
        interval_s, headers = world.caller.comments
        assert interval_s == 15 and headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    else:
        assert world.caller.comments is None


# --- the caller leaves: what a cut-off answer costs ---------------------------------------------------------


async def test_leaving_before_the_first_event_costs_the_prompt() -> None:
    silence = Silence()
    world = World(FakeReply(silence))
    await world.serve_until(silence, stream=True)
    assert world.outcome() == Outcome(Ending.CLIENT_GONE, 499, Usage(world.prompt_tokens, 0))


async def test_leaving_a_plain_request_costs_the_prompt_as_well() -> None:
    for script in (lambda s: s, FakeReply):  # before the head of the reply, and before its body
        silence = Silence()
        world = World(script(silence))
        await world.serve_until(silence)
        assert world.outcome() == Outcome(Ending.CLIENT_GONE, 499, Usage(world.prompt_tokens, 0))


async def test_leaving_while_there_is_no_connection_yet_costs_nothing() -> None:
    silence = Silence(is_connected=False)
    world = World(silence)
    await world.serve_until(silence)
    assert world.outcome() == Outcome(Ending.CLIENT_GONE, 499, None)
    assert world.record.attempts == 1


async def test_leaving_after_some_events_costs_prompt_and_events() -> None:
    silence = Silence()
    world = World(FakeReply(*EVENTS[:2], silence))
    await world.serve_until(silence, stream=True)
    assert world.outcome() == Outcome(Ending.CLIENT_GONE, 499, Usage(world.prompt_tokens, 2))
    assert (world.record.ending, world.record.completion_tokens) == ("client_gone", 2)


async def test_leaving_between_usage_and_end_mark_costs_what_the_engine_told() -> None:
    silence = Silence()
    world = World(FakeReply(*EVENTS, usage_event(40, 50), silence))
    await world.serve_until(silence, stream=True)
    assert world.outcome() == Outcome(Ending.CLIENT_GONE, 499, Usage(40, 50))


async def test_a_gateway_that_stops_after_the_end_mark_has_completed_the_request() -> None:
    silence = Silence()
    world = World(FakeReply(*EVENTS, usage_event(40, 3), DONE, silence))
    task = asyncio.create_task(world.serve(stream=True))
    await silence.reached()
    assert world.caller.is_finished
    task.cancel()
    await task
    assert world.outcome() == Outcome(Ending.COMPLETED, 200, Usage(40, 3))
    assert (world.record.ending, world.record.error_code) == ("completed", None)


async def test_leaving_while_the_prompt_is_counted_reserves_nothing() -> None:
    silence = Silence()
    world = World(silence)
    await world.serve_until(silence, messages=[{"role": "user", "content": "x" * 5000}])
    assert world.gate.tickets == []


# --- names of endings ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (errors.BadRequest("x"), Ending.REFUSED),
        (errors.LimitExceeded("x"), Ending.REFUSED),
        (errors.NoReplica("x", retry_after_s=1), Ending.REFUSED),
        (errors.StoreUnavailable("x", retry_after_s=1), Ending.REFUSED),
        (errors.ClientGone("x"), Ending.CLIENT_GONE),
        (errors.ConnectFailed("x"), Ending.UPSTREAM_ERROR),
        (errors.UpstreamTimeout("x"), Ending.UPSTREAM_ERROR),
        (errors.InternalError("x"), Ending.FAILED),
    ],
)
def test_an_ending_says_who_ended_it(error: GatewayError, ending: Ending) -> None:
    assert ending_of(error) is ending
