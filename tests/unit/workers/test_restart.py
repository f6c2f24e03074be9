import random

from workers.restart import Crash, RestartPolicy, next_delay

PLAIN = RestartPolicy(first_s=1, cap_s=8, jitter=0, max_crashes=5, window_s=600)


def crashes(*at_s: float, was_ready: bool = True) -> list[Crash]:
    return [Crash(t, was_ready) for t in at_s]


def delays(policy: RestartPolicy, times: list[float], **kwargs: bool) -> list[float | None]:
    rng = random.Random(1)
    return [next_delay(policy, crashes(*times[: n + 1], **kwargs), rng) for n in range(len(times))]


def test_each_crash_in_the_window_doubles_the_delay_until_it_is_given_up():
    assert delays(PLAIN, [0, 10, 20, 30, 40]) == [1, 2, 4, 8, None]


def test_the_delay_has_a_cap():
    assert next_delay(PLAIN, crashes(0, 1, 2, 3), random.Random(1)) == 8


def test_a_worker_that_dies_once_an_hour_is_restarted_for_ever():
    assert delays(PLAIN, [3600.0 * n for n in range(50)]) == [1] * 50


def test_starts_too_slow_for_the_window_are_given_up_as_well():
    assert delays(PLAIN, [1800.0 * n for n in range(5)], was_ready=False) == [1, 2, 4, 8, None]


def test_one_start_that_became_ready_forgives_the_failed_ones_before_it():
    old = [*crashes(0, 1800, 3600, 5400, was_ready=False), *crashes(9000)]
    assert next_delay(PLAIN, old, random.Random(1)) == 1


def test_jitter_moves_the_delay_within_its_share():
    policy = RestartPolicy(first_s=4, jitter=0.25)
    drawn = {next_delay(policy, crashes(0), random.Random(seed)) for seed in range(200)}
    assert len(drawn) > 100
    assert all(d is not None and 3 <= d <= 5 for d in drawn)
