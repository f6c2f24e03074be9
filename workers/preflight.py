"""Can this machine run this config? Facts first, then pure rules. Called by check_cli.py, up_cli.py and cli.py."""

from __future__ import annotations

from collections.abc import Collection

from gateway.config.load import LoadedConfig
from workers.facts import Facts
from workers.finding import Finding, Part, Severity
from workers.gather import gather
from workers.gpu_rules import gpu_findings
from workers.machine_rules import machine_findings
from workers.model_rules import model_findings

__all__ = ["Finding", "Part", "Severity", "errors", "findings", "gather"]


def findings(facts: Facts) -> list[Finding]:
    """All that is to be said about these facts, errors first, else in the order of the rules."""
    found = [*machine_findings(facts), *gpu_findings(facts), *model_findings(facts)]
    return sorted(found, key=lambda finding: list(Severity).index(finding.severity))


def errors(loaded: LoadedConfig, parts: Collection[Part] = tuple(Part)) -> list[str]:
    """What keeps these parts from starting, one line each (key path, fact, way out), as ConfigError takes them."""
    return [
        finding.line
        for finding in findings(gather(loaded))
        if finding.severity is Severity.ERROR and (finding.part is Part.HOST or finding.part in parts)
    ]
