"""The windows of the pools that may serve a request: made once per snapshot and pool order, read for every request."""

from __future__ import annotations

from collections.abc import Mapping


class Windows(dict[str, int | None]):
    """Tokens that a pool can hold, by pool; None where it does not say. Not to be changed once it is made."""

    __slots__ = ("largest", "pools", "smallest")

    def __init__(self, windows: Mapping[str, int | None]) -> None:
        super().__init__(windows)
        known = [window for window in windows.values() if window is not None]
        is_known = bool(known) and len(known) == len(windows)
        self.pools = frozenset(windows)
        self.smallest: int | None = min(known) if is_known else None  # None: there is a pool that does not say
        self.largest: int | None = max(known) if is_known else None
