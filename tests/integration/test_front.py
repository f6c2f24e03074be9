"""What the gateway relies on from its server, for proxied paths and all others, tried on a real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path

import pytest

PROBE = Path(__file__).parents[1] / "fakes" / "front_probe.py"
WITHIN_S = 15.0


@dataclass
class Probe:
    """The probe's process; `told` is what it printed so far."""

    process: asyncio.subprocess.Process
    port: int
    told: list[str] = field(default_factory=list)

    async def tells(self, line: str, within_s: float = WITHIN_S) -> None:
        """Returns once the probe has printed `line`; TimeoutError after the deadline, AssertionError when it ended."""
        assert self.process.stdout is not None
        async with asyncio.timeout(within_s):
            while line not in self.told:
                read = await self.process.stdout.readline()
                assert read, f"probe ended without {line!r}; it said {self.told[-5:]}"
                self.told.append(read.decode().strip())

    async def rest(self) -> list[str]:
        """Everything it prints until its end."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WITHIN_S):
            self.told += (await self.process.stdout.read()).decode().split("\n")
        return self.told

    def client(self, *, receive_buffer: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            sock.connect(("127.0.0.1", self.port))
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        return sock


@asynccontextmanager
async def running_probe(drain_s: float = 10, head_s: float = 10, write_s: float = 60) -> AsyncIterator[Probe]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(PROBE), str(drain_s), str(head_s), str(write_s), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        first = await asyncio.wait_for(process.stdout.readline(), WITHIN_S)
        yield Probe(process, int(first.split()[1]))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def told_to_stop(
    path: str, drain_s: float, number: signal.Signals = signal.SIGTERM
) -> AsyncIterator[tuple[Probe, socket.socket]]:
    """A probe that got the signal in the midst of a reply, and the client that it replies to."""
    async with running_probe(drain_s=drain_s) as probe:
        with probe.client() as client:
            await ask(client, path)
            await probe.tells("entered")
            probe.process.send_signal(number)
            yield probe, client


async def ask(sock: socket.socket, path: str) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def read_to_end(sock: socket.socket) -> bytes:
    """Until the server closes, or resets because we sent on."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(WITHIN_S):
            while data := await asyncio.get_running_loop().sock_recv(sock, 65_536):
                got += data
    return got


async def read_until(sock: socket.socket, end: bytes) -> None:
    got = b""
    async with asyncio.timeout(WITHIN_S):
        while not got.endswith(end):
            data = await asyncio.get_running_loop().sock_recv(sock, 65_536)
            assert data, f"closed after {got!r}"
            got += data


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


BOTH = pytest.mark.parametrize("lane", ["", "/app"], ids=["proxied", "app"])


@BOTH
@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["fin", "rst"])
@pytest.mark.parametrize("path", ["/wait", "/stream"])
async def test_a_client_that_leaves_is_noticed(path, leave, lane):
    async with running_probe() as probe:
        client = probe.client()
        await ask(client, lane + path)
        await probe.tells("entered")
        leave(client)
        await probe.tells("client gone")


@BOTH
async def test_send_blocks_while_the_client_does_not_read(lane):
    async with running_probe() as probe:
        with probe.client(receive_buffer=65_536) as client:
            await ask(client, lane + "/flood")
            with pytest.raises(TimeoutError):
                await probe.tells("all sent", within_s=2)
            await asyncio.get_running_loop().sock_recv(client, 1)
            before = len(probe.told)
            drained = asyncio.create_task(drain(client))
            await probe.tells("all sent")
            drained.cancel()
        assert before < 400  # of 1,600 chunks: what fits the kernel's buffers, not the reply


async def test_a_client_that_never_reads_on_is_cut():
    async with running_probe(write_s=0.5) as probe:
        with probe.client(receive_buffer=65_536) as client:
            await ask(client, "/flood")
            await probe.tells("client gone")
            assert "all sent" not in probe.told


async def test_a_client_that_reads_slowly_all_the_time_is_not_cut():
    """What it takes shows in the kernel's queue long before there is room for the next write."""
    loop = asyncio.get_running_loop()
    async with running_probe(write_s=1) as probe:
        with probe.client(receive_buffer=65_536) as client:
            await ask(client, "/flood")
            until = loop.time() + 5
            while loop.time() < until:
                assert await loop.sock_recv(client, 16_384)
                await asyncio.sleep(0.05)
            drained = asyncio.create_task(drain(client))
            await probe.tells("all sent")
            drained.cancel()
            assert "client gone" not in probe.told


async def test_a_big_upload_arrives_whole():
    async with running_probe() as probe:
        with probe.client() as client:
            size = 20_000_000
            head = b"POST /body HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % size
            sending = asyncio.create_task(asyncio.get_running_loop().sock_sendall(client, head + bytes(size)))
            assert (await read_to_end(client)).endswith(b"\r\n\r\n%d" % size)
            await sending


async def drain(sock: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, 1 << 20):
        pass


@BOTH
async def test_sigterm_lets_a_stream_finish_and_takes_no_new_connection(lane):
    async with told_to_stop(lane + "/until-told", drain_s=10) as (probe, client):
        assert (await read_to_end(client)).endswith(b"whole\r\n0\r\n\r\n")
        assert await asyncio.wait_for(probe.process.wait(), WITHIN_S) == 0
        with pytest.raises(ConnectionRefusedError):
            probe.client()


@BOTH
async def test_new_connections_are_refused_while_a_stream_drains(lane):
    async with told_to_stop(lane + "/stream", drain_s=30) as (probe, _), asyncio.timeout(WITHIN_S):
        while True:
            try:
                probe.client().close()
            except ConnectionRefusedError:
                break
            await asyncio.sleep(0.02)
        assert probe.process.returncode is None


@BOTH
async def test_grace_time_ends_a_stream_that_may_still_say_why(lane):
    """The handler is cancelled, its clean-up is waited for, and only then does the app end."""
    async with told_to_stop(lane + "/stream", drain_s=0.1) as (probe, client):
        assert (await read_to_end(client)).endswith(b"bye\n\r\n0\r\n\r\n")
        told = await probe.rest()
        assert [line for line in told if line in ("cancelled", "cleaned up", "lifespan ends")] == [
            "cancelled",
            "cleaned up",
            "lifespan ends",
        ]
        assert await asyncio.wait_for(probe.process.wait(), WITHIN_S) == 0


@BOTH
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait_for_the_grace_time(number, lane):
    async with told_to_stop(lane + "/stream", drain_s=600, number=number) as (probe, client):
        async with asyncio.timeout(WITHIN_S):
            while b"bye" not in await asyncio.get_running_loop().sock_recv(client, 65_536):
                probe.process.send_signal(number)
        assert "lifespan ends" in await probe.rest()
        assert await asyncio.wait_for(probe.process.wait(), WITHIN_S) == 0


@pytest.mark.parametrize("path", ["/plain", "/app"])
async def test_an_idle_connection_does_not_hold_up_a_stop(path):
    async with running_probe(drain_s=600) as probe:
        with probe.client() as client:
            await ask(client, path)
            await asyncio.get_running_loop().sock_recv(client, 1)
            probe.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(WITHIN_S):
                assert await asyncio.wait_for(probe.process.wait(), WITHIN_S) == 0


async def test_a_head_without_end_is_refused():
    async with running_probe() as probe:
        with probe.client() as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: ")
            sending = asyncio.create_task(send_for_ever(client))
            head, _, body = (await read_to_end(client)).partition(b"\r\n\r\n")
            sending.cancel()
        assert head.startswith(b"HTTP/1.1 431 ")
        assert json.loads(body)["error"]["code"] == "request_head_too_large"


async def send_for_ever(sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await asyncio.get_running_loop().sock_sendall(sock, b"a" * 8_000)


@pytest.mark.parametrize(
    "begin", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"\r\n"], ids=["silent", "half", "blank"]
)
async def test_a_head_that_never_comes_is_not_waited_for(begin):
    async with running_probe(head_s=0.3) as probe:
        with probe.client() as client:
            await asyncio.get_running_loop().sock_sendall(client, begin)
            assert await read_to_end(client) == b""


@BOTH
async def test_a_running_reply_outlives_the_time_for_a_head(lane):
    async with running_probe(head_s=0.2) as probe:
        with probe.client() as client:
            await ask(client, lane + "/stream")
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HT")  # half a pipelined request
            got = b""
            async with asyncio.timeout(WITHIN_S):
                while got.count(b"tick") < 60:
                    got += await asyncio.get_running_loop().sock_recv(client, 65_536)


@pytest.mark.parametrize("path", ["/plain", "/app"])
async def test_a_body_that_nobody_reads_is_not_taken_for_ever(path):
    async with running_probe(head_s=0.5) as probe:
        with probe.client() as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(
                client, b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" % path.encode()
            )

            async def drip():
                while True:
                    await loop.sock_sendall(client, b"1\r\nx\r\n")
                    await asyncio.sleep(0.1)

            dripping = asyncio.create_task(drip())
            try:
                assert (await read_to_end(client)).startswith(b"HTTP/1.1 200")
            finally:
                dripping.cancel()
                await asyncio.gather(dripping, return_exceptions=True)


@pytest.mark.parametrize("path", ["/plain", "/app"])
async def test_a_body_that_ends_after_the_reply_leaves_the_connection_open(path):
    async with running_probe(head_s=0.5) as probe:
        with probe.client() as client:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(
                client, b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n1" % path.encode()
            )
            await read_until(client, b"ok")
            await loop.sock_sendall(client, b"23")
            await asyncio.sleep(0.7)  # longer than it may take
            await ask(client, path)
            await read_until(client, b"ok")


async def test_garbage_is_answered_in_the_error_envelope():
    async with running_probe() as probe:
        with probe.client() as client:
            await asyncio.get_running_loop().sock_sendall(client, b"\x00\xff no http\r\n\r\n")
            head, _, body = (await read_to_end(client)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_an_ambiguous_body_length_is_refused():
    async with running_probe() as probe:
        with probe.client() as client:
            await asyncio.get_running_loop().sock_sendall(
                client,
                b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            )
            assert (await read_to_end(client)).startswith(b"HTTP/1.1 400 ")


@BOTH
async def test_replies_tell_the_time_of_day(lane):
    dates: set[str] = set()
    async with running_probe() as probe, asyncio.timeout(WITHIN_S):
        with probe.client() as client:
            while len(dates) < 2:
                await ask(client, lane or "/plain")
                head = await asyncio.get_running_loop().sock_recv(client, 65_536)
                dates |= {line[6:].decode() for line in head.split(b"\r\n") if line.lower().startswith(b"date: ")}
                await asyncio.sleep(0.05)
    first, second = sorted(parsedate_to_datetime(date) for date in dates)
    assert second > first
    assert abs(datetime.now(UTC) - second) < timedelta(minutes=1)
