"""An engine that cannot be reached or breaks off: told for what it is, and nothing stays open."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket

import pytest
from fakes.scripted_upstream import Peer
from fakes.waits import eventually

from gateway.domain.errors import ConnectFailed, OutOfDescriptors, UpstreamBroken

from .conftest import Pair
from .exchanges import PATIENT, POST, answer_ok, fetch, resets_when_told


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
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        busy = await both.transport.send(upstream.url, POST, PATIENT)
        held = [os.open(os.devnull, os.O_RDONLY)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + 8, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            with pytest.raises(OutOfDescriptors):
                await both.transport.send(f"{both.scheme}://127.0.0.1:1", POST, PATIENT)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in held:
                os.close(fd)
        busy.close()


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
