"""From a spec to argv and environment of one `vllm serve` start: pure. Called by `worker.py`."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gateway.config.schema import TomlValue
from workers.spec import WorkerSpec

MARK_VARIABLE = "POOLGATE_WORKER"  # in every worker's environment: how its descendants are found
# vLLM puts ZeroMQ sockets "<run folder>/<uuid, 36 characters>" there, and sun_path holds 107 bytes.
MAX_RUN_FOLDER_BYTES = 68


@dataclass(frozen=True, slots=True)
class Launch:
    """What a child is started with. The engine key is in `env` only: argv is readable by every user of the host."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    mark: str  # value of MARK_VARIABLE: worker id and a nonce of this start
    run_folder: Path  # private to this start: its TMPDIR; the one who spawns makes it, the one who stops removes it


def launch_of(
    spec: WorkerSpec,
    *,
    port: int,
    internal_port: int,
    engine_key: str,
    nonce: str,
    temp_folder: Path,
    parent_env: Mapping[str, str],
) -> Launch:
    """`internal_port` is where vLLM begins to look for ports between its own processes; `nonce` names this start."""
    mark = f"{spec.id}:{nonce}"
    folder = run_folder(spec.state_dir, temp_folder, nonce)
    env = _environment(spec, parent_env)
    env |= {
        MARK_VARIABLE: mark,
        "VLLM_API_KEY": engine_key,
        "VLLM_PORT": str(internal_port),
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        # an empty value hides every GPU; an inherited one would shift the indices that the config means
        "CUDA_VISIBLE_DEVICES": ",".join(spec.gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # so that an index means the same card as in nvidia-smi
    }
    return Launch(_argv(spec, port), env, mark, folder)


def run_folder(state_dir: Path, temp_folder: Path, nonce: str) -> Path:
    """A short private folder: in the state directory, else under the temp folder when that path is too long."""
    path = state_dir / "run" / nonce
    if len(os.fsencode(path)) <= MAX_RUN_FOLDER_BYTES:
        return path
    owner = hashlib.sha256(os.fsencode(state_dir)).hexdigest()[:8]
    path = temp_folder / f"poolgate-{owner}-{nonce}"
    return path if len(os.fsencode(path)) <= MAX_RUN_FOLDER_BYTES else Path("/tmp") / path.name


def flags_of(name: str, value: TomlValue) -> Iterator[str]:
    """One option as arguments: true → --flag, false → --no-flag, a list → its items after the flag, a table → JSON."""
    flag = name.lstrip("-").replace("_", "-")
    if isinstance(value, bool):
        yield f"--{flag}" if value else f"--no-{flag}"
    elif isinstance(value, list):
        if value:
            yield f"--{flag}"
            yield from map(_text, value)
    else:
        text = _text(value)
        if text.startswith("-"):  # else argparse takes the value for a flag
            yield f"--{flag}={text}"
        else:
            yield from (f"--{flag}", text)


def _text(value: TomlValue) -> str:
    if isinstance(value, (dict, list, bool)):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _argv(spec: WorkerSpec, port: int) -> tuple[str, ...]:
    own = ("--served-model-name", spec.served_name, "--host", "127.0.0.1", "--port", str(port))
    options = (arg for name, value in spec.options for arg in flags_of(name, value))
    return (spec.vllm, "serve", spec.model, *own, *options)


def _environment(spec: WorkerSpec, parent_env: Mapping[str, str]) -> dict[str, str]:
    """The supervisor's environment without its secrets, then our defaults where it says nothing, then the config's."""
    env = {
        name: value
        for name, value in parent_env.items()
        if not name.startswith("POOLGATE_") and name not in spec.hidden_env
    }
    if "/" in spec.vllm:
        # tools of vLLM's venv (ninja, for kernels compiled at run time) are looked up on PATH
        env["PATH"] = os.pathsep.join(filter(None, (os.path.dirname(spec.vllm), env.get("PATH"))))
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    env.setdefault("PYTHONUNBUFFERED", "1")
    if spec.model_is_local:
        env.setdefault("HF_HUB_OFFLINE", "1")
        env.setdefault("TRANSFORMERS_OFFLINE", "1")
    if not spec.gpus and spec.is_eager:
        # else the first request with logprobs stalls the engine for 7 to 20 s, even with --enforce-eager
        env.setdefault("TORCH_COMPILE_DISABLE", "1")
    # One compile cache per worker: equal workers that start together on a cold shared one break each other's files.
    # It outlives a restart, so only the first start of a worker compiles.
    cache = env.get("VLLM_CACHE_ROOT") or str(spec.state_dir / "cache")
    env["VLLM_CACHE_ROOT"] = os.path.join(cache, spec.file_stem)
    return env | dict(spec.env)
