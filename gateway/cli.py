"""The command `poolgate`. Each subcommand is thin: it loads the config and calls the file that does the work.

Commands of the supervisor come in through the entry-point group `poolgate.commands`, since the gateway knows nothing of
the supervisor's code.
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from pathlib import Path

import click

from gateway.cli_keys import keys
from gateway.cli_status import status
from gateway.config.load import load
from gateway.config.option import config_option
from gateway.domain.errors import ConfigError, GatewayError


class Poolgate(click.Group):
    """Adds the installed subcommands of other packages, and turns our own errors into plain lines on stderr."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *entry_points(group="poolgate.commands").names})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        for entry in entry_points(group="poolgate.commands", name=cmd_name):
            command: click.Command = entry.load()
            return command
        return None

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ConfigError as exc:
            for line in exc.findings:
                click.echo(f"config error: {line}", err=True)
            ctx.exit(1)
        except GatewayError as exc:
            click.echo(f"error: {exc.message}", err=True)
            ctx.exit(1)
        except OSError as exc:
            if exc.filename is None:
                raise
            click.echo(f"error: {exc.filename}: {exc.strerror}", err=True)
            ctx.exit(1)


@click.group(cls=Poolgate, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="poolgate")
def main() -> None:
    """One OpenAI-compatible endpoint in front of pools of vLLM servers.

    \b
    Start here:
      poolgate check      is config.toml sound, and can this machine run it?
      poolgate up         Redis, workers and gateway on this machine, in one go
      poolgate status     what runs, and in which state
      poolgate keys       make, list and revoke API keys
    """
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per probe otherwise
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


@main.command()
@config_option
def serve(path: Path) -> None:
    """Run the gateway alone: the HTTP endpoint, without Redis and without workers.

    For a machine of its own, or behind a balancer: any number of gateways share one Redis (redis.url in the config).
    Stops on SIGTERM or Ctrl-C: takes no new requests, lets the running ones finish for gateway.drain_s seconds.
    """
    from gateway.serve import serve as run

    sys.exit(run(load(path)))


main.add_command(keys)
main.add_command(status)
