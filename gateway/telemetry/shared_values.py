"""Numbers that the processes of one gateway share: each adds to a slot of its own, and any of them reads all.

Used by instruments.py, which writes, by exposition.py, which reads, and by gateway/serve.py, which hands out the slots.

The memory has no name anywhere: the parent of a group makes it and passes it on by descriptor. So two gateways cannot
meet in it, nothing is left behind when they are killed, and a slot outlives the process in it: the one that takes a
dead process's place goes on counting where that one stopped.

A slot is an array of float64 and then text, one JSON line per series in the order of their values. One thread writes
it. A line counts from the moment its length is added to the slot's own, after the line itself was written; an aligned
float64 is read and written whole. So a reader needs no lock, and a process can be killed between any two instructions.
"""

from __future__ import annotations

import json
import mmap
import os
from typing import NamedTuple

SLOT_VARIABLE = "POOLGATE_METRICS_SLOT"  # set for the processes of a group: DESCRIPTOR:NUMBER
VALUES = 131_072  # of one slot, in float64; memory that was never written to takes none
NAMES_BYTES = 1_048_576
_SLOT_BYTES = VALUES * 8 + NAMES_BYTES
_PID, _NAMES_LENGTH, _FIRST = 0, 1, 8  # indices in the values of a slot; the first series begins at _FIRST


class Series(NamedTuple):
    """`width` values of one family under one set of label values; the first is number `first` of the slot's."""

    family: str
    labels: tuple[str, ...]
    first: int
    width: int


class Slot:
    """One process's values. Made by SharedValues; written by that process alone."""

    def __init__(self, values: memoryview[float], names: memoryview) -> None:
        self.values = values
        self._names = names
        self._series: list[Series] = []
        self._read_to = 0  # in `_names`
        self._free = _FIRST

    def take(self) -> None:
        """This process is the one in the slot from now on."""
        self.values[_PID] = float(os.getpid())

    def leave(self) -> None:
        """Nobody is in it; the totals stay. Called by the process in it, or by its parent when it is dead."""
        self.values[_PID] = 0.0

    @property
    def is_taken(self) -> bool:
        return self.values[_PID] != 0.0

    def series(self) -> list[Series]:
        """All series so far, also those of processes that had the slot before. Not to be changed by the caller."""
        length = int(self.values[_NAMES_LENGTH])
        if length > self._read_to:
            try:
                found = [json.loads(line) for line in bytes(self._names[self._read_to : length]).splitlines()]
            except ValueError:  # the length is here before the text: some processors show writes in another order
                return self._series
            for family, labels, width in found:
                self._series.append(Series(family, tuple(labels), self._free, width))
                self._free += width
            self._read_to = length
        return self._series

    def add(self, family: str, labels: tuple[str, ...], width: int) -> Series | None:
        """Room for a series that is not there yet; None when the slot is full."""
        self.series()
        line = json.dumps([family, labels, width]).encode() + b"\n"
        end = self._read_to + len(line)
        if end > len(self._names) or self._free + width > len(self.values):
            return None
        self._names[self._read_to : end] = line
        self.values[_NAMES_LENGTH] = float(end)
        return self.series()[-1]


class SharedValues:
    """`slots` slots. With a descriptor: shared with every process that has it; without: of this process alone."""

    def __init__(self, slots: int, descriptor: int = -1) -> None:
        self.descriptor = descriptor
        memory = memoryview(mmap.mmap(descriptor, slots * _SLOT_BYTES))
        self.slots: list[Slot] = []
        for start in range(0, slots * _SLOT_BYTES, _SLOT_BYTES):
            names = start + VALUES * 8
            self.slots.append(Slot(memory[start:names].cast("d"), memory[names : start + _SLOT_BYTES]))

    @classmethod
    def for_group(cls, slots: int) -> SharedValues:
        """For the parent of `slots` processes; the descriptor is open as long as this process lives."""
        descriptor = os.memfd_create("poolgate-metrics")
        os.ftruncate(descriptor, slots * _SLOT_BYTES)
        return cls(slots, descriptor)

    def variable(self, number: int) -> dict[str, str]:
        """What the environment of the process in slot `number` says; it needs the descriptor as well."""
        return {SLOT_VARIABLE: f"{self.descriptor}:{number}"}

    def sums(self, gauges: frozenset[str]) -> dict[tuple[str, tuple[str, ...]], list[float]]:
        """Each series' values, added up over all slots; those of `gauges` only over slots with a process in them."""
        found: dict[tuple[str, tuple[str, ...]], list[float]] = {}
        for slot in self.slots:
            is_taken, values = slot.is_taken, slot.values
            for family, labels, first, width in slot.series():
                if not is_taken and family in gauges:
                    continue
                mine = list(values[first : first + width])
                others = found.get((family, labels))
                found[family, labels] = mine if others is None else [a + b for a, b in zip(mine, others, strict=True)]
        return found

    def taken(self) -> int:
        """How many processes there are."""
        return sum(slot.is_taken for slot in self.slots)


def slot_from_environment() -> tuple[SharedValues, Slot]:
    """What the parent of a group has passed on; else memory of this process alone."""
    descriptor, _, number = os.environ.get(SLOT_VARIABLE, "").partition(":")
    if not number:
        alone = SharedValues(1)
        return alone, alone.slots[0]
    shared = SharedValues(os.fstat(int(descriptor)).st_size // _SLOT_BYTES, int(descriptor))
    return shared, shared.slots[int(number)]
