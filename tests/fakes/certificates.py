"""A certificate authority of the tests' own, and certificates for servers, made with the openssl command.

authority = Authority(folder)
server = authority.server_context("IP:127.0.0.1")   # for a server
trusted = authority.certificate                     # for whoever is to believe it
"""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

DAYS = "7"


class Authority:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificate = folder / "ca.pem"
        self._key = folder / "ca.key"
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", DAYS),
            *("-subj", "/CN=tests", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
            *("-keyout", str(self._key), "-out", str(self.certificate)),
        )

    def issue(self, names: str, days: str = DAYS) -> tuple[Path, Path]:
        """(certificate, key) of a server; `names` as in "IP:127.0.0.1,DNS:localhost"."""
        stem = "".join(c if c.isalnum() else "-" for c in names) + days
        made, key, request, extensions = (self.folder / f"{stem}.{kind}" for kind in ("pem", "key", "csr", "ext"))
        if not made.exists():
            extensions.write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\n")
            openssl(
                *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=server"),
                *("-keyout", str(key), "-out", str(request)),
            )
            openssl(
                *("x509", "-req", "-in", str(request), "-CA", str(self.certificate), "-CAkey", str(self._key)),
                *("-CAcreateserial", "-days", days, "-extfile", str(extensions), "-out", str(made)),
            )
        return made, key

    def server_context(self, names: str = "IP:127.0.0.1", days: str = DAYS) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self.issue(names, days))
        return context


def openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
