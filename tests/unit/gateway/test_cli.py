"""The command line as a person meets it: a help text for every command, faults as plain lines, no traceback."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from gateway.cli import main
from gateway.cli_keys import keys

COMMANDS = [[name] for name in main.list_commands(click.Context(main))]
COMMANDS += [["keys", name] for name in keys.list_commands(click.Context(keys))]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_the_commands_of_both_packages_are_there() -> None:
    assert {"check", "keys", "serve", "status", "up", "workers"} <= {command[0] for command in COMMANDS}


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_every_command_explains_itself(command: list[str], flag: str) -> None:
    result = run(*command, flag)
    assert result.exit_code == 0
    usage, _, text = result.output.partition("\n\n")
    assert usage.startswith("Usage: main " + " ".join(command))
    description, _, options = text.partition("Options:")
    assert len(description.split()) > 5, "a sentence at least"
    if command != ["keys"]:
        assert "--config" in options and "config.toml" in options


def test_the_first_page_says_where_to_start() -> None:
    output = run("--help").output
    for line in ("poolgate check", "poolgate up", "poolgate status", "poolgate keys"):
        assert line in output
    for line in output.partition("Commands:")[2].strip().splitlines():
        assert len(line.split()) > 3, f"no short help: {line}"


def test_the_version_is_told() -> None:
    assert "0." in run("--version").output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert run("fly").exit_code == 2


@pytest.mark.parametrize("command", ["serve", "status"])
def test_faults_of_the_config_are_plain_lines_on_stderr(command: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[gateway]\nprot = 1\n[pools.a]\nurls = ['http://a']\n[routes.chat]\ntargets = [{ pool = 'b' }]\n")
    result = run(command, "--config", str(path))
    assert result.exit_code == 1
    assert "config error: gateway.prot: unknown key" in result.stderr
    assert "Traceback" not in result.output + result.stderr and result.stdout == ""


def test_a_missing_config_names_the_file(tmp_path: Path) -> None:
    result = run("serve", "--config", str(tmp_path / "none.toml"))
    assert result.exit_code == 1
    assert "none.toml: cannot be read" in result.stderr


def test_a_redis_that_does_not_answer_is_one_plain_line(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[pools.a]\nurls = ['http://a']\n[routes.chat]\ntargets = [{ pool = 'a' }]\n")
    result = run("status", "--config", str(path))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: Redis does not answer") and "poolgate up" in result.stderr
    assert len(result.stderr.splitlines()) == 1
