"""Run-time keys in a real Redis: made, used, listed, revoked by several processes; and the key of a first run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fakes.waits import eventually
from redis.asyncio import Redis

from gateway.admission.first_key import MARKER, ensure_first_key
from gateway.admission.key_record import digest_of
from gateway.admission.key_ring import KEPT_S, KeyRing
from gateway.admission.keys import KeyStore
from gateway.admission.link import RedisLink
from gateway.config.load import LoadedConfig
from gateway.domain.errors import BadRequest, InvalidKey
from gateway.domain.request import Limits

ConfigFor = Callable[..., LoadedConfig]


@contextlib.asynccontextmanager
async def process(loaded: LoadedConfig) -> AsyncIterator[tuple[KeyRing, KeyStore]]:
    """What one gateway process has of keys."""
    link = RedisLink.open(loaded)
    ring = KeyRing(loaded.config, link)
    store = KeyStore(loaded, ring)
    try:
        yield ring, store
    finally:
        await store.aclose()
        await link.aclose()


async def is_refused(store: KeyStore, key: str) -> bool:
    try:
        await store.authenticate(key)
    except InvalidKey:
        return True
    return False


async def test_a_new_key_works_and_brings_what_it_was_given(redis_url: str, config_for: ConfigFor) -> None:
    loaded = config_for(redis_url, users={"alice": {"limits": {"in_flight": 3}}}, classes={"batch": {"priority": 9}})
    async with process(loaded) as (ring, store):
        made = await ring.create(
            "ci", user="alice", class_name="batch", models=("chat",), limits=Limits(5, 50, 1), expires_in_s=60
        )
        principal = await store.authenticate(made.clear)
        assert (principal.key_id, principal.user, principal.class_name) == (made.record.id, "alice", "batch")
        assert (principal.models, principal.key_limits) == (("chat",), Limits(5, 50, 1))
        assert principal.user_limits == Limits(in_flight=3)
        assert await ring.all_keys() == (made.record,)
        assert made.record.expires_s == made.record.created_s + 60


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"user": "bob"}, 'no user "bob"; users are: none'),
        ({"class_name": "gold"}, 'no class "gold"; classes are: default'),
        ({"models": ("chat", "nope")}, 'no route "nope"; routes are: chat'),
        ({"models": ()}, "at least one model"),
    ],
    ids=lambda value: str(value)[:20],
)
async def test_a_key_may_name_only_what_the_config_knows(
    redis_url: str, redis_client: Redis, config_for: ConfigFor, fields: dict[str, object], fault: str
) -> None:
    async with process(config_for(redis_url)) as (ring, _):
        with pytest.raises(BadRequest, match=fault):
            await ring.create("ci", **fields)  # type: ignore[arg-type]
        assert await redis_client.keys("*") == []


async def test_a_name_is_taken_while_its_key_is_live(redis_url: str, config_for: ConfigFor) -> None:
    loaded = config_for(redis_url, keys={"static": {"sha256": digest_of(b"x")}})
    async with process(loaded) as (ring, _):
        await ring.create("ci")
        for name in ("ci", "static", "", "a\nb", "x" * 129):
            with pytest.raises(BadRequest):
                await ring.create(name)
        await ring.revoke("ci")
        await ring.create("ci")
        assert sorted(record.state(0) for record in await ring.all_keys()) == ["live", "revoked"]


async def test_a_key_revoked_by_one_process_is_refused_by_all(redis_url: str, config_for: ConfigFor) -> None:
    loaded = config_for(redis_url)
    async with process(loaded) as (ring, here), process(loaded) as (_, there):
        by_id, by_name = await ring.create("one"), await ring.create("two")
        for made in (by_id, by_name):
            await here.authenticate(made.clear)
            await there.authenticate(made.clear)
        assert [record.name for record in await ring.revoke(by_id.record.id)] == ["one"]
        assert [record.id for record in await ring.revoke("two")] == [by_name.record.id]
        for store in (here, there):
            for made in (by_id, by_name):
                await eventually(lambda s=store, m=made: is_refused(s, m.clear), "a revoked key is refused")  # type: ignore[misc]
        assert await ring.revoke("one") == ()


async def test_a_revoked_key_stays_on_record_for_a_month_and_then_is_forgotten(
    redis_url: str, redis_client: Redis, config_for: ConfigFor
) -> None:
    async with process(config_for(redis_url)) as (ring, store):
        made, kept = await ring.create("gone"), await ring.create("kept")
        await ring.revoke("gone")
        key = f"{{poolgate}}:key:{digest_of(made.clear.encode())}"
        first_revoked_s = await redis_client.hget(key, "revoked_s")
        assert KEPT_S - 60 < await redis_client.ttl(key) <= KEPT_S
        assert await redis_client.ttl(f"{{poolgate}}:key:{digest_of(kept.clear.encode())}") == -1
        assert await ring.revoke(made.record.id) == ()
        assert await redis_client.hget(key, "revoked_s") == first_revoked_s
        await redis_client.delete(key)  # as when the month is over
        assert [record.name for record in await ring.all_keys()] == ["kept"]
        assert await redis_client.hlen("{poolgate}:keys") == 1
        assert await ring.revoke(made.record.id) == ()
        assert not await redis_client.exists(key)
        assert await is_refused(store, made.clear)


async def test_an_expired_key_lapses_a_month_after_its_end(
    redis_url: str, redis_client: Redis, config_for: ConfigFor
) -> None:
    async with process(config_for(redis_url)) as (ring, _):
        made = await ring.create("short", expires_in_s=100)
        left_s = await redis_client.ttl(f"{{poolgate}}:key:{digest_of(made.clear.encode())}")
        assert KEPT_S + 40 < left_s <= KEPT_S + 100


async def test_an_expired_key_is_refused(redis_url: str, redis_client: Redis, config_for: ConfigFor) -> None:
    async with process(config_for(redis_url)) as (ring, store):
        made = await ring.create("short", expires_in_s=100)
        digest = digest_of(made.clear.encode())
        await redis_client.hset(f"{{poolgate}}:key:{digest}", "expires_s", str(made.record.created_s - 1))
        assert await is_refused(store, made.clear)


async def test_a_record_that_nobody_can_read_is_refused_and_told(
    redis_url: str, redis_client: Redis, config_for: ConfigFor, caplog: pytest.LogCaptureFixture
) -> None:
    async with process(config_for(redis_url)) as (ring, store):
        made = await ring.create("ci")
        await redis_client.hdel(f"{{poolgate}}:key:{digest_of(made.clear.encode())}", "models")
        assert await is_refused(store, made.clear)
        assert "cannot be read" in caplog.text
        assert await ring.all_keys() == ()


async def test_no_key_in_clear_is_anywhere_in_redis_or_in_the_log(
    redis_url: str, redis_client: Redis, config_for: ConfigFor, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        loaded = config_for(redis_url)
        link = RedisLink.open(loaded)
        path = await ensure_first_key(loaded, link)
        await link.aclose()
        assert path is not None
        async with process(loaded) as (ring, store):
            made = await ring.create("canary", limits=Limits(in_flight=1))
            clear = [await asyncio.to_thread(lambda: path.read_text().strip()), made.clear]
            for key in clear:
                await store.authenticate(key)
                await is_refused(store, key + "x")
            await ring.revoke("canary")
            await is_refused(store, made.clear)
        dump = await everything_in(redis_client)
    assert b"canary" in dump
    for key in clear:
        secret = key.split("-", 3)[3]
        assert secret.encode() not in dump
        assert secret not in caplog.text


async def everything_in(redis: Redis) -> bytes:
    parts: list[bytes] = []
    for key in await redis.keys("*"):
        value = await redis.hgetall(key) if await redis.type(key) == b"hash" else await redis.get(key)
        parts += [key, repr(value).encode()]
    return b"\n".join(parts)


# --- the first key ----------------------------------------------------------------------------------------------------


async def first_key(loaded: LoadedConfig) -> Path | None:
    link = RedisLink.open(loaded)
    try:
        return await ensure_first_key(loaded, link)
    finally:
        await link.aclose()


FIRST_KEY = """
import asyncio, sys
from pathlib import Path
from gateway.admission.first_key import ensure_first_key
from gateway.admission.link import RedisLink
from gateway.config.load import load

async def main():
    loaded = load(Path(sys.argv[1]))
    link = RedisLink.open(loaded, timeout_s=20)
    print((await ensure_first_key(loaded, link)).read_text().strip())
    await link.aclose()

asyncio.run(main())
"""


async def test_of_many_processes_exactly_one_makes_the_first_key(
    redis_url: str, config_for: ConfigFor, tmp_path: Path
) -> None:
    loaded = config_for(redis_url)
    file = tmp_path / "real.toml"
    lines = [
        'gateway.state_dir = "state"',
        f'redis.url = "{redis_url}"',
        'pools.p.urls = ["http://127.0.0.1:9"]',
        'routes.chat.targets = [{ pool = "p" }]',
    ]
    await asyncio.to_thread(file.write_text, "\n".join(lines))
    command = [sys.executable, "-c", FIRST_KEY, str(file)]
    makers = [await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE) for _ in range(5)]
    async with asyncio.timeout(60):
        shown = {(await maker.communicate())[0].decode().strip() for maker in makers}
    [key] = shown
    async with process(loaded) as (ring, store):
        assert [record.name for record in await ring.all_keys()] == ["first"]
        principal = await store.authenticate(key)
        assert (principal.models, principal.key_limits.is_empty()) == (("*",), True)


async def test_the_first_key_is_for_its_owners_eyes_and_found_again(redis_url: str, config_for: ConfigFor) -> None:
    loaded = config_for(redis_url)
    umask = os.umask(0)
    try:
        path = await first_key(loaded)
    finally:
        os.umask(umask)
    assert path == loaded.state_dir / "first.key"
    assert await asyncio.to_thread(lambda: path.stat().st_mode & 0o777) == 0o600
    assert await asyncio.to_thread(lambda: path.parent.stat().st_mode & 0o777) == 0o700
    assert await asyncio.to_thread(lambda: os.listdir(path.parent)) == ["first.key"]
    before = await asyncio.to_thread(path.read_text)
    assert await first_key(loaded) == path
    assert await asyncio.to_thread(path.read_text) == before


async def test_with_keys_in_the_config_there_is_no_first_key(
    redis_url: str, redis_client: Redis, config_for: ConfigFor
) -> None:
    assert await first_key(config_for(redis_url, keys={"a": {"sha256": digest_of(b"x")}})) is None
    assert await redis_client.keys("*") == []


async def test_a_store_that_had_a_key_gets_no_first_one(redis_url: str, config_for: ConfigFor) -> None:
    loaded = config_for(redis_url)
    async with process(loaded) as (ring, _):
        await ring.create("made-by-hand")
        assert await first_key(loaded) is None
        assert len(await ring.all_keys()) == 1


async def test_a_first_key_that_was_revoked_or_removed_is_not_made_again(redis_url: str, config_for: ConfigFor) -> None:
    loaded = config_for(redis_url)
    path = await first_key(loaded)
    assert path is not None
    async with process(loaded) as (ring, _):
        await ring.revoke("first")
        await asyncio.to_thread(path.unlink)
        assert await first_key(loaded) is None
        assert len(await ring.all_keys()) == 1


async def test_a_maker_that_died_half_way_does_not_leave_everybody_without_a_key(
    redis_url: str, redis_client: Redis, config_for: ConfigFor
) -> None:
    loaded = config_for(redis_url)
    await redis_client.set(MARKER, "somebody who died", px=200)  # its claim, about to lapse
    await asyncio.to_thread(write, loaded.state_dir / "first.key", "sk-pg-00000000-never-stored")
    path = await first_key(loaded)
    assert path is not None
    async with process(loaded) as (_, store):
        key = await asyncio.to_thread(path.read_text)
        assert (await store.authenticate(key.strip())).models == ("*",)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(text)
