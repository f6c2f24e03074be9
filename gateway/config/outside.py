"""What pools of others need beside config.toml: keys in the environment, authorities in files.

Read by the gateway at its start, and by `poolgate check` for what it has to say about them.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

from gateway.config.load import LoadedConfig, read_key_env
from gateway.config.rules import replica_url
from gateway.config.schema import Config
from gateway.domain.errors import ConfigError


def engine_keys(config: Config) -> dict[str, str]:
    """The engine's key by pool, for pools that name a variable which is set."""
    named = {name: pool.key_env for name, pool in config.pools.items() if pool.key_env is not None}
    return {name: key for name, variable in named.items() if (key := read_key_env(variable)) is not None}


def own_authorities(loaded: LoadedConfig) -> dict[str, Path]:
    """`tls_ca` of each https url that has one, by the url as requests use it."""
    return {
        replica_url(url): _file(loaded, pool.tls_ca)
        for pool in loaded.config.pools.values()
        if pool.tls_ca is not None
        for url in pool.urls or []
    }


def _file(loaded: LoadedConfig, tls_ca: str) -> Path:
    return loaded.directory / Path(tls_ca).expanduser()


def trust_only(path: Path) -> ssl.SSLContext:
    """A client context that accepts certificates of this authority alone. Raises OSError; ssl.SSLError is one."""
    return ssl.create_default_context(cafile=str(path))


def outside_faults(loaded: LoadedConfig) -> Iterator[tuple[str, str, str]]:
    """(key path, what is the case, the way out) of each thing that keeps a gateway from starting."""
    keys = engine_keys(loaded.config)
    for name, pool in loaded.config.pools.items():
        if pool.key_env is not None and name not in keys:
            fact = f"environment variable {pool.key_env} is not set: those servers would refuse every request"
            yield (
                f"pools.{name}.key_env",
                fact,
                "set it where the gateway starts, or remove key_env if they want no key",
            )
        elif name in keys and not (keys[name].isascii() and keys[name].isprintable()):
            fact = f"environment variable {pool.key_env} holds characters that no key has"
            yield f"pools.{name}.key_env", fact, "set it to the key alone, without line breaks"
        if pool.tls_ca is not None:
            try:
                trust_only(_file(loaded, pool.tls_ca))
            except ssl.SSLError:
                yield f"pools.{name}.tls_ca", "holds no certificate in PEM form", "give the authority's own PEM file"
            except OSError as exc:
                yield f"pools.{name}.tls_ca", f"cannot be read ({exc.strerror})", "give the path of a PEM file"


def check_outside(loaded: LoadedConfig) -> None:
    """Raises ConfigError."""
    if found := [f"{key}: {fact}; {way_out}" for key, fact, way_out in outside_faults(loaded)]:
        raise ConfigError(found)
