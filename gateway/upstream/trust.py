"""Which certificates are accepted where: the public authorities, or a pool's own. Made by `app.py` for `wire.py`."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path

import httpx

from gateway.config.outside import trust_only


class Trust:
    """Called with a url. Contexts are made once; reading the public authorities takes 20 ms."""

    def __init__(self, own: Mapping[str, Path]) -> None:
        """`own`: the PEM file of the only authority that is accepted, by url. Raises OSError."""
        by_path = {path: _for_http(trust_only(path)) for path in set(own.values())}
        self._own = {url: by_path[path] for url, path in own.items()}
        self._public: ssl.SSLContext | None = None

    def __call__(self, url: str) -> ssl.SSLContext:
        return self._own.get(url) or self.public()

    def public(self) -> ssl.SSLContext:
        """certifi's authorities, and those of this machine: companies put theirs there."""
        if self._public is None:
            self._public = _for_http(httpx.create_ssl_context(trust_env=False))
            self._public.load_default_certs()
        return self._public


def _for_http(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context
