"""Who is believed to be the master, and that the silent ones hold nobody up. Asking is any awaitable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from redis.exceptions import ConnectionError, ResponseError

from gateway.config.redis_master import MasterUnknown, Seeker, Told
from gateway.config.redis_url import Member

A, B, C = ("a", 1), ("b", 2), ("c", 3)
OLD, NEW = ("old", 6379), ("new", 6379)
SILENCE_S = 60.0  # a search that waits for the silent ones fails by the test's deadline


class Asked:
    """`answers`: what each member tells, an error, or None for silence."""

    def __init__(self, answers: dict[Member, Told | Exception | None]) -> None:
        self.answers = answers
        self.asked: list[Member] = []

    async def __call__(self, member: Member) -> Told:
        self.asked.append(member)
        answer = self.answers[member]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer


Make = Callable[..., tuple[Seeker, Asked]]


@pytest.fixture
def make() -> Make:
    def made(answers: dict[Member, Told | Exception | None], timeout_s: float = SILENCE_S) -> tuple[Seeker, Asked]:
        asked = Asked(answers)
        return Seeker(asked, [member for member in answers if member is not C], timeout_s), asked

    return made


async def test_silent_and_broken_ones_hold_nobody_up(make: Make) -> None:
    seeker, asked = make({A: None, B: Told(1, NEW)})
    async with asyncio.timeout(SILENCE_S / 2):
        assert await seeker.find() == NEW
    asked.answers = {A: ConnectionError("refused"), B: Told(1, NEW)}
    seeker.doubt(NEW)
    assert await seeker.find() == NEW


async def test_the_one_that_has_heard_of_the_failover_is_believed(make: Make) -> None:
    seeker, _ = make({A: Told(3, OLD), B: Told(4, NEW)})
    assert await seeker.find() == NEW


async def test_a_known_master_is_asked_for_again_only_when_it_is_doubted(make: Make) -> None:
    seeker, asked = make({A: Told(1, OLD)})
    assert [await seeker.find() for _ in range(3)] == [OLD] * 3
    seeker.doubt(NEW)  # of a connection that went elsewhere
    assert await seeker.find() == OLD
    assert asked.asked == [A]
    asked.answers = {A: Told(2, NEW)}
    seeker.doubt(OLD)
    assert await seeker.find() == NEW


async def test_all_who_wait_share_one_search_and_a_cancelled_one_does_not_end_it(make: Make) -> None:
    seeker, asked = make({A: Told(1, NEW), B: None})
    waiting = [asyncio.create_task(seeker.find()) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    assert await asyncio.gather(*waiting[1:]) == [NEW] * 4
    assert sorted(asked.asked) == [A, B]


async def test_nodes_that_one_told_of_are_asked_when_those_of_the_url_are_gone(make: Make) -> None:
    seeker, asked = make({A: Told(1, OLD, (A, C)), C: Told(2, NEW)})
    assert await seeker.find() == OLD
    asked.answers[A] = ConnectionError("refused")
    seeker.doubt(OLD)
    assert await seeker.find() == NEW


async def test_when_nobody_tells_each_reason_is_told(make: Make) -> None:
    seeker, _ = make({A: ResponseError("no such master"), B: None}, timeout_s=0.05)
    with pytest.raises(MasterUnknown, match=r"a:1: no such master; b:2: no answer in time") as caught:
        await seeker.find()
    assert set(caught.value.reasons) == {A, B}


async def test_closing_ends_a_search(make: Make) -> None:
    seeker, _ = make({A: None})
    waiting = asyncio.create_task(seeker.find())
    await asyncio.sleep(0)
    await seeker.aclose()
    await asyncio.gather(waiting, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
