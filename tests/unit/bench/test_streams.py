"""A stream counts as good only when it was answered 200 and ended with [DONE]."""

from __future__ import annotations

import pytest
from fakes.kept_transport import KeptTransport

from bench.streams import StreamClient

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN, DONE, END = chunk(b'data: {"x": 1}\n\n'), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n"


class Watched:
    """A client with an open request; `ends` are the faults that it reported."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.client = StreamClient(lambda _, fault: self.ends.append(fault))
        self.transport = KeptTransport()
        self.client.connection_made(self.transport)
        self.client.ask(b"request")


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_whole_stream_is_good_and_its_events_are_counted(watched: Watched) -> None:
    watched.client.data_received(HEAD + TOKEN)
    assert watched.ends == [] and watched.client.first_at >= watched.client.asked_at
    watched.client.data_received(TOKEN + DONE + END)
    assert watched.ends == [""]
    assert (watched.client.take_events(), watched.client.take_events()) == (3, 0)


def test_a_done_that_comes_in_pieces_is_seen(watched: Watched) -> None:
    whole = HEAD + TOKEN + DONE + END
    for i in range(len(whole)):
        watched.client.data_received(whole[i : i + 1])
    assert watched.ends == [""]


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (HEAD + TOKEN + END, "ended without [DONE]"),
        (b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}", "status 429"),
    ],
)
def test_another_end_is_a_fault(watched: Watched, reply: bytes, fault: str) -> None:
    watched.client.data_received(reply)
    assert watched.ends == [fault]


def test_what_is_no_http_is_a_fault(watched: Watched) -> None:
    watched.client.data_received(b"nonsense\r\n\r\n")
    assert len(watched.ends) == 1 and watched.ends[0].startswith("not HTTP")


def test_a_connection_lost_within_a_stream_is_a_fault_once(watched: Watched) -> None:
    watched.client.data_received(HEAD + TOKEN)
    watched.client.connection_lost(ConnectionResetError("reset"))
    assert watched.ends == ["connection lost: reset"] and watched.client.is_lost


def test_a_connection_lost_after_the_end_is_no_fault(watched: Watched) -> None:
    watched.client.data_received(HEAD + DONE + END)
    watched.client.connection_lost(None)
    assert watched.ends == [""]


def test_a_client_that_gives_up_reports_nothing(watched: Watched) -> None:
    watched.client.close()
    watched.client.connection_lost(None)
    assert watched.ends == [] and watched.transport.is_aborted


def test_the_next_stream_on_the_connection_is_judged_by_itself(watched: Watched) -> None:
    watched.client.data_received(HEAD + DONE + END)
    watched.client.ask(b"request")
    watched.client.data_received(HEAD + TOKEN + END)
    assert watched.ends == ["", "ended without [DONE]"]
