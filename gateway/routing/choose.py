"""Which replicas may serve a request, best first: pure, on one frozen snapshot. Called by dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gateway.domain.errors import NoReplica
from gateway.domain.replica import ReplicaRecord, ReplicaState
from gateway.domain.route import PoolOrder, Target
from gateway.fleet.snapshot import Snapshot

LOADING_RETRY_S = 5.0  # a worker needs tens of seconds to load: asking again sooner cannot help
RESTART_RETRY_S = 10.0


def choose(order: PoolOrder, snapshot: Snapshot, fitting: frozenset[str], rng: Random) -> list[ReplicaRecord]:
    """Candidates in the order in which they may be tried; never empty.

    `fitting` holds the pools whose window takes the request. First comes the pool that the targets' weights pick among
    those with a ready replica, then the other targets, then the fallback pools; in a pool the least loaded first.
    Raises NoReplica when nothing is ready.
    """
    if len(order.targets) == 1 and not order.fallback:  # the usual route: one pool, and often one replica
        pool = order.targets[0].pool
        ready = snapshot.ready(pool) if pool in fitting else ()
        if ready:
            return by_load(ready, snapshot, rng)
        raise not_ready(order, snapshot)
    targets = [t for t in order.targets if t.pool in fitting and snapshot.ready(t.pool)]
    pools = [t.pool for t in weighted_order(targets, rng)]
    pools += [pool for pool in order.fallback if pool in fitting and snapshot.ready(pool)]
    if not pools:
        raise not_ready(order, snapshot)
    return [replica for pool in pools for replica in by_load(snapshot.ready(pool), snapshot, rng)]


def pools_to_wait_for(order: PoolOrder, candidates: Sequence[ReplicaRecord]) -> list[str]:
    """The pools of these candidates, best first; of fallback pools only where no target has a candidate.

    That a target is full is no reason to fall back: it can serve, a little later.
    """
    if len(candidates) == 1:
        return [candidates[0].pool]
    pools = list(dict.fromkeys(replica.pool for replica in candidates))
    if len(pools) == 1:
        return pools
    targets = {target.pool for target in order.targets}
    return [pool for pool in pools if pool in targets] or pools


def beginning_with(pool: str, candidates: list[ReplicaRecord]) -> list[ReplicaRecord]:
    """The same candidates, those of `pool` first."""
    if candidates[0].pool == pool:
        return candidates
    return sorted(candidates, key=lambda replica: replica.pool != pool)


def weighted_order(targets: Sequence[Target], rng: Random) -> list[Target]:
    """A random order in which each target comes first with the chance of its weight."""
    # Efraimidis and Spirakis (2006): sorting by u^(1/w) draws without replacement in proportion to the weights
    if len(targets) < 2:
        return list(targets)
    return sorted(targets, key=lambda t: rng.random() ** (1.0 / t.weight), reverse=True)


def by_load(replicas: Sequence[ReplicaRecord], snapshot: Snapshot, rng: Random) -> list[ReplicaRecord]:
    """Least loaded first; equals in random order, so that processes that see the same facts do not herd."""

    def load(replica: ReplicaRecord) -> tuple[float, float]:
        waiting = replica.load.waiting if replica.load else 0
        return snapshot.in_flight(replica.id) + waiting, rng.random()

    return sorted(replicas, key=load) if len(replicas) > 1 else list(replicas)


def not_ready(order: PoolOrder, snapshot: Snapshot) -> NoReplica:
    """The refusal that says what each pool of the order is doing."""
    states = [f"{pool} ({describe(snapshot.replicas(pool))})" for pool in order.pools()]
    loading = any(
        r.state in (ReplicaState.STARTING, ReplicaState.WARMING) for p in order.pools() for r in snapshot.replicas(p)
    )
    return NoReplica(
        f"No replica of this model can take this request now: {', '.join(states)}. Try again later.",
        param="model",
        retry_after_s=LOADING_RETRY_S if loading else RESTART_RETRY_S,
    )


def describe(replicas: Sequence[ReplicaRecord]) -> str:
    """'starting', '2 starting, 1 failed', or 'no replica known'. States only: causes are for operators."""
    counts: dict[str, int] = {}
    for replica in replicas:
        counts[replica.state.value] = counts.get(replica.state.value, 0) + 1
    if not counts:
        return "no replica known"
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{n} {state}" for state, n in sorted(counts.items()))
