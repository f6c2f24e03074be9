from __future__ import annotations

import json
from pathlib import Path

import pytest

from workers.check_cli import as_document, as_text, from_line, summary
from workers.finding import Finding, Part, Severity

ERROR = Finding(Severity.ERROR, Part.GATEWAY, "gateway.port", "8080 is taken", "stop it")
WARNING = Finding(Severity.WARNING, Part.WORKERS, "pools.a.max_model_len", "too large", "make it smaller")
HINT = Finding(Severity.HINT, Part.WORKERS, "pools", "no GPU", "fine for small models")
PATH = Path("config.toml")


def test_findings_are_grouped_and_aligned_with_the_way_out_below():
    assert as_text(PATH, None, [ERROR, WARNING, HINT]).splitlines() == [
        "config.toml",
        "",
        "1 ERROR",
        "  gateway.port           8080 is taken",
        "                         fix: stop it",
        "",
        "1 WARNING",
        "  pools.a.max_model_len  too large",
        "                         fix: make it smaller",
        "",
        "1 HINT",
        "  pools                  no GPU",
        "                         fine for small models",
        "",
        "Not ready: 1 error, 1 warning, 1 hint. `poolgate up` would refuse to start.",
    ]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([], "Ready: nothing stands in the way of a start."),
        ([WARNING, WARNING], "Ready: nothing stands in the way of a start (2 warnings)."),
        ([ERROR, ERROR], "Not ready: 2 errors. `poolgate up` would refuse to start."),
    ],
)
def test_the_last_line_says_whether_a_start_would_work(found, text):
    assert summary(found) == text


@pytest.mark.parametrize(
    ("line", "key", "fact", "way_out"),
    [
        ("a.b: is wrong: so; really; do that", "a.b", "is wrong: so; really", "do that"),
        ("a.b: is wrong", "a.b", "is wrong", "see docs/config.md"),
    ],
)
def test_a_config_fault_is_split_into_key_fact_and_way_out(line, key, fact, way_out):
    finding = from_line(line)
    assert (finding.severity, finding.key, finding.fact, finding.way_out) == (Severity.ERROR, key, fact, way_out)


def test_json_has_every_finding_with_all_its_parts():
    document = json.loads(as_document(PATH, None, [ERROR]))
    assert document == {
        "config": "config.toml",
        "revision": None,
        "findings": [
            {
                "severity": "error",
                "part": "gateway",
                "key": "gateway.port",
                "fact": "8080 is taken",
                "way_out": "stop it",
            }
        ],
    }
