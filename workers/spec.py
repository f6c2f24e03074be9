"""Which workers a config asks of this host: pure but for one look at the disk per model. Called by `cli.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from gateway.config.load import LoadedConfig
from gateway.config.rules import memory_share
from gateway.config.schema import PoolSection, TomlValue, key_variables

# pool keys that are flags of `vllm serve` under the same name, in the order in which they are written
FLAG_KEYS = (
    "tensor_parallel_size",
    "quantization",
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "max_num_seqs",
    "scheduling_policy",
)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Everything that one `vllm serve` process is started with, save what is drawn anew at each start (port, key)."""

    id: str  # "<pool>/<number>@<host>"
    pool: str
    number: int  # position in the pool's `replicas`, from 0
    vllm: str  # the command: a bare name from PATH, or an absolute path
    model: str  # absolute directory, or hub name
    model_is_local: bool
    served_name: str
    state_dir: Path  # absolute
    gpus: tuple[str, ...] = ()  # indices or UUIDs; empty: the CPU
    options: tuple[tuple[str, TomlValue], ...] = ()  # option name (with _ or -) → value, in order
    env: Mapping[str, str] = field(default_factory=dict)
    hidden_env: frozenset[str] = frozenset()  # variables of the supervisor that a worker must not see
    has_priority: bool = False
    memory_share: float = 0.0  # of each GPU; 0 when the KV cache is sized in bytes, or on the CPU
    load_s: float = 1800.0  # from spawn to ready
    stop_s: float = 20.0  # from SIGTERM to SIGKILL

    @property
    def file_stem(self) -> str:
        """The worker's name in file names: unique on the host, without slashes."""
        return f"{quote(self.pool, safe='')}-{self.number}"

    @property
    def log_path(self) -> Path:
        return self.state_dir / "logs" / f"{self.file_stem}.log"

    @property
    def record_path(self) -> Path:
        return self.state_dir / "workers" / f"{self.file_stem}.json"

    @property
    def is_eager(self) -> bool:
        return any(
            name.replace("-", "_").lstrip("_") == "enforce_eager" and value is True for name, value in self.options
        )


def specs_of(loaded: LoadedConfig, host: str, gpu_count: int) -> list[WorkerSpec]:
    """One spec per replica of each pool that has a `model`, in the config's order; pools with `urls` give none.

    `gpu_count` is the number of NVIDIA GPUs of this host: it decides where replicas without `gpus` run.
    """
    config = loaded.config
    hidden = key_variables(config)
    specs = []
    for name, pool in config.pools.items():
        if pool.model is None:
            continue
        model, is_local = _model(pool.model, loaded.directory)
        for number, replica in enumerate(pool.replicas):
            gpus = _gpus(replica.gpus, pool.tensor_parallel_size, gpu_count)
            specs.append(
                WorkerSpec(
                    id=f"{name}/{number}@{host}",
                    pool=name,
                    number=number,
                    vllm=loaded.resolve(pool.vllm or config.workers.vllm),
                    model=model,
                    model_is_local=is_local,
                    served_name=pool.served_name or name,
                    state_dir=loaded.state_dir.resolve(),
                    gpus=gpus,
                    options=_options(pool),
                    env={**config.workers.env, **pool.env},
                    hidden_env=hidden,
                    has_priority=pool.scheduling_policy == "priority",
                    memory_share=memory_share(pool) if gpus else 0.0,
                    load_s=config.workers.load_s,
                    stop_s=config.workers.stop_s,
                )
            )
    return specs


def _model(text: str, directory: Path) -> tuple[str, bool]:
    """The model as vLLM should get it, and whether it is a directory of this host.

    "Qwen/Qwen2.5-0.5B-Instruct" is a hub name unless that directory lies beside the config file.
    """
    path = directory / Path(text).expanduser()
    is_path = text.startswith(("/", "./", "../", "~")) or ("/" in text and path.exists())
    return (str(path.resolve()), True) if is_path else (text, False)


def _gpus(asked: list[int | str] | None, tensor_parallel_size: int, gpu_count: int) -> tuple[str, ...]:
    if asked is None:
        return tuple(str(i) for i in range(tensor_parallel_size)) if gpu_count > 0 else ()
    return tuple(str(gpu) for gpu in asked)


def _options(pool: PoolSection) -> tuple[tuple[str, TomlValue], ...]:
    """Options that differ from vLLM's own defaults: what the config says, plus nothing."""
    named = {key: getattr(pool, key) for key in FLAG_KEYS}
    if pool.tensor_parallel_size == 1:
        del named["tensor_parallel_size"]
    return (*((key, value) for key, value in named.items() if value is not None), *pool.vllm_args.items())
