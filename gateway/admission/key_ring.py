"""Keys made at run time, in Redis: make, find, list, revoke. Used by keys.py for look-ups and by `poolgate keys`.

`{poolgate}:key:<sha256>` holds one record (the key itself is nowhere); `{poolgate}:keys` maps key id to that hash.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from redis.asyncio import Redis

from gateway.admission.key_record import KeyRecord, digest_of, from_hash, new_key, to_hash
from gateway.admission.link import PATIENT_S, RedisLink
from gateway.config.schema import NAME_PATTERN, Config
from gateway.domain.errors import BadRequest
from gateway.domain.request import NO_LIMITS, Limits
from gateway.domain.store_keys import TAG

log = logging.getLogger(__name__)

INDEX = f"{TAG}:keys"
KEY_NAME = re.compile(NAME_PATTERN)
KEPT_S = 30 * 86_400  # a record after its key was revoked or has expired
# one step, so that a record which lapses meanwhile does not come back half: KEYS record; ARGV seconds that it is kept
REVOKE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.call('HGET', KEYS[1], 'revoked_s') ~= '' then return 0 end
redis.call('HSET', KEYS[1], 'revoked_s', redis.call('TIME')[1])
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""


def record_key(digest: str) -> str:
    return f"{TAG}:key:{digest}"


@dataclass(frozen=True, slots=True)
class NewKey:
    """`clear` is the key itself: shown once, to whoever asked for it, and kept nowhere."""

    clear: str
    record: KeyRecord

    def __repr__(self) -> str:
        return f"NewKey({self.record.id})"


class KeyRing:
    """Every call raises StoreUnavailable when Redis does not answer."""

    def __init__(self, config: Config, link: RedisLink) -> None:
        self._config = config
        self._link = link

    async def find(self, digest: str) -> tuple[KeyRecord | None, int]:
        """The record of that hash, revoked and expired ones too, and Redis' time in seconds."""

        async def run(redis: Redis) -> list[Any]:
            pipe = redis.pipeline(transaction=False)
            pipe.hgetall(record_key(digest))
            pipe.time()
            return await pipe.execute()

        fields, time = await self._link.call(run)
        return _parsed(fields, digest), time[0]

    async def create(
        self,
        name: str,
        *,
        user: str | None = None,
        class_name: str | None = None,
        models: tuple[str, ...] = ("*",),
        limits: Limits = NO_LIMITS,
        expires_in_s: int | None = None,
        clear: str | None = None,
    ) -> NewKey:
        """A new key. Raises BadRequest when the config does not know what it names, or when a live key has its name.

        `clear`: the key itself where the caller has already written it down (see first_key.py), of the usual form.
        """
        for fault in self._faults(name, user, class_name, models):
            raise BadRequest(fault)
        now_s = await self.now_s()
        if any(record.name == name and record.is_live(now_s) for record in await self.all_keys()):
            raise BadRequest(f'There is a live key named "{name}"; revoke it or take another name.', param="name")
        record = KeyRecord(
            id="",
            name=name,
            user=user,
            class_name=class_name,
            models=models,
            limits=limits,
            created_s=now_s,
            expires_s=None if expires_in_s is None else now_s + expires_in_s,
        )
        while True:
            key = clear or new_key(secrets.token_hex(4))
            record = replace(record, id=key.split("-")[2])
            if await self._store(digest_of(key.encode()), record):
                return NewKey(key, record)
            if clear is not None:
                raise BadRequest(f"There is a key with the id {record.id} already.")

    async def _store(self, digest: str, record: KeyRecord) -> bool:
        """Whether the id was free; if not, nothing is kept."""
        key = record_key(digest)

        async def write(redis: Redis) -> bool:
            # the record first: an index entry without a record would be swept by a listing that runs in between
            await redis.hset(key, mapping=cast(Any, to_hash(record)))
            if record.expires_s is not None:
                await redis.expireat(key, record.expires_s + KEPT_S)
            if await redis.hsetnx(INDEX, record.id, digest):
                return True
            await redis.delete(key)
            return False

        return await self._link.call(write, timeout_s=PATIENT_S)

    async def all_keys(self) -> tuple[KeyRecord, ...]:
        """Every key on record, by time of creation. Forgets the ids whose record has lapsed."""
        return tuple(record for record, _ in await self._all())

    async def revoke(self, id_or_name: str) -> tuple[KeyRecord, ...]:
        """Revoke the key of that id, or else every live key of that name; returns those that were not revoked before.

        A gateway process that has just used the key knows within 2 s. The record stays for 30 days, then lapses.
        """
        every = await self._all()
        chosen = [row for row in every if row[0].id == id_or_name] or [
            row for row in every if row[0].name == id_or_name
        ]

        async def run(redis: Redis) -> list[Any]:
            return [await redis.eval(REVOKE, 1, record_key(digest), str(KEPT_S)) for _, digest in chosen]

        done = await self._link.call(run, timeout_s=PATIENT_S)
        return tuple(record for (record, _), was_live in zip(chosen, done, strict=True) if was_live)

    async def _all(self) -> list[tuple[KeyRecord, str]]:
        """Records with their hashes."""

        async def read(redis: Redis) -> list[tuple[KeyRecord, str]]:
            found = cast(dict[bytes, bytes], await redis.hgetall(INDEX))
            index = {key_id: digest.decode() for key_id, digest in found.items()}
            if not index:
                return []
            pipe = redis.pipeline(transaction=False)
            for digest in index.values():
                pipe.hgetall(record_key(digest))
            rows = await pipe.execute()
            if lapsed := [key_id for key_id, row in zip(index, rows, strict=True) if not row]:
                await redis.hdel(INDEX, *lapsed)
            records = ((_parsed(row, digest), digest) for row, digest in zip(rows, index.values(), strict=True))
            return [(record, digest) for record, digest in records if record is not None]

        return sorted(await self._link.call(read, timeout_s=PATIENT_S), key=lambda row: (row[0].created_s, row[0].id))

    async def now_s(self) -> int:
        """Redis' clock."""
        return int((await self._link.call(lambda redis: redis.time(), timeout_s=PATIENT_S))[0])

    def _faults(self, name: str, user: str | None, class_name: str | None, models: tuple[str, ...]) -> Iterator[str]:
        config = self._config
        if KEY_NAME.fullmatch(name) is None:
            yield "A key's name has 1 to 128 letters, digits and . _ / : -, and begins with a letter or digit."
        if name in config.keys:
            yield f'The config has a key named "{name}" ([keys.{name}]); take another name.'
        if user is not None and user not in config.users:
            yield f'There is no user "{user}"; users are: {_names(config.users)}.'
        if class_name is not None and class_name not in config.classes:
            yield f'There is no class "{class_name}"; classes are: {_names(config.classes)}.'
        if not models:
            yield 'Name at least one model, or "*" for all.'
        for model in models:
            if model != "*" and model not in config.routes:
                yield f'There is no route "{model}"; routes are: {_names(config.routes)}, or "*" for all.'


def _names(known: Iterable[str]) -> str:
    return ", ".join(sorted(known)) or "none"


def _parsed(fields: Mapping[bytes, bytes], digest: str) -> KeyRecord | None:
    """None for no record, and for one that nobody can read: then the key is not valid."""
    if not fields:
        return None
    try:
        return from_hash(fields)
    except ValueError as exc:
        log.warning("the record of key hash %s… cannot be read (%s); that key is refused", digest[:12], exc)
        return None
