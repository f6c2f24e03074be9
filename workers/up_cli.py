"""`poolgate up`: everything on one machine. Found by the gateway's command line through an entry point."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import click

from gateway.config.load import LoadedConfig, load
from gateway.config.option import config_option
from gateway.domain.errors import ConfigError
from workers import preflight
from workers.finding import Severity
from workers.progress import ProgressPrinter
from workers.up import Up


@click.command()
@config_option
def up(path: Path) -> None:
    """Start everything on this machine: Redis, the vLLM workers, the gateway.

    Shows how each worker gets along, and when one is ready, how to call it. Where redis.url is "embedded" (the
    default) it runs a Redis of its own in the state directory; else it uses the one that the config names.

    Ctrl-C stops all of it: the gateway takes no new requests and lets the running ones finish for gateway.drain_s
    seconds, then the workers end, then Redis. A second Ctrl-C does not wait for running requests.
    """
    loaded = load(path)
    findings = preflight.findings(preflight.gather(loaded))
    if errors := [finding.line for finding in findings if finding.severity is Severity.ERROR]:
        raise ConfigError(errors)
    for finding in findings:
        if finding.severity is Severity.WARNING:
            click.echo(f"warning: {finding.line}")
    sys.exit(asyncio.run(_run(loaded)))


async def _run(loaded: LoadedConfig) -> int:
    everything = Up(loaded, ProgressPrinter())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, everything.on_signal)
    return await everything.run()
