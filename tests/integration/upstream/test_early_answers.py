"""Engines that refuse a long request before they have read it, and reset the connection behind their answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.scripted_upstream import Peer, ScriptedUpstream, plain
from fakes.waits import eventually

from gateway.domain.errors import UpstreamBroken
from gateway.upstream.transport import Deadlines, UpstreamRequest

from .conftest import Pair

PATIENT = Deadlines(connect_s=10, first_byte_s=10, gap_s=10, total_s=20)
ROUNDS = 15


def post() -> UpstreamRequest:
    return UpstreamRequest(b"POST", b"/v1/chat/completions", (), b"x" * 8_000_000)


@pytest.mark.parametrize("taken", [0, 1_000_000], ids=["nothing taken", "something taken"])
@pytest.mark.parametrize("answer", [b"too long", b"too long " * 3_000], ids=["short", "some kilobytes"])
async def test_an_answer_with_a_reset_behind_it_is_lost_to_the_body_that_is_still_on_its_way(
    both: Pair, answer: bytes, taken: int
) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.take(taken)
        await peer.send(plain(answer, b"413 Content Too Large"))
        peer.reset()

    async with both.upstream(refuse) as upstream:
        for _ in range(ROUNDS):
            reply = await both.transport.send(upstream.url, post(), PATIENT)
            assert (reply.status, await reply.read_all(1 << 20)) == (413, answer)
            reply.close()
        await eventually(lambda: both.transport.idle == 0)


async def test_an_answer_larger_than_what_may_wait_here_is_kept_too(plain_only: Pair, tmp_path: Path) -> None:
    answer = b"too long " * 20_000

    async def refuse(peer: Peer) -> None:
        await peer.send(plain(answer, b"413 Content Too Large"))
        raise ConnectionResetError  # closes, with the body unread

    path = str(tmp_path / "s")
    async with ScriptedUpstream(refuse, socket_path=path) as upstream:
        for _ in range(ROUNDS):
            reply = await plain_only.transport.send(upstream.url, post(), PATIENT)
            assert (reply.status, await reply.read_all(1 << 20)) == (413, answer)
            reply.close()


async def test_half_an_answer_before_a_reset_is_no_whole_one(both: Pair) -> None:
    async def refuse(peer: Peer) -> None:
        await peer.send(plain(b"too long", b"413 Content Too Large")[:-3])
        peer.reset()

    async with both.upstream(refuse) as upstream:
        with pytest.raises(UpstreamBroken):
            reply = await both.transport.send(upstream.url, post(), PATIENT)
            try:
                assert await reply.read() == b"too l"
                await reply.read()
            finally:
                reply.close()


async def test_a_reset_without_an_answer_is_told_as_one(both: Pair) -> None:
    async def reset(peer: Peer) -> None:
        peer.reset()

    async with both.upstream(reset) as upstream:
        with pytest.raises(UpstreamBroken) as caught:
            await both.transport.send(upstream.url, post(), PATIENT)
        assert not caught.value.response_began and not caught.value.request_sent
