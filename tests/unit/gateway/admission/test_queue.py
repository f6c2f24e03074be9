"""Whose turn it is in a pool's queue: classes, ageing, users."""

from __future__ import annotations

import pytest

from gateway.admission.queue import AGED_EVERY, QUANTUM, Queue, Waiter


def waiter(
    user: str = "user:a", cost: int = 100, *, priority: int = 0, since_s: float = 0.0, queue_s: float = 30
) -> Waiter:
    return Waiter(f"class-{priority}", priority, user, cost, since_s, queue_s)


def filled(*waiters: Waiter) -> Queue:
    queue = Queue()
    for each in waiters:
        queue.add(each)
    return queue


def order(queue: Queue, now_s: float = 0.0) -> list[Waiter]:
    found = []
    while (each := queue.pop(now_s)) is not None:
        found.append(each)
    return found


async def test_those_of_one_user_go_in_the_order_in_which_they_came() -> None:
    waiters = [waiter() for _ in range(5)]
    assert order(filled(*waiters)) == waiters


async def test_a_class_goes_before_all_classes_with_a_higher_number() -> None:
    batch, interactive = [waiter(priority=10) for _ in range(3)], [waiter(priority=0) for _ in range(3)]
    assert order(filled(*batch, *interactive)) == [*interactive, *batch]


async def test_an_aged_request_of_a_lower_class_gets_one_place_in_ten_and_no_more() -> None:
    queue = filled(*(waiter(priority=10, queue_s=20) for _ in range(5)))
    for _ in range(60):
        queue.add(waiter(priority=0, since_s=11.0))
    priorities = [each.priority for each in (queue.pop(11.0) for _ in range(40)) if each is not None]
    assert priorities.count(10) == 4
    assert all(sum(priorities[i : i + AGED_EVERY]) <= 10 for i in range(len(priorities) - AGED_EVERY))


async def test_a_lower_class_that_has_not_waited_half_its_time_gets_no_place() -> None:
    queue = filled(*(waiter(priority=10, queue_s=20) for _ in range(5)))
    for _ in range(60):
        queue.add(waiter(priority=0, since_s=9.9))
    assert [each.priority for each in (queue.pop(9.9) for _ in range(40)) if each is not None] == [0] * 40


async def test_a_user_with_many_requests_does_not_keep_others_waiting() -> None:
    hoard = [waiter("user:hoard", QUANTUM) for _ in range(50)]
    few = [waiter("user:few", QUANTUM) for _ in range(3)]
    users = [each.user[1] for each in order(filled(*hoard, *few))]
    assert users[:6].count("user:few") == 3


@pytest.mark.parametrize("cost", [1, QUANTUM // 8, QUANTUM, 10 * QUANTUM, 10**15])
async def test_users_share_by_tokens_whatever_a_request_costs(cost: int) -> None:
    dear = [waiter("user:dear", 8 * cost) for _ in range(40)]
    cheap = [waiter("user:cheap", cost) for _ in range(320)]
    served = order(filled(*dear, *cheap))
    assert len(served) == 360
    spent = {"user:dear": 0, "user:cheap": 0}
    for each in served:
        spent[each.user[1]] += each.cost
        if min(spent.values()) == 320 * cost:
            break
        if max(spent.values()) < 320 * cost:  # while both have something waiting
            assert abs(spent["user:dear"] - spent["user:cheap"]) <= 2 * max(QUANTUM, 8 * cost)


async def test_who_leaves_is_passed_over_and_counts_no_more() -> None:
    waiters = [waiter("user:a"), waiter("user:b"), waiter("user:a")]
    queue = filled(*waiters)
    waiters[0].leave()
    assert len(queue) == queue.waiting("class-0") == 2
    assert set(order(queue)) == {waiters[1], waiters[2]}
    waiters[0].leave()  # again: nothing happens
    assert len(queue) == 0 and list(queue.by_priority()) == []


async def test_one_that_waits_in_two_pools_leaves_both_when_one_has_room() -> None:
    one = waiter()
    first, second = filled(one), filled(one)
    assert second.pop(0.0) is one
    assert (len(first), len(second)) == (0, 0)


async def test_a_user_who_comes_back_brings_no_turns_from_before() -> None:
    queue = filled(waiter("user:a", 1), waiter("user:b", QUANTUM))
    order(queue)
    for _ in range(5):
        queue.add(waiter("user:b", QUANTUM))
    for _ in range(5):
        queue.add(waiter("user:a", QUANTUM))
    users = [each.user[1] for each in order(queue)]
    assert sorted(users[:2]) == sorted(users[2:4]) == ["user:a", "user:b"]


async def test_the_newest_of_a_class_are_named_last_come_first() -> None:
    waiters = [waiter() for _ in range(4)]
    queue = filled(*waiters, waiter(priority=5))
    assert queue.newest("class-0", 2) == [waiters[3], waiters[2]]
    assert queue.newest("class-0", 0) == queue.newest("class-0", -1) == []


async def test_an_aged_request_is_found_behind_one_of_a_more_patient_class_of_the_same_priority() -> None:
    patient = Waiter("patient", 10, "user:a", 100, 0.0, 3600)
    hasty = Waiter("hasty", 10, "user:a", 100, 0.0, 4)
    queue = filled(patient, hasty)
    for _ in range(60):
        queue.add(waiter(priority=0, since_s=3.0))
    served = [queue.pop(3.0) for _ in range(AGED_EVERY + 1)]
    assert hasty in served and patient not in served
