"""One finding of `poolgate check`: where in the config, what is the case, and the way out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """ERROR: a start would fail or serve something else than asked. WARNING: it may. HINT: good to know."""

    ERROR = "error"
    WARNING = "warning"
    HINT = "hint"


class Part(StrEnum):
    """Who stumbles over it: every command, the gateway, the supervisor, or whoever needs Redis."""

    HOST = "host"
    GATEWAY = "gateway"
    WORKERS = "workers"
    REDIS = "redis"


@dataclass(frozen=True, slots=True)
class Finding:
    severity: Severity
    part: Part
    key: str  # key path in the config, as in pools.chat.replicas[0].gpus
    fact: str
    way_out: str

    @property
    def line(self) -> str:
        return f"{self.key}: {self.fact}; {self.way_out}"
