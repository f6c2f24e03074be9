"""Requests that dispatch refuses before an engine is asked: nothing is sent, nothing stays reserved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fakes.story import ALICE, FakeGate, FakeReply, a_request, plain_answer, replica

from gateway.domain.errors import ContextTooLong, GatewayError, LimitExceeded, NoReplica, NotAllowed, UnknownModel
from gateway.domain.outcome import Ending
from gateway.domain.replica import ReplicaState
from gateway.domain.request import RateState

from .dispatch_world import A, B, World


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
