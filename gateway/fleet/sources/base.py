"""What a source of replica records is. The registry asks each one on its own, so a dead one delays no other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gateway.domain.replica import ReplicaRecord


class SourceUnavailable(Exception):
    """The source cannot say now; the registry keeps what it said last."""


class Source(Protocol):
    name: str

    async def replicas(self) -> Sequence[ReplicaRecord]:
        """All replicas that this source knows, within a deadline of its own. Raises SourceUnavailable."""
        ...
