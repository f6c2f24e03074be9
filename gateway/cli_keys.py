"""`poolgate keys`: make, list and revoke the keys that live in Redis. The root command is in cli.py."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click

from gateway.admission.classes import default_class
from gateway.admission.key_record import KeyRecord
from gateway.admission.key_ring import KeyRing
from gateway.admission.link import RedisLink
from gateway.config.load import LoadedConfig, load
from gateway.config.option import config_option
from gateway.config.schema import limits_from
from gateway.domain.errors import StoreUnavailable
from gateway.domain.request import Limits

T = TypeVar("T")

TIMEOUT_S = 5.0  # a person waits, and not for long
SECONDS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class Duration(click.ParamType[int]):
    """ "30d" → seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([1-9][0-9]{0,5})([mhdw])", str(value))
        if found is None:
            self.fail(f'"{value}" is no duration; write 90m, 12h, 30d or 4w', param, ctx)
        return int(found[1]) * SECONDS[found[2]]


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    Keys made here live in Redis, as a hash only; every gateway knows a new one at once, and a revoked one no longer
    after 2 seconds. Keys that never change can stand in the config instead ([keys.NAME]).
    """


@keys.command()
@config_option
@click.argument("name")
@click.option("--user", help="Whose key it is: a [users.NAME] of the config, whose limits its keys share.")
@click.option("--class", "class_name", help="Which class its requests run in: a [classes.NAME] of the config.")
@click.option("--model", "models", multiple=True, help="A route it may use; repeat for more. Without: all.")
@click.option("--rpm", type=click.IntRange(min=1), help="Requests a minute.")
@click.option("--tpm", type=click.IntRange(min=1), help="Tokens a minute, prompt and output.")
@click.option("--in-flight", type=click.IntRange(min=1), help="Requests at once.")
@click.option("--tokens-per-day", type=click.IntRange(min=1), help="Tokens a day, which ends at 00:00 UTC.")
@click.option("--tokens-per-month", type=click.IntRange(min=1), help="Tokens a month, likewise.")
@click.option("--expires", "expires_in_s", type=Duration(), metavar="30d", help="Valid for: 90m, 12h, 30d, 4w.")
def create(
    path: Path,
    name: str,
    user: str | None,
    class_name: str | None,
    models: tuple[str, ...],
    rpm: int | None,
    tpm: int | None,
    in_flight: int | None,
    tokens_per_day: int | None,
    tokens_per_month: int | None,
    expires_in_s: int | None,
) -> None:
    """Make a key called NAME and show it, this once.

    The key alone goes to stdout, so KEY=$(poolgate keys create NAME) works.
    """
    loaded = load(path)
    limits = Limits(rpm, tpm, in_flight, tokens_per_day, tokens_per_month)
    made = with_ring(
        loaded,
        lambda ring: ring.create(
            name,
            user=user,
            class_name=class_name,
            models=models or ("*",),
            limits=limits,
            expires_in_s=expires_in_s,
        ),
    )
    click.echo(
        f'Key "{name}" (id {made.record.id}). It is shown this once and kept nowhere; put it somewhere safe:', err=True
    )
    click.echo(made.clear)


@keys.command("list")
@config_option
@click.option("--json", "as_json", is_flag=True, help="As JSON, one object per key.")
def list_keys(path: Path, as_json: bool) -> None:
    """Show all keys: those of the config and those in Redis, revoked ones for 30 days.

    Keys themselves are never shown: nobody has them but their owners.
    """
    loaded = load(path)
    records = with_ring(loaded, lambda ring: ring.all_keys())
    rows = [*from_config(loaded), *(from_record(loaded, record, time.time()) for record in records)]
    if as_json:
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    for line in table(rows):
        click.echo(line)
    if not rows:
        click.echo("No keys yet. Make one: poolgate keys create NAME", err=True)


@keys.command()
@config_option
@click.argument("id_or_name")
def revoke(path: Path, id_or_name: str) -> None:
    """Revoke the key with that id or name: within 2 seconds no gateway takes it any more.

    Requests that are running go on to their end.
    """
    loaded = load(path)
    if id_or_name in loaded.config.keys:
        raise click.ClickException(
            f'"{id_or_name}" is a key of the config; remove [keys.{id_or_name}] there and restart.'
        )
    revoked = with_ring(loaded, lambda ring: ring.revoke(id_or_name))
    if not revoked:
        raise click.ClickException(f'No live key has the id or name "{id_or_name}"; see poolgate keys list.')
    for record in revoked:
        click.echo(f'Revoked "{record.name}" (id {record.id}).')


def with_ring(loaded: LoadedConfig, work: Callable[[KeyRing], Awaitable[T]]) -> T:
    """What `work` gives. A Redis that does not answer ends the command with the way out."""

    async def run() -> T:
        link = RedisLink.open(loaded, timeout_s=TIMEOUT_S)
        try:
            return await work(KeyRing(loaded.config, link))
        finally:
            await link.aclose()

    try:
        return asyncio.run(run())
    except StoreUnavailable as exc:
        if loaded.config.redis.is_embedded:
            hint = f"keys live in the Redis that poolgate up runs; is it running with {loaded.path}?"
        else:
            hint = f"is the server that redis.url in {loaded.path} names running, and may we use it?"
        raise click.ClickException(f"Redis does not answer: {hint} ({exc.__cause__!r})") from exc


def from_config(loaded: LoadedConfig) -> Iterator[dict[str, Any]]:
    for name, key in loaded.config.keys.items():
        class_name = key.class_ or default_class(loaded.config.classes)
        yield row(name, name, "config", key.user, class_name, tuple(key.models), limits_from(key.limits))


def from_record(loaded: LoadedConfig, record: KeyRecord, now_s: float) -> dict[str, Any]:
    class_name = record.class_name or default_class(loaded.config.classes)
    shown = row(record.id, record.name, record.state(now_s), record.user, class_name, record.models, record.limits)
    for field, at_s in (("created", record.created_s), ("expires", record.expires_s), ("revoked", record.revoked_s)):
        shown[field] = None if at_s is None else f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return shown


def row(
    key_id: str, name: str, state: str, user: str | None, class_name: str, models: tuple[str, ...], limits: Limits
) -> dict[str, Any]:
    return {
        "id": key_id,
        "name": name,
        "state": state,
        "user": user,
        "class": class_name,
        "models": list(models),
        "requests_per_min": limits.requests_per_min,
        "tokens_per_min": limits.tokens_per_min,
        "in_flight": limits.in_flight,
        "tokens_per_day": limits.tokens_per_day,
        "tokens_per_month": limits.tokens_per_month,
        "created": None,
        "expires": None,
        "revoked": None,
    }


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Columns as wide as their widest cell; none where there is no row."""
    limits = {
        "requests_per_min": "rpm",
        "tokens_per_min": "tpm",
        "in_flight": "in flight",
        "tokens_per_day": "tokens/day",
        "tokens_per_month": "tokens/month",
    }
    before, after = ["id", "name", "state", "user", "class", "models"], ["created", "expires"]
    heads, fields = [*before, *limits.values(), *after], [*before, *limits, *after]
    cells = [[cell(each[field]) for field in fields] for each in rows]
    widths = [max(len(head), *(len(line[column]) for line in cells)) for column, head in enumerate(heads) if cells]
    for line in [heads, *cells] if cells else []:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()


def cell(value: Any) -> str:
    if value is None:
        return "-"
    return " ".join(value) if isinstance(value, list) else str(value)
