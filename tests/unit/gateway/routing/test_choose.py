"""choose: the order of candidates on one frozen snapshot, and what is said when there is none."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from fakes.story import replica

from gateway.domain.errors import NoReplica
from gateway.domain.replica import ReplicaState
from gateway.domain.route import PoolOrder, Target
from gateway.fleet.snapshot import Snapshot
from gateway.routing.choose import LOADING_RETRY_S, RESTART_RETRY_S, choose, not_ready

FLEET = Snapshot([replica("a/0@h"), replica("b/0@h"), replica("c/0@h"), replica("d/0@h")], {})
ALL = frozenset("abcd")
ORDER = PoolOrder((Target("a", 3.0), Target("b", 1.0)), ("c", "d"))


def pools(order: PoolOrder, snapshot: Snapshot, fitting: frozenset[str] = ALL, seed: int = 1) -> list[str]:
    return [r.pool for r in choose(order, snapshot, fitting, Random(seed))]


def test_targets_come_first_then_the_fallback_pools_in_order() -> None:
    for seed in range(50):
        chosen = pools(ORDER, FLEET, seed=seed)
        assert set(chosen[:2]) == {"a", "b"}
        assert chosen[2:] == ["c", "d"]


def test_targets_share_the_load_in_proportion_to_their_weights() -> None:
    rng = Random(7)
    firsts = Counter(choose(ORDER, FLEET, ALL, rng)[0].pool for _ in range(4000))
    assert firsts["a"] + firsts["b"] == 4000
    assert 0.72 < firsts["a"] / 4000 < 0.78


@pytest.mark.parametrize("weight", [1e-6, 1e6])
def test_extreme_weights_do_no_harm(weight: float) -> None:
    order = PoolOrder((Target("a", weight), Target("b", 1.0)))
    assert sorted(pools(order, FLEET)) == ["a", "b"]


def test_a_target_without_a_ready_replica_is_passed_over() -> None:
    fleet = Snapshot([replica("a/0@h", ReplicaState.DRAINING), replica("b/0@h"), replica("c/0@h")], {})
    assert pools(ORDER, fleet) == ["b", "c"]


def test_only_pools_that_hold_the_request_are_chosen() -> None:
    assert pools(ORDER, FLEET, frozenset({"b", "d"})) == ["b", "d"]
    assert pools(ORDER, FLEET, frozenset({"c"})) == ["c"]


def test_draining_starting_and_failed_replicas_are_not_chosen() -> None:
    others = [replica(f"a/{i}@h", state) for i, state in enumerate(ReplicaState)]
    chosen = choose(PoolOrder((Target("a"),)), Snapshot(others, {}), ALL, Random(1))
    assert [r.state for r in chosen] == [ReplicaState.READY]


def test_the_least_loaded_replica_of_a_pool_comes_first() -> None:
    members = [replica("a/0@h", waiting=5), replica("a/1@h", waiting=0), replica("a/2@h")]
    fleet = Snapshot(members, {"a/1@h": 2, "a/2@h": 1})
    for seed in range(20):
        chosen = choose(PoolOrder((Target("a"),)), fleet, ALL, Random(seed))
        assert [r.id for r in chosen] == ["a/2@h", "a/1@h", "a/0@h"]


def test_equally_loaded_replicas_take_turns() -> None:
    fleet = Snapshot([replica("a/0@h"), replica("a/1@h")], {})
    rng = Random(3)
    firsts = Counter(choose(PoolOrder((Target("a"),)), fleet, ALL, rng)[0].id for _ in range(1000))
    assert min(firsts.values()) > 400


# --- when nobody can serve ------------------------------------------------------------------------------------


def refusal(*replicas: tuple[str, ReplicaState], fitting: frozenset[str] = ALL) -> NoReplica:
    fleet = Snapshot([replica(id_, state) for id_, state in replicas], {})
    with pytest.raises(NoReplica) as caught:
        choose(ORDER, fleet, fitting, Random(1))
    return caught.value


def test_a_loading_pool_is_named_with_its_state_and_when_to_come_back() -> None:
    error = refusal(("a/0@h", ReplicaState.STARTING), ("b/0@h", ReplicaState.FAILED))
    assert "a (starting), b (failed), c (no replica known), d (no replica known)" in error.message
    assert (error.retry_after_s, error.param) == (LOADING_RETRY_S, "model")


def test_several_replicas_of_a_pool_are_counted_by_state() -> None:
    starting, failed = ReplicaState.STARTING, ReplicaState.FAILED
    error = refusal(("a/0@h", starting), ("a/1@h", failed), ("a/2@h", starting))
    assert "a (1 failed, 2 starting)" in error.message


@pytest.mark.parametrize("state", [ReplicaState.FAILED, ReplicaState.BACKOFF, ReplicaState.STOPPED])
def test_a_pool_that_does_not_load_is_asked_for_later(state: ReplicaState) -> None:
    assert refusal(("a/0@h", state)).retry_after_s == RESTART_RETRY_S


def test_causes_of_a_failure_are_not_for_callers() -> None:
    fleet = Snapshot([replica("a/0@h", ReplicaState.FAILED, detail="CUDA out of memory on /secret/path")], {})
    assert "secret" not in not_ready(ORDER, fleet).message


def test_a_ready_pool_that_is_too_small_is_no_way_out() -> None:
    error = refusal(("a/0@h", ReplicaState.READY), ("b/0@h", ReplicaState.STARTING), fitting=frozenset({"b"}))
    assert "a (ready)" in error.message and "b (starting)" in error.message
    assert "is ready" not in error.message, "it would contradict itself"
