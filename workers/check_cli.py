"""`poolgate check`: what is wrong with the config, or with this machine for it. Found through an entry point."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from gateway.config.load import LoadedConfig, load
from gateway.config.option import config_option
from gateway.domain.errors import ConfigError
from workers.finding import Finding, Part, Severity
from workers.preflight import findings, gather

KEY_COLUMNS = 34  # longer key paths push their line to the right


@click.command(short_help="Is config.toml sound, and can this machine run it?")
@config_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object, for scripts.")
def check(path: Path, as_json: bool) -> None:
    """Say whether config.toml is sound and whether this machine can run it. Starts nothing.

    Looks at the file, the environment, the vllm command, the models on disk, the GPUs, the port and Redis. Every
    finding has the key that it is about and the way out. The exit code is 1 when there is an error: `poolgate up` would
    refuse with the same lines. Warnings and hints do not stop a start.
    """
    loaded: LoadedConfig | None = None
    try:
        loaded = load(path)
        found = findings(gather(loaded))
    except ConfigError as exc:
        found = [from_line(line) for line in exc.findings]
    click.echo(as_document(path, loaded, found) if as_json else as_text(path, loaded, found))
    sys.exit(1 if any(finding.severity is Severity.ERROR for finding in found) else 0)


def from_line(line: str) -> Finding:
    """A fault of the config itself, which comes as `key.path: fact; way out`."""
    key, _, rest = line.partition(": ")
    fact, _, way_out = rest.rpartition("; ")
    return Finding(Severity.ERROR, Part.HOST, key, fact or rest, way_out if fact else "see docs/config.md")


def as_document(path: Path, loaded: LoadedConfig | None, found: Sequence[Finding]) -> str:
    document = {
        "config": str(path),
        "revision": loaded.revision if loaded else None,
        "findings": [asdict(finding) for finding in found],
    }
    return json.dumps(document, ensure_ascii=False, indent=2)


def as_text(path: Path, loaded: LoadedConfig | None, found: Sequence[Finding]) -> str:
    lines = [f"{path}{f', revision {loaded.revision}' if loaded else ''}"]
    width = min(KEY_COLUMNS, max((len(finding.key) for finding in found), default=0))
    for severity in Severity:
        group = [finding for finding in found if finding.severity is severity]
        if group:
            lines += ["", _counted(len(group), severity).upper()]
        for finding in group:
            mark = "" if severity is Severity.HINT else "fix: "
            lines += [f"  {finding.key:<{width}}  {finding.fact}", f"  {'':<{width}}  {mark}{finding.way_out}"]
    return "\n".join([*lines, "", summary(found)])


def summary(found: Sequence[Finding]) -> str:
    counts = Counter(finding.severity for finding in found)
    told = ", ".join(_counted(counts[severity], severity) for severity in Severity if counts[severity])
    if counts[Severity.ERROR]:
        return f"Not ready: {told}. `poolgate up` would refuse to start."
    return f"Ready: nothing stands in the way of a start{f' ({told})' if told else ''}."


def _counted(count: int, severity: Severity) -> str:
    return f"{count} {severity.value}{'s' if count != 1 else ''}"
