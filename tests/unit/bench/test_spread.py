"""Percentiles, the range over rounds, and ratios taken within a round."""

from __future__ import annotations

import pytest

from bench.spread import Spread, percentile, ratios, spread


def test_spread_is_median_lowest_and_highest() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(median=2.5, low=1.0, high=10.0, rounds=4)


def test_spread_of_nothing_is_nothing() -> None:
    assert spread([]) is None


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 50), (99, 99), (100, 100)])
def test_percentile_is_the_nearest_rank(percent: float, value: float) -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], percent) == value


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_ratio_is_taken_within_its_round_and_only_where_both_have_one() -> None:
    ours, theirs = {1: 10.0, 2: 30.0, 3: 5.0}, {1: 20.0, 2: 15.0, 4: 1.0}
    assert ratios(ours, theirs) == {1: 0.5, 2: 2.0}


def test_a_peer_that_measured_nothing_gives_no_ratio() -> None:
    assert ratios({1: 10.0}, {1: 0.0}) == {}
