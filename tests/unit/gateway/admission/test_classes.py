from __future__ import annotations

import pytest

from gateway.admission.classes import default_class, lowest_class
from gateway.config.schema import ClassSection


def classes(**priorities: int) -> dict[str, ClassSection]:
    return {name: ClassSection(priority=priority) for name, priority in priorities.items()}


@pytest.mark.parametrize(
    ("priorities", "expected"),
    [
        ({"default": 7, "interactive": 0}, "default"),
        ({"interactive": 0, "batch": 10}, "interactive"),
        ({"premium": -10, "standard": 0, "batch": 10}, "standard"),
        ({"premium": -1, "standard": 1}, "standard"),
        ({"only": 500}, "only"),
    ],
)
def test_a_key_that_names_no_class_is_neither_preferred_nor_put_last(priorities: dict[str, int], expected: str) -> None:
    assert default_class(classes(**priorities)) == expected


def test_the_lowest_class_is_the_one_that_goes_last() -> None:
    assert lowest_class(classes(batch=10, premium=-10, standard=0)) == "batch"
