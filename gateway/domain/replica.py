"""A replica's record: written by its source (supervisor, static list), read by every gateway.

The supervisor of a host publishes all its records as one JSON document under `fleet_key(host)`, with a TTL, and adds
the host to the set `HOSTS_KEY`. A document that was not renewed is gone, and with it that host's replicas.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from gateway.domain.store_keys import TAG

HOSTS_KEY = f"{TAG}:hosts"  # sorted set: host name, scored with the time (s, Redis clock) of its last publication
FLEET_TTL_S = 10.0


def fleet_key(host: str) -> str:
    return f"{TAG}:fleet:{host}"


class ReplicaState(StrEnum):
    STARTING = "starting"  # the process runs and loads
    WARMING = "warming"  # it answers; the first real token is still out
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    BACKOFF = "backoff"  # died; waits before the next start
    FAILED = "failed"  # gave up; a person must act


@dataclass(frozen=True, slots=True)
class Load:
    """What the engine said of itself. `kv_use` is a fraction in [0, 1]."""

    running: int
    waiting: int
    kv_use: float


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """Times are seconds since the epoch on the writer's clock: for people, never for decisions."""

    id: str  # "<pool>/<number>@<host>", unique in the fleet
    pool: str
    url: str  # "http://127.0.0.1:34567", "https://host/prefix", "unix:/path": what stands before a request's path
    state: ReplicaState
    served_name: str
    since_s: float  # when this state began
    detail: str = ""  # phase while starting ("loading weights 3/8"), cause in words when failed
    max_model_len: int | None = None  # known once ready
    api_key: str | None = None  # the engine's own key; goes to the engine only
    has_priority: bool = False  # runs with --scheduling-policy priority
    engine: str = "vllm"  # or "openai": gets nothing that only vLLM knows, and counts no tokens
    engine_version: str | None = None
    restarts: int = 0
    pid: int | None = None
    load: Load | None = None

    def is_ready(self) -> bool:
        return self.state is ReplicaState.READY


@dataclass(frozen=True, slots=True)
class FleetDocument:
    """All replicas of one host at one moment."""

    host: str
    revision: str  # of the config that the supervisor runs
    published_s: float
    replicas: tuple[ReplicaRecord, ...]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_json(raw: bytes | str) -> FleetDocument:
        """Raises ValueError for anything that `to_json` of this version would not have written."""
        try:
            data: dict[str, Any] = json.loads(raw)
            replicas = tuple(_record(r) for r in data["replicas"])
            return FleetDocument(data["host"], data["revision"], float(data["published_s"]), replicas)
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"not a fleet document: {exc!r}") from exc


def _record(data: dict[str, Any]) -> ReplicaRecord:
    load = data.get("load")
    return ReplicaRecord(**{**data, "state": ReplicaState(data["state"]), "load": Load(**load) if load else None})
