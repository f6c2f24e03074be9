"""The id of each request: the caller's own when it is sane, else one that nobody else has. For incoming.py, app.py."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from itertools import count

REQUEST_ID = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class RequestIds:
    """New ids: random in front, so that no two processes make the same, and counted behind, which is cheap."""

    __slots__ = ("_numbers", "_prefix")

    def __init__(self) -> None:
        self._prefix = "req-" + os.urandom(8).hex()
        self._numbers = count(int.from_bytes(os.urandom(3), "big"))

    def new(self) -> str:
        return f"{self._prefix}{next(self._numbers):08x}"


def request_id_of(headers: Iterable[tuple[bytes, bytes]], new: Callable[[], str]) -> str:
    """The caller's X-Request-Id when it is sane and there is just one, else a new one."""
    given = [value for name, value in headers if name == b"x-request-id"]
    if given and len(given) == 1 and REQUEST_ID.fullmatch(given[0]):
        return given[0].decode("ascii")
    return new()
