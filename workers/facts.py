"""What `poolgate check` and a start know about this machine: plain data, read by gather.py, judged by the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.config.schema import Config
from workers.gpu import Card
from workers.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class ModelDir:
    """A path that the config gives as a model. Only the first level is read, no weights."""

    kind: str  # "directory", "file", "missing", or "unreadable"
    names: frozenset[str] = frozenset()  # files in it
    config: Mapping[str, Any] = field(default_factory=dict)  # config.json; empty when there is none
    faults: tuple[str, ...] = ()  # files that are there and cannot be read as what they are, in words
    missing_shards: tuple[str, ...] = ()  # listed in the index of the weights, but not there
    lfs_pointers: tuple[str, ...] = ()  # weights that are only Git LFS pointers
    weights_bytes: int = 0
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class PortUse:
    """Why gateway.host and gateway.port cannot be listened on."""

    problem: str  # "taken", "address" (no such address here), "forbidden", or "other"
    detail: str = ""  # what the system said
    pid: int | None = None  # who listens, where that can be seen
    program: str = ""
    is_ours: bool = False  # a gateway of this very config file


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that cannot be used, in words. Neither text holds a secret."""

    fact: str
    way_out: str


@dataclass(frozen=True, slots=True)
class Facts:
    config: Config
    directory: Path  # of the config file
    cards: tuple[Card, ...] = ()
    card_names: Mapping[str, str] = field(default_factory=dict)  # by UUID
    mig_uuids: frozenset[str] = frozenset()
    has_hidden_gpus: bool = False  # NVIDIA devices or tools are there, but nvidia-smi lists no card
    specs: tuple[WorkerSpec, ...] = ()  # one per worker of this host
    commands: Mapping[str, Trouble] = field(default_factory=dict)  # vllm commands of specs that cannot be run
    models: Mapping[str, ModelDir] = field(default_factory=dict)  # by model path, local ones
    cached_hub_names: frozenset[str] = frozenset()  # hub names whose files are in the hub's cache here
    offline_hub_names: frozenset[str] = frozenset()  # hub names of workers that run with HF_HUB_OFFLINE
    allows_long_window: bool = False  # VLLM_ALLOW_LONG_MAX_MODEL_LEN
    port: PortUse | None = None
    redis: Trouble | None = None
    state_dir: Trouble | None = None
    outside: tuple[tuple[str, Trouble], ...] = ()  # by key path: what pools of others need and do not get here
    unset_variables: frozenset[str] = frozenset()
    key_digests: Mapping[str, str] = field(default_factory=dict)  # static keys by name: hex SHA-256
    overrides: tuple[tuple[str, str], ...] = ()  # environment variable, key path that it sets
    memory_bytes: int = 0  # of this machine (of the container, where it has a limit)
