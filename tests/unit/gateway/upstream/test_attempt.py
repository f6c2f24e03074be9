"""Attempts over a scripted transport: when another replica is tried, and what travels to an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fakes.story import FakeReply, FakeTransport, FixedSource, Silence, a_record, a_request, replica

from gateway.config.schema import TimeoutsSection
from gateway.domain.errors import ConnectFailed, UpstreamBroken, UpstreamError, UpstreamTimeout
from gateway.domain.replica import ReplicaRecord
from gateway.domain.request import Endpoint, InferenceRequest
from gateway.fleet.registry import Registry
from gateway.upstream.attempt import Attempts, Sent, headers_for, tokenize_body

A, B, C = replica("a/0@h"), replica("b/0@h", api_key="engine-b"), replica("c/0@h")
REFUSED = ConnectFailed("No connection to the engine: Connection refused.")
NO_CONNECT = UpstreamTimeout("The engine took no connection before the connect deadline.", deadline="connect")


class World:
    def __init__(self, transport: FakeTransport) -> None:
        self.transport = transport
        self.fleet = Registry([FixedSource([A, B, C])])
        self.attempts = Attempts(
            transport, self.fleet, TimeoutsSection(connect_s=1, first_byte_s=2, gap_s=3, total_s=4)
        )
        self.record = a_record()

    async def send(self, *candidates: ReplicaRecord, request: InferenceRequest | None = None) -> Sent:
        """Until the reply's head has come; the block that reads it ends at once."""

        def body_for(replica: ReplicaRecord) -> bytes:
            return replica.id.encode()

        async with self.attempts.send(request or a_request(), candidates, body_for, self.record) as sent:
            assert self.fleet.in_flight_total() == 1
            return sent

    async def ready(self) -> set[str]:
        return {r.id for r in self.fleet.snapshot().all() if r.is_ready()}


async def world(*script: FakeReply | Exception | Silence) -> World:
    made = World(FakeTransport(*script))
    await made.fleet.refresh()
    return made


async def test_the_first_candidate_serves_and_its_reply_is_closed_afterwards() -> None:
    reply = FakeReply(b"{}")
    made = await world(reply)
    sent = await made.send(A, B)
    assert (sent.reply, sent.replica) == (reply, A)
    assert reply.is_closed and made.fleet.in_flight_total() == 0
    assert made.transport.urls == ["http://a/0@h"]
    assert (made.record.attempts, made.record.pool, made.record.replica) == (1, "a", "a/0@h")
    deadlines = made.transport.deadlines[0]
    assert (deadlines.connect_s, deadlines.first_byte_s, deadlines.gap_s, deadlines.total_s) == (1, 2, 3, 4)


@pytest.mark.parametrize("failure", [REFUSED, NO_CONNECT], ids=["refused", "blackhole"])
async def test_a_replica_that_takes_no_connection_is_passed_over_and_left_out(failure: UpstreamError) -> None:
    made = await world(failure, FakeReply(b"{}"))
    sent = await made.send(A, B)
    assert sent.replica == B
    assert (made.record.attempts, made.record.pool) == (2, "b")
    assert await made.ready() == {"b/0@h", "c/0@h"}
    assert made.fleet.in_flight_total() == 0
    assert [request.body for _, request in made.transport.sent] == [b"a/0@h", b"b/0@h"], "each gets a body of its own"


async def test_a_second_attempt_has_a_request_id_of_its_own() -> None:
    made = await world(REFUSED, FakeReply(b"{}"))
    await made.send(A, B)
    first, second = (dict(request.headers)[b"x-request-id"] for _, request in made.transport.sent)
    assert (first, second) == (b"req-1", b"req-1-2")


async def test_no_more_than_two_replicas_are_tried() -> None:
    made = await world(REFUSED, REFUSED, FakeReply(b"{}"))
    with pytest.raises(ConnectFailed):
        await made.send(A, B, C)
    assert made.transport.urls == [A.url, B.url]
    assert made.fleet.in_flight_total() == 0


@pytest.mark.parametrize(
    "failure",
    [
        UpstreamBroken("reset"),
        UpstreamBroken("reset", response_began=True),
        UpstreamTimeout("silent", deadline="first byte"),
        UpstreamTimeout("silent", deadline="total"),
    ],
    ids=["broken", "broken late", "first byte", "total"],
)
async def test_a_replica_that_may_have_seen_the_request_is_the_last_one_tried(failure: UpstreamError) -> None:
    made = await world(failure, FakeReply(b"{}"))
    with pytest.raises(type(failure)):
        await made.send(A, B)
    assert made.transport.urls == [A.url]
    assert await made.ready() == {"a/0@h", "b/0@h", "c/0@h"}
    assert made.fleet.in_flight_total() == 0


@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_no_answer_of_an_engine_is_retried(status: int) -> None:
    made = await world(FakeReply(b"{}", status=status), FakeReply(b"{}"))
    assert (await made.send(A, B)).reply.status == status
    assert made.transport.urls == [A.url]


async def test_a_failure_after_the_head_closes_the_reply_and_tries_nobody_else() -> None:
    reply = FakeReply(b"{}")
    made = await world(reply, FakeReply(b"{}"))
    with pytest.raises(UpstreamBroken):
        async with made.attempts.send(a_request(), [A, B], lambda _: b"", made.record):
            raise UpstreamBroken("after some text")
    assert reply.is_closed
    assert made.transport.urls == [A.url]
    assert made.fleet.in_flight_total() == 0


# --- what travels ------------------------------------------------------------------------------------------------


def test_the_engines_key_goes_to_the_engine_and_no_other_credential_does() -> None:
    request = a_request()
    request.headers = ((b"traceparent", b"00-x"),)
    with_key = headers_for(request, B, 1)
    assert (b"authorization", b"Bearer engine-b") in with_key
    assert [name for name, _ in headers_for(request, A, 1)] == [b"content-type", b"x-request-id", b"traceparent"]


async def test_each_replica_gets_its_own_key_only() -> None:
    made = await world(REFUSED, FakeReply(b"{}"))
    await made.send(A, B)
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
        assert await made.ready() == {"b/0@h", "c/0@h"}


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


def body_to_count(endpoint: Endpoint = Endpoint.CHAT, **fields: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(tokenize_body(a_request(endpoint=endpoint, **fields), A))
    return decoded


def test_tools_and_template_settings_are_counted_with_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    body = body_to_count(
        tools=tools,
        chat_template_kwargs={"enable_thinking": False},
        add_special_tokens=True,
        max_tokens=5,
        temperature=1,
    )
    assert body == {
        "model": "a-model",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
        "add_special_tokens": True,
    }


def test_a_plain_prompt_is_counted_as_it_will_be_read() -> None:
    body = body_to_count(Endpoint.COMPLETIONS, add_special_tokens=False, max_tokens=5)
    assert body == {"model": "a-model", "prompt": "Once", "add_special_tokens": False}
