"""Every metric of the gateway: name, kind, labels, buckets and meaning. Read by instruments.py and exposition.py.

docs/operations.md lists the same; a test compares them. Label values come from the config and from small fixed sets.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    name: str  # without the prefix `poolgate_`
    kind: str  # "counter", "gauge" or "histogram"
    labels: tuple[str, ...]
    meaning: str
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, in seconds; +Inf is added

    @property
    def width(self) -> int:
        """Numbers of one series: a histogram has its sum, then a count for each bucket and one above them all."""
        return len(self.bounds) + 2 if self.bounds else 1


REQUEST_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
TTFT_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
ADMIT_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

REQUESTS = Family(
    "requests_total", "counter", ("route", "pool", "class", "status", "ending"), "Requests to an inference path."
)
TOKENS = Family("tokens_total", "counter", ("route", "pool", "class", "kind"), "Tokens of prompts and completions.")
ERRORS = Family("errors_total", "counter", ("route", "error_code"), "Requests that the gateway answered with an error.")
RETRIES = Family("retries_total", "counter", ("route", "pool"), "Replicas asked beyond the first, per request.")
REQUEST_SECONDS = Family(
    "request_seconds", "histogram", ("route", "class"), "From a request's arrival to its last byte.", REQUEST_BOUNDS
)
TTFT = Family(
    "ttft_seconds", "histogram", ("route", "pool"), "From a streamed request's arrival to its first byte.", TTFT_BOUNDS
)
TPOT = Family(
    "time_per_output_token_seconds",
    "histogram",
    ("route", "pool"),
    "Mean time per token after the first, of streams that completed.",
    TOKEN_BOUNDS,
)
ADMIT = Family("admit_seconds", "histogram", ("class",), "From a request's arrival to its admission.", ADMIT_BOUNDS)
QUEUE = Family(
    "queue_seconds",
    "histogram",
    ("pool", "class"),
    "How long requests waited that had to wait for a slot.",
    TTFT_BOUNDS,
)

IN_FLIGHT = Family("requests_in_flight", "gauge", ("pool",), "Requests that replicas of the pool work on.")
WAITING = Family("requests_waiting", "gauge", ("pool", "class"), "Requests that wait for a slot of the pool.")
SLOTS = Family("slots", "gauge", ("pool",), "Requests that gateway processes may run on the pool now, as they know it.")
EXCHANGES = Family("open_exchanges", "gauge", (), "Requests that are read, wait, or are answered.")
DROPPED = Family("access_records_dropped_total", "counter", (), "Access records lost because the log took no more.")
REDIS_AWAY = Family("redis_away", "gauge", (), "Gateway processes that go on without Redis; 0 is well.")
MEMORY = Family("process_resident_memory_bytes", "gauge", ("process",), "Resident memory of a gateway process.")
CPU = Family("process_cpu_seconds_total", "counter", ("process",), "CPU time of a gateway process.")

# said by the process that is asked alone
PROCESSES = Family("processes", "gauge", (), "Gateway processes that share the port.")
REPLICAS = Family("replicas", "gauge", ("pool", "state"), "Replicas as this gateway knows them.")
BUILD = Family("build_info", "gauge", ("version", "revision"), "Always 1: the release, and the config it runs.")

COUNTED = (REQUESTS, TOKENS, ERRORS, RETRIES, REQUEST_SECONDS, TTFT, TPOT, ADMIT, QUEUE)  # by Instruments.observe
PUBLISHED = (IN_FLIGHT, WAITING, SLOTS, EXCHANGES, DROPPED, REDIS_AWAY, MEMORY, CPU)  # by Instruments.publish
FAMILIES = (*COUNTED, *PUBLISHED, PROCESSES, REPLICAS, BUILD)
