"""What a refused request is told about when to come back."""

from __future__ import annotations

from random import Random

import pytest

from gateway.admission.drain import Drain
from gateway.admission.queue import Queue, Waiter


@pytest.mark.parametrize("slots", [1, 8, 64])
@pytest.mark.parametrize("load", [1.2, 4.0])
async def test_retry_after_is_true_within_a_third_in_a_steady_state(slots: int, load: float) -> None:
    """A pool whose slots last 2 s on average, with more arriving than it can serve: who is refused and comes back as it
    was told would have its turn then. Simulated time; the queue and the drain are the real ones."""
    rng = Random(slots * 10 + int(load))
    mean_s, queue_max = 2.0, 40
    queue, drain = Queue(), Drain()
    ends: list[float] = []
    now_s, arrives_s = 0.0, 0.0
    told: list[tuple[float, Waiter]] = []  # what each one that got the last place would have been told
    went_s: dict[Waiter, float] = {}

    def fill() -> None:
        while len(ends) < slots and (waiter := queue.pop(now_s)) is not None:
            took_s = rng.uniform(0.5, 1.5) * mean_s
            ends.append(now_s + took_s)
            ends.sort()
            drain.moved(waiter.class_name, now_s)
            went_s[waiter] = now_s

    until_s = 1000 * mean_s
    while now_s < until_s:
        if ends and ends[0] <= arrives_s:
            now_s = ends.pop(0)
        else:
            now_s = arrives_s
            arrives_s += rng.expovariate(load * slots / mean_s)
            if queue.waiting("chat") < queue_max:
                ahead = queue.waiting("chat")
                waiter = Waiter("chat", 0, "user:a", 1, now_s, 1e9)
                if ahead == queue_max - 1 and now_s > until_s / 4:
                    told.append(
                        (drain.wait_s("chat", ahead, ahead, slots, queue.longest_s("chat", now_s), now_s), waiter)
                    )
                queue.add(waiter)
        fill()
    truths = [(said_s, went_s[waiter] - waiter.since_s) for said_s, waiter in told if waiter in went_s]
    assert len(truths) > 30
    good = sum(abs(said_s - true_s) <= 0.3 * true_s for said_s, true_s in truths)
    assert good >= 0.9 * len(truths)


def test_before_the_queue_has_moved_the_slots_own_time_tells() -> None:
    drain = Drain()
    assert drain.wait_s("chat", 3, 3, 4, 0.0, 10.0) == pytest.approx(1.0)  # nothing known: a slot lasts a second
    for _ in range(100):
        drain.held(5.0)
    assert drain.wait_s("chat", 3, 7, 4, 0.0, 10.0) == pytest.approx(8 * 5.0 / 4)


def test_a_class_is_told_by_its_own_pace() -> None:
    drain = Drain()
    for number in range(40):
        drain.moved("fast", number / 10)
        if number % 4 == 0:
            drain.moved("slow", number / 10)
    assert drain.wait_s("fast", 9, 9, 1, 0.0, 3.9) == pytest.approx(1.0)
    assert drain.wait_s("slow", 9, 19, 1, 0.0, 3.9) == pytest.approx(4.0, rel=0.15)


def test_a_queue_that_stands_still_gets_slower_by_the_second_and_its_past_is_forgotten() -> None:
    drain = Drain()
    for number in range(20):
        drain.moved("chat", number / 10)
    soon, later = (drain.wait_s("chat", 0, 0, 1, 0.0, now_s) for now_s in (2.0, 20.0))
    assert later > 5 * soon
    assert drain.rate("chat", 100.0) is None
    assert drain.wait_s("chat", 10**9, 0, 1, 0.0, 2.0) == 3600.0


def test_who_is_refused_by_a_queue_that_stands_still_is_told_no_less_than_it_has_stood() -> None:
    drain = Drain()
    drain.held(0.3)  # long ago, when all was well
    assert drain.wait_s("chat", 0, 0, 1, 61.0, 100.0) == 61.0
