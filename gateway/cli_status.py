"""`poolgate status`: what runs, read from Redis, where supervisors publish and gateways report."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import click
from redis.exceptions import RedisError

from gateway.admission.capacity import key_of, use_in
from gateway.config.load import LoadedConfig, load
from gateway.config.option import config_option
from gateway.config.schema import slots_of
from gateway.config.store import connect
from gateway.domain.errors import StoreUnavailable
from gateway.domain.replica import FleetDocument, ReplicaRecord
from gateway.fleet.sources.base import SourceUnavailable
from gateway.fleet.sources.static import StaticSource
from gateway.fleet.sources.supervisor import SupervisorSource

Use = Mapping[str, tuple[int, int]]  # by pool: requests that run, and that wait


@click.command()
@config_option
@click.option("--json", "as_json", is_flag=True, help="For machines: one JSON document.")
def status(path: Path, as_json: bool) -> None:
    """Show every pool with its replicas: state, for how long, load, and why when something is wrong.

    Exit code 0 when each pool has a ready replica, 3 when one has none.
    """
    loaded = load(path)
    documents, use = asyncio.run(_told(loaded))
    static = asyncio.run(StaticSource(loaded.config, time.time()).replicas())
    replicas = [*(r for d in documents for r in d.replicas), *static]
    if as_json:
        click.echo(json.dumps(as_document(loaded, documents, replicas, use), indent=2))
    else:
        for line in [*lines(loaded, documents, replicas, time.time()), *slot_lines(loaded, replicas, use)]:
            click.echo(line)
    pools = set(loaded.config.pools)
    if pools - {r.pool for r in replicas if r.is_ready()}:
        raise SystemExit(3)


async def _told(loaded: LoadedConfig) -> tuple[list[FleetDocument], Use]:
    redis = connect(loaded, timeout_s=2.0)
    try:
        documents = await SupervisorSource(redis).documents()
        seconds, _ = await redis.time()
        pools = slots_of(loaded.config.pools)
        return documents, {
            pool: use_in(cast(dict[bytes, bytes], await redis.hgetall(key_of(pool))), seconds * 1000) for pool in pools
        }
    except (SourceUnavailable, RedisError) as exc:
        raise StoreUnavailable(
            f"Redis does not answer ({exc}). Is Poolgate running? Start it with: poolgate up --config {loaded.path}"
        ) from exc
    finally:
        await redis.aclose()


def as_document(
    loaded: LoadedConfig, documents: list[FleetDocument], replicas: list[ReplicaRecord], use: Use
) -> dict[str, Any]:
    """The same facts as the table; the engines' own keys stay out."""
    rows = [{k: v for k, v in asdict(r).items() if k != "api_key"} for r in replicas]
    return {
        "config": {"file": str(loaded.path), "revision": loaded.revision},
        "hosts": [{"host": d.host, "revision": d.revision, "published_s": d.published_s} for d in documents],
        "pools": {pool: [r for r in rows if r["pool"] == pool] for pool in loaded.config.pools},
        "slots": {
            pool: {"slots": slots, "running": use[pool][0], "waiting": use[pool][1]}
            for pool, slots in _slots(loaded, replicas).items()
        },
        "other_replicas": [r for r in rows if r["pool"] not in loaded.config.pools],
    }


HEADER = ("POOL", "REPLICA", "STATE", "FOR", "RUNNING", "WAITING", "KV", "RESTARTS", "DETAIL")


def lines(
    loaded: LoadedConfig, documents: list[FleetDocument], replicas: list[ReplicaRecord], now_s: float
) -> list[str]:
    rows: list[tuple[str, ...]] = [HEADER]
    for pool in [*loaded.config.pools, *sorted({r.pool for r in replicas} - set(loaded.config.pools))]:
        members = [r for r in replicas if r.pool == pool]
        rows += [_row(r, now_s) for r in members] or [(pool, "-", "no replica known", "", "", "", "", "", "")]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADER))]
    table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [f"config {loaded.path}  revision {loaded.revision}", *_hosts(loaded, documents), "", *table]


def slot_lines(loaded: LoadedConfig, replicas: list[ReplicaRecord], use: Use) -> list[str]:
    """What the gateways send to each bounded pool, and keep waiting for it."""
    rows = [
        f"pool {pool}: {use[pool][0]} of {slots} slots taken, {use[pool][1]} requests wait in the gateway"
        for pool, slots in _slots(loaded, replicas).items()
    ]
    return ["", *rows] if rows else []


def _slots(loaded: LoadedConfig, replicas: list[ReplicaRecord]) -> dict[str, int]:
    ready = [r.pool for r in replicas if r.is_ready()]
    return {pool: bound * ready.count(pool) for pool, bound in slots_of(loaded.config.pools).items()}


def _hosts(loaded: LoadedConfig, documents: list[FleetDocument]) -> list[str]:
    if not documents and any(pool.model for pool in loaded.config.pools.values()):
        return ["no supervisor reports; start one with: poolgate workers (or poolgate up)"]
    return [
        f"supervisor {d.host}  revision {d.revision}"
        + ("" if d.revision == loaded.revision else "  (not this file's: restart it to apply the edit)")
        for d in documents
    ]


def _row(replica: ReplicaRecord, now_s: float) -> tuple[str, ...]:
    load_ = replica.load
    return (
        replica.pool,
        replica.id,
        replica.state.value,
        duration(now_s - replica.since_s),
        str(load_.running) if load_ else "-",
        str(load_.waiting) if load_ else "-",
        f"{load_.kv_use:.0%}" if load_ else "-",
        str(replica.restarts),
        replica.detail,
    )


def duration(seconds: float) -> str:
    """'42s', '3m10s', '2h05m', '4d03h'."""
    s = max(0, int(seconds))
    if s < 60:
        return f"{s}s"
    if s < 3600:
        return f"{s // 60}m{s % 60:02d}s"
    if s < 86400:
        return f"{s // 3600}h{s % 3600 // 60:02d}m"
    return f"{s // 86400}d{s % 86400 // 3600:02d}h"
