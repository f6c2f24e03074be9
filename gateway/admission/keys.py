"""Who is calling: a presented key becomes a Principal. The edge calls `authenticate` before it reads a body.

Static keys come from the config; run-time keys from Redis, through a cache that bounds how long a change goes unseen:
a known key is asked for again after 1.5 s, an unknown one after 1 s, so a revocation holds everywhere within 2 s.
While Redis is away a key seen in the last 60 s goes on working, and a revocation is seen when Redis is back.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from gateway.admission.classes import default_class, lowest_class
from gateway.admission.key_record import MAX_KEY_BYTES, RUN_TIME_KEY, KeyRecord, digest_of
from gateway.admission.key_ring import KeyRing
from gateway.config.load import LoadedConfig, read_key_env
from gateway.config.schema import limits_from
from gateway.config.tasks import end_task
from gateway.domain.errors import ConfigError, InvalidKey, StoreUnavailable
from gateway.domain.request import NO_LIMITS, Limits, Principal

log = logging.getLogger(__name__)

FRESH_S = 1.5
UNKNOWN_S = 1.0
STALE_S = 60.0
MAX_CACHED = 10_000
MAX_UNKNOWN = 10_000  # a cache of its own: strangers' guesses must not push the callers' keys out


@dataclass(frozen=True, slots=True)
class _Cached:
    """`asked_s`: when the look-up began, on this process's clock. `ends_s`: when the key expires, on the same clock."""

    principal: Principal | None
    asked_s: float
    ends_s: float
    record: KeyRecord | None = None


class KeyStore:
    """One per process and config revision."""

    def __init__(self, loaded: LoadedConfig, ring: KeyRing, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError when two static keys are the same key: which one is calling could not be told."""
        self._config = loaded.config
        self._ring = ring
        self._clock = clock
        self._static = self._static_keys()
        self._known: OrderedDict[str, _Cached] = OrderedDict()
        self._unknown: OrderedDict[str, _Cached] = OrderedDict()
        self._digests: dict[bytes, str] = {}
        self._lookups: dict[str, asyncio.Task[_Cached]] = {}  # one per hash, shared by all who ask meanwhile

    async def authenticate(self, presented: bytes | str) -> Principal:
        """Raises InvalidKey, always with the same message; StoreUnavailable when only Redis could tell and is away."""
        key = presented.encode("utf-8", "surrogatepass") if isinstance(presented, str) else presented
        if not 0 < len(key) <= MAX_KEY_BYTES:
            raise InvalidKey
        digest = digest_of(key)
        static = self._static.get(digest)
        if static is not None and hmac.compare_digest(static[0], digest):
            self._remember(key, digest)
            return static[1]
        if RUN_TIME_KEY.fullmatch(key) is None:
            raise InvalidKey
        cached = self._fresh(digest)
        if cached is None:
            cached = await self._look_up(digest)
        if cached.principal is None or self._clock() >= cached.ends_s:
            raise InvalidKey
        self._remember(key, digest)
        return cached.principal

    def _remember(self, key: bytes, digest: str) -> None:
        """Spares hashing a good key at each of its requests. Strangers' guesses never get in."""
        if key not in self._digests:
            if len(self._digests) >= MAX_CACHED:
                self._digests.clear()
            self._digests[key] = digest

    def known(self, presented: bytes) -> Principal | None:
        """Whose key it is, where that was asked a moment ago; None: `authenticate` has to say."""
        digest = self._digests.get(presented)
        if digest is None:
            return None
        static = self._static.get(digest)
        if static is not None:
            return static[1]
        cached = self._known.get(digest)
        now_s = self._clock()
        if cached is None or now_s - cached.asked_s > FRESH_S or now_s >= cached.ends_s:
            return None
        return cached.principal

    async def aclose(self) -> None:
        """End the look-ups that are on their way."""
        for lookup in list(self._lookups.values()):
            await end_task(lookup)

    def _fresh(self, digest: str) -> _Cached | None:
        now_s = self._clock()
        cached = self._known.get(digest)
        if cached is not None and now_s - cached.asked_s <= FRESH_S:
            self._known.move_to_end(digest)
            return cached
        cached = self._unknown.get(digest)
        return cached if cached is not None and now_s - cached.asked_s <= UNKNOWN_S else None

    async def _look_up(self, digest: str) -> _Cached:
        lookup = self._lookups.get(digest)
        if lookup is None:
            lookup = self._lookups[digest] = asyncio.create_task(self._ask(digest))
            lookup.add_done_callback(lambda task: self._looked_up(digest, task))
        try:
            return await asyncio.shield(lookup)  # a caller who leaves must not fail the others
        except StoreUnavailable:
            stale = self._known.get(digest)
            if stale is None or self._clock() - stale.asked_s > STALE_S:
                raise
            return stale

    def _looked_up(self, digest: str, task: asyncio.Task[_Cached]) -> None:
        self._lookups.pop(digest, None)
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits any more

    async def _ask(self, digest: str) -> _Cached:
        """Ends within the link's deadline. The answer is as old as the question: counted from before it was sent."""
        asked_s = self._clock()
        record, redis_s = await self._ring.find(digest)
        if record is None or not record.is_live(redis_s):
            self._known.pop(digest, None)
            cached = _Cached(None, asked_s, float("inf"))
            _keep(self._unknown, digest, cached, MAX_UNKNOWN)
            return cached
        ends_s = float("inf") if record.expires_s is None else asked_s + record.expires_s - redis_s
        before = self._known.get(digest)
        # nothing changed: the same principal, with all that is bound to it
        principal = before.principal if before is not None and before.record == record else self._principal(record)
        cached = _Cached(principal, asked_s, ends_s, record)
        _keep(self._known, digest, cached, MAX_CACHED)
        return cached

    def _principal(self, record: KeyRecord) -> Principal:
        """The config may have changed since the key was made: a class that is gone becomes the lowest one."""
        class_name = record.class_name or default_class(self._config.classes)
        if class_name not in self._config.classes:
            class_name = lowest_class(self._config.classes)
        return Principal(
            key_id=record.id,
            user=record.user,
            class_name=class_name,
            models=record.models,
            key_limits=record.limits,
            user_limits=self._user_limits(record.user),
        )

    def _user_limits(self, user: str | None) -> Limits:
        section = self._config.users.get(user) if user is not None else None
        return NO_LIMITS if section is None else limits_from(section.limits)

    def _static_keys(self) -> dict[str, tuple[str, Principal]]:
        found: dict[str, tuple[str, Principal]] = {}
        for name, key in self._config.keys.items():
            if key.sha256 is not None:
                digest = key.sha256.lower()
            elif (clear := read_key_env(key.key_env or "")) is not None:
                digest = digest_of(clear.encode())
            else:
                log.warning('key "%s" is off: environment variable %s is not set', name, key.key_env)
                continue
            if digest in found:
                other = found[digest][1].key_id
                raise ConfigError([f"keys.{name}: is the same key as keys.{other}; give each name a key of its own"])
            principal = Principal(
                key_id=name,
                user=key.user,
                class_name=key.class_ or default_class(self._config.classes),
                models=tuple(key.models),
                key_limits=limits_from(key.limits),
                user_limits=self._user_limits(key.user),
            )
            found[digest] = (digest, principal)
        return found


def _keep(cache: OrderedDict[str, _Cached], digest: str, cached: _Cached, most: int) -> None:
    cache[digest] = cached
    cache.move_to_end(digest)
    if len(cache) > most:
        cache.popitem(last=False)
