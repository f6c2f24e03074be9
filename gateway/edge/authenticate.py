"""Which key a request carries, and which class it runs in. The key itself is looked up by admission."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gateway.config.schema import ClassSection
from gateway.domain.errors import BadRequest, InvalidKey, NotAllowed
from gateway.domain.request import Principal


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The key from `Authorization: Bearer K` (scheme in any case, blanks around K) or `x-api-key: K`.

    Raises InvalidKey, always with the same message, when there is none or it cannot be one.
    """
    key = b""
    for name, value in headers:
        if name == b"authorization":
            parts = value.split(None, 1)
            if len(parts) < 2 or parts[0].lower() != b"bearer":
                raise InvalidKey
            key = parts[1].strip()
            break
        if name == b"x-api-key":
            key = value.strip()
    if not key:
        raise InvalidKey
    return key


def class_for(asked: bytes | None, principal: Principal, classes: Mapping[str, ClassSection]) -> str:
    """The key's class, or the one that X-Poolgate-Class asks for: never one that goes before the key's own.

    Raises BadRequest for an unknown class, NotAllowed for one above the key's.
    """
    if asked is None:
        return principal.class_name
    name = asked.strip().decode("latin-1")
    wanted = classes.get(name)
    if wanted is None:
        raise BadRequest(f"X-Poolgate-Class must be one of {', '.join(sorted(classes))}.", param="X-Poolgate-Class")
    if wanted.priority < classes[principal.class_name].priority:
        raise NotAllowed(
            f"This key is of class '{principal.class_name}' and may not ask for '{name}', which goes before it.",
            param="X-Poolgate-Class",
        )
    return name
