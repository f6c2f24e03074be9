"""Reads the facts of this machine for preflight.py. Starts nothing that stays; every look has a deadline."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import psutil

from gateway.config.load import LoadedConfig, read_key_env
from gateway.config.outside import outside_faults
from gateway.config.schema import Config, key_variables
from workers.facts import Facts, Trouble
from workers.gpu import list_cards
from workers.look import look_at_port
from workers.look_redis import look_at_redis
from workers.model_dir import read_model_dir
from workers.spec import WorkerSpec, specs_of

NVIDIA_SMI_S = 10.0
HF_TRUE = ("1", "ON", "YES", "TRUE")  # huggingface_hub's ENV_VARS_TRUE_VALUES
VLLM_WAY_OUT = 'install vLLM in a venv of its own (`make serve` does) and name its command, e.g. "/opt/vllm/bin/vllm"'


def gather(loaded: LoadedConfig, environ: Mapping[str, str] = os.environ) -> Facts:
    """Some seconds at most. Not to be called from a running event loop."""
    config = loaded.config
    cards = tuple(asyncio.run(list_cards()))
    specs = tuple(specs_of(loaded, "localhost", len(cards)))
    names, mig = nvidia_names(_nvidia_smi_list())
    hub_names = {spec.model for spec in specs if not spec.model_is_local}
    return Facts(
        config=config,
        directory=loaded.directory,
        cards=cards,
        card_names=names,
        mig_uuids=mig,
        has_hidden_gpus=not cards and (bool(shutil.which("nvidia-smi")) or Path("/dev/nvidia0").exists()),
        specs=specs,
        commands={spec.vllm: trouble for spec in specs if (trouble := look_at_command(spec))},
        models={spec.model: read_model_dir(Path(spec.model)) for spec in specs if spec.model_is_local},
        cached_hub_names=frozenset(name for name in hub_names if _is_cached(name, environ)),
        offline_hub_names=frozenset(spec.model for spec in specs if _is_offline(spec, environ)),
        allows_long_window=_is_true({**environ, **config.workers.env}, "VLLM_ALLOW_LONG_MAX_MODEL_LEN"),
        port=look_at_port(loaded),
        redis=look_at_redis(loaded),
        state_dir=look_at_state_dir(loaded.state_dir),
        outside=tuple((key, Trouble(fact, way_out)) for key, fact, way_out in outside_faults(loaded)),
        unset_variables=frozenset(name for name in key_variables(config) if read_key_env(name) is None),
        key_digests=_digests(config),
        overrides=tuple(overrides(environ)),
        memory_bytes=_memory_bytes(),
    )


def look_at_command(spec: WorkerSpec) -> Trouble | None:
    """Whether the vllm command can be run; it is not run: that alone takes nine seconds."""
    if "/" not in spec.vllm:
        if shutil.which(spec.vllm) is None:
            return Trouble(f'no command "{spec.vllm}" on PATH', VLLM_WAY_OUT)
        return None
    path = Path(spec.vllm)
    if not path.exists():
        return Trouble(f"{path} does not exist", VLLM_WAY_OUT)
    if not path.is_file():
        return Trouble(f"{path} is no file", "name the command itself, e.g. bin/vllm in its venv")
    if not os.access(path, os.X_OK):
        return Trouble(f"{path} is not executable", f"chmod +x {path}")
    interpreter = _interpreter(path)
    if interpreter is not None and not os.path.exists(interpreter):
        return Trouble(
            f"{path} wants {interpreter}, which does not exist", "make its venv anew: one that was moved does not work"
        )
    return None


def _interpreter(script: Path) -> str | None:
    try:
        with script.open("rb") as file:
            first = file.readline(512)
    except OSError:
        return None
    words = first[2:].split() if first.startswith(b"#!") else []
    return os.fsdecode(words[0]) if words else None


def look_at_state_dir(path: Path) -> Trouble | None:
    """Whether it can be written, or made."""
    way_out = "give this user access to it, or set gateway.state_dir to another directory"
    if path.exists() and not path.is_dir():
        return Trouble(f"{path} is a file", "remove it, or set gateway.state_dir to a directory")
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        return Trouble(f"{path} cannot be made: {there} is a file", "set gateway.state_dir to another directory")
    if not os.access(there, os.W_OK | os.X_OK):
        verb = "written to" if there == path else "made"
        return Trouble(f"{path} cannot be {verb} by this user", way_out)
    return None


def _nvidia_smi_list() -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        told = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return told.stdout if told.returncode == 0 else ""


def nvidia_names(listing: str) -> tuple[dict[str, str], frozenset[str]]:
    """From `nvidia-smi -L`: card name by UUID, and the UUIDs of MIG instances."""
    cards = {uuid: name for name, uuid in re.findall(r"^GPU \d+: (.+) \(UUID: (GPU-[^)]+)\)", listing, re.MULTILINE)}
    return cards, frozenset(re.findall(r"\(UUID: (MIG-[^)]+)\)", listing))


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").upper() in HF_TRUE


def _is_offline(spec: WorkerSpec, environ: Mapping[str, str]) -> bool:
    return not spec.model_is_local and _is_true({**environ, **spec.env}, "HF_HUB_OFFLINE")


def _is_cached(name: str, environ: Mapping[str, str]) -> bool:
    home = environ.get("HF_HOME") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    snapshots = Path(cache).expanduser() / f"models--{name.replace('/', '--')}" / "snapshots"
    return any(snapshots.glob("*/config.json"))


def _digests(config: Config) -> dict[str, str]:
    found = {}
    for name, key in config.keys.items():
        clear = read_key_env(key.key_env) if key.key_env else None
        if key.sha256 is not None:
            found[name] = key.sha256.lower()
        elif clear is not None:
            found[name] = hashlib.sha256(clear.encode()).hexdigest()
    return found


def overrides(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Variables that set a key of the config, with its key path; values are not looked at."""
    found = []
    for variable in sorted(environ):
        parts = variable.lower().removeprefix("poolgate_").split("__")
        if variable.lower().startswith("poolgate_") and parts[0] in Config.model_fields:
            found.append((variable, ".".join(parts)))
    return found


def _memory_bytes() -> int:
    """Of the machine, or of the container's limit where that is lower (cgroup v2)."""
    total: int = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total
