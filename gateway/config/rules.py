"""Cross-section checks of a config: names exist, aliases are unique, GPU shares fit. Pure; called by `load.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from gateway.config.schema import Config, PoolSection

VLLM_DEFAULT_MEMORY_SHARE = 0.92  # vLLM 0.33, --gpu-memory-utilization


def findings(config: Config) -> list[str]:
    """One line per fault, each beginning with its key path; empty when the config is sound."""
    return [
        *_classes_and_users(config),
        *_routes(config),
        *_aliases(config),
        *_gpus(config),
        *_tensor_parallel(config),
        *_authorities(config),
    ]


def _known(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _classes_and_users(config: Config) -> Iterator[str]:
    for name, key in config.keys.items():
        if key.class_ is not None and key.class_ not in config.classes:
            yield f'keys.{name}.class: no class "{key.class_}"; classes are: {_known(config.classes)}'
        if key.user is not None and key.user not in config.users:
            yield f'keys.{name}.user: no user "{key.user}"; add [users.{key.user}] or use: {_known(config.users)}'
        for model in key.models:
            if model != "*" and model not in config.routes:
                yield f'keys.{name}.models: no route "{model}"; routes are: {_known(config.routes)} (or "*" for all)'


def _routes(config: Config) -> Iterator[str]:
    for name, route in config.routes.items():
        orders = {"": (route.targets, route.fallback)}
        for class_name, order in route.by_class.items():
            if class_name not in config.classes:
                yield (
                    f'routes.{name}.by_class.{class_name}: no class "{class_name}"; '
                    f"classes are: {_known(config.classes)}"
                )
            orders[f".by_class.{class_name}"] = (order.targets, order.fallback)
        for path, (targets, fallback) in orders.items():
            seen: set[str] = set()
            named = [(f"targets[{i}].pool", t.pool) for i, t in enumerate(targets)]
            named += [(f"fallback[{i}]", pool) for i, pool in enumerate(fallback)]
            for where, pool in named:
                if pool not in config.pools:
                    yield f'routes.{name}{path}.{where}: no pool "{pool}"; pools are: {_known(config.pools)}'
                elif pool in seen:
                    yield f'routes.{name}{path}.{where}: pool "{pool}" is listed twice; list it once'
                seen.add(pool)


def _aliases(config: Config) -> Iterator[str]:
    owner: dict[str, str] = {}
    for name, route in config.routes.items():
        for i, alias in enumerate(route.aliases):
            where = f"routes.{name}.aliases[{i}]"
            if alias in config.routes:
                other = config.routes[alias]
                if alias != name and name in other.aliases:
                    yield f'{where}: "{name}" and "{alias}" are aliases of each other (a cycle); keep one as the route'
                else:
                    yield f'{where}: "{alias}" is the name of a route; choose another alias or remove that route'
            elif alias in owner:
                yield f'{where}: "{alias}" is already an alias of route "{owner[alias]}"; keep it in one place'
            else:
                owner[alias] = name


def memory_share(pool: PoolSection) -> float:
    """Of each GPU's memory, in [0, 1]; 0 where the cache is sized in bytes."""
    if "kv_cache_memory_bytes" in pool.vllm_args or "kv-cache-memory-bytes" in pool.vllm_args:
        return 0.0  # sized in bytes: this flag makes vLLM ignore the share
    return VLLM_DEFAULT_MEMORY_SHARE if pool.gpu_memory_utilization is None else pool.gpu_memory_utilization


def _gpus(config: Config) -> Iterator[str]:
    holders: dict[int | str, list[tuple[str, float]]] = defaultdict(list)
    for name, pool in config.pools.items():
        for i, replica in enumerate(pool.replicas if pool.model else []):
            where = f"pools.{name}.replicas[{i}].gpus"
            gpus = replica.gpus or []
            for gpu in gpus:
                if isinstance(gpu, int) and gpu < 0:
                    yield f"{where}: {gpu} is no GPU index; count from 0"
                if isinstance(gpu, str) and not gpu.startswith(("GPU-", "MIG-")):
                    yield f'{where}: "{gpu}" is no GPU; give an index, a GPU-UUID or a MIG-UUID'
            if len(set(gpus)) < len(gpus):
                yield f"{where}: a GPU is listed twice in {gpus}; list each once"
            for gpu in dict.fromkeys(gpus):
                holders[gpu].append((where, memory_share(pool)))
    for gpu, users in holders.items():
        total = sum(share for _, share in users)
        if len(users) > 1 and total > 1.0 + 1e-9:
            places = ", ".join(f"{where} (share {share:g})" for where, share in users)
            yield (
                f"{users[1][0]}: GPU {gpu} is used by more than one replica and their shares sum to {total:g}: "
                f"{places}; give them other GPUs, or lower gpu_memory_utilization so that the sum is at most 1"
            )


def _tensor_parallel(config: Config) -> Iterator[str]:
    for name, pool in config.pools.items():
        for i, replica in enumerate(pool.replicas if pool.model else []):
            if replica.gpus and len(replica.gpus) != pool.tensor_parallel_size:
                yield (
                    f"pools.{name}.replicas[{i}].gpus: tensor_parallel_size={pool.tensor_parallel_size} but "
                    f"gpus={replica.gpus}; list {pool.tensor_parallel_size} GPU(s) or set "
                    f"tensor_parallel_size={len(replica.gpus)}"
                )


def _authorities(config: Config) -> Iterator[str]:
    """A connection belongs to a url, not to a pool: so one url has one tls_ca."""
    first: dict[str, tuple[str, str | None]] = {}
    for name, pool in config.pools.items():
        for i, url in enumerate(pool.urls or []):
            if not url.startswith("https://"):
                continue
            place, tls_ca = first.setdefault(replica_url(url), (f"pools.{name}.urls[{i}]", pool.tls_ca))
            if tls_ca != pool.tls_ca:
                yield f"pools.{name}.urls[{i}]: is {place} too, with another tls_ca; give both pools the same"


def replica_url(url: str) -> str:
    """A url of the config as requests use it: their path begins with /v1, so one at its end is not doubled."""
    return url if url.startswith("unix:") else url.rstrip("/").removesuffix("/v1").rstrip("/")
