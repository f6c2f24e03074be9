"""The story of one request over a scripted engine: one settlement in every ending, one body per replica."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, cast

import msgspec
import pytest
from fakes.bodies import CHAT_LIKE, MESSAGES
from fakes.story import (
    ALICE,
    DONE,
    FakeCaller,
    FakeGate,
    FakeReply,
    FakeTransport,
    FixedSource,
    Silence,
    a_config,
    a_record,
    a_request,
    event,
    plain_answer,
    replica,
    usage_event,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.admission.gate import Gate
from gateway.dispatch import Dispatcher, ending_of
from gateway.domain import errors
from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import (
    ConnectFailed,
    ContextTooLong,
    EngineBusy,
    EngineDied,
    EngineFailed,
    GatewayError,
    LimitExceeded,
    NoReplica,
    NotAllowed,
    UnknownModel,
    UpstreamBroken,
    UpstreamError,
    UpstreamTimeout,
)
from gateway.domain.outcome import Ending, Outcome, Usage
from gateway.domain.replica import ReplicaRecord, ReplicaState
from gateway.domain.request import InferenceRequest, RateState
from gateway.edge.decode import DENIED_FIELDS, decode
from gateway.fleet.registry import Registry
from gateway.routing.table import RouteTable, routes_of
from gateway.upstream.attempt import Attempts
from gateway.upstream.forward import Forwarder

POOLS = {name: {"urls": [f"http://{name}"]} for name in ("a", "b")}
CHAT = {"aliases": ["gpt"], "targets": [{"pool": "a"}], "fallback": ["b"]}
A, B = replica("a/0@h"), replica("b/0@h")
REFUSED = ConnectFailed("Connection refused.")
EVENTS = (event("Hel"), event("lo"), event("!", "stop"))


class World:
    """A dispatcher between a scripted engine and a caller that listens."""

    def __init__(
        self,
        *script: FakeReply | Exception | Silence,
        fleet: list[ReplicaRecord] | None = None,
        gate: FakeGate | None = None,
        **sections: Any,
    ) -> None:
        config = a_config(**{"pools": POOLS, "routes": {"chat": CHAT}} | sections).config
        self.transport = FakeTransport(*script)
        self.fleet = Registry([FixedSource([A, B] if fleet is None else fleet)])
        self.gate = gate or FakeGate()
        self.caller = FakeCaller(log=self.gate.log)
        self.record = a_record()
        self.dispatcher = Dispatcher(
            config,
            RouteTable(routes_of(config)),
            cast(Gate, self.gate),
            self.fleet,
            Attempts(self.transport, self.fleet, Forwarder(), config.gateway.timeouts, config.gateway.retry),
            Random(1),
        )

    async def serve(self, request: InferenceRequest | None = None, **fields: Any) -> None:
        await self.fleet.refresh()
        await self.dispatcher.serve(request or a_request(**fields), self.caller, self.record)

    async def serve_until(self, silence: Silence, **fields: Any) -> None:
        """The caller leaves when the engine has been silent for a while."""
        task = asyncio.create_task(self.serve(**fields))
        await asyncio.wait_for(silence.reached.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def outcome(self) -> Outcome:
        """Of the one ticket, which was settled exactly once."""
        (ticket,) = self.gate.tickets
        (outcome,) = ticket.outcomes
        assert not self.fleet.in_flight_by_pool()
        return outcome

    @property
    def prompt_tokens(self) -> int:
        """The estimate that the reservation was made with."""
        return self.gate.reserved[0] - 1024


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
    await asyncio.wait_for(silence.reached.wait(), 5)
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


# --- refused before an engine is asked ----------------------------------------------------------------------


async def refused(error: type[GatewayError], world: World, **fields: Any) -> GatewayError:
    with pytest.raises(error) as caught:
        await world.serve(**fields)
    assert world.transport.sent == []
    assert all(ticket.outcomes for ticket in world.gate.tickets)
    return caught.value


async def test_an_unknown_model_never_reaches_the_gate() -> None:
    world = World()
    await refused(UnknownModel, world, model="gpt-9")
    assert world.gate.tickets == []


async def test_a_model_that_the_key_may_not_use_is_refused_under_its_alias_too() -> None:
    world = World()
    with pytest.raises(NotAllowed):
        await world.serve(a_request(model="gpt", principal=replace(ALICE, models=("other",))))
    assert world.gate.tickets == []


async def test_a_limit_refusal_tells_the_callers_headers_what_is_left() -> None:
    rate = RateState(limit_requests=1, remaining_requests=0, reset_requests_s=9)
    world = World(gate=FakeGate(LimitExceeded("full", retry_after_s=9, rate=rate)))
    await refused(LimitExceeded, world)
    assert world.caller.rate == rate


async def test_an_admitted_requests_reply_tells_what_is_left() -> None:
    rate = RateState(limit_requests=10, remaining_requests=9)
    world = World(FakeReply(plain_answer()), gate=FakeGate(rate=rate))
    await world.serve()
    assert world.caller.rate == rate


async def test_nothing_is_reserved_while_every_pool_loads() -> None:
    world = World(fleet=[replica("a/0@h", ReplicaState.STARTING)])
    error = await refused(NoReplica, world)
    assert "a (starting)" in error.message and error.retry_after_s
    assert world.gate.tickets == []


async def test_a_pool_that_goes_away_after_admission_gives_the_reservation_back() -> None:
    world = World()
    real_admit: Callable[..., Any] = world.gate.admit

    async def admit(*args: Any) -> Any:
        ticket = await real_admit(*args)
        world.fleet.set_aside(A, "refused a connection")
        world.fleet.set_aside(B, "refused a connection")
        return ticket

    world.gate.admit = admit  # type: ignore[method-assign]
    await refused(NoReplica, world)
    outcome = world.outcome()
    assert (outcome.ending, outcome.usage, outcome.error_code) == (Ending.REFUSED, None, "model_not_ready")


LONG = [{"role": "user", "content": "x" * 5000}]


async def test_a_prompt_over_every_window_is_refused_before_the_engine_is_asked() -> None:
    world = World(FakeReply(b'{"count": 3000}'))
    with pytest.raises(ContextTooLong, match=r"2048.*3000"):
        await world.serve(messages=LONG)
    assert [request.path for _, request in world.transport.sent] == [b"/tokenize"]
    assert world.gate.tickets == []


def two_pools(a_window: int | None, b_window: int | None) -> dict[str, Any]:
    """As the config says it; None: it does not say."""
    pools: dict[str, Any] = {"a": {"urls": ["http://a"]}, "b": {"urls": ["http://b"]}}
    for name, window in (("a", a_window), ("b", b_window)):
        if window is not None:
            pools[name]["max_model_len"] = window
    return pools


@pytest.mark.parametrize("big_window", [32_768, None])
async def test_a_prompt_for_a_big_model_that_loads_is_a_503_and_not_the_small_models_400(
    big_window: int | None,
) -> None:
    loading = replica("a/0@h", ReplicaState.STARTING, max_model_len=None)
    world = World(FakeReply(b'{"count": 10000}'), fleet=[loading, B], pools=two_pools(big_window, 2048))
    with pytest.raises(NoReplica, match=r"a \(starting\)") as caught:
        await world.serve(messages=LONG)
    assert caught.value.retry_after_s


async def test_a_prompt_that_no_pool_of_the_route_will_ever_hold_is_a_400_even_while_one_loads() -> None:
    loading = replica("a/0@h", ReplicaState.STARTING)
    world = World(FakeReply(b'{"count": 10000}'), fleet=[loading, B], pools=two_pools(2048, 2048))
    with pytest.raises(ContextTooLong):
        await world.serve(messages=LONG)


async def test_a_server_that_is_no_vllm_is_not_asked_to_count() -> None:
    cloud = replica("a/0@h", engine="openai")
    world = World(FakeReply(plain_answer()), fleet=[cloud])
    await world.serve(messages=LONG)
    assert [request.path for _, request in world.transport.sent] == [b"/v1/chat/completions"]
    world = World(FakeReply(b'{"count": 1000}'), FakeReply(plain_answer()), fleet=[cloud, B])
    await world.serve(messages=LONG)
    assert world.transport.urls == [B.url, cloud.url], "counted by the vLLM of the route, served by its target"


async def test_a_fallback_with_a_smaller_window_is_skipped() -> None:
    small = replica("a/0@h", max_model_len=512)
    world = World(FakeReply(b'{"count": 1000}'), FakeReply(plain_answer()), fleet=[small, B])
    await world.serve(messages=LONG)
    assert world.transport.urls == [B.url, B.url], "counted and served by the pool that holds it"


# --- what is sent -------------------------------------------------------------------------------------------


async def body_sent(*, route: dict[str, Any] | None = None, to: ReplicaRecord = A, **fields: Any) -> dict[str, Any]:
    world = World(
        FakeReply(plain_answer()) if not fields.get("stream") else FakeReply(*EVENTS, DONE),
        fleet=[to],
        routes={"chat": CHAT | (route or {})},
        classes={"default": {"priority": 3}},
    )
    await world.serve(**fields)
    (body,) = world.transport.bodies()
    return body


async def test_the_engine_is_asked_for_its_own_name_of_the_model() -> None:
    assert await body_sent(model="gpt") == {"model": "a-model", "messages": MESSAGES}


async def test_priority_goes_only_to_workers_that_are_set_up_for_it() -> None:
    assert "priority" not in await body_sent(n=2)
    assert (await body_sent(n=2, to=replica("a/0@h", has_priority=True)))["priority"] == 3


async def test_usage_is_always_asked_of_a_stream_and_of_nothing_else() -> None:
    assert "stream_options" not in await body_sent()
    assert (await body_sent(stream=True))["stream_options"] == {"include_usage": True}
    assert (await body_sent(stream=True, stream_options=None))["stream_options"] == {"include_usage": True}
    for asked in (True, False, None):
        options = {"include_usage": asked, "x": [1]}
        assert (await body_sent(stream=True, stream_options=options))["stream_options"] == {
            "include_usage": True,
            "x": [1],
        }


async def test_running_usage_is_not_switched_on_behind_the_callers_back() -> None:
    running = {"continuous_usage_stats": True}
    assert (await body_sent(stream=True, stream_options=running))["stream_options"] == {"include_usage": True}
    both = running | {"include_usage": True}
    assert (await body_sent(stream=True, stream_options=both))["stream_options"] == both


async def test_route_defaults_fill_in_only_what_the_caller_left_out() -> None:
    defaults = {"temperature": 0.5, "top_p": 0.9}
    body = await body_sent(route={"defaults": defaults}, temperature=0)
    assert (body["temperature"], body["top_p"]) == (0, 0.9)


async def test_the_routes_cap_is_written_into_the_body() -> None:
    cap = {"max_output_tokens": 100}
    assert (await body_sent(route=cap))["max_tokens"] == 100
    assert (await body_sent(route=cap, max_tokens=50))["max_tokens"] == 50
    assert (await body_sent(route=cap, max_tokens=500))["max_tokens"] == 100
    body = await body_sent(route=cap, max_completion_tokens=500)
    assert body["max_completion_tokens"] == 100 and "max_tokens" not in body
    both = await body_sent(route=cap, max_completion_tokens=500, max_tokens=500)
    assert (both["max_completion_tokens"], both["max_tokens"]) == (100, 100)


async def test_a_clamped_request_is_told_so() -> None:
    world = World(FakeReply(plain_answer()), routes={"chat": CHAT | {"max_output_tokens": 100}})
    await world.serve(max_tokens=500)
    assert world.caller.headers[b"x-poolgate-clamped"] == b"max_tokens"
    world = World(FakeReply(plain_answer()), routes={"chat": CHAT | {"max_output_tokens": 100}})
    await world.serve()
    assert b"x-poolgate-clamped" not in world.caller.headers


async def test_a_cap_nobody_asked_for_fits_the_window_of_the_replica_that_gets_it() -> None:
    world = World(
        REFUSED,
        FakeReply(plain_answer()),
        fleet=[replica("a/0@h", max_model_len=4096), replica("b/0@h", max_model_len=512)],
        routes={"chat": CHAT | {"max_output_tokens": 2000}},
    )
    await world.serve()
    to_a, to_b = world.transport.bodies()
    assert to_a["max_tokens"] == 2000
    assert 400 < to_b["max_tokens"] < 512


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
OURS = {
    "model",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "stream_options",
    "n",
    "best_of",
    "priority",
}
foreign = st.dictionaries(st.text(max_size=10).filter(lambda name: name not in OURS | DENIED_FIELDS), JSON, max_size=5)


@settings(deadline=None)
@given(foreign=foreign, indent=st.sampled_from([None, 1]), is_ascii=st.booleans(), is_stream=st.booleans())
async def test_every_field_that_is_not_ours_reaches_the_engine_byte_for_byte(
    foreign: dict[str, Any], indent: int | None, is_ascii: bool, is_stream: bool
) -> None:
    fields = {"model": "chat", "messages": MESSAGES, "max_tokens": 500, "stream": is_stream, **foreign}
    body = json.dumps(fields, indent=indent, ensure_ascii=is_ascii).encode()
    world = World(
        FakeReply(*EVENTS, DONE) if is_stream else FakeReply(plain_answer()),
        fleet=[replica("a/0@h", has_priority=True, max_model_len=None)],
        routes={"chat": CHAT | {"max_output_tokens": 100, "defaults": {"temperature": 1}}},
    )
    await world.serve(decode(body, Endpoint.CHAT, ALICE, "default", "req-1"))
    raw = msgspec.json.Decoder(dict[str, msgspec.Raw])
    before, after = raw.decode(body), raw.decode(world.transport.sent[0][1].body)
    for name in [*foreign, "messages"]:
        assert bytes(after[name]) == bytes(before[name])
    assert set(after) - set(before) <= {"priority", "temperature", "stream_options"}


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
