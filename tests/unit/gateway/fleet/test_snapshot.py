"""Snapshot: which replicas of a pool are ready, and how many tokens every one of them holds."""

from __future__ import annotations

import pytest
from fakes.story import replica

from gateway.domain.replica import ReplicaState
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
