"""Counts: what is asked once, kept, shared and let go."""

from __future__ import annotations

import asyncio

import pytest

from gateway.upstream.counts import HASH_ASIDE_BYTES, Counts, key_of


class Engine:
    """Counts to what it is told, when it is told; notes how often it was asked and whether it was let go."""

    def __init__(self, answer: int | Exception | None = 7, *, is_open: bool = True) -> None:
        self.answer = answer
        self.asked = self.given_up = 0
        self.gate = asyncio.Event()
        self.is_reached = asyncio.Event()
        if is_open:
            self.gate.set()

    async def __call__(self) -> int | None:
        self.asked += 1
        self.is_reached.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_the_same_prompt_is_counted_once() -> None:
    counts, engine = Counts(), Engine()
    assert [await counts.of(b"k", engine) for _ in range(3)] == [7, 7, 7]
    assert engine.asked == 1
    await counts.of(b"other", engine)
    assert engine.asked == 2


async def test_callers_of_the_same_moment_share_a_count() -> None:
    counts, engine = Counts(), Engine(is_open=False)
    tasks = [asyncio.create_task(counts.of(b"k", engine)) for _ in range(5)]
    await engine.is_reached.wait()
    engine.gate.set()
    assert await asyncio.gather(*tasks) == [7] * 5
    assert engine.asked == 1


async def test_the_others_get_their_count_though_the_first_one_leaves() -> None:
    counts, engine = Counts(), Engine(is_open=False)
    first = asyncio.create_task(counts.of(b"k", engine))
    await engine.is_reached.wait()
    second = asyncio.create_task(counts.of(b"k", engine))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    assert first.cancelled()
    engine.gate.set()
    assert await second == 7
    assert (engine.asked, engine.given_up) == (1, 0)


async def test_a_count_that_nobody_waits_for_any_more_is_given_up() -> None:
    counts, engine = Counts(), Engine(is_open=False)
    tasks = [asyncio.create_task(counts.of(b"k", engine)) for _ in range(2)]
    await engine.is_reached.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert engine.given_up == 1
    engine.gate.set()
    assert await counts.of(b"k", engine) == 7, "and whoever comes later asks anew"
    assert engine.asked == 2


@pytest.mark.parametrize("answer", [None, ValueError("no")])
async def test_a_count_that_failed_is_shared_and_not_kept(answer: Exception | None) -> None:
    counts, engine = Counts(), Engine(answer, is_open=False)
    tasks = [asyncio.create_task(counts.of(b"k", engine)) for _ in range(2)]
    await engine.is_reached.wait()
    engine.gate.set()
    told = await asyncio.gather(*tasks, return_exceptions=True)
    assert [str(each) for each in told] == [str(answer)] * 2
    engine.answer = 9
    assert await counts.of(b"k", engine) == 9
    assert engine.asked == 2


async def test_the_prompt_that_was_asked_for_longest_ago_is_forgotten_first() -> None:
    counts, engine = Counts(max_kept=2), Engine()
    for key in (b"a", b"b", b"a", b"c"):
        await counts.of(key, engine)
    assert engine.asked == 3
    await counts.of(b"a", engine)
    assert engine.asked == 3
    await counts.of(b"b", engine)
    assert engine.asked == 4


async def test_a_count_is_not_believed_for_ever() -> None:
    now = 0.0
    counts, engine = Counts(kept_s=600, clock=lambda: now), Engine()
    await counts.of(b"k", engine)
    now = 599.0
    await counts.of(b"k", engine)
    assert engine.asked == 1
    now = 601.0
    await counts.of(b"k", engine)
    assert engine.asked == 2


async def test_a_prompt_is_known_by_its_pool_path_and_bytes_however_large_it_is() -> None:
    large = b"x" * HASH_ASIDE_BYTES
    asked = [("a", b"/tokenize", b"x"), ("b", b"/tokenize", b"x"), ("a", b"/other", b"x"), ("a", b"/tokenize", b"y")]
    asked += [("a", b"/tokenize", large), ("a", b"/tokenize", large + b"x")]
    keys = [await key_of(*each) for each in asked]
    assert len(set(keys)) == len(asked)
    assert keys == [await key_of(*each) for each in asked]
    assert {len(key) for key in keys} == {32}


async def test_whoever_fails_may_ask_again_at_once() -> None:
    counts, broken, sound = Counts(), Engine(ValueError("no")), Engine()

    async def either() -> int | None:
        try:
            return await counts.of(b"k", broken)
        except ValueError:
            return await counts.of(b"k", sound)

    assert await asyncio.gather(*(either() for _ in range(3))) == [7, 7, 7]
    assert (broken.asked, sound.asked) == (1, 1)
