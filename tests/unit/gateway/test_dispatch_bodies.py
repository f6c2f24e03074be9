"""What dispatch sends to an engine: one body per replica, the caller's own fields untouched."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from fakes.bodies import MESSAGES
from fakes.story import ALICE, DONE, FakeReply, plain_answer, replica
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.domain.endpoint import Endpoint
from gateway.domain.replica import ReplicaRecord
from gateway.edge.decode import DENIED_FIELDS, decode

from .dispatch_world import CHAT, EVENTS, REFUSED, A, World


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
