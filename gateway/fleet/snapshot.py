"""A frozen view of the fleet that one decision is made on; built by the registry, read by routing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.domain.replica import ReplicaRecord
from gateway.domain.route import PoolOrder
from gateway.domain.windows import Windows


class Snapshot:
    """All replicas known at one moment. `in_flight` is this process's own live count of requests per replica."""

    __slots__ = ("_by_pool", "_in_flight", "_ready", "_windows")

    def __init__(self, replicas: Iterable[ReplicaRecord], in_flight: Mapping[str, int]) -> None:
        by_pool: dict[str, list[ReplicaRecord]] = {}
        for replica in replicas:
            by_pool.setdefault(replica.pool, []).append(replica)
        self._by_pool = {pool: tuple(members) for pool, members in by_pool.items()}
        self._ready = {pool: tuple(r for r in members if r.is_ready()) for pool, members in by_pool.items()}
        self._in_flight = in_flight
        self._windows: dict[PoolOrder, Windows] = {}

    def replicas(self, pool: str) -> tuple[ReplicaRecord, ...]:
        return self._by_pool.get(pool, ())

    def ready(self, pool: str) -> tuple[ReplicaRecord, ...]:
        return self._ready.get(pool, ())

    def in_flight(self, replica_id: str) -> int:
        return self._in_flight.get(replica_id, 0)

    def window(self, pool: str) -> int | None:
        """Tokens that every ready replica of the pool can hold; None when no ready replica says."""
        windows = [r.max_model_len for r in self.ready(pool) if r.max_model_len]
        return min(windows) if windows else None

    def windows(self, order: PoolOrder) -> Windows:
        """`window` of each pool of the order that has a ready replica; worked out once, for there are few orders."""
        windows = self._windows.get(order)
        if windows is None:
            windows = Windows({pool: self.window(pool) for pool in order.pools() if self.ready(pool)})
            self._windows[order] = windows
        return windows

    def all(self) -> Iterable[ReplicaRecord]:
        for members in self._by_pool.values():
            yield from members
