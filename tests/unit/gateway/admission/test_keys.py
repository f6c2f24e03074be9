"""Authentication over a ring that is a plain dict: the caches' bounds in time, and what a config says about keys."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.admission import keys as keys_module
from gateway.admission.key_record import KeyRecord, digest_of, new_key
from gateway.admission.key_ring import KeyRing
from gateway.admission.keys import FRESH_S, STALE_S, UNKNOWN_S, KeyStore
from gateway.config.load import LoadedConfig, parse
from gateway.domain.errors import ConfigError, InvalidKey, StoreUnavailable
from gateway.domain.request import NO_LIMITS, Limits

NOW_S = 1_800_000_000


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Ring(KeyRing):
    """Records by hash, and how often each was asked for; `is_away` stands for a Redis that does not answer."""

    def __init__(self) -> None:
        self.records: dict[str, KeyRecord] = {}
        self.asked: list[str] = []
        self.is_away = False
        self.was_asked = asyncio.Event()
        self.gate: asyncio.Event | None = None

    async def find(self, digest: str) -> tuple[KeyRecord | None, int]:
        self.asked.append(digest)
        self.was_asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.is_away:
            raise StoreUnavailable("away", retry_after_s=1.0)
        return self.records.get(digest), NOW_S

    def add(self, key: str, **fields: Any) -> None:
        record = KeyRecord(id=key.split("-")[2], name="n", user=None, class_name=None, models=("*",), created_s=NOW_S)
        self.records[digest_of(key.encode())] = replace(record, **fields)

    def revoke(self, key: str) -> None:
        digest = digest_of(key.encode())
        self.records[digest] = replace(self.records[digest], revoked_s=NOW_S)


@pytest.fixture
def ring() -> Ring:
    return Ring()


@pytest.fixture
def clock() -> Clock:
    return Clock()


def config(**sections: Any) -> LoadedConfig:
    data: dict[str, Any] = {
        "pools": {"p": {"urls": ["http://h:1"]}},
        "routes": {"chat": {"targets": [{"pool": "p"}]}},
        "classes": {"interactive": {"priority": 0}, "batch": {"priority": 10}},
        "users": {"alice": {"limits": {"requests_per_min": 5}}},
    }
    return parse(data | sections, Path("/nowhere/config.toml"))


@pytest.fixture
def store(ring: Ring, clock: Clock) -> KeyStore:
    return KeyStore(config(), ring, clock=clock)


KEY = new_key("0badcafe")
OTHER = new_key("12345678")


async def refusal(store: KeyStore, key: bytes | str) -> str:
    with pytest.raises(InvalidKey) as caught:
        await store.authenticate(key)
    return caught.value.message


# --- what is presented ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "odd",
    [
        b"",
        "",
        "sk-“curly”",
        "sk—dash",
        b"\xff",
        "\udcff",
        "a" * 100_000,
        b"sk-pg-0badcafe-" + b"\xff" * 43,
        "sk-pg-0badcafe-" + "ü" * 43,
        KEY + "\n",
        KEY + " ",
        KEY.upper(),
        KEY[:-1],
    ],
    ids=range(13),  # keys are random, and names of tests must not be
)
async def test_an_odd_key_is_refused_like_any_bad_one(store: KeyStore, ring: Ring, odd: bytes | str) -> None:
    ring.add(KEY)
    assert await refusal(store, odd) == await refusal(store, OTHER)


async def test_what_cannot_be_a_run_time_key_costs_no_look_up(store: KeyStore, ring: Ring) -> None:
    for key in ("guess", "sk-1234", "sk-pg-0badcafe-short", "sk-pg-NOTHEXID-" + "a" * 43):
        await refusal(store, key)
    assert ring.asked == []


# --- static keys ------------------------------------------------------------------------------------------------------


async def test_static_keys_come_by_environment_or_by_hash(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_ALICE_KEY", " alice's own key\n")
    store = KeyStore(
        config(
            keys={
                "a": {"key_env": "TEST_ALICE_KEY", "user": "alice", "class": "batch", "models": ["chat"]},
                "b": {"sha256": hashlib.sha256(b"bobs").hexdigest().upper(), "limits": {"in_flight": 2}},
            }
        ),
        ring,
    )
    alice, bob = await store.authenticate("alice's own key"), await store.authenticate(b"bobs")
    assert (alice.key_id, alice.user, alice.class_name, alice.models) == ("a", "alice", "batch", ("chat",))
    assert alice.user_limits == Limits(requests_per_min=5)
    assert (bob.key_id, bob.user, bob.class_name, bob.models) == ("b", None, "interactive", ("*",))
    assert (bob.key_limits, bob.user_limits) == (Limits(in_flight=2), NO_LIMITS)
    assert ring.asked == []


async def test_static_keys_work_while_redis_is_away(ring: Ring) -> None:
    ring.is_away = True
    store = KeyStore(config(keys={"b": {"sha256": digest_of(b"bobs")}}), ring)
    assert (await store.authenticate("bobs")).key_id == "b"


async def test_a_key_whose_environment_variable_is_unset_is_off_and_told(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TEST_UNSET_KEY", "  ")
    store = KeyStore(config(keys={"a": {"key_env": "TEST_UNSET_KEY"}}), ring)
    assert "TEST_UNSET_KEY is not set" in caplog.text
    await refusal(store, "")
    await refusal(store, "  ")


def test_one_key_under_two_names_is_a_fault_of_the_config(ring: Ring) -> None:
    with pytest.raises(ConfigError, match=r"keys\.b: is the same key as keys\.a"):
        KeyStore(config(keys={"a": {"sha256": digest_of(b"x")}, "b": {"sha256": digest_of(b"x")}}), ring)


# --- run-time keys ----------------------------------------------------------------------------------------------------


async def test_a_run_time_key_brings_its_own_and_its_users_limits(store: KeyStore, ring: Ring) -> None:
    ring.add(KEY, user="alice", class_name="batch", models=("chat",), limits=Limits(tokens_per_min=7))
    principal = await store.authenticate(KEY)
    assert (principal.key_id, principal.user, principal.class_name) == ("0badcafe", "alice", "batch")
    assert (principal.key_limits, principal.user_limits) == (Limits(tokens_per_min=7), Limits(requests_per_min=5))
    assert (principal.may_use("chat"), principal.may_use("other")) == (True, False)


async def test_what_the_config_no_longer_knows_does_not_raise_the_caller(store: KeyStore, ring: Ring) -> None:
    ring.add(KEY, user="left", class_name="removed")
    principal = await store.authenticate(KEY)
    assert (principal.class_name, principal.user, principal.user_limits) == ("batch", "left", NO_LIMITS)


async def test_a_known_key_is_asked_for_again_only_after_its_time(store: KeyStore, ring: Ring, clock: Clock) -> None:
    ring.add(KEY)
    for _ in range(100):
        await store.authenticate(KEY)
    assert len(ring.asked) == 1
    clock.now += FRESH_S + 0.001
    await store.authenticate(KEY)
    assert len(ring.asked) == 2


async def test_a_key_that_did_not_change_is_the_same_principal_and_one_that_did_another(
    store: KeyStore, ring: Ring, clock: Clock
) -> None:
    ring.add(KEY, limits=Limits(tokens_per_min=7))
    first = await store.authenticate(KEY)
    clock.now += FRESH_S + 0.001
    assert await store.authenticate(KEY) is first
    ring.add(KEY, limits=Limits(tokens_per_min=8))
    clock.now += FRESH_S + 0.001
    changed = await store.authenticate(KEY)
    assert changed is not first
    assert changed.key_limits == Limits(tokens_per_min=8)


async def test_a_revoked_key_is_refused_once_its_cache_time_is_over(store: KeyStore, ring: Ring, clock: Clock) -> None:
    ring.add(KEY)
    await store.authenticate(KEY)
    ring.revoke(KEY)
    clock.now += FRESH_S + 0.001
    await refusal(store, KEY)


async def test_a_key_that_was_good_a_moment_ago_is_known_without_asking(
    store: KeyStore, ring: Ring, clock: Clock
) -> None:
    key = KEY
    ring.add(key, expires_s=NOW_S + 1)
    assert store.known(key.encode()) is None
    principal = await store.authenticate(key)
    assert store.known(key.encode()) is principal
    clock.now += 0.9
    assert store.known(key.encode()) is principal
    clock.now += 0.2
    assert store.known(key.encode()) is None, "it has expired"
    other = OTHER
    ring.add(other)
    await store.authenticate(other)
    ring.revoke(other)
    clock.now += FRESH_S + 0.1
    assert store.known(other.encode()) is None
    with pytest.raises(InvalidKey):
        await store.authenticate(other)
    assert store.known(other.encode()) is None


async def test_a_guess_is_never_known(store: KeyStore, ring: Ring) -> None:
    for guess in (b"", b"nonsense", KEY.encode()):
        with pytest.raises(InvalidKey):
            await store.authenticate(guess)
        assert store.known(guess) is None


async def test_an_answer_is_as_old_as_its_question(store: KeyStore, ring: Ring, clock: Clock) -> None:
    ring.add(KEY)
    ring.gate = asyncio.Event()
    asking = asyncio.create_task(store.authenticate(KEY))
    await ring.was_asked.wait()
    clock.now += FRESH_S + 0.001  # Redis was slow; what it says may be outdated by now
    ring.gate.set()
    await asking
    ring.revoke(KEY)
    await refusal(store, KEY)


async def test_an_unknown_key_is_not_asked_for_again_and_again(store: KeyStore, ring: Ring, clock: Clock) -> None:
    for _ in range(50):
        await refusal(store, KEY)
    assert len(ring.asked) == 1
    ring.add(KEY)
    clock.now += UNKNOWN_S + 0.001
    assert (await store.authenticate(KEY)).key_id == "0badcafe"


async def test_an_expired_key_is_refused_also_from_the_cache(store: KeyStore, ring: Ring, clock: Clock) -> None:
    ring.add(KEY, expires_s=NOW_S + 1)
    await store.authenticate(KEY)
    clock.now += 1
    await refusal(store, KEY)
    ring.add(OTHER, expires_s=NOW_S)
    await refusal(store, OTHER)


async def test_many_at_once_share_one_look_up_and_one_leaving_does_not_hurt_the_others(
    store: KeyStore, ring: Ring
) -> None:
    ring.add(KEY)
    ring.gate = asyncio.Event()
    calls = [asyncio.create_task(store.authenticate(KEY)) for _ in range(50)]
    await asyncio.sleep(0)
    calls[0].cancel()
    await asyncio.sleep(0)
    ring.gate.set()
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert {getattr(result, "key_id", result) for result in results[1:]} == {"0badcafe"}
    assert len(ring.asked) == 1


async def test_closing_ends_a_look_up_that_is_on_its_way(store: KeyStore, ring: Ring) -> None:
    ring.gate = asyncio.Event()
    asking = asyncio.create_task(store.authenticate(KEY))
    await asyncio.sleep(0)
    await store.aclose()
    with pytest.raises(asyncio.CancelledError):
        await asking


# --- Redis away -------------------------------------------------------------------------------------------------------


async def test_while_redis_is_away_a_key_seen_lately_works_and_no_other(
    store: KeyStore, ring: Ring, clock: Clock
) -> None:
    ring.add(KEY)
    ring.add(OTHER)
    await store.authenticate(KEY)
    ring.is_away = True
    clock.now += STALE_S
    assert (await store.authenticate(KEY)).key_id == "0badcafe"
    with pytest.raises(StoreUnavailable):
        await store.authenticate(OTHER)
    clock.now += 0.001
    with pytest.raises(StoreUnavailable):
        await store.authenticate(KEY)


async def test_a_revocation_that_was_seen_is_not_forgotten_when_redis_goes_away(
    store: KeyStore, ring: Ring, clock: Clock
) -> None:
    ring.add(KEY)
    await store.authenticate(KEY)
    ring.revoke(KEY)
    clock.now += FRESH_S + 0.001
    await refusal(store, KEY)
    ring.is_away = True
    clock.now += UNKNOWN_S + 0.001
    with pytest.raises(StoreUnavailable):
        await store.authenticate(KEY)


async def test_an_expired_key_does_not_come_back_while_redis_is_away(store: KeyStore, ring: Ring, clock: Clock) -> None:
    ring.add(KEY, expires_s=NOW_S + 10)
    await store.authenticate(KEY)
    ring.is_away = True
    clock.now += 10
    await refusal(store, KEY)


# --- bounds -----------------------------------------------------------------------------------------------------------


async def test_guesses_do_not_push_known_keys_out_and_both_caches_are_bounded(
    store: KeyStore, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "MAX_CACHED", 2)
    monkeypatch.setattr(keys_module, "MAX_UNKNOWN", 3)
    ring.add(KEY)
    await store.authenticate(KEY)
    guesses = [new_key(f"{number:08x}") for number in range(10)]
    for guess in guesses:
        await refusal(store, guess)
    await store.authenticate(KEY)
    assert len(ring.asked) == 11
    asked_again: Callable[[str], bool] = lambda guess: digest_of(guess.encode()) in ring.asked[11:]  # noqa: E731
    for guess in (guesses[-1], guesses[0]):
        await refusal(store, guess)
    assert (asked_again(guesses[-1]), asked_again(guesses[0])) == (False, True)


async def test_the_longest_unused_key_leaves_the_cache_first(
    store: KeyStore, ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "MAX_CACHED", 2)
    third = new_key("00000003")
    for key in (KEY, OTHER, third):
        ring.add(key)
    for key in (KEY, OTHER, KEY, third, KEY, OTHER):
        await store.authenticate(key)
    assert [ring.asked.count(digest_of(key.encode())) for key in (KEY, OTHER, third)] == [1, 2, 1]
