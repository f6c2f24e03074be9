"""Counts each request at its end, and what this process is busy with once a second; exposition.py shows it.

`observe` stands on the request path: one look-up by a small tuple, then additions to shared memory. Label values come
from the config and from fixed sets, never from what a caller sent, and their number is bounded all the same.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.domain.outcome import Ending
from gateway.domain.record import AccessRecord
from gateway.telemetry import families as f
from gateway.telemetry.families import Family
from gateway.telemetry.shared_values import SharedValues, Slot

MAX_KEYS = 10_000  # of one process: combinations of route, pool, class, status and ending
MAX_SERIES = 5_000
OTHER = "other"  # every label of the series that stands for all past the bound
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Places:
    """Where the requests of one key count: indices of the slot's values. A histogram's is that of its sum."""

    requests: int
    prompt: int
    completion: int
    total_s: int
    ttft_s: int
    token_s: int
    admit_s: int
    is_completed: bool


class Instruments:
    """One per process, for all revisions of its config. Owns its slot; only the event loop calls it."""

    def __init__(self, shared: SharedValues, slot: Slot) -> None:
        self.shared = shared
        self._slot = slot
        self._values = slot.values
        self._known: dict[tuple[str, tuple[str, ...]], int] = {}
        gauges = {family.name for family in f.FAMILIES if family.kind == "gauge"}
        for family, labels, first, width in slot.series():
            self._known[family, labels] = first
            if family in gauges:  # what the process before this one was busy with
                self._values[first : first + width] = memoryview(bytes(8 * width)).cast("d")
        self._keys: dict[tuple[str | None, str | None, str | None, int, str | None], Places] = {}
        for family_of in (*f.COUNTED, *f.PUBLISHED):  # there from the start, so that there is always room for them
            self._place(family_of, (OTHER,) * len(family_of.labels))
        self._past_bound = self._places(OTHER, OTHER, OTHER, OTHER, OTHER)
        self._pools: set[str] = set()  # that ever had a request in flight
        self._dropped_before = self._values[self._place(f.DROPPED, ())]
        self._cpu_before = self._values[self._place(f.CPU, (self._number(),))]
        slot.take()

    @classmethod
    def alone(cls) -> Instruments:
        """With memory that no other process sees."""
        shared = SharedValues(1)
        return cls(shared, shared.slots[0])

    def observe(self, record: AccessRecord) -> None:
        """Once per request, when it has ended and its record is complete."""
        key = (record.route, record.pool, record.class_name, record.status, record.ending)
        places = self._keys.get(key)
        if places is None:
            places = self._bind(key)
        values = self._values
        values[places.requests] += 1.0
        total_s = record.total_s
        at = places.total_s
        values[at] += total_s
        values[at + 1 + bisect_left(f.REQUEST_BOUNDS, total_s)] += 1.0
        if (admit_s := record.admit_s) is not None:
            at = places.admit_s
            values[at] += admit_s
            values[at + 1 + bisect_left(f.ADMIT_BOUNDS, admit_s)] += 1.0
        if (queue_s := record.queue_s) is not None:
            at = self._place(f.QUEUE, (record.pool or "", record.class_name or ""))
            values[at] += queue_s
            values[at + 1 + bisect_left(f.TTFT_BOUNDS, queue_s)] += 1.0
        if (tokens := record.prompt_tokens) is not None and tokens > 0:
            values[places.prompt] += tokens
        if (tokens := record.completion_tokens) is not None and tokens > 0:
            values[places.completion] += tokens
        if record.stream and (ttft_s := record.ttft_s) is not None:
            at = places.ttft_s
            values[at] += ttft_s
            values[at + 1 + bisect_left(f.TTFT_BOUNDS, ttft_s)] += 1.0
            if tokens is not None and tokens > 1 and places.is_completed:
                token_s = (total_s - ttft_s) / (tokens - 1)
                at = places.token_s
                values[at] += token_s
                values[at + 1 + bisect_left(f.TOKEN_BOUNDS, token_s)] += 1.0
        if record.attempts > 1:
            values[self._place(f.RETRIES, (record.route or "", record.pool or ""))] += record.attempts - 1
        if (code := record.error_code) is not None:
            if record.ending == Ending.ENGINE_REFUSED:
                code = "engine_refused"  # the engine's own words are no fixed set
            values[self._place(f.ERRORS, (record.route or "", code))] += 1.0

    def publish_slots(self, slots: Mapping[str, int], waiting: Mapping[tuple[str, str], int]) -> None:
        """This process's part of each pool's slots, and who waits for one, by pool and class. Called with `publish`."""
        values = self._values
        for pool, granted in slots.items():
            values[self._place(f.SLOTS, (pool,))] = float(granted)
        for labels, requests in waiting.items():
            values[self._place(f.WAITING, labels)] = float(requests)

    def publish(self, in_flight: Mapping[str, int], exchanges: int, dropped: int, *, is_redis_away: bool) -> None:
        """What this process is busy with, for scrapes that reach another one; `in_flight` is per pool, none is 0.

        Called once a second and at a scrape. `dropped` counts from the start of this process.
        """
        values = self._values
        self._pools.update(in_flight)
        for pool in self._pools:
            values[self._place(f.IN_FLIGHT, (pool,))] = float(in_flight.get(pool, 0))
        values[self._place(f.EXCHANGES, ())] = float(exchanges)
        values[self._place(f.DROPPED, ())] = self._dropped_before + dropped
        values[self._place(f.REDIS_AWAY, ())] = float(is_redis_away)
        values[self._place(f.MEMORY, (self._number(),))] = float(resident_bytes())
        spent = os.times()
        values[self._place(f.CPU, (self._number(),))] = self._cpu_before + spent.user + spent.system

    def close(self) -> None:
        """The process ends in good order: it is busy with nothing any more."""
        self._slot.leave()

    def _number(self) -> str:
        return str(self.shared.slots.index(self._slot))

    def _bind(self, key: tuple[str | None, str | None, str | None, int, str | None]) -> Places:
        if len(self._keys) >= MAX_KEYS:
            return self._past_bound
        route, pool, class_name, status, ending = key
        places = self._places(route or "", pool or "", class_name or "", str(status), ending or "")
        self._keys[key] = places
        return places

    def _places(self, route: str, pool: str, class_name: str, status: str, ending: str) -> Places:
        return Places(
            requests=self._place(f.REQUESTS, (route, pool, class_name, status, ending)),
            prompt=self._place(f.TOKENS, (route, pool, class_name, "prompt")),
            completion=self._place(f.TOKENS, (route, pool, class_name, "completion")),
            total_s=self._place(f.REQUEST_SECONDS, (route, class_name)),
            ttft_s=self._place(f.TTFT, (route, pool)),
            token_s=self._place(f.TPOT, (route, pool)),
            admit_s=self._place(f.ADMIT, (class_name,)),
            is_completed=ending == Ending.COMPLETED,
        )

    def _place(self, family: Family, labels: tuple[str, ...]) -> int:
        """Index of a series' first value; past the bound that of the family's series for all others."""
        first = self._known.get((family.name, labels))
        if first is None:
            rest = self._known.get((family.name, (OTHER,) * len(labels)))
            if rest is not None and len(self._known) >= MAX_SERIES:
                return rest
            made = self._slot.add(family.name, labels, family.width)
            if made is None:
                assert rest is not None, "a slot has room for the first series of each family"
                return rest
            first = self._known[family.name, labels] = made.first
        return first


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE_BYTES
