import asyncio

import pytest

from gateway.config.tasks import end_task, to_its_end


async def test_a_task_that_swallows_a_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr("gateway.config.tasks.CANCEL_AGAIN_S", 0.0)
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await end_task(task)
    assert task.cancelled() and swallowed == 3


async def test_the_error_of_an_ended_task_is_not_raised_again():
    async def broken() -> None:
        raise RuntimeError("told elsewhere")

    await end_task(asyncio.create_task(broken()), patience_s=1.0)


async def test_clean_up_goes_to_its_end_through_two_cancellations():
    gate = asyncio.Event()
    is_clean = False

    async def clean_up() -> None:
        nonlocal is_clean
        await gate.wait()
        is_clean = True

    task = asyncio.create_task(to_its_end(clean_up()))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_clean


async def test_clean_up_hands_on_its_result_and_its_error():
    async def result(fails: bool) -> int:
        if fails:
            raise ValueError("no")
        return 7

    assert await to_its_end(result(False)) == 7
    with pytest.raises(ValueError, match="no"):
        await to_its_end(result(True))
