"""The NVIDIA GPUs of this host, and turns on them: one start at a time per GPU, and only into memory that is free.

`cli.py` lists the cards; every worker starts inside `GpuDesk.hold`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from workers.errors import GpuBusy

QUERY_S = 10.0
POLL_S = 1.0
FREE_S = 60.0  # how long memory of a worker that has just ended may take to come back


@dataclass(frozen=True, slots=True)
class Card:
    """One GPU as nvidia-smi shows it, in PCI order; memory in MiB."""

    index: str
    uuid: str
    total_mib: int
    used_mib: int
    holders: tuple[str, ...] = ()  # "pid 12 (71000 MiB)" of each process that computes on it


CardQuery = Callable[[], Awaitable[list[Card]]]


async def list_cards() -> list[Card]:
    """The cards now; none when there is no nvidia-smi, or when it fails or hangs."""
    cards = await _nvidia_smi("--query-gpu=index,uuid,memory.total,memory.used")
    apps = await _nvidia_smi("--query-compute-apps=gpu_uuid,pid,used_memory") if cards else ""
    return cards_of(cards, apps)


def cards_of(gpu_csv: str, apps_csv: str) -> list[Card]:
    """Cards from the two tables of nvidia-smi (no header, no units); rows with other than numbers are left out."""
    holders: dict[str, list[str]] = {}
    for uuid, pid, used in _rows(apps_csv, 3):
        holders.setdefault(uuid, []).append(f"pid {pid} ({used} MiB)")
    return [
        Card(index, uuid, int(total), int(used), tuple(holders.get(uuid, ())))
        for index, uuid, total, used in _rows(gpu_csv, 4)
        if total.isdecimal() and used.isdecimal()
    ]


def _rows(csv: str, width: int) -> list[list[str]]:
    rows = [[cell.strip() for cell in line.split(",")] for line in csv.splitlines()]
    return [row for row in rows if len(row) == width]


async def _nvidia_smi(query: str) -> str:
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    process = await asyncio.create_subprocess_exec(
        command,
        query,
        "--format=csv,noheader,nounits",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(QUERY_S):
            out, _ = await process.communicate()
    except TimeoutError:
        return ""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return out.decode(errors="replace") if process.returncode == 0 else ""


class GpuDesk:
    """Turns on the GPUs of one host. Workers on the CPU pass at once, in parallel."""

    def __init__(self, cards: Sequence[Card], query: CardQuery = list_cards) -> None:
        self._index_of = {card.uuid: card.index for card in cards}
        self._query = query
        self._locks: dict[str, asyncio.Lock] = {}  # as many as the config names GPUs

    @contextlib.asynccontextmanager
    async def hold(self, gpus: Sequence[str]) -> AsyncIterator[None]:
        """Keeps other starts off these GPUs: vLLM measures free memory while it loads, and would count theirs in.

        Index and UUID of one card are the same card. Always taken in one order, so that two cannot wait for each other.
        """
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted({self._index_of.get(gpu, gpu) for gpu in gpus}):
                await stack.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))
            yield

    async def wait_for_memory(
        self, gpus: Sequence[str], share: float, *, timeout_s: float = FREE_S, poll_s: float = POLL_S
    ) -> None:
        """Returns when `share` of each card's memory is free, or when that cannot be known (MIG, no nvidia-smi).

        Raises GpuBusy after `timeout_s`, naming who holds the memory.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        while gpus and share > 0:
            short = [c for c in await self._query() if {c.index, c.uuid} & set(gpus) and not _has_room(c, share)]
            if not short:
                return
            if asyncio.get_running_loop().time() >= deadline:
                raise GpuBusy("; ".join(_shortage(card, share) for card in short))
            await asyncio.sleep(poll_s)


def _has_room(card: Card, share: float) -> bool:
    return card.total_mib - card.used_mib >= share * card.total_mib


def _shortage(card: Card, share: float) -> str:
    return (
        f"GPU {card.index}: {card.total_mib - card.used_mib} of {card.total_mib} MiB are free, a share of {share:g} "
        f"is asked; held by {', '.join(card.holders) or 'unknown processes'}; end them or lower gpu_memory_utilization"
    )
