import asyncio

import pytest

from workers.errors import GpuBusy
from workers.gpu import Card, GpuDesk, cards_of


def card(used_mib: int, index: str = "0", holders: tuple[str, ...] = ()) -> Card:
    return Card(index, f"GPU-{index}", 80_000, used_mib, holders)


def desk_showing(*moments: list[Card], shown: list[list[Card]] | None = None) -> GpuDesk:
    """The last moment lasts. `shown` is filled with those that were looked at."""
    left = list(moments)

    async def query() -> list[Card]:
        now = left.pop(0) if len(left) > 1 else left[0]
        if shown is not None:
            shown.append(now)
        return now

    return GpuDesk(moments[0], query)


def test_nvidia_smis_tables_become_cards_with_their_holders():
    gpus = "0, GPU-a, 81559, 615\n1, GPU-b, 81559, [N/A]\n"
    apps = "GPU-a, 4242, 600\nGPU-a, 4243, 12\n"
    assert cards_of(gpus, apps) == [Card("0", "GPU-a", 81559, 615, ("pid 4242 (600 MiB)", "pid 4243 (12 MiB)"))]


def test_no_gpu_or_a_message_instead_of_a_table_gives_no_cards():
    assert cards_of("", "") == cards_of("NVIDIA-SMI has failed because it could not reach the driver\n", "") == []


async def test_restart_before_the_memory_is_free_waits_for_it():
    shown: list[list[Card]] = []
    desk = desk_showing([card(70_000)], [card(40_000)], [card(600)], [card(500)], shown=shown)
    await desk.wait_for_memory(("0",), 0.9, timeout_s=5, poll_s=0)
    assert shown[-1] == [card(600)], "neither before it is free nor long after"


async def test_memory_that_stays_taken_is_an_error_that_names_the_holder():
    desk = desk_showing([card(70_000, holders=("pid 4242 (69385 MiB)",)), card(79_000, index="1")])
    with pytest.raises(GpuBusy, match=r"GPU 0: 10000 of 80000 MiB .* pid 4242") as raised:
        await desk.wait_for_memory(("GPU-0",), 0.9, timeout_s=0, poll_s=0)
    assert "GPU 1" not in raised.value.message


async def test_memory_that_cannot_be_seen_holds_up_nobody():
    await desk_showing([]).wait_for_memory(("MIG-1",), 0.9, timeout_s=0)
    await desk_showing([card(79_000)]).wait_for_memory((), 0.9, timeout_s=0)
    await desk_showing([card(79_000)]).wait_for_memory(("0",), 0.0, timeout_s=0)


async def starts_overlap(desk: GpuDesk, first: tuple[str, ...], second: tuple[str, ...]) -> bool:
    inside = 0
    most = 0

    async def start(gpus: tuple[str, ...]) -> None:
        nonlocal inside, most
        async with desk.hold(gpus):
            inside += 1
            most = max(most, inside)
            for _ in range(5):
                await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(start(first), start(second))
    return most > 1


async def test_two_workers_do_not_start_on_one_gpu_at_once():
    desk = GpuDesk([card(0)])
    assert not await starts_overlap(desk, ("0",), ("0",))
    assert not await starts_overlap(desk, ("0", "1"), ("1", "2"))


async def test_index_and_uuid_of_one_gpu_are_the_same_gpu():
    assert not await starts_overlap(GpuDesk([card(0)]), ("0",), ("GPU-0",))


async def test_starts_on_different_gpus_or_on_the_cpu_run_side_by_side():
    desk = GpuDesk([card(0), card(0, index="1")])
    assert await starts_overlap(desk, ("0",), ("1",))
    assert await starts_overlap(desk, (), ())
