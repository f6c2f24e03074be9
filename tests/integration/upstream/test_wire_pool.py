"""Connections that stay: how long they live, when one is used again, what happens when it has gone stale."""

from __future__ import annotations

import asyncio

import pytest
from fakes.scripted_upstream import Peer, plain
from fakes.waits import eventually

from gateway.domain.errors import ConnectFailed, UpstreamBroken, UpstreamTimeout
from gateway.upstream import wire
from gateway.upstream.transport import Deadlines, UpstreamRequest

from .conftest import Pair, wire_transport
from .exchanges import LONG, PATIENT, POST, answer_ok, fetch, sends, silent, stale, tell_and_hang

# --- reuse ----------------------------------------------------------------------------------------------------------


async def test_one_connection_serves_request_after_request(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        for _ in range(20):
            assert await fetch(both, upstream.url) == b"hello"
        assert (upstream.accepted, both.transport.active, both.transport.idle) == (1, 0, 1)


async def test_two_requests_at_once_have_a_connection_each(both: Pair) -> None:
    pair = asyncio.Barrier(2)

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await pair.wait()
            await peer.send(plain(b"hello"))

    async with both.upstream(script) as upstream:
        for _ in range(3):
            assert await asyncio.gather(fetch(both, upstream.url), fetch(both, upstream.url)) == [b"hello"] * 2
        assert (upstream.accepted, both.transport.idle) == (2, 2)


async def test_a_whole_reply_frees_its_connection_before_it_is_read(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        first = await both.transport.send(upstream.url, POST, PATIENT)
        assert both.transport.active == 0
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 1
        assert await first.read_all(10) == b"hello"


@pytest.mark.parametrize(
    "reply", [plain(b"x", b"200 OK", b"connection: close"), b"HTTP/1.0 200 OK\r\ncontent-length: 1\r\n\r\nx"]
)
async def test_a_connection_that_the_engine_wants_to_close_is_not_kept(both: Pair, reply: bytes) -> None:
    async with both.upstream(sends(reply)) as upstream:
        for n in (1, 2):
            assert await fetch(both, upstream.url) == b"x"
            assert (upstream.accepted, both.transport.idle) == (n, 0)


async def test_a_reply_closed_before_its_end_takes_its_connection_along(both: Pair) -> None:
    async with both.upstream(tell_and_hang) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert both.transport.active == 1
        reply.close()
        reply.close()
        assert (both.transport.active, both.transport.idle) == (0, 0)
        await eventually(lambda: upstream.open_connections == 0)
        with pytest.raises(UpstreamBroken):
            await reply.read()


async def test_an_idle_connection_that_speaks_unasked_is_dropped(both: Pair) -> None:
    speak = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await speak.wait()
        await peer.send(b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\n\r\n")
        await peer.closed()

    async with both.upstream(script, answer_ok) as upstream:
        await fetch(both, upstream.url)
        speak.set()
        await eventually(lambda: both.transport.idle == 0)
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 2


async def test_an_idle_connection_closed_by_the_engine_leaves_the_pool(both: Pair) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))

    async with both.upstream(once) as upstream:
        await fetch(both, upstream.url)
        await eventually(lambda: both.transport.idle == 0 and not both.transport._open)
        assert await fetch(both, upstream.url) == b"hello"


async def test_idle_connections_are_closed_before_the_engine_does(both: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SWEEP_S", 0.02)
    async with both.upstream(answer_ok) as upstream, both.upstream(answer_ok) as other:
        await asyncio.gather(*(fetch(both, url) for url in (upstream.url, upstream.url, other.url)))
        assert both.transport.idle == 3
        monkeypatch.setattr(wire, "IDLE_TLS_S" if both.is_tls else "IDLE_S", 0.05)
        await eventually(lambda: both.transport.idle == 0 and upstream.open_connections + other.open_connections == 0)
        await eventually(lambda: both.transport._sweeper is None)
        assert await fetch(both, upstream.url) == b"hello"


async def test_a_connection_idle_too_long_is_not_used_even_before_the_sweep(
    both: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with both.upstream(answer_ok) as upstream:
        await fetch(both, upstream.url)
        monkeypatch.setattr(wire, "IDLE_TLS_S" if both.is_tls else "IDLE_S", -1.0)
        await fetch(both, upstream.url)
        assert upstream.accepted == 2


async def test_idle_connections_and_their_addresses_are_bounded(both: Pair) -> None:
    transport = wire_transport(both.authority, max_idle_per_replica=2, max_idle_replicas=1)
    bounded = Pair(transport, both.authority, both.is_tls)
    async with both.upstream(answer_ok) as upstream, both.upstream(answer_ok) as other:
        await asyncio.gather(*(fetch(bounded, upstream.url) for _ in range(5)))
        await fetch(bounded, other.url)
        assert transport.idle == 2
        await eventually(lambda: upstream.open_connections == 2 and other.open_connections == 0)
        await transport.aclose()


async def test_many_at_once_have_a_connection_each_and_get_their_own_reply(both: Pair) -> None:
    async def echo(peer: Peer) -> None:
        while True:
            request = await peer.request()
            await peer.send(plain(request.body))

    async with both.upstream(echo) as upstream:

        async def one(i: int) -> bool:
            body = b"%d" % i * 100
            return await fetch(both, upstream.url, UpstreamRequest(b"POST", b"/", (), body)) == body

        for _ in range(3):
            assert all(await asyncio.gather(*(one(i) for i in range(40))))
        assert upstream.accepted == both.transport.idle == 40


# --- a stale connection ---------------------------------------------------------------------------------------------


async def test_a_stale_connection_is_replaced_once_and_the_body_sent_again(both: Pair) -> None:
    async with both.upstream(stale, answer_ok) as upstream:
        await fetch(both, upstream.url)
        assert await fetch(both, upstream.url) == b"hello"
        assert upstream.accepted == 2
        assert [r.body for r in upstream.requests] == [POST.body] * 3


async def test_an_engine_that_died_after_working_on_a_request_is_not_given_it_again(both: Pair) -> None:
    async def works_then_dies(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await peer.request()
        await asyncio.sleep(3 * wire.STALE_S)
        peer.reset()

    async with both.upstream(works_then_dies, answer_ok) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert caught.value.request_sent and not caught.value.response_began
        assert len(upstream.requests) == 2


async def test_a_fresh_connection_that_breaks_is_not_tried_again(both: Pair) -> None:
    async def reset(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with both.upstream(stale, reset) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert not caught.value.response_began
        assert upstream.accepted == 2


async def test_an_engine_that_died_with_a_request_and_takes_no_other_one_may_have_seen_it(
    both: Pair,
) -> None:
    """Told as a connection that could not be made, the request would be given to the next engine to die of."""
    async with both.upstream(stale) as upstream:
        await fetch(both, upstream.url)
        assert upstream._listener is not None and upstream._acceptor is not None
        upstream._acceptor.cancel()
        await asyncio.wait({upstream._acceptor})
        upstream._listener.close()
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert caught.value.request_sent and not caught.value.response_began
        assert isinstance(caught.value.__cause__, ConnectFailed)


async def test_no_second_try_once_a_byte_of_the_reply_has_come(both: Pair) -> None:
    async def half(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await peer.request()
        await peer.send(b"H")
        await eventually(lambda: any(c._reply is not None and c._reply.response_began for c in both.transport._open))
        peer.reset()  # which may overtake what was sent before it

    async with both.upstream(half) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert caught.value.response_began
        assert upstream.accepted == 1


async def test_a_timeout_on_a_used_connection_is_not_tried_again(both: Pair) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))
        await silent(peer)

    async with both.upstream(once) as upstream:
        await fetch(both, upstream.url)
        with pytest.raises(UpstreamTimeout):
            await both.transport.send(upstream.url, POST, Deadlines(LONG, 0.05, LONG, LONG))
        assert upstream.accepted == 1


async def test_a_connection_that_the_engine_closed_while_idle_costs_nothing(both: Pair) -> None:
    async def once(peer: Peer) -> None:
        await peer.request()
        await peer.send(plain(b"hello"))

    async with both.upstream(once) as upstream:
        for _ in range(5):
            assert await fetch(both, upstream.url) == b"hello"
            await eventually(lambda: upstream.open_connections == 0)
