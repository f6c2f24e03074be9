"""Every request of the open loop has one fate, and only those of the measured time count."""

from __future__ import annotations

import asyncio
from time import perf_counter

import pytest
from fakes.kept_transport import KeptTransport

from bench.overload.arrivals import Arrival
from bench.overload.load import Client, Fate, OpenLoop, Request, summary

OK = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n"
TOKEN = b"b\r\ndata: {}\n\n\n\r\n"
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 2\r\n\r\n{}"


class Other(KeptTransport):
    """The other side of a connection, which answers the request that is written to it."""

    def __init__(self, client: Client, reply: bytes) -> None:
        super().__init__()
        self._client, self._reply = client, reply

    def write(self, data: bytes | bytearray | memoryview) -> None:
        super().write(data)
        asyncio.get_running_loop().call_soon(self._client.data_received, self._reply)


async def fate_of(reply: bytes, patience_s: float = 5.0) -> tuple[Request, OpenLoop, Other]:
    """Of one request, sent on a connection that is there already."""
    loop = OpenLoop(1, {"a": b"request"}, patience_s)
    client = Client()
    other = Other(client, reply)
    client.connection_made(other)
    client.idle_since = perf_counter()
    loop._idle.append(client)
    await loop.run([Arrival(0.0, "a")])
    [request] = loop.done
    assert other.written == b"request"
    return request, loop, other


async def test_a_whole_stream_is_served_and_its_connection_kept() -> None:
    request, loop, _ = await fate_of(OK + b"X-Poolgate-Queue-Ms: 42\r\n\r\n" + TOKEN + END)
    assert (request.fate, request.queue_ms, request.fault) == ("served", 42.0, "")
    assert 0 < request.first_ms <= request.ended_s * 1e3 and len(loop._idle) == 1


async def test_without_the_header_a_reply_has_not_waited() -> None:
    request, _, _ = await fate_of(OK + b"\r\n" + TOKEN + END)
    assert request.queue_ms == 0


@pytest.mark.parametrize("status", [b"503 Service Unavailable", b"429 Too Many Requests"])
async def test_a_refusal_is_no_failure(status: bytes) -> None:
    request, _, _ = await fate_of(BUSY.replace(b"503 Service Unavailable", status))
    assert request.fate == "refused"


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (OK + b"\r\n" + TOKEN + b"0\r\n\r\n", "ended without [DONE]"),
        (BUSY.replace(b"503", b"500"), "status 500"),
    ],
)
async def test_a_broken_stream_and_any_other_status_are_failures(reply: bytes, fault: str) -> None:
    request, loop, other = await fate_of(reply)
    assert (request.fate, request.fault) == ("failed", fault)
    assert loop._idle == [] and other.is_aborted


async def test_who_has_no_token_in_time_gives_up_and_leaves() -> None:
    request, loop, other = await fate_of(OK + b"\r\n", patience_s=0.0)
    assert (request.fate, request.first_ms) == ("gave_up", 0.0)
    assert loop._idle == [] and other.is_aborted


def request(due_s: float, fate: Fate = "served", ended_s: float = 0.0, fault: str = "") -> Request:
    return Request("a", due_s, fate, fault, first_ms=due_s * 100, queue_ms=due_s * 10, ended_s=ended_s)


def test_requests_count_by_when_they_were_due_and_goodput_by_when_streams_ended() -> None:
    done = [
        request(0.4, ended_s=1.4),  # due in the warm-up, ended in the measured time
        request(0.5, ended_s=1.5),
        request(0.1, ended_s=0.9),  # all of it before
        request(1.0, ended_s=2.0),
        request(2.9, ended_s=3.4),  # the other way round
        request(2.0, "refused", 2.0),
        request(2.5, "gave_up"),
        request(2.6, "failed", fault="status 500"),
    ]
    found = summary(done, warm_up_s=1.0, seconds=2.0)
    assert found["callers"]["a"] == {
        "offered": 5,
        "served": 2,
        "refused": 1,
        "gave_up": 1,
        "failed": 1,
        "completed": 3,
        "queue_ms": [10.0, 29.0],
        "first_ms": [100.0, 290.0, 250.0],  # who gave up counts with the time that he waited
    }
    assert found["faults"] == "1 × status 500"


def test_a_failure_in_the_warm_up_is_told_too() -> None:
    assert summary([request(0.1, "failed", fault="x"), request(1.5)], 1.0, 1.0)["faults"] == "1 × x"
