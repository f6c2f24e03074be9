"""Slots of shared memory: what one process adds another reads, a successor goes on, a half-made series is none."""

from __future__ import annotations

import os

import pytest

from gateway.telemetry import shared_values
from gateway.telemetry.shared_values import SLOT_VARIABLE, SharedValues, Slot, slot_from_environment

NO_GAUGES: frozenset[str] = frozenset()


def count(slot: Slot, family: str, labels: tuple[str, ...], value: float) -> None:
    series = next((one for one in slot.series() if (one.family, one.labels) == (family, labels)), None)
    series = series or slot.add(family, labels, 1)
    assert series is not None
    slot.values[series.first] += value


def test_a_series_is_the_sum_over_all_slots() -> None:
    shared = SharedValues(3)
    count(shared.slots[0], "a", ("x",), 1)
    count(shared.slots[2], "b", (), 5)
    count(shared.slots[2], "a", ("x",), 2)
    count(shared.slots[2], "a", ("y",), 4)
    assert shared.sums(NO_GAUGES) == {("a", ("x",)): [3.0], ("a", ("y",)): [4.0], ("b", ()): [5.0]}


def test_two_processes_with_one_descriptor_see_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    parent = SharedValues.for_group(2)
    try:
        ((name, value),) = parent.variable(1).items()
        monkeypatch.setenv(name, value)
        seen, slot = slot_from_environment()
        count(slot, "a", ("é\n",), 7)
        assert slot is seen.slots[1] and len(seen.slots) == 2
        assert parent.sums(NO_GAUGES) == {("a", ("é\n",)): [7.0]}
    finally:
        os.close(parent.descriptor)


def test_without_a_parent_a_process_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SLOT_VARIABLE, raising=False)
    first, second = slot_from_environment(), slot_from_environment()
    count(first[1], "a", (), 1)
    assert second[0].sums(NO_GAUGES) == {} and len(first[0].slots) == 1


def test_a_successor_finds_the_series_of_the_one_before_and_adds_its_own_behind_them() -> None:
    shared = SharedValues.for_group(1)
    count(shared.slots[0], "a", ("x",), 3)
    count(shared.slots[0], "h", (), 1)
    successor = SharedValues(1, shared.descriptor)
    os.close(shared.descriptor)
    count(successor.slots[0], "a", ("x",), 1)
    count(successor.slots[0], "a", ("z",), 1)
    assert successor.sums(NO_GAUGES) == {("a", ("x",)): [4.0], ("h", ()): [1.0], ("a", ("z",)): [1.0]}
    assert shared.sums(NO_GAUGES) == successor.sums(NO_GAUGES)


def test_a_process_killed_while_it_named_a_series_leaves_none() -> None:
    shared = SharedValues(1)
    slot = shared.slots[0]
    count(slot, "a", (), 1)
    slot._names[slot._read_to : slot._read_to + 9] = b'["half", '  # and its length was not added
    assert [one.family for one in slot.series()] == ["a"]
    count(slot, "b", (), 2)
    assert shared.sums(NO_GAUGES) == {("a", ()): [1.0], ("b", ()): [2.0]}


def test_a_length_seen_before_its_text_is_no_error_and_is_read_later() -> None:
    shared = SharedValues.for_group(1)
    reader = SharedValues(1, shared.descriptor)
    os.close(shared.descriptor)
    slot = shared.slots[0]
    count(slot, "a", (), 1)
    line = bytes(slot._names[: slot._read_to])
    slot._names[: len(line)] = bytes(len(line))
    assert reader.sums(NO_GAUGES) == {}
    slot._names[: len(line)] = line
    assert reader.sums(NO_GAUGES) == {("a", ()): [1.0]}


def test_gauges_of_a_slot_that_nobody_is_in_do_not_count() -> None:
    shared = SharedValues(2)
    for slot in shared.slots:
        slot.take()
        count(slot, "gauge", (), 1)
        count(slot, "total", (), 1)
    shared.slots[0].leave()
    assert shared.sums(frozenset({"gauge"})) == {("gauge", ()): [1.0], ("total", ()): [2.0]}
    assert shared.taken() == 1


@pytest.mark.parametrize(("name", "most"), [("VALUES", 12), ("NAMES_BYTES", 64)])
def test_a_full_slot_takes_no_more_series(monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setattr(shared_values, "VALUES", most if name == "VALUES" else 1024)
    size = shared_values.VALUES * 8 + (most if name == "NAMES_BYTES" else 1_048_576)
    monkeypatch.setattr(shared_values, "_SLOT_BYTES", size)
    slot = SharedValues(1).slots[0]
    made = [slot.add("family", (str(i),), 1) for i in range(10)]
    assert made[0] is not None and made[-1] is None
    assert [one for one in made if one is not None] == slot.series()
