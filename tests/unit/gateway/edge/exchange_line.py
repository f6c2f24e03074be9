"""An exchange and the client's line behind it, in memory, for the tests of the exchange and its parts."""

from __future__ import annotations

from fakes.client import DATE, Headers, Reply, read_reply

from gateway.edge.context import Exchange
from gateway.edge.request_ids import RequestIds

IDS = RequestIds()


class FakeLine:
    """The client's connection: keeps what is written, takes no more while `is_full`."""

    date_line = b"%b: %b\r\n" % DATE

    def __init__(self) -> None:
        self.written = b""
        self.is_full = False
        self.calls: list[str] = []

    def new_id(self) -> str:
        return IDS.new()

    def handler_ended(self, task: object) -> None:
        self.calls.append("handler ended")

    def write(self, data: bytes) -> None:
        assert data and "cut" not in self.calls
        self.written += data

    def ended(self) -> None:
        assert "ended" not in self.calls, "a reply ends once"
        self.calls.append("ended")

    def cut(self) -> None:
        self.calls.append("cut")

    def resume_reading(self) -> None:
        self.calls.append("resume")

    def reply(self, *, is_head: bool = False) -> Reply:
        reply, rest = read_reply(self.written, is_head=is_head, is_closed=True)
        assert rest == b""
        return reply


def exchange(
    headers: Headers | None = None, *, method: str = "POST", version: str = "1.1"
) -> tuple[Exchange, FakeLine]:
    line = FakeLine()
    made = Exchange(
        line,
        method,
        [(b"x-request-id", b"mine")] if headers is None else headers,
        version=version,
        keep_alive=version == "1.1",
    )
    return made, line
