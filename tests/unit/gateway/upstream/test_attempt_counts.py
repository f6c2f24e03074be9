"""A prompt counted by an engine's own tokenizer, where one can be asked."""

from __future__ import annotations

import pytest
from fakes.story import FakeReply, a_request

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
