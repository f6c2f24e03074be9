"""Whether the GPUs and the memory of this machine are what the pools ask for. Pure; called by preflight.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from workers.facts import Facts
from workers.finding import Finding, Part, Severity
from workers.gpu import Card
from workers.spec import WorkerSpec


def gpu_findings(facts: Facts) -> Iterator[Finding]:
    yield from _gpus(facts)
    yield from _shares(facts)
    yield from _memory(facts)


def card_of(gpu: str, cards: tuple[Card, ...]) -> Card | None:
    """The card that an index or a UUID means; CUDA takes the beginning of a UUID where it fits one card alone."""
    exact = [card for card in cards if gpu in (card.index, card.uuid)]
    begun = [card for card in cards if gpu.startswith("GPU-") and card.uuid.startswith(gpu)]
    return exact[0] if exact else begun[0] if len(begun) == 1 else None


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.specs and not facts.cards and facts.has_hidden_gpus:
        yield Finding(
            Severity.WARNING,
            Part.WORKERS,
            "pools",
            "this machine has NVIDIA devices, but nvidia-smi does not list them",
            "make `nvidia-smi -L` work (driver; in a container NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        )
    elif not facts.cards and any(_asked(facts, spec) is None for spec in facts.specs):
        yield Finding(
            Severity.HINT,
            Part.WORKERS,
            "pools",
            "this machine shows no NVIDIA GPU: workers run on the CPU",
            "enough for small models, with a CPU build of vLLM; start GPU pools on a machine with GPUs",
        )
    for spec in facts.specs:
        asked = _asked(facts, spec)
        if asked is None:
            missing = [gpu for gpu in spec.gpus if card_of(gpu, facts.cards) is None]
            if missing:
                yield _error(
                    f"pools.{spec.pool}.tensor_parallel_size",
                    f"{len(spec.gpus)} GPUs are needed, this machine has {len(facts.cards)}",
                    "set it to a number of GPUs that is there",
                )
            continue
        missing = [gpu for gpu in spec.gpus if not _exists(gpu, facts)]
        if missing and facts.cards:
            yield _error(
                _gpus_key(spec),
                f"no GPU {', '.join(missing)} on this machine",
                f"it has {'; '.join(_shown(card, facts) for card in facts.cards)}{_mig(facts)}",
            )
        elif missing:
            yield _error(
                _gpus_key(spec),
                f"names GPU {', '.join(missing)}, but this machine shows no NVIDIA GPU",
                "remove gpus to run on the CPU, or start on the machine that has them",
            )


def _asked(facts: Facts, spec: WorkerSpec) -> list[int | str] | None:
    return facts.config.pools[spec.pool].replicas[spec.number].gpus


def _exists(gpu: str, facts: Facts) -> bool:
    if gpu.startswith("MIG-"):
        return any(uuid.startswith(gpu) for uuid in facts.mig_uuids)
    return card_of(gpu, facts.cards) is not None


def _shown(card: Card, facts: Facts) -> str:
    name = facts.card_names.get(card.uuid, "GPU")
    return f"{card.index} ({name}, {card.total_mib} MiB, {card.uuid})"


def _mig(facts: Facts) -> str:
    return f"; MIG instances: {', '.join(sorted(facts.mig_uuids))}" if facts.mig_uuids else ""


def _gpus_key(spec: WorkerSpec) -> str:
    return f"pools.{spec.pool}.replicas[{spec.number}].gpus"


def _error(key: str, fact: str, way_out: str) -> Finding:
    return Finding(Severity.ERROR, Part.WORKERS, key, fact, way_out)


def _shares(facts: Facts) -> Iterator[Finding]:
    """What config rules cannot see: an index and a UUID that are one card, and workers that take GPU 0 by default."""
    users: dict[str, list[WorkerSpec]] = defaultdict(list)
    for spec in facts.specs:
        for card in {c.uuid: c for gpu in spec.gpus if (c := card_of(gpu, facts.cards))}.values():
            if spec.memory_share > 0:
                users[card.uuid].append(spec)
    for card in facts.cards:
        specs = users[card.uuid]
        total = sum(spec.memory_share for spec in specs)
        free = card.total_mib - card.used_mib
        if total > 1.0 + 1e-9:
            places = ", ".join(f"{_gpus_key(spec)} (share {spec.memory_share:g})" for spec in specs)
            yield _error(
                _gpus_key(specs[-1]),
                f"GPU {card.index} is used by more than one worker and their shares sum to {total:g}: {places}",
                "give them other GPUs, or lower gpu_memory_utilization so that the sum is at most 1",
            )
        elif free < total * card.total_mib:
            yield Finding(
                Severity.WARNING,
                Part.WORKERS,
                _gpus_key(specs[0]),
                f"GPU {card.index}: {free} of {card.total_mib} MiB are free now, a share of {total:g} is asked; "
                f"held by {', '.join(card.holders) or 'processes that cannot be seen'}",
                "end them, or lower gpu_memory_utilization (nothing to do if they are workers of this config)",
            )


def _memory(facts: Facts) -> Iterator[Finding]:
    on_cpu = 0
    for spec in facts.specs:
        weights = facts.models[spec.model].weights_bytes if spec.model in facts.models else 0
        cards = [card for gpu in spec.gpus if (card := card_of(gpu, facts.cards))]
        if cards:
            room = sum(card.total_mib for card in cards) * (spec.memory_share or 1.0)
            if weights > room * 2**20:
                yield Finding(
                    Severity.WARNING,
                    Part.WORKERS,
                    f"pools.{spec.pool}.model",
                    f"the weights are {_gib(weights)}, the share of its GPUs is {_gib(int(room * 2**20))}",
                    "list more GPUs with a larger tensor_parallel_size, or take a quantized model",
                )
        elif not spec.gpus:
            before, on_cpu = on_cpu, on_cpu + weights
            if before <= facts.memory_bytes < on_cpu:
                yield Finding(
                    Severity.WARNING,
                    Part.WORKERS,
                    f"pools.{spec.pool}.model",
                    f"with this one the weights of all workers are {_gib(on_cpu)}, the memory here is "
                    f"{_gib(facts.memory_bytes)}",
                    "run fewer workers here, or smaller models",
                )


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
