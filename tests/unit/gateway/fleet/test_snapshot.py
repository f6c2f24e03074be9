"""Snapshot: which replicas of a pool are ready, and how many tokens every one of them holds."""

from __future__ import annotations

import pytest
from fakes.story import replica

from gateway.domain.replica import ReplicaState
from gateway.domain.route import PoolOrder, Target
from gateway.fleet.snapshot import Snapshot


@pytest.mark.parametrize("state", [s for s in ReplicaState if s is not ReplicaState.READY])
def test_only_ready_replicas_serve(state: ReplicaState) -> None:
    snapshot = Snapshot([replica("a/0@h", state), replica("a/1@h")], {})
    assert [r.id for r in snapshot.ready("a")] == ["a/1@h"]
    assert [r.id for r in snapshot.replicas("a")] == ["a/0@h", "a/1@h"]


def test_a_pool_nobody_spoke_of_is_empty() -> None:
    snapshot = Snapshot([replica("a/0@h")], {})
    assert snapshot.ready("b") == snapshot.replicas("b") == ()
    assert snapshot.window("b") is None


def test_the_window_is_what_every_ready_replica_holds() -> None:
    snapshot = Snapshot(
        [
            replica("a/0@h", max_model_len=4096),
            replica("a/1@h", max_model_len=2048),
            replica("a/2@h", ReplicaState.STARTING, max_model_len=512),
            replica("a/3@h", max_model_len=None),
            replica("b/0@h", max_model_len=None),
        ],
        {},
    )
    assert snapshot.window("a") == 2048
    assert snapshot.window("b") is None


def test_an_orders_windows_are_those_of_its_pools_that_can_serve() -> None:
    snapshot = Snapshot(
        [
            replica("a/0@h", max_model_len=4096),
            replica("b/0@h", max_model_len=None),
            replica("c/0@h", ReplicaState.STARTING),
            replica("d/0@h", max_model_len=512),
        ],
        {},
    )
    order = PoolOrder((Target("a"), Target("c")), fallback=("b", "nobody"))
    assert snapshot.windows(order) == {"a": 4096, "b": None}
    assert snapshot.windows(order) is snapshot.windows(order), "worked out once"
    assert snapshot.windows(PoolOrder((Target("d"),))) == {"d": 512}
    assert snapshot.windows(PoolOrder((Target("c"),))) == {}


def test_two_orders_that_read_alike_are_two() -> None:
    """They are keys of what is worked out for each of them, and are looked up by their identity."""
    first, second = PoolOrder((Target("a"),)), PoolOrder((Target("a"),))
    assert first != second and len({first, second}) == 2
