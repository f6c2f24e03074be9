"""The forms of `redis.url` beside "embedded": read, checked, shown without secrets. For schema.py and redis_client.py.

    redis://, rediss://, unix://                                one server, as redis-py reads it
    redis+sentinel://USER:PASSWORD@HOST:PORT,HOST:PORT/SERVICE/NUMBER?sentinel_username=…&sentinel_password=…
    redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT           with TLS: rediss+sentinel://, rediss+cluster://

These spellings are those of PyPI's redis-sentinel-url, prefect-redis and limits. User and password are the data
servers'; sentinels have their own, or none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

SERVER, SENTINEL, CLUSTER = "server", "sentinel", "cluster"
SCHEMES = {
    "redis": SERVER,
    "rediss": SERVER,
    "unix": SERVER,
    "redis+sentinel": SENTINEL,
    "rediss+sentinel": SENTINEL,
    "redis+cluster": CLUSTER,
    "rediss+cluster": CLUSTER,
}
WAY_OUT = {
    SERVER: "write redis://:PASSWORD@HOST:PORT/NUMBER",
    SENTINEL: "write redis+sentinel://:PASSWORD@HOST:26379,HOST2:26379/SERVICE",
    CLUSTER: "write redis+cluster://:PASSWORD@HOST:6379,HOST2:6379",
}
OPTIONS = {"username", "password", "protocol"}
OPTIONS_OF = {SERVER: {"db"}, SENTINEL: {"sentinel_username", "sentinel_password"}, CLUSTER: set[str]()}
SECRETS = {"password", "sentinel_password", "ssl_password"}
MAX_MEMBERS = 16  # asked at the same time

Member = tuple[str, int]


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`members` are the sentinels, the cluster nodes we begin with, or the one server; empty for a Unix socket."""

    scheme: str
    members: tuple[Member, ...]
    path: str
    user_info: str = field(repr=False)  # "user:password", still percent-encoded; or empty
    query: str = field(repr=False)

    @property
    def form(self) -> str:
        return SCHEMES[self.scheme]

    @property
    def service(self) -> str:
        """How the sentinels call the master."""
        return unquote(self.path.split("/")[1]) if self.form == SENTINEL else ""

    @property
    def place(self) -> str:
        """The servers, without user, password and options."""
        if self.scheme == "unix":
            return f"unix://{self.path}"
        servers = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.members)
        return f"{self.scheme}://{servers}" + (f"/{self.path.split('/')[1]}" if self.form == SENTINEL else "")

    @property
    def public(self) -> str:
        """All of it without secrets, for a hash that is shown."""
        told = [f"{name}={value}" for name, value in parse_qsl(self.query) if name not in SECRETS]
        return f"{self.scheme} {self.members} {self.path} {told}"

    def secrets(self) -> list[str]:
        """What must not be repeated of what a server says."""
        found = [unquote(self.user_info.partition(":")[2])]
        found += [value for name, value in parse_qsl(self.query) if name in SECRETS]
        return [secret for secret in found if secret]

    def options(self) -> dict[str, str]:
        return dict(parse_qsl(self.query))

    def data_server(self) -> str:
        """What redis-py reads: scheme, user, password, database and options of a data server, its host left out."""
        scheme = self.scheme.partition("+")[0]
        number = self.path.split("/")[2:3] if self.form == SENTINEL else []
        user = f"{self.user_info}@" if self.user_info else ""
        return f"{scheme}://{user}/{''.join(number)}?{self._options_without('sentinel_')}"

    def sentinel_server(self) -> str:
        """As `data_server`, for a sentinel: it has a user and password of its own, and no databases."""
        return f"{self.scheme.partition('+')[0]}:///?{self._options_without('sentinel_', 'username', 'password')}"

    def _options_without(self, *beginnings: str) -> str:
        return "&".join(part for part in self.query.split("&") if not part.startswith(beginnings))


def read_redis_url(text: str) -> RedisUrl:
    """Raises ValueError for what redis-py would only stumble over when it connects; it never repeats the URL."""
    scheme, separator, rest = text.partition("://")
    form = SCHEMES.get(scheme)
    if form is None or not separator:
        raise ValueError(
            'is no Redis; give "embedded", redis://…, rediss://…, unix://…, redis+sentinel://… or redis+cluster://…'
        )
    if "#" in rest:
        raise ValueError('holds a "#", after which nothing counts; write it as %23')
    location, _, query = rest.partition("?")
    network, slash, path = location.partition("/")
    user_info, _, servers = network.rpartition("@")
    url = RedisUrl(scheme, _members(servers, scheme, form), slash + path, user_info, query)
    _check_path(url)
    for name, _ in parse_qsl(url.query, keep_blank_values=True):
        if name not in OPTIONS | OPTIONS_OF[form] and not name.startswith("ssl_"):
            raise ValueError(f'has an option "{name}" that Redis does not know; remove it')
    return url


def _members(servers: str, scheme: str, form: str) -> tuple[Member, ...]:
    # one by one: urlsplit takes a list with brackets in it for a broken IPv6 address
    if scheme == "unix":
        return ()
    parts = servers.split(",")
    if form == SERVER and len(parts) > 1:
        raise ValueError("names several servers; write redis+sentinel://… or redis+cluster://…, or keep one")
    if len(parts) > MAX_MEMBERS:
        raise ValueError(f"names {len(parts)} servers; {MAX_MEMBERS} are enough, name those")
    default = 26379 if form == SENTINEL else 6379
    return tuple(_member(part, form, default) for part in parts)


def _member(text: str, form: str, default: int) -> Member:
    try:
        parts = urlsplit(f"redis://{text}")
        host, port = parts.hostname, parts.port
    except ValueError as exc:
        raise ValueError(f"cannot be read; {WAY_OUT[form]}, brackets around IPv6") from exc
    if form != SERVER and not host:
        raise ValueError(f"names a server without a host; {WAY_OUT[form]}")
    return host or "localhost", port or default


def _check_path(url: RedisUrl) -> None:
    if url.form == SENTINEL:
        if re.fullmatch(r"/[^/]+(/\d*)?", url.path) is None:
            raise ValueError(f"names no service of the sentinels, or more than that; {WAY_OUT[SENTINEL]}")
    elif url.form == CLUSTER:
        if url.path.strip("/") not in ("", "0"):
            raise ValueError(f"names a database, which a Redis Cluster does not have; {WAY_OUT[CLUSTER]}")
    elif url.scheme != "unix" and re.fullmatch(r"/?\d*", url.path) is None:
        raise ValueError("names no database by number; write redis://HOST:PORT/NUMBER")
