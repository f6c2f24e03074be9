"""Keys as data: their form, their hash, and the record that Redis keeps of one. Pure; for keys.py, key_ring.py."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from gateway.domain.request import NO_LIMITS, Limits

MAX_KEY_BYTES = 4096  # more cannot be a key: not even hashed
RUN_TIME_KEY = re.compile(rb"sk-pg-[0-9a-f]{8}-[A-Za-z0-9_-]{32,64}")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One run-time key without the key. Times in seconds since the epoch, on Redis' clock."""

    id: str  # 8 hex digits, part of the key itself, so that a person can tell keys apart
    name: str
    user: str | None
    class_name: str | None
    models: tuple[str, ...]
    limits: Limits = NO_LIMITS
    created_s: int = 0
    expires_s: int | None = None
    revoked_s: int | None = None

    def is_live(self, now_s: float) -> bool:
        return self.revoked_s is None and (self.expires_s is None or now_s < self.expires_s)

    def state(self, now_s: float) -> str:
        if self.revoked_s is not None:
            return "revoked"
        return "live" if self.is_live(now_s) else "expired"


def new_key(key_id: str) -> str:
    """A key in clear: its id, then 256 random bits."""
    return f"sk-pg-{key_id}-{secrets.token_urlsafe(32)}"


def digest_of(key: bytes) -> str:
    """The only form in which a key is kept: SHA-256, 64 hex digits. Keys are random, so no salt and no slow hash."""
    return hashlib.sha256(key).hexdigest()


def to_hash(record: KeyRecord) -> dict[str, str]:
    """Fields of the Redis hash; "" stands for None."""
    return {
        "id": record.id,
        "name": record.name,
        "user": record.user or "",
        "class": record.class_name or "",
        "models": json.dumps(record.models),
        "limits": json.dumps({kind: value for kind, value in asdict(record.limits).items() if value is not None}),
        "created_s": str(record.created_s),
        "expires_s": "" if record.expires_s is None else str(record.expires_s),
        "revoked_s": "" if record.revoked_s is None else str(record.revoked_s),
    }


def from_hash(fields: Mapping[bytes, bytes]) -> KeyRecord:
    """Raises ValueError for anything that `to_hash` of this version would not have written."""
    try:
        text = {name.decode(): value.decode() for name, value in fields.items()}
        models = json.loads(text["models"])
        if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
            raise ValueError("models is no list of names")
        return KeyRecord(
            id=text["id"],
            name=text["name"],
            user=text["user"] or None,
            class_name=text["class"] or None,
            models=tuple(models),
            limits=Limits(**json.loads(text["limits"])),
            created_s=int(text["created_s"]),
            expires_s=int(text["expires_s"]) if text["expires_s"] else None,
            revoked_s=int(text["revoked_s"]) if text["revoked_s"] else None,
        )
    except (KeyError, TypeError) as exc:
        raise ValueError(f"not a key record: {exc!r}") from exc
