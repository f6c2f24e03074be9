"""How a request gets its slot on its way through dispatch, and that the slot ends with it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fakes.story import FakeReply, Silence, plain_answer

from gateway.domain.endpoint import Endpoint
from gateway.domain.errors import ConnectFailed, QueueTimeout
from gateway.domain.outcome import Ending

from .dispatch_world import EVENTS, REFUSED, World

CLASSES = {"default": {"priority": 0, "queue_s": 0.05}}


async def world(*script: FakeReply | Exception | Silence, slots: int = 1) -> World:
    pools = {name: {"urls": [f"http://{name}"], "max_in_flight": 1} for name in ("a", "b")}
    made = World(*script, pools=pools, classes=CLASSES)
    for pool in made.slots.pools():
        made.slots.granted(pool, slots, 1, is_short=slots == 0)
    await made.fleet.refresh()
    return made


def held(world: World) -> dict[str, int]:
    return {pool.name: pool.held for pool in world.slots.pools()}


async def test_a_request_holds_its_slot_while_the_engine_works_and_not_longer() -> None:
    silence = Silence()
    story = await world(silence)
    task = asyncio.create_task(story.serve())
    await silence.reached()
    assert held(story) == {"a": 1, "b": 0}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(story) == {"a": 0, "b": 0}
    assert story.record.queue_s is None and story.caller.queue_s is None


async def test_a_request_that_waits_in_vain_is_refused_charged_nothing_and_never_sent() -> None:
    story = await world(slots=0)
    with pytest.raises(QueueTimeout):
        await story.serve()
    assert story.outcome().ending is Ending.REFUSED and story.outcome().usage is None
    assert story.transport.sent == []
    assert story.record.queue_s is not None and story.record.queue_s >= 0.05
    assert story.caller.queue_s == story.record.queue_s
    assert (story.record.pool, story.record.error_code) == ("a", "queue_timeout")


async def test_a_full_target_is_waited_for_and_its_fallback_not_used() -> None:
    story = await world(FakeReply(plain_answer()))
    taken = story.slots.take(["a"], "default")
    assert taken is not None
    asyncio.get_running_loop().call_later(0.01, taken.release)
    await story.serve()
    assert story.record.pool == "a" and story.caller.status == 200


async def test_a_request_does_not_go_on_at_a_pool_that_is_full() -> None:
    story = await world(REFUSED, FakeReply(*EVENTS))
    taken = story.slots.take(["b"], "default")
    assert taken is not None
    with pytest.raises(ConnectFailed):
        await story.serve()
    assert len(story.transport.sent) == 1
    taken.release()
    assert held(story) == {"a": 0, "b": 0}


async def test_a_request_that_goes_on_elsewhere_takes_the_slot_there() -> None:
    silence = Silence()
    story = await world(REFUSED, silence)
    task = asyncio.create_task(story.serve())
    await silence.reached()
    assert held(story) == {"a": 0, "b": 1}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert held(story) == {"a": 0, "b": 0}


async def test_what_costs_no_tokens_needs_no_slot() -> None:
    story = await world(FakeReply(plain_answer()), slots=0)
    fields: dict[str, Any] = {"endpoint": Endpoint.TOKENIZE}
    await story.serve(**fields)
    assert story.caller.status == 200 and story.record.queue_s is None
