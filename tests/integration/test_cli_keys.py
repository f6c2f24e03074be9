"""`poolgate keys` as a person and as a script use it, on a real Redis."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gateway.admission.key_record import RUN_TIME_KEY, digest_of
from gateway.cli import main

Run = Callable[..., Result]


@pytest.fixture
def config_file(redis_url: str, tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    lines = [
        f'redis.url = "{redis_url}"',
        'pools.p.urls = ["http://127.0.0.1:9"]',
        'routes.chat.targets = [{ pool = "p" }]',
        "classes.interactive.priority = 0",
        "classes.batch.priority = 10",
        "users.alice.limits.in_flight = 3",
        f'keys.static.sha256 = "{digest_of(b"x")}"',
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def run(config_file: Path) -> Run:
    def invoke(command: str, *args: str, config: Path = config_file) -> Result:
        return CliRunner().invoke(main, ["keys", command, "--config", str(config), *args])

    return invoke


def test_a_key_is_shown_once_alone_on_stdout_and_never_listed(run: Run) -> None:
    made = run("create", "ci")
    assert made.exit_code == 0, made.output
    assert RUN_TIME_KEY.fullmatch(made.stdout.strip().encode())
    assert '"ci"' in made.stderr
    listed = run("list"), run("list", "--json")
    for result in listed:
        assert result.exit_code == 0
        assert made.stdout.strip() not in result.output
        assert made.stdout.strip().split("-")[2] in result.output


def test_the_list_shows_keys_of_config_and_store_with_all_they_were_given(run: Run) -> None:
    options = ["--user", "alice", "--class", "batch", "--model", "chat", "--rpm", "5", "--tpm", "50"]
    options += ["--in-flight", "2", "--tokens-per-day", "700", "--tokens-per-month", "9000"]
    made = run("create", "ci", *options, "--expires", "30d")
    assert made.exit_code == 0, made.output
    static, ci = json.loads(run("list", "--json").stdout)
    assert (static["name"], static["state"], static["class"]) == ("static", "config", "interactive")
    assert (ci["state"], ci["user"], ci["class"], ci["models"]) == ("live", "alice", "batch", ["chat"])
    assert (ci["requests_per_min"], ci["tokens_per_min"], ci["in_flight"]) == (5, 50, 2)
    assert (ci["tokens_per_day"], ci["tokens_per_month"]) == (700, 9000)
    assert ci["expires"] > ci["created"]
    lines = run("list").stdout.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(rf"{ci['id']} +ci +live +alice +batch +chat +5 +50 +2 +700 +9000 +\S+Z +\S+Z", lines[2])


def test_a_key_is_revoked_by_id_or_name(run: Run) -> None:
    key_id = run("create", "one").stdout.split("-")[2]
    run("create", "two")
    assert run("revoke", key_id).stdout == f'Revoked "one" (id {key_id}).\n'
    assert run("revoke", "two").exit_code == 0
    assert {row["state"] for row in json.loads(run("list", "--json").stdout)[1:]} == {"revoked"}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["create", "ci", "--user", "bob"], 'no user "bob"; users are: alice'),
        (["create", "ci", "--class", "gold"], 'no class "gold"; classes are: batch, interactive'),
        (["create", "ci", "--model", "nope"], 'no route "nope"; routes are: chat'),
        (["create", "static"], r"The config has a key named .static."),
        (["create", "ci", "--expires", "soon"], "write 90m, 12h, 30d or 4w"),
        (["create", "ci", "--rpm", "0"], "rpm"),
        (["create", "ci", "--tokens-per-month", "0"], "tokens-per-month"),
        (["revoke", "nobody"], "No live key has the id or name"),
        (["revoke", "static"], r"remove \[keys.static\]"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_told_with_the_way_out(run: Run, command: list[str], message: str) -> None:
    result = run(*command)
    assert result.exit_code != 0
    assert re.search(message, result.stderr)
    assert "Traceback" not in result.output


@pytest.mark.parametrize("url", ["embedded", "unix:///nowhere/redis.sock", "redis://:hidden-password@127.0.0.1:1"])
def test_a_redis_that_does_not_answer_ends_in_advice(run: Run, config_file: Path, tmp_path: Path, url: str) -> None:
    other = tmp_path / "other.toml"
    other.write_text(re.sub(r'redis.url = ".*"', f'redis.url = "{url}"', config_file.read_text()))
    result = run("list", config=other)
    assert result.exit_code == 1
    assert "Redis does not answer" in result.stderr
    assert ("poolgate up" if url == "embedded" else "redis.url") in result.stderr
    assert "hidden-password" not in result.output


@pytest.mark.parametrize("command", [[], ["create"], ["list"], ["revoke"]], ids=" ".join)
def test_help_is_there(command: list[str]) -> None:
    result = CliRunner().invoke(main, ["keys", *command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout
