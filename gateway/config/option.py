"""`--config FILE`, the same for every command."""

from __future__ import annotations

from pathlib import Path

import click

config_option = click.option(
    "--config",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("config.toml"),
    show_default=True,
    help="The config file.",
)
