"""`poolgate status`: the table over documents and replicas, the JSON of the same facts, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from fakes.story import a_config, replica

from gateway import cli_status
from gateway.admission.capacity import use_in
from gateway.cli_status import as_document, duration, lines, status
from gateway.config.load import LoadedConfig
from gateway.domain.replica import FleetDocument, Load, ReplicaState

NOW = 1000.0
CONFIG = a_config(
    pools={"big": {"model": "/m/big"}, "small": {"model": "/m/small"}},
    routes={"chat": {"targets": [{"pool": "big"}]}},
)


def document(*replicas: Any, host: str = "h1", revision: str = CONFIG.revision) -> FleetDocument:
    return FleetDocument(host, revision, NOW, tuple(replicas))


def rendered(*documents: FleetDocument, loaded: LoadedConfig = CONFIG) -> list[str]:
    return lines(loaded, list(documents), [r for d in documents for r in d.replicas], NOW)


def test_each_replica_is_a_row_with_state_age_load_and_cause() -> None:
    text = rendered(
        document(
            replica("big/0@h1", since_s=NOW - 190, load=Load(3, 2, 0.125), restarts=1),
            replica("small/0@h1", ReplicaState.FAILED, since_s=NOW - 5, detail="out of memory"),
        )
    )
    assert text[0] == f"config /etc/poolgate/config.toml  revision {CONFIG.revision}"
    assert text[1] == f"supervisor h1  revision {CONFIG.revision}"
    header, big, small = text[3:]
    assert header.split() == ["POOL", "REPLICA", "STATE", "FOR", "RUNNING", "WAITING", "KV", "RESTARTS", "DETAIL"]
    assert big.split() == ["big", "big/0@h1", "ready", "3m10s", "3", "2", "12%", "1"]
    assert small.split() == ["small", "small/0@h1", "failed", "5s", "-", "-", "-", "0", "out", "of", "memory"]
    assert big.index("ready") == small.index("failed") == header.index("STATE")


def test_a_pool_without_a_replica_is_not_passed_over_in_silence() -> None:
    assert any(
        row.split() == ["small", "-", "no", "replica", "known"] for row in rendered(document(replica("big/0@h1")))
    )


def test_replicas_of_pools_that_the_config_does_not_have_are_shown_too() -> None:
    assert rendered(document(replica("old/0@h1")))[-1].startswith("old ")


def test_no_supervisor_is_told_with_the_way_out() -> None:
    assert "poolgate workers" in rendered()[1]
    elsewhere = a_config()
    assert "supervisor" not in "".join(rendered(loaded=elsewhere)), "pools that others run need none"


def test_a_supervisor_with_another_config_is_told() -> None:
    assert "restart" in rendered(document(revision="0123456789ab"))[1]


def test_the_engines_keys_are_in_neither_form() -> None:
    made = document(replica("big/0@h1", api_key="canary"))
    shown = json.dumps(as_document(CONFIG, [made], list(made.replicas), {}))
    assert "canary" not in shown + "".join(rendered(made))
    assert json.loads(shown)["pools"]["big"][0]["state"] == "ready"


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (-3, "0s"),
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m00s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (86400 * 4 + 3 * 3600, "4d03h"),
    ],
)
def test_ages_are_short(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


# --- the command --------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`run(documents, flags…)` over a config with the pools big and small."""
    path = tmp_path / "config.toml"
    path.write_text(
        "[pools.big]\nmodel = '/m/big'\nmax_num_seqs = 4\n[pools.small]\nurls = ['http://small']\n"
        "[routes.chat]\ntargets = [{ pool = 'big' }]\n"
    )

    def call(documents: list[FleetDocument], *flags: str) -> Result:
        async def answer(_: LoadedConfig) -> tuple[list[FleetDocument], dict[str, tuple[int, int]]]:
            return documents, {"big": (3, 17)}

        monkeypatch.setattr(cli_status, "_told", answer)
        return CliRunner().invoke(status, ["--config", str(path), *flags])

    return call


def test_exit_code_0_when_each_pool_has_a_ready_replica(run: Callable[..., Result]) -> None:
    result = run([document(replica("big/0@h1"), replica("big/1@h1", ReplicaState.FAILED))])
    assert result.exit_code == 0, result.output
    assert "big/1@h1" in result.output and "small/0@static" in result.output


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.FAILED, ReplicaState.DRAINING])
def test_exit_code_3_when_a_pool_has_none(state: ReplicaState, run: Callable[..., Result]) -> None:
    assert run([document(replica("big/0@h1", state))]).exit_code == 3
    assert run([]).exit_code == 3


def test_json_is_one_document(run: Callable[..., Result]) -> None:
    result = run([document(replica("big/0@h1"))], "--json")
    shown = json.loads(result.output)
    assert set(shown) == {"config", "hosts", "pools", "slots", "other_replicas"}
    assert set(shown["pools"]) == {"big", "small"}
    assert shown["slots"] == {"big": {"slots": 4, "running": 3, "waiting": 17}}


def test_a_pool_with_a_bound_says_how_full_it_is(run: Callable[..., Result]) -> None:
    shown = run([document(replica("big/0@h1"), replica("big/1@h1"))]).output.splitlines()
    assert shown[-1] == "pool big: 3 of 8 slots taken, 17 requests wait in the gateway"


def test_what_redis_holds_of_a_pool_counts_only_processes_that_live() -> None:
    fields = {b"a": b"4;2000;3;900;0:5,10:7", b"b": b"2;2000;0;0;0:0", b"dead": b"9;999;9;900;0:99"}
    assert use_in(fields, 1000) == (3, 9)
