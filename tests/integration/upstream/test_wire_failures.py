"""An engine that cannot be reached or breaks off: told for what it is, and nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator

import pytest
from fakes.scripted_upstream import Peer
from fakes.waits import eventually

from gateway.domain.errors import ConnectFailed, OutOfDescriptors, UpstreamBroken, UpstreamTimeout
from gateway.upstream.transport import Deadlines

from .conftest import Pair
from .exchanges import LONG, PATIENT, POST, answer_ok, fetch, resets_when_told, stale


@pytest.mark.parametrize(
    ("url", "words", "address"),
    [
        ("https://no-such-host.invalid:8000", "does not resolve", "invalid"),
        ("http://no-such-host.invalid:8000", "does not resolve", "invalid"),
        (f"http://{'a' * 70}.invalid:8000", "does not resolve", "invalid"),
        ("unix:/nonexistent/vllm.sock", "No such file", "/nonexistent"),
    ],
)
async def test_no_connection_is_told_in_words_without_the_address(
    plain_only: Pair, url: str, words: str, address: str
) -> None:
    with pytest.raises(ConnectFailed, match=words) as caught:
        await plain_only.transport.send(url, POST, PATIENT)
    assert address not in caught.value.message


async def test_connect_refused_is_told_in_words_without_the_address(both: Pair) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))  # bound, so that nobody else gets it, and not listening
        port = sock.getsockname()[1]
        with pytest.raises(ConnectFailed, match="Connection refused") as caught:
            await both.transport.send(f"{both.scheme}://127.0.0.1:{port}", POST, PATIENT)
    assert str(port) not in caught.value.message and "127.0.0.1" not in caught.value.message
    assert not both.transport._open


async def test_no_file_descriptor_left_is_named_as_our_own_trouble(both: Pair) -> None:
    async with both.upstream(answer_ok) as upstream:
        await fetch(both, upstream.url)
        busy = await both.transport.send(upstream.url, POST, PATIENT)
        with no_descriptor_left(), pytest.raises(OutOfDescriptors):
            await both.transport.send(f"{both.scheme}://127.0.0.1:1", POST, PATIENT)
        busy.close()


async def test_no_descriptor_for_a_second_try_does_not_hide_that_an_engine_died_with_the_request(both: Pair) -> None:
    async with both.upstream(stale) as upstream:
        await fetch(both, upstream.url)
        with no_descriptor_left(), pytest.raises(UpstreamBroken) as caught:
            await fetch(both, upstream.url)
        assert caught.value.request_sent and isinstance(caught.value.__cause__, OutOfDescriptors)
        assert len(upstream.requests) == 2


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """What is open stays; nothing can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_the_caller_of_send_hears_when_a_replica_may_have_the_request(both: Pair) -> None:
    told: list[str] = []
    request = POST._replace(on_send=lambda: told.append("sent"))
    async with both.deaf() as url:
        with pytest.raises(UpstreamTimeout):
            await both.transport.send(url, request, Deadlines(0.2, LONG, LONG, LONG))
    assert told == []
    async with both.upstream(answer_ok) as upstream:
        for count in (1, 2):  # on a new connection, and on a kept one
            await fetch(both, upstream.url, request)
            assert told == ["sent"] * count and upstream.accepted == 1


async def test_reset_before_the_head_is_broken_and_no_byte_had_come(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        await peer.request()
        peer.reset()

    async with both.upstream(script) as upstream:
        with pytest.raises(UpstreamBroken) as caught:
            await both.transport.send(upstream.url, POST, PATIENT)
        assert not caught.value.response_began
        assert not both.transport._open


async def test_reset_after_the_head_is_broken_not_a_short_success(both: Pair) -> None:
    go_on = asyncio.Event()
    async with both.upstream(resets_when_told(go_on)) as upstream:
        reply = await both.transport.send(upstream.url, POST, PATIENT)
        assert await reply.read() == b"one"
        go_on.set()
        for _ in range(2):
            with pytest.raises(UpstreamBroken) as caught:
                await reply.read()
            assert caught.value.response_began


async def test_an_engine_that_hangs_up_on_accept_is_broken(both: Pair) -> None:
    async def script(peer: Peer) -> None:
        peer.reset()

    async with both.upstream(script) as upstream:
        for _ in range(20):
            with pytest.raises((UpstreamBroken, ConnectFailed)):
                await both.transport.send(upstream.url, POST, PATIENT)
        await eventually(lambda: not both.transport._open)
