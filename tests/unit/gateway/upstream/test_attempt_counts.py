"""A prompt counted by an engine's own tokenizer, where one can be asked."""

from __future__ import annotations

import asyncio

import pytest
from fakes.story import FakeReply, a_request, replica

from gateway.domain.errors import UpstreamBroken, UpstreamTimeout
from gateway.domain.replica import ReplicaRecord

from .attempts_world import NO_CONNECT, REFUSED, A, B, C, D, E, F, world


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
        FakeReply(b'{"count": 3, "x": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
        FakeReply(UpstreamBroken("reset")),
        UpstreamTimeout("silent", deadline="first byte"),
        UpstreamBroken("reset"),
    ],
    ids=["404", "500", "no json", "no count", "odd count", "deep", "broken", "silent", "reset"],
)
async def test_an_engine_that_cannot_count_leaves_the_decision_to_itself(answer: FakeReply | Exception) -> None:
    made = await world(answer)
    assert await made.attempts.count_tokens(a_request(), [A, B]) is None
    assert len(made.transport.sent) == 1


async def test_bad_text_beside_a_count_is_no_matter() -> None:
    assert await counted(FakeReply(b'{"count": 3, "x": "\xff"}')) == 3


async def test_no_count_is_none() -> None:
    assert await counted(FakeReply(b"{}", status=404)) is None
    assert await counted(REFUSED, REFUSED) is None
    assert await counted(candidates=()) is None


async def test_the_same_prompt_again_costs_no_second_call() -> None:
    made = await world(FakeReply(b'{"count": 31}'), FakeReply(b'{"count": 8}'), FakeReply(b'{"count": 32}'))
    ask = made.attempts.count_tokens
    assert [await ask(a_request(), [A]), await ask(a_request(max_tokens=9), [A])] == [31, 31]
    assert await ask(a_request(messages=[{"role": "user", "content": "another"}]), [A]) == 8
    assert await ask(a_request(), [B]) == 32, "another pool has another tokenizer"
    assert len(made.transport.sent) == 3


async def test_a_prompt_that_could_not_be_counted_is_asked_for_again() -> None:
    made = await world(FakeReply(b"{}", status=500), REFUSED, FakeReply(b'{"count": 31}'))
    assert await made.attempts.count_tokens(a_request(), [A]) is None
    assert await made.attempts.count_tokens(a_request(), [A]) is None
    assert await made.attempts.count_tokens(a_request(), [A]) == 31


@pytest.mark.parametrize("second", [B, replica("a/1@h")], ids=["other pool", "same pool"])
async def test_callers_who_share_a_refused_connection_share_the_next_one_too(second: ReplicaRecord) -> None:
    made = await world(REFUSED, FakeReply(b'{"count": 31}'))
    replicas = [A, second]
    assert await asyncio.gather(*(made.attempts.count_tokens(a_request(), replicas) for _ in range(4))) == [31] * 4
    assert len(made.transport.sent) == 2
