"""Attempts over a scripted transport: when another replica is asked, within which bounds, and what travels."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fakes.story import (
    DONE,
    FakeCaller,
    FakeReply,
    FakeTransport,
    FixedSource,
    Silence,
    a_record,
    a_request,
    event,
    plain_answer,
    replica,
    usage_event,
)

from gateway.config.schema import RetrySection, TimeoutsSection
from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import (
    ConnectFailed,
    EngineDied,
    EngineFailed,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import InferenceRequest
from gateway.fleet.registry import Registry
from gateway.upstream.attempt import Attempts, headers_for
from gateway.upstream.body import JSON
from gateway.upstream.forward import Forwarder
from gateway.upstream.journey import Journey
from gateway.upstream.retry import MAX_REFUSED
from gateway.upstream.transport import Deadlines, UpstreamRequest, late

A, B, C = replica("a/0@h"), replica("b/0@h", api_key="engine-b"), replica("c/0@h")
D, E, F = replica("d/0@h"), replica("e/0@h"), replica("f/0@h")
REFUSED = ConnectFailed("No connection to the engine: Connection refused.")
NO_CONNECT = late("connect", "took no connection before")


class World:
    def __init__(self, transport: FakeTransport, **retry: Any) -> None:
        self.transport = transport
        self.fleet = Registry([FixedSource([A, B, C, D, E, F])])
        self.attempts = Attempts(
            transport,
            self.fleet,
            Forwarder(),
            TimeoutsSection(connect_s=1, first_byte_s=2, gap_s=3, total_s=40),
            RetrySection(**retry),
        )
        self.record = a_record()
        self.caller = FakeCaller()
        self.outcomes: list[Outcome] = []

    async def run(self, *candidates: ReplicaRecord, request: InferenceRequest | None = None, **fields: Any) -> Outcome:
        def body_for(replica: ReplicaRecord) -> bytes:
            assert sum(self.fleet.in_flight_by_pool().values()) == 1, "each replica counts while it has the request"
            return replica.id.encode()

        journey = Journey(
            request or a_request(**fields),
            self.caller,
            self.record,
            body_for,
            self.outcomes.append,
            prompt_tokens=30,
            was_clamped=False,
        )
        try:
            return await self.attempts.run(journey, candidates)
        finally:
            assert not self.fleet.in_flight_by_pool()

    def ready(self) -> set[str]:
        return {r.id for r in self.fleet.snapshot().all() if r.is_ready()}

    def aside(self) -> dict[str, str | None]:
        return {r.id: r.detail for r in self.fleet.snapshot().all() if not r.is_ready()}


async def world(*script: FakeReply | Exception | Silence, **retry: Any) -> World:
    made = World(FakeTransport(*script), **retry)
    await made.fleet.refresh()
    return made


def fine() -> FakeReply:
    return FakeReply(plain_answer(7, 3))


def status(number: int, message: str = "no") -> FakeReply:
    return FakeReply(json.dumps({"error": {"message": message, "code": number}}).encode(), status=number)


async def test_the_first_candidate_serves_and_its_reply_is_closed_afterwards() -> None:
    reply = fine()
    made = await world(reply)
    assert await made.run(A, B) == Outcome(Ending.COMPLETED, 200, Usage(7, 3))
    assert reply.is_closed and made.transport.urls == ["http://a/0@h"]
    assert (made.record.attempts, made.record.pool, made.record.replica) == (1, "a", "a/0@h")
    deadlines = made.transport.deadlines[0]
    assert (deadlines.connect_s, deadlines.first_byte_s, deadlines.gap_s, deadlines.total_s) == (1, 2, 3, 40)
    assert made.aside() == {}


# --- what moves on, and what does not ----------------------------------------------------------------------------


MOVES_ON: dict[str, Callable[[], FakeReply | Exception]] = {
    "refused": lambda: REFUSED,
    "blackhole": lambda: NO_CONNECT,
    "never sent": lambda: UpstreamBroken("closed", request_sent=False),
    "500": lambda: status(500),
    "502": lambda: status(502),
    "401": lambda: status(401),
    "429": lambda: status(429),
    "503": lambda: status(503),
    "aborted": lambda: FakeReply(plain_answer(finish="abort")),
    "no json": lambda: FakeReply(b"<html>"),
}
STAYS: dict[str, Callable[[], FakeReply | Exception]] = {
    "reset": lambda: UpstreamBroken("reset"),
    "reset in the body": lambda: FakeReply(b"{", UpstreamBroken("reset", response_began=True)),
    "first byte": lambda: UpstreamTimeout("silent", deadline="first byte"),
    "gap": lambda: FakeReply(b"{", UpstreamTimeout("silent", deadline="gap")),
    "total": lambda: UpstreamTimeout("slow", deadline="total"),
    "died": lambda: status(500, "EngineCore encountered an issue."),
}
IN_FLIGHT = ("reset", "reset in the body", "died")


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


# --- streams -----------------------------------------------------------------------------------------------------


ERROR_EVENT = b'data: {"error":{"message":"out of memory","code":500}}\n\n'


@pytest.mark.parametrize(
    "first",
    [[ERROR_EVENT, DONE], [event("", "abort"), DONE], [event("") + ERROR_EVENT]],
    ids=["error event", "given up", "error behind the role"],
)
async def test_a_stream_that_fails_before_its_first_byte_moves_on(first: list[bytes]) -> None:
    made = await world(FakeReply(*first), FakeReply(event("Hi", "stop"), usage_event(7, 1), DONE))
    assert await made.run(A, B, stream=True) == Outcome(Ending.COMPLETED, 200, Usage(7, 1))
    assert made.caller.body == event("Hi", "stop") + DONE


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


# --- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
async def test_no_more_replicas_are_asked_than_the_config_says(attempts: int) -> None:
    made = await world(*(status(500) for _ in range(6)), attempts=attempts)
    with pytest.raises(EngineFailed):
        await made.run(A, B, C, D, E, F)
    assert len(made.transport.sent) == attempts


async def test_refused_connections_are_not_attempts_and_have_a_bound_of_their_own() -> None:
    made = await world(*([REFUSED] * 6))
    with pytest.raises(ConnectFailed):
        await made.run(A, B, C, D, E, F)
    assert len(made.transport.sent) == MAX_REFUSED
    made = await world(REFUSED, REFUSED, status(500), fine())
    assert (await made.run(A, B, C, D)).ending is Ending.COMPLETED


async def test_a_fleet_with_refused_connections_gets_no_less_because_the_budget_is_spent() -> None:
    made = await world(REFUSED, fine(), share=0)
    assert (await made.run(A, B)).ending is Ending.COMPLETED


async def test_no_share_means_no_further_attempt() -> None:
    made = await world(status(500), fine(), share=0)
    with pytest.raises(EngineFailed):
        await made.run(A, B)
    assert made.transport.urls == [A.url]


async def test_a_fleet_in_trouble_gets_a_share_more_and_not_twice_the_load() -> None:
    made = await world(*(status(500) for _ in range(1000)), share=0.1)
    for _ in range(200):
        with pytest.raises(EngineFailed):
            await made.run(A, B)
    assert 220 <= len(made.transport.sent) <= 231  # the burst, and a tenth


async def test_no_further_attempt_begins_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("gateway.upstream.attempt.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(FakeTransport):
        async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> FakeReply:
            now[0] += 6
            return await super().send(url, request, deadlines)

    made = World(Slow(*(status(500) for _ in range(5))), attempts=5, within_s=10)
    with pytest.raises(EngineFailed):
        await made.run(A, B, C, D, E)
    assert len(made.transport.sent) == 2, "after 6 s another one, after 12 s none"
    assert [deadlines.total_s for deadlines in made.transport.deadlines] == [40, 34], "the total deadline is one"


async def test_a_total_deadline_that_is_used_up_ends_the_next_attempt_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("gateway.upstream.attempt.time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(FakeTransport):
        async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> FakeReply:
            now[0] += 50
            return await super().send(url, request, deadlines)

    made = World(Slow(status(500), fine()), within_s=100)
    await made.run(A, B)
    assert 0 < made.transport.deadlines[1].total_s < 0.01


async def test_without_candidates_behind_it_a_failure_is_told_at_once() -> None:
    made = await world(status(500))
    with pytest.raises(EngineFailed):
        await made.run(A)


# --- what is left out afterwards ---------------------------------------------------------------------------------


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
    with contextlib.suppress(EngineDied):
        outcome = await made.run(A, B, stream=True)
        assert (outcome.ending, outcome.error_code) == (Ending.UPSTREAM_ERROR, "engine_died")
        assert made.outcomes == [outcome]
    assert made.aside() == {A.id: "its engine died"}
    assert made.transport.urls == [A.url] and made.caller.body.startswith(event("Hel") + DEATH)


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


async def test_a_further_attempt_has_a_request_id_of_its_own() -> None:
    made = await world(REFUSED, status(503), fine())
    await made.run(A, B, C)
    ids = [dict(request.headers)[b"x-request-id"] for _, request in made.transport.sent]
    assert ids == [b"req-1", b"req-1-2", b"req-1-3"]


async def test_a_caller_who_leaves_closes_the_reply_and_asks_nobody_else() -> None:
    silence = Silence()
    reply = FakeReply(silence)
    made = await world(reply, fine())
    task = asyncio.create_task(made.run(A, B))
    await silence.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert reply.is_closed and made.transport.urls == [A.url]


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


# --- counting ----------------------------------------------------------------------------------------------------


async def counted(*script: FakeReply | Exception, candidates: tuple[ReplicaRecord, ...] = (A, B)) -> int | None:
    made = await world(*script)
    return await made.attempts.count_tokens(a_request(), candidates)


async def test_the_prompt_is_counted_by_the_engines_own_tokenizer() -> None:
    reply = FakeReply(b'{"count": 31, "max_model_len": 2048, ', b'"tokens": [1, 2]}')
    made = await world(reply)
    assert await made.attempts.count_tokens(a_request(), [B]) == 31
    (url, request), *_ = made.transport.sent
    assert (url, request.path) == (B.url, b"/tokenize")
    assert dict(request.headers)[b"authorization"] == b"Bearer engine-b"
    assert reply.is_closed


async def test_a_replica_that_takes_no_connection_does_not_hinder_the_count() -> None:
    for failure in (REFUSED, NO_CONNECT):
        made = await world(failure, FakeReply(b'{"count": 31}'))
        assert await made.attempts.count_tokens(a_request(), [A, B]) == 31
        assert made.ready() == {B.id, C.id, D.id, E.id, F.id}


@pytest.mark.parametrize(
    "answer",
    [
        FakeReply(b'{"detail":"Not Found"}', status=404),
        FakeReply(b"", status=500),
        FakeReply(b"not json"),
        FakeReply(b"{}"),
        FakeReply(b'{"count": "many"}'),
        FakeReply(b'{"count": 3, "x": "\xff"}'),
        FakeReply(b'{"count": 3, "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        FakeReply(UpstreamBroken("reset")),
        UpstreamTimeout("silent", deadline="first byte"),
        UpstreamBroken("reset"),
    ],
    ids=["404", "500", "no json", "no count", "odd count", "no utf-8", "deep", "broken", "silent", "reset"],
)
async def test_an_engine_that_cannot_count_leaves_the_decision_to_itself(answer: FakeReply | Exception) -> None:
    made = await world(answer)
    await made.attempts.count_tokens(a_request(), [A, B])  # whatever it says, nothing is raised
    assert len(made.transport.sent) == 1


async def test_no_count_is_none() -> None:
    assert await counted(FakeReply(b"{}", status=404)) is None
    assert await counted(REFUSED, REFUSED) is None
    assert await counted(candidates=()) is None
