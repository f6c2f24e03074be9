"""What a transport to a replica promises; attempt.py calls it, `wire.py` implements it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gateway.domain.errors import UpstreamTimeout
from gateway.upstream.fast_path import FastPath


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds. None of them is optional: every wait on a replica ends.

    `connect_s` and `total_s` run from the call of `send`; `first_byte_s` from the moment the connection is there until
    the first byte of the body (engines send the head of a stream long before its first token); `gap_s` is the longest
    silence between two reads after that, and runs only while somebody waits in `read`.
    """

    connect_s: float
    first_byte_s: float
    gap_s: float
    total_s: float


def late(deadline: str, what: str = "passed") -> UpstreamTimeout:
    """The error of a deadline, as UpstreamTimeout names them. It says which key of the config sets it."""
    key = f"gateway.timeouts.{deadline.replace(' ', '_')}_s"
    return UpstreamTimeout(f"The engine {what} the {deadline} deadline ({key}).", deadline=deadline)


class UpstreamRequest(NamedTuple):
    """One request as it is to arrive at the replica, less what the transport itself writes.

    The transport adds host, content-length and accept-encoding, and leaves out hop-by-hop headers and `expect`.
    """

    method: bytes
    path: bytes  # with its query, beginning with "/"
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    on_send: Callable[[], None] | None = None  # called once there is a connection: from then on a replica may have it


class UpstreamReply(Protocol):
    """A reply whose head has come. Whoever got it closes it, in every case; one task at a time reads it.

    A cancelled `read` closes the reply: nobody is left who wants it.
    """

    status: int
    is_whole: bool  # its last byte has come, read or not

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Lower-case names, without hop-by-hop headers, in the replica's order."""
        ...

    async def read(self) -> bytes:
        """The next bytes of the body, all that are there; b"" at its end.

        Raises UpstreamTimeout at a deadline and UpstreamBroken when the reply breaks off, both after the bytes that
        had already come.
        """
        ...

    async def read_all(self, limit_bytes: int) -> bytes:
        """The whole rest of the body. Raises as `read` does, and UpstreamBroken when it is longer than the limit."""
        ...

    async def relay(self, take: Callable[[bytes], bool], fast: FastPath | None = None) -> None:
        """Hands every further read to `take` until the end of the body, without waking the task that waits here.

        `take` gets what `read` would give, called where the bytes come in: it must be quick, and may call `close`. What
        it raises ends the reply and comes out here. It says whether it can take more: after False nothing is handed
        over until `resume`, and once a bounded number of bytes waits the replica is no longer read from; no silence is
        counted meanwhile. Raises as `read` does, after the bytes that had come; at the total deadline without those
        that a taker had no room for, even if the reply has come whole. A cancelled `relay` closes the reply.

        `fast` is offered a read that begins with a chunk of the body first, as it came from the wire: what it takes is
        not handed to `take`.
        """
        ...

    def resume(self) -> None:
        """The taker of `relay` has room again."""
        ...

    def close(self) -> None:
        """Gives the connection back if the whole reply has come and it can be used again, else cuts it at once.

        May be called at any time and more than once. For the replica a cut means: stop generating.
        """
        ...


class Transport(Protocol):
    async def send(self, url: str, request: UpstreamRequest, deadlines: Deadlines) -> UpstreamReply:
        """Returns when the head of the reply has come, whatever its status.

        Raises ConnectFailed, UpstreamTimeout, UpstreamBroken, or OutOfDescriptors, which is no replica's fault; then,
        and when cancelled, nothing is left open.
        """
        ...

    async def aclose(self) -> None:
        """Cuts every connection, busy or idle; a `send` after it raises ShuttingDown."""
        ...
