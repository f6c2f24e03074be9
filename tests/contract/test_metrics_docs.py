"""docs/operations.md lists every metric as it is: name, type and labels."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.telemetry.exposition import PREFIX
from gateway.telemetry.families import FAMILIES
from gateway.telemetry.instruments import MAX_KEYS, MAX_SERIES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
ROW = re.compile(r"^\| `(poolgate_\w+)` \| (\w+) \| ([^|]+) \| (.+) \|$", re.MULTILINE)


def test_every_metric_is_listed_as_it_is_and_no_other() -> None:
    listed = [(name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in ROW.findall(DOCUMENT)]
    assert listed == [(PREFIX + family.name, family.kind, family.labels) for family in FAMILIES]


def test_the_bounds_are_those_of_the_code() -> None:
    assert f"Past {MAX_SERIES:,} series of one process ({MAX_KEYS:,} combinations of labels)" in DOCUMENT
